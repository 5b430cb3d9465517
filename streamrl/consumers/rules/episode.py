"""The score that an episode gave itself."""

from __future__ import annotations

from typing import ClassVar

from typing_extensions import override

from streamrl.config import RunConfig
from streamrl.consumers.reward import Reward, RewardSample, Score
from streamrl.errors import ConfigError, DataError


class EpisodeScore(Reward):
    """What the episode returned (`Episode.run`, `get_reward` of an environment, an agent's reward), with its parts."""

    instant: ClassVar[bool] = True

    def __init__(self) -> None:
        """It has no arguments: what an episode is worth is said where it is played."""

    @override
    def check_config(self, config: RunConfig) -> None:
        if config.episode.kind is None and config.recording.mode != "read":
            raise ConfigError(
                "reward episode is for episodes, and this run has single answers", "set episode.run, or another reward"
            )
        if config.episode.kind == "tools":
            raise ConfigError(
                "reward episode needs episodes that score themselves; episode.tools only lets the model call functions",
                "set another reward, or write an Episode or an environment with get_reward",
            )

    @override
    async def score(self, sample: RewardSample) -> Score:
        if sample.score is None and sample.stop == "agent_failed":
            raise DataError(
                f"the agent of line {sample.prompt.line} of the data set failed and posted no score",
                "set episode.agent.failed_score to what that is worth, or let the agent post a score before it fails",
            )
        if sample.score is None:
            raise DataError(
                f"the episode of line {sample.prompt.line} of the data set gave itself no score",
                "return a number from `run` (of an environment: `get_reward`), or use another reward",
            )
        return Score(sample.score.value, sample.score.parts)

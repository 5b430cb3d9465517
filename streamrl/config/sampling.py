"""Configuration of sampling: how responses are drawn, while training and for evaluation."""

from __future__ import annotations

from typing import Annotated, Final, TypeAlias

from pydantic import Field

from streamrl.config.base import Fraction, Natural, Positive, Section

Heat: TypeAlias = Annotated[float, Field(ge=0, le=10)]
TopP: TypeAlias = Annotated[float, Field(gt=0, le=1)]
StopString: TypeAlias = Annotated[str, Field(min_length=1)]
SGLANG_MASK: Final = 4096
"""Most tokens that SGLang tells a cut distribution of (`--sampling-mask-max-tokens`)."""


class DrawConfig(Section):
    """How one response is drawn. `min_p`, `top_k` and `top_p` cut the distribution, in this order."""

    temperature: Heat = Field(1.0, description="softmax temperature")
    max_new_tokens: Positive = Field(256, description="longest response in tokens")
    top_p: TopP = Field(1.0, description="only the most probable tokens that reach this share together; 1: all")
    top_k: Natural = Field(0, description="only so many of the most probable tokens; 0: all tokens")
    min_p: Fraction = Field(0.0, description="only tokens of at least this share of the highest probability; 0: all")
    stop: tuple[StopString, ...] = Field((), description="texts that end a response; its own text ends before")
    min_tokens: Natural = Field(0, description="no end of the sequence and no text of `stop` before so many tokens")
    seed: Natural | None = Field(
        None,
        description="gives each response random numbers of its own, from this, its group and its place in it; empty:"
        " those of the engine",
    )

    @property
    def cuts(self) -> str:
        """The first option that makes tokens impossible; empty: every token is possible everywhere."""
        if self.temperature == 0:
            return ""
        changed = {"top_p": self.top_p < 1, "top_k": self.top_k > 0, "min_p": self.min_p > 0}
        return next((name for name, cut in changed.items() if cut), "")


OPTIONS: Final = set(DrawConfig.model_fields)


class SamplingConfig(DrawConfig):
    """How responses are drawn that are trained (docs/guides/sampling.md)."""

    temperature: Annotated[float, Field(gt=0, le=10)] = Field(
        1.0, description="softmax temperature, learner and engine"
    )
    group_size: Positive = Field(8, description="responses per prompt")
    min_group: Positive = Field(2, description="a group with fewer scored responses is dead, not trained")
    greedy_baseline: bool = Field(
        False,
        description="one more response per prompt, of the most probable tokens: it is scored, never trained, and its"
        " reward is the baseline of learner.advantage.use remax",
    )

    @property
    def responses(self) -> int:
        """Responses to a training prompt, the greedy one included."""
        return self.group_size + self.greedy_baseline

    @property
    def min_responses(self) -> int:
        """Scored responses, the greedy one included, below which a group is dead."""
        return self.min_group + self.greedy_baseline


class EvaluationConfig(Section):
    """Held-out accuracy while training goes on. How its responses are drawn is as in `sampling` where it is empty."""

    every: Natural = Field(0, description="versions between rounds; 0: never")
    prompts: Positive = Field(128, description="held-out prompts of one round")
    samples: Positive = Field(1, description="responses per held-out prompt; several also give avg@k and pass@k")
    final_prompts: Natural = Field(0, description="held-out prompts for the first and last version at the end; 0: none")
    threshold: float = Field(0.5, description="a held-out response with a score above this counts as right")
    temperature: Heat | None = Field(None, description="0: the most probable token each time")
    max_new_tokens: Positive | None = Field(None, description="longest response in tokens")
    top_p: TopP | None = Field(None, description="as in sampling")
    top_k: Natural | None = Field(None, description="as in sampling")
    min_p: Fraction | None = Field(None, description="as in sampling")
    stop: tuple[StopString, ...] | None = Field(None, description="as in sampling")
    min_tokens: Natural | None = Field(None, description="as in sampling")
    seed: Natural | None = Field(None, description="as in sampling")

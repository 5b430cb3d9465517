"""What rewards that ask a model have in common: its servers, its rate limit, and the first answer."""

from __future__ import annotations

import asyncio
import logging
from abc import abstractmethod
from collections.abc import Awaitable
from typing import Final

from typing_extensions import override

from streamrl.config import RewardModelConfig, RunConfig
from streamrl.consumers.models.client import refuses
from streamrl.consumers.models.dialects import UnclearScore
from streamrl.consumers.reward import AskedModel, Reward, RewardContext, check_model
from streamrl.consumers.samples import make_sample
from streamrl.errors import DataError, RewardBusy, RewardImpossible, RewardUnavailable, StreamrlError, Unreachable

logger = logging.getLogger(__name__)

CHARACTERS_PER_TOKEN: Final = 3
"""An estimate."""
_SHARE: Final = 0.95
"""Part of the deadline after which a request gives up by itself, with an error that names the slow server."""
_SCORED_SECONDS: Final = 1.0
"""Longest time for asking whether the run has scores: an attempt that has just failed has little time left."""


class AskingReward(Reward):
    """Until its first answer could be read, a refusal means that the servers can never answer."""

    def __init__(self, model: str) -> None:
        self._name = model
        self._model: AskedModel | None = None
        self._limit = 0.0
        self._requests = 1
        self._answered = False

    @abstractmethod
    def _check(self, model: RewardModelConfig) -> None:
        """Raise `ConfigError` when this reward cannot ask such a model."""

    @override
    def check_config(self, config: RunConfig) -> None:
        check_model(self._name, config.reward_models)
        self._check(config.reward_models[self._name])

    @override
    async def open(self, context: RewardContext) -> None:
        self._model = context.model(self._name)
        self._scored, self._answered = context.scored, False
        self._limit = _SHARE * context.deadline
        self._check(self._model.config)

    @override
    def slots(self) -> int | None:
        return None if self._model is None else max(1, self._model.slots // self._requests)

    @override
    def away(self) -> str:
        return "" if self._model is None else self._model.away

    @property
    def _asked(self) -> AskedModel:
        assert self._model is not None, "scores come after open"
        return self._model

    async def _probe(self, asking: Awaitable[object]) -> None:
        """Ask about `PROBE`. `RewardImpossible` ends the run; other errors are logged."""
        try:
            await asking
        except RewardImpossible:
            raise
        except StreamrlError as error:
            await self._refuse(error, probe=True)
            extra = {"model": self._name, "why": error.message}
            logger.warning("reward model does not answer yet; samples will wait for it", extra=extra)

    async def _refuse(self, error: StreamrlError, *, probe: bool = False) -> None:
        """Raise `RewardImpossible` if an error means that no server can ever answer.

        Every server can answer a `probe`, so its refusal is not caused by the sample.
        """
        if self._answered or isinstance(error, RewardBusy):
            return
        cause = error.__cause__ if isinstance(error, RewardUnavailable) else error
        never = isinstance(cause, UnclearScore) or (probe and isinstance(cause, DataError)) or refuses(cause)
        if not isinstance(cause, StreamrlError) or not never:
            return
        try:
            async with asyncio.timeout(_SCORED_SECONDS):
                self._answered = await self._scored()  # if the run has scores, its servers have answered before
        except (TimeoutError, Unreachable):
            return  # the next answer decides
        if not self._answered:
            raise RewardImpossible(f"reward model {self._name} cannot be asked: {cause.message}", cause.hint) from error


PROBE: Final = make_sample("Four.", prompt="What is two plus two?", answer="4")
"""A short sample that is asked about at the start, to see that the servers can answer at all."""

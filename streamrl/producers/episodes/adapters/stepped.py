"""Environments that are stepped with the text of each reply: what SkyRL-Gym and Gymnasium have in common."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import queue
import threading
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal, Protocol, TypeVar

from typing_extensions import override

from streamrl.errors import DeadlineExceeded
from streamrl.producers.episodes.clock import EpisodeOver
from streamrl.producers.episodes.episode import Chat, Episode, Task
from streamrl.producers.episodes.rendering import Message
from streamrl.producers.episodes.session import EpisodeSession, SampledTurn
from streamrl.producers.episodes.tools import run_for
from streamrl.score import Score, finite
from streamrl.wire import StopReason

logger = logging.getLogger(__name__)

StepRewards = Literal["turns", "sum"]
_CLOSING: Final = 5.0
"""Seconds that an episode waits for `close` of its environment, which goes on afterwards."""
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class EnvironmentStep:
    """What an environment did with one reply.

    Attributes:
        messages: what it answers.
        reward: of the reply; None: there is none, because the environment was not stepped.
        stop: why the episode ends here; None: it goes on.
        said: what the reply is replaced with in the conversation; None: it stays as it was sampled.
    """

    messages: list[Message]
    reward: float | None
    stop: StopReason | None = None
    said: str | None = None


class SteppedEnvironment(Protocol):
    """One instance for one sample. All its methods are called in one thread, which is its own."""

    def reset(self) -> list[Message]:
        """The conversation before the first reply."""
        ...

    def step(self, action: str) -> EnvironmentStep: ...

    def close(self) -> None: ...


class SteppedEpisode(Episode):
    """Steps an environment with each reply until it is done.

    Args:
        rewards: `turns` rewards each turn with the reward of its step, and the score of the episode is 0, because the
            learner adds the rewards of turns to it; `sum` rewards no turn, and the score is their sum.
    """

    def __init__(self, rewards: StepRewards) -> None:
        if rewards not in ("turns", "sum"):
            raise ValueError(f"rewards is {rewards!r}: write turns or sum")
        self._per_turn = rewards == "turns"

    @abstractmethod
    def make(self, task: Task, max_turns: int) -> SteppedEnvironment:
        """A fresh environment for a sample of `task`; called in the thread of that environment."""

    @abstractmethod
    def action(self, session: EpisodeSession, turn: SampledTurn) -> str:
        """The text of a reply that the environment gets."""

    @override
    async def run(self, task: Task, chat: Chat) -> float | Score | None:
        session = chat.session
        environment = _InThread(type(self).__name__)
        steps, total = 0, 0.0
        try:
            async with session.part("start"):
                messages = await environment.make(partial(self.make, task, session.limits.max_turns))
            stop = None
            while stop is None:
                turn = await session.sampled(messages)
                step = await self._stepped(session, environment, self.action(session, turn))
                if step.reward is not None:
                    steps, total = steps + 1, total + finite(step.reward, "the reward of a step")
                    if self._per_turn:
                        session.reward(step.reward, turn.number)
                said = turn.reply.message if step.said is None else {"role": "assistant", "content": step.said}
                messages += [said, *step.messages]
                stop = step.stop
            if stop != "completed":
                session.end(stop)
        except EpisodeOver as over:
            session.end(over.stop)
        finally:
            await environment.close()
        return Score(0.0 if self._per_turn else total, {"return": total, "steps": float(steps)})

    async def _stepped(self, session: EpisodeSession, environment: _InThread, action: str) -> EnvironmentStep:
        """One step. DeadlineExceeded: it took longer than a tool may, and what it did is unknown."""
        longest = session.limits.tool_deadline
        async with session.part("tools"):
            try:
                async with asyncio.timeout(longest) as limit:
                    return await environment.call(lambda instance: instance.step(action))
            except TimeoutError as error:
                if not limit.expired():
                    raise
                what = f"a step of {type(self).__name__} took longer than {longest:g} s"
                raise DeadlineExceeded(what, "raise episode.tool_deadline") from error


class _InThread:
    """One environment and the thread that makes, steps and closes it.

    Its calls never overlap, also when the episode is cancelled while one runs, and what an environment binds to its
    thread (a connection of sqlite) works. The thread is a daemon: a call that never returns leaves it behind.
    """

    def __init__(self, name: str) -> None:
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._instance: SteppedEnvironment | None = None
        self._open = True
        threading.Thread(target=contextvars.copy_context().run, args=(self._serve,), name=name, daemon=True).start()

    async def make(self, make: Callable[[], SteppedEnvironment]) -> list[Message]:
        """Make the environment and reset it; the conversation before the first reply."""

        def made() -> list[Message]:
            self._instance = make()
            return list(self._instance.reset())

        return await self._submit(made)

    async def call(self, work: Callable[[SteppedEnvironment], _T]) -> _T:
        def called() -> _T:
            assert self._instance is not None
            return work(self._instance)

        return await self._submit(called)

    async def close(self) -> None:
        """Close the environment after the call that is running. An error is logged: the sample is complete."""

        def closed() -> None:
            self._open = False
            if self._instance is not None:
                self._instance.close()

        try:
            async with asyncio.timeout(_CLOSING):
                await self._submit(closed)
        except Exception as error:  # noqa: BLE001 (code of the user)
            why = "it takes too long" if isinstance(error, TimeoutError) else f"{type(error).__name__}: {error}"
            logger.warning("an environment cannot be closed", extra={"why": why})

    async def _submit(self, work: Callable[[], _T]) -> _T:
        future: asyncio.Future[_T] = asyncio.get_running_loop().create_future()
        self._work.put(partial(run_for, future, work))
        return await future

    def _serve(self) -> None:
        while self._open:
            self._work.get()()

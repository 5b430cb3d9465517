"""Environments that are stepped with the text of each reply: what SkyRL-Gym, Gymnasium and OpenEnv have in common."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import queue
import re
import threading
import zlib
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal, Protocol, TypeVar

from typing_extensions import override

from streamrl.errors import DeadlineExceeded, RetryLater
from streamrl.producers.episodes.clock import EpisodeOver
from streamrl.producers.episodes.episode import Chat, Episode, Task
from streamrl.producers.episodes.rendering import Message
from streamrl.producers.episodes.session import EpisodeSession, SampledTurn
from streamrl.producers.episodes.tools import result_of, run_for
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
        reward: of the reply; None: there is none.
        stop: why the episode ends here; None: it goes on.
        said: what the reply is replaced with in the conversation; None: it stays as it was sampled.
    """

    messages: list[Message]
    reward: float | None
    stop: StopReason | None = None
    said: str | None = None


class RunningEnvironment(Protocol):
    """One environment for one sample. `close` is always called, also after a `reset` that failed."""

    async def reset(self) -> list[Message]:
        """The conversation before the first reply."""
        ...

    async def step(self, action: str) -> EnvironmentStep: ...

    async def close(self) -> None: ...


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
    def environment(self, task: Task, max_turns: int) -> RunningEnvironment:
        """The environment of a sample of `task`, which is started by its `reset`."""

    @abstractmethod
    def action(self, session: EpisodeSession, turn: SampledTurn) -> str:
        """The text of a reply that the environment gets."""

    @override
    async def run(self, task: Task, chat: Chat) -> float | Score | None:
        session = chat.session
        environment = self.environment(task, session.limits.max_turns)
        steps, total = 0, 0.0
        try:
            async with session.part("start"):
                messages = await environment.reset()
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
        except RetryLater as error:
            session.fault = error
            raise
        finally:
            await _close(environment)
        return Score(0.0 if self._per_turn else total, {"return": total, "steps": float(steps)})

    async def _stepped(self, session: EpisodeSession, environment: RunningEnvironment, action: str) -> EnvironmentStep:
        """One step. DeadlineExceeded: it took longer than a tool may, and what it did is unknown."""
        longest = session.limits.tool_deadline
        async with session.part("tools"):
            try:
                async with asyncio.timeout(longest) as limit:
                    return await environment.step(action)
            except TimeoutError as error:
                if not limit.expired():
                    raise
                what = f"a step of {type(self).__name__} took longer than {longest:g} s"
                raise DeadlineExceeded(what, "raise episode.tool_deadline") from error


class ThreadedEpisode(SteppedEpisode):
    """Steps an environment whose methods are no coroutines, in a thread for each sample."""

    @abstractmethod
    def make(self, task: Task, max_turns: int) -> SteppedEnvironment:
        """A fresh environment for a sample of `task`; called in the thread of that environment."""

    @override
    def environment(self, task: Task, max_turns: int) -> RunningEnvironment:
        return _InThread(type(self).__name__, partial(self.make, task, max_turns))


class _InThread:
    """One environment and the thread that makes, steps and closes it.

    Its calls never overlap, also when the episode is cancelled while one runs, and what an environment binds to its
    thread (a connection of sqlite) works. The thread is a daemon: a call that never returns leaves it behind.
    """

    def __init__(self, name: str, make: Callable[[], SteppedEnvironment]) -> None:
        self._name = name
        self._make = make
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._instance: SteppedEnvironment | None = None
        self._open = True
        threading.Thread(target=contextvars.copy_context().run, args=(self._serve,), name=name, daemon=True).start()

    async def reset(self) -> list[Message]:
        def made() -> list[Message]:
            self._instance = self._make()
            return list(self._instance.reset())

        return await self._submit(made)

    async def step(self, action: str) -> EnvironmentStep:
        def stepped() -> EnvironmentStep:
            assert self._instance is not None
            return self._instance.step(action)

        return await self._submit(stepped)

    async def close(self) -> None:
        """Close the environment after the call that is running."""

        def closed() -> None:
            self._open = False
            if self._instance is not None:
                self._instance.close()

        await self._submit(closed)

    async def _submit(self, work: Callable[[], _T]) -> _T:
        future: asyncio.Future[_T] = asyncio.get_running_loop().create_future()
        self._work.put(partial(run_for, future, work))
        return await result_of(future, self._name)

    def _serve(self) -> None:
        while self._open:
            self._work.get()()


async def _close(environment: RunningEnvironment) -> None:
    """An error is logged: the sample is complete."""
    try:
        async with asyncio.timeout(_CLOSING):
            await environment.close()
    except Exception as error:  # noqa: BLE001 (code of the user)
        why = "it takes too long" if isinstance(error, TimeoutError) else f"{type(error).__name__}: {error}"
        logger.warning("an environment cannot be closed", extra={"why": why})


class ActionPattern:
    """Where the action is in a reply.

    Args:
        pattern: regular expression whose first group holds the action; the last place where it is found counts. None:
            the whole reply is the action, without spaces around it.
    """

    def __init__(self, pattern: str | None) -> None:
        self._pattern = re.compile(pattern, re.DOTALL) if pattern is not None else None
        if self._pattern is not None and not self._pattern.groups:
            raise ValueError(f"pattern {pattern!r} has no group for the action: write (...) around it")

    def found(self, text: str) -> str | None:
        """The action in a reply; None: the pattern is not in it."""
        if self._pattern is None:
            return text.strip()
        found = [match[1] for match in self._pattern.finditer(text)]
        return found[-1].strip() if found and found[-1] is not None else None

    def __str__(self) -> str:
        """For the model, after the kind of action that is expected."""
        return "" if self._pattern is None else f", written as {self._pattern.pattern}"


def seed_of(task: Task, seed: int) -> int:
    """The same for all samples of a group: the `seed` of the line, or made of the line's number."""
    given = task.metadata.get("seed")
    if isinstance(given, int):
        return given
    return zlib.crc32(f"{seed} {task.evaluation} {task.line}".encode())

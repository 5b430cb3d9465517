"""Environments that are stepped with the text of each reply: what SkyRL-Gym, Gymnasium and OpenEnv have in common."""

from __future__ import annotations

import asyncio
import contextvars
import re
import threading
import zlib
from abc import abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any, ClassVar, Literal, TypeAlias, TypeVar, get_args

from typing_extensions import override

from streamrl.errors import DeadlineExceeded
from streamrl.plugin_import import one_of
from streamrl.producers.episodes.clock import EpisodeOver
from streamrl.producers.episodes.environment import begin, closed
from streamrl.producers.episodes.episode import Chat, Episode, Task
from streamrl.producers.episodes.rendering import Message
from streamrl.producers.episodes.session import EpisodeSession
from streamrl.producers.episodes.tools import result_of, run_for
from streamrl.score import Score, finite
from streamrl.wire import StopReason

_T = TypeVar("_T")
StepRewards = Literal["turns", "sum"]


@dataclass(frozen=True, slots=True)
class EnvironmentStep:
    """What an environment did with one reply."""

    answer: str | list[dict[str, Any]]  # the messages that follow; a text, or parts with images, are one of the user
    reward: float | None = None
    stop: StopReason | None = None
    said: str | None = None  # what the reply is replaced with in the conversation; None: it stays as it was sampled


Blocking: TypeAlias = Generator[EnvironmentStep, Any, None]
NonBlocking: TypeAlias = AsyncGenerator[EnvironmentStep, Any]


class SteppedEpisode(Episode):
    """Steps an environment with each reply until it is done.

    Args:
        rewards: `turns` rewards each turn with the reward of its step, and the score of the episode is 0, because the
            learner adds the rewards of turns to it; `sum` rewards no turn, and the score is their sum.
        pattern: regular expression whose first group holds the action; the last place where it is found counts. None:
            the whole reply is the action, without spaces around it.
        invalid_reward: of a reply that is no action.
    """

    whole_text: ClassVar = False  # whether the environment gets all text of a reply, its thinking and calls as well

    def __init__(self, rewards: StepRewards, pattern: str | None = None, invalid_reward: float = 0.0) -> None:
        self._per_turn = one_of("rewards", rewards, get_args(StepRewards)) == "turns"
        self._pattern = re.compile(r"\A(.*)\Z" if pattern is None else pattern, re.DOTALL)
        if not self._pattern.groups:
            raise ValueError(f"pattern {pattern!r} has no group for the action: write (...) around it")
        self._written = "" if pattern is None else f", written as {pattern}"
        self._invalid_reward = invalid_reward

    @abstractmethod
    def play(self, task: Task, max_turns: int) -> Blocking | NonBlocking:
        """Make an environment, step it with each text that is sent, and close it. The first answer opens the chat."""

    def found(self, reply: str) -> str | None:
        """What the last match of the pattern found; None: it is not in the reply."""
        found = [match[1] for match in self._pattern.finditer(reply) if match[1] is not None]
        return found[-1].strip() if found else None

    def refusal(self, why: str) -> EnvironmentStep:
        """The answer to a reply that is no action: the environment is not stepped."""
        return EnvironmentStep(f"error: this is no action{why}{self._written}", self._invalid_reward)

    @override
    async def run(self, task: Task, chat: Chat) -> float | Score | None:
        session, name = chat.session, type(self).__name__
        steps, total = 0, 0.0
        played = self.play(task, session.limits.max_turns)
        playing = played if isinstance(played, AsyncGenerator) else _InThread(name, played)
        try:
            async with session.part("start"):
                messages = _opening(task, (await playing.asend(None)).answer)
            while session.stop is None:
                turn = await session.sampled(messages)
                text = turn.text if self.whole_text else turn.reply.content
                step = await self._stepped(session, playing.asend(text))
                if step.reward is not None:
                    steps, total = steps + 1, total + finite(step.reward, "the reward of a step")
                    if self._per_turn:
                        session.reward(step.reward, turn.number)
                said = {"role": "assistant", "content": step.said} if step.said is not None else turn.reply.message
                messages += [said, *_messages(step.answer)]
                if step.stop is not None:
                    session.end(step.stop)
        except EpisodeOver as over:
            session.end(over.stop)
        finally:
            await closed(playing.aclose(), name)
        return Score(0.0 if self._per_turn else total, {"return": total, "steps": float(steps)})

    async def _stepped(self, session: EpisodeSession, step: Awaitable[EnvironmentStep]) -> EnvironmentStep:
        """One step. DeadlineExceeded: it took longer than a tool may, and what it did is unknown."""
        longest = session.limits.tool_deadline
        try:
            async with session.part("tools"), asyncio.timeout(longest) as limit:
                return await step
        except TimeoutError as error:
            if not limit.expired():
                raise
            what = f"a step of {type(self).__name__} took longer than {longest:g} s"
            raise DeadlineExceeded(what, "raise episode.tool_deadline") from error


class _InThread:
    """Sends to a generator in a thread of its own: steps never overlap, and one that never returns is left behind."""

    def __init__(self, name: str, playing: Blocking) -> None:
        self._name, self._playing = name, playing
        self._inbox: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        threading.Thread(target=contextvars.copy_context().run, args=(self._serve,), name=name, daemon=True).start()

    async def asend(self, action: Any) -> EnvironmentStep:
        return await self._run(partial(self._playing.send, action))

    async def aclose(self) -> None:
        try:
            await self._run(self._playing.close)
        finally:
            self._inbox.put(None)

    async def _run(self, work: Callable[[], _T]) -> _T:
        future: asyncio.Future[_T] = asyncio.get_running_loop().create_future()
        self._inbox.put(partial(run_for, future, work))
        return await result_of(future, self._name)

    def _serve(self) -> None:
        for work in iter(self._inbox.get, None):
            work()


def _opening(task: Task, answer: str | list[dict[str, Any]]) -> list[Message]:
    if _messages(answer) is answer:
        return answer
    begin(task, f"\n\n{answer}" if isinstance(answer, str) and task.text and answer else answer)
    return task.messages


def _messages(answer: str | list[dict[str, Any]]) -> list[Message]:
    if isinstance(answer, str) or any("role" not in part for part in answer):
        return [{"role": "user", "content": answer}]
    return answer


def seed_of(task: Task) -> int:
    """The same for all samples of a group: the `seed` of the line, or made of the line's number."""
    given = task.metadata.get("seed")
    return given if isinstance(given, int) else zlib.crc32(f"0 {task.evaluation} {task.line}".encode())

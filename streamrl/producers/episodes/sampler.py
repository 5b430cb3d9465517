"""Makes the sample of one place in a group: opens the episode, runs it, encodes the record."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import logging
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any, Final, Self

from typing_extensions import override

from streamrl.config import EpisodeConfig, RunConfig
from streamrl.config.episode import RUN_PYTHON
from streamrl.engine import Generator
from streamrl.errors import DataError, DeadlineExceeded, PluginError, RetryLater, StreamrlError, leaves
from streamrl.plugin_import import build_plugin, import_plugin, look_in
from streamrl.producers.episodes.blocked_loop import NAMED_SECONDS, Tell, naming_what_blocks
from streamrl.producers.episodes.clock import EpisodeOver
from streamrl.producers.episodes.environment import EnvironmentEpisode, ToolEpisode, check_environment
from streamrl.producers.episodes.episode import Chat, Episode, Task
from streamrl.producers.episodes.journal import BeginAgain
from streamrl.producers.episodes.known_models import renderer_of
from streamrl.producers.episodes.rendering import ChatRenderer
from streamrl.producers.episodes.run_python import python_tool
from streamrl.producers.episodes.session import EpisodeSession
from streamrl.producers.episodes.tools import Tool, in_task, left_behind
from streamrl.producers.sampler import SampleOrder, Sampler, SingleTurn
from streamrl.producers.tokenizer import Tokenizer
from streamrl.sandbox import SandboxSettings
from streamrl.score import Score
from streamrl.wire import Sample, StopReason

logger = logging.getLogger(__name__)

_OPEN_SHARE: Final = 0.5  # of `supervisor.start_deadline`, for `open`: a worker that takes all of it is killed unsaid
_CLOSE_SECONDS: Final = 10.0
_GRACE: Final = 30.0  # for code of the user to end after its cancellation: it may have to close a browser
_AGENT: Final = "the agent"
_NEWEST: Final = 32  # calls of a tool, and runs of the agent, that are looked at
_LEAST: Final = 8  # fewer say nothing
_LASTING_SECONDS: Final = 10.0
_MOST_TOOLS: Final = 256  # agents name their tools themselves


class EpisodeFailed(StreamrlError):
    """The user's code raised an error, or returned what is no score."""


def sampler_of(
    config: RunConfig, engine: Generator, tokenizer: Tokenizer, name: str = "", blocked: Tell | None = None
) -> Sampler:
    """What makes the samples of a run; `name` is that of the process, `blocked` as in `naming_what_blocks`."""
    if config.episode.kind is None:
        return SingleTurn(config, engine, tokenizer, name)
    return EpisodeSampler(config, engine, tokenizer, episode_of(config), name, blocked=blocked)


def episode_of(config: RunConfig) -> Episode:
    """The episode that the run file names. PluginError: it cannot be found, imported or built."""
    episode = config.episode
    paths = look_in(config.plugin_paths)
    if episode.run is not None:
        return _user_episode(episode.run, episode.args, paths)
    if episode.environment is not None:
        return _user_environment(episode.environment, episode.args, paths)
    if episode.agent is not None:
        from streamrl.producers.episodes.agent import AgentEpisode  # with the server of the endpoint

        return AgentEpisode(config)
    return ToolEpisode([_tool(use, episode, paths) for use in episode.tools])


def _tool(use: str, episode: EpisodeConfig, paths: list[Path]) -> Callable[..., Any] | Tool:
    if use != RUN_PYTHON:
        function: Callable[..., Any] = import_plugin(use, paths, role="tool")
        return function
    settings = build_plugin(SandboxSettings, f"tool {use}", episode.run_python)
    assert isinstance(settings, SandboxSettings)
    if settings.longest >= episode.tool_deadline:
        what = f"tool {use}: a program may take {settings.longest:g} s, and a call {episode.tool_deadline:g} s"
        hint = f"raise episode.tool_deadline, or lower `seconds` or `wall` in episode.{use}"
        raise PluginError(what, hint)
    return python_tool(settings)


def _user_episode(use: str, args: Mapping[str, Any], paths: list[Path]) -> Episode:
    target = import_plugin(use, paths, role="episode")
    if not (inspect.isclass(target) and issubclass(target, Episode)):
        raise PluginError(f"episode {use} is no subclass of Episode", "a class with `reset` is an episode.environment")
    built = build_plugin(target, f"episode {use}", args)
    assert isinstance(built, Episode)
    if not inspect.iscoroutinefunction(built.run):
        raise PluginError(f"episode {use}: run is not async", "write `async def run(self, task, chat)`")
    return built


def _user_environment(use: str, args: Mapping[str, Any], paths: list[Path]) -> Episode:
    target = import_plugin(use, paths, role="environment")
    if not callable(target):
        raise PluginError(f"environment {use} is of type {type(target).__name__}", "name a class")
    try:
        inspect.signature(target).bind(**args)
    except TypeError as error:
        raise PluginError(f"environment {use}: episode.args do not fit: {error}") from error
    except ValueError:
        pass  # no readable signature: its first object is the check
    if inspect.isclass(target):
        check_environment(target)
    return EnvironmentEpisode(functools.partial(target, **args))


class EpisodeSampler(Sampler):
    """Runs episodes, `episode.concurrent` at the same time; opens the user's episode when it is entered."""

    def __init__(
        self,
        config: RunConfig,
        engine: Generator,
        tokenizer: Tokenizer,
        episode: Episode,
        name: str = "",
        *,
        blocked: Tell | None = None,
    ) -> None:
        self._config, self._engine, self._tokenizer, self._name = config, engine, tokenizer, name
        self._episode, self._what = episode, type(episode).__name__
        self._deterministic = config.episode.deterministic or episode.deterministic
        self._renderer: ChatRenderer | None = None
        self._places = asyncio.Semaphore(config.episode.concurrent or 1 << 20)
        self._running: set[EpisodeSession] = set()
        self._counts = Counter(forks=0, dropped_turns=0, auxiliary_turns=0)
        self._tools = ToolFigures()
        self._blocked = blocked
        self._watching = contextlib.ExitStack()

    @override
    async def __aenter__(self) -> Self:
        self._renderer = await asyncio.to_thread(renderer_of, self._tokenizer, self._config.episode.tool_format)
        what, longest = self._what, _OPEN_SHARE * self._config.supervisor.start_deadline
        try:
            async with asyncio.timeout(longest) as limit:
                await self._episode.open()
        except StreamrlError:
            raise
        except (Exception, KeyboardInterrupt, SystemExit) as error:
            if limit.expired():
                why = f"episode {what} was not open after {longest:g} s"
                raise DeadlineExceeded(why, "fix its `open`, or raise supervisor.start_deadline") from error
            raise PluginError(f"episode {what} cannot be opened: {type(error).__name__}: {error}") from error
        # At a third of a lease: the last renewal by the event loop may be as long ago.
        seconds = min(NAMED_SECONDS, self._config.lease.seconds / 3)
        self._watching.enter_context(naming_what_blocks(self._blocked, seconds))
        return self

    @override
    async def __aexit__(self, *error: object) -> None:
        self._watching.close()
        try:
            async with asyncio.timeout(_CLOSE_SECONDS):
                await self._episode.close()
        except Exception:
            # Its samples are made: the error that ended them, or an orderly end, counts for more.
            logger.exception("an episode did not close", extra={"episode": self._what})

    @override
    def capacity(self, slots: int) -> int:
        return (self._config.episode.concurrent or 2 * slots) if slots else 0

    @override
    def figures(self) -> Mapping[str, int | float]:
        generating = sum(session.generating for session in self._running)
        now = {"episodes": len(self._running), "generating": generating, "hanging": len(left_behind)}
        return {**now, **self._counts, "agents_failed": self._tools.agents_failed}

    @override
    def trouble(self) -> str:
        return self._tools.trouble()

    @override
    async def sample(self, order: SampleOrder) -> Sample:
        async with self._places:
            try:
                session, score = await self._played(order)
            except BeginAgain as error:
                logger.warning("an episode cannot go on from its record", extra={"why": error.message})
                session, score = await self._played(order)  # without a record, so this is raised once
        if session.stop == "rollout_timeout":
            logger.warning("an episode ran out of time", extra={"line": order.prompt.line, "why": session.clock.late})
            if self._config.episode.timed_out == "drop":
                raise DeadlineExceeded(session.clock.late)
        sample = session.sample(score, self._name)
        self._tools.add(sample)
        return sample

    async def _played(self, order: SampleOrder) -> tuple[EpisodeSession, Score | None]:
        assert self._renderer is not None
        session = EpisodeSession(
            self._config, self._engine, self._renderer, self._tokenizer, order, deterministic=self._deterministic
        )
        self._running.add(session)
        try:
            await session.images.open()
            return session, await self._play(session, Task.of(order.prompt))
        finally:
            self._running.discard(session)
            counts = {"dropped_turns": session.dropped, "auxiliary_turns": session.auxiliary}
            self._counts.update(counts, forks=session.forks)
            self._tools.ended(session.stop)
            await session.close()

    async def _play(self, session: EpisodeSession, task: Task) -> Score | None:
        """Run the user's code; its score. If a limit ended it and it gave none, what an agent posted, else 0."""
        try:
            async with self._guarded(session), session.clock.whole():
                running = self._episode.run(task, Chat(session))
                score = _score_of(await in_task(running, f"{self._what}.run", _GRACE))
                session.check_overflow()
                return score
        except EpisodeOver as over:
            session.end(over.stop)
        stop = session.stop
        assert stop is not None
        try:
            async with self._guarded(session), session.part("scoring"):
                scoring = self._episode.cut_short(task, stop)
                given = _score_of(await in_task(scoring, f"{self._what}.cut_short", _GRACE))
        except EpisodeOver:
            given = None
        return given or Score(session.posted or 0.0)

    @contextlib.asynccontextmanager
    async def _guarded(self, session: EpisodeSession) -> AsyncIterator[None]:
        """Tell errors of the engine from those of the user's code, whatever that code made of them."""
        try:
            yield
        except Exception as error:
            meant = session.fault or self._meant(session, error)
            if meant is error:
                raise
            raise meant from error
        if session.fault is not None:
            raise session.fault

    def _meant(self, session: EpisodeSession, error: Exception) -> Exception:
        """What an error of the user's code, or those in the group of its sub-agents, mean for the episode."""
        if isinstance(error, (EpisodeOver, DataError, RetryLater)):
            return error
        # An error of the code is never hidden by the end of the episode, which may have come later.
        overs = [each for each in leaves(error) if isinstance(each, EpisodeOver)]
        found = [each for each in leaves(error) if not isinstance(each, EpisodeOver)]
        if not found:
            return EpisodeOver(session.stop or overs[0].stop)
        worst = next((each for each in found if not isinstance(each, DataError)), found[0])
        if isinstance(worst, DataError):
            return worst
        return EpisodeFailed(f"episode {self._what} failed: {type(worst).__name__}: {worst}")


def _score_of(value: Any) -> Score | None:
    return value if value is None or isinstance(value, Score) else Score(value)


class ToolFigures:
    """Which tools and agents of a worker's episodes fail, in words for `streamrl status`."""

    def __init__(self) -> None:
        self.agents_failed = 0
        self._failed: dict[str, deque[bool]] = {}

    def add(self, sample: Sample) -> None:
        for use in (use for turn in sample.turns for use in turn.tools if use.outcome not in {"unknown", "malformed"}):
            self._note(f"tool {use.name}", use.outcome != "ok")

    def ended(self, stop: StopReason | None) -> None:
        self.agents_failed += stop == "agent_failed"
        self._note(_AGENT, stop == "agent_failed")

    def trouble(self) -> str:
        """Name what fails in half of its newest calls, and code that was given up and goes on; empty: none."""
        hanging = left_behind.lasting(_LASTING_SECONDS)
        found = [f"{what} goes on after its cancellation, {calls}x" for what, calls in sorted(hanging.items())]
        for name, calls in sorted(self._failed.items()):
            if len(calls) >= _LEAST and 2 * sum(calls) >= len(calls):
                so = f"{sum(calls)} of the last {len(calls)}"
                found.append(f"{name} failed in {so} episodes" if name == _AGENT else f"{name}: {so} calls failed")
        return "; ".join(found)

    def _note(self, name: str, failed: bool) -> None:
        if name in self._failed or len(self._failed) < _MOST_TOOLS:
            self._failed.setdefault(name, deque(maxlen=_NEWEST)).append(failed)

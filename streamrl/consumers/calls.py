"""The calls of one reward in one worker: slot, circuit, thread, deadline, attempts with backoff, figures."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import queue
import random
import threading
import time
import traceback
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeVar

import orjson

from streamrl.config import RewardWorkerConfig
from streamrl.consumers.figures import FailureKind, RewardFigures
from streamrl.consumers.limits import Circuit, Slots
from streamrl.consumers.plugins import ASKING, LoadedReward
from streamrl.consumers.processes import CallFailed
from streamrl.consumers.reward import RewardSample, Score
from streamrl.errors import (
    ConfigError,
    DeadlineExceeded,
    RewardBusy,
    RewardImpossible,
    RewardUnavailable,
    StreamrlError,
)
from streamrl.wire import utf8

logger = logging.getLogger(__name__)

DETAIL_BYTES: Final = 4096
WHY_CHARACTERS: Final = 200
_LONGEST_PAUSE: Final = 30.0
_OF_THE_SAMPLE: Final = (
    *(ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, NameError, RuntimeError, TypeError),
    *(ValueError, CallFailed),
)
"""Python's own errors for wrong values are caused by the sample; any other error may mean that a service is away."""

Subject = RewardSample | Sequence[RewardSample]
"""What one call scores: a sample, or all samples of a group."""


class ScoringFailed(StreamrlError):
    """A sample will never have a score. `fail_group`: its group fails too (`on_failure: dead`).

    `detail` is the traceback of the last attempt, at most `DETAIL_BYTES` long.
    """

    def __init__(self, message: str, detail: str = "", fail_group: bool = False) -> None:
        message, detail = utf8(message), utf8(detail)  # Redis, logs and JSON take UTF-8 only
        super().__init__(message)
        self.args = (message, detail, fail_group)
        self.detail = detail
        self.fail_group = fail_group


class CallEnded(BaseException):
    """Ends a call that holds the event loop; `except Exception` does not catch it."""


class NoTime(RewardUnavailable):
    """The lease of the sample may end before another attempt does."""


@dataclass(slots=True)
class SampleState:
    until: float  # end of the sample's lease, by `time.monotonic`; no attempt may last longer
    failure: ScoringFailed | None = None  # one reward failed for good, so the others stop trying
    fault: Exception | None = None  # the last failed attempt of any reward since the last outage


_failed_servers: Final[ContextVar[dict[str, None] | None]] = ContextVar("failed_servers", default=None)


@contextlib.contextmanager
def remembering_failed_servers() -> Iterator[None]:
    """All requests in this block, including those of tasks that it starts, are for one sample (or one group)."""
    token = _failed_servers.set({})
    try:
        yield
    finally:
        _failed_servers.reset(token)


def failed_servers() -> dict[str, None]:
    """URLs of servers that failed the current sample, the latest last. The caller adds to it."""
    failed = _failed_servers.get()
    return {} if failed is None else failed


_R = TypeVar("_R")
_Job = tuple[Callable[..., Any], Any, asyncio.Future[Any], asyncio.AbstractEventLoop]


class CallThreads:
    """Daemon threads that run sync functions for coroutines of one event loop.

    A thread cannot be killed. If the caller of `run` is cancelled at its deadline, the thread is abandoned until the
    function returns, or dies with the process. The standard executor joins its threads at exit, so one hanging reward
    would keep the process from ending. `abandoned` counts the threads that still run such a call.
    """

    def __init__(self) -> None:
        self.abandoned = 0
        self.started = 0
        self._idle: list[queue.SimpleQueue[_Job]] = []

    async def run(self, call: Callable[..., _R], argument: Any) -> _R:
        """Return `call(argument)`, run in a thread. A `BaseException` such as `SystemExit` becomes `RuntimeError`."""
        loop = asyncio.get_running_loop()
        inbox = self._idle.pop() if self._idle else self._start()
        future: asyncio.Future[_R] = loop.create_future()
        inbox.put((call, argument, future, loop))
        try:
            return await future
        finally:
            self.abandoned += future.cancelled()  # one that has its result ended in the turn of its deadline

    def _start(self) -> queue.SimpleQueue[_Job]:
        inbox: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self.started += 1
        threading.Thread(target=self._work, args=(inbox,), name=f"reward-{self.started}", daemon=True).start()
        return inbox

    def _work(self, inbox: queue.SimpleQueue[_Job]) -> None:
        while True:
            call, argument, future, loop = inbox.get()
            result, error = None, None
            try:
                result = call(argument)
            except Exception as raised:  # noqa: BLE001 (handed to the caller of `run`)
                error = raised
            except BaseException as raised:  # noqa: BLE001 (a thread must not end the process or vanish)
                error = RuntimeError(f"{type(raised).__name__}: {raised}").with_traceback(raised.__traceback__)
            try:
                loop.call_soon_threadsafe(self._finish, inbox, future, result, error)
            except RuntimeError:
                return  # the loop is closed: the process is ending
            del call, argument, future, result, error

    def _finish(
        self, inbox: queue.SimpleQueue[_Job], future: asyncio.Future[Any], result: Any, error: Exception | None
    ) -> None:
        self._idle.append(inbox)
        if future.cancelled():
            self.abandoned -= 1
        elif error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)


class RewardCalls:
    def __init__(self, reward: LoadedReward, worker: RewardWorkerConfig, threads: CallThreads) -> None:
        spec = reward.spec
        self.reward = reward
        self.figures = RewardFigures()
        self.circuit = Circuit()
        self._has_pool = spec.use in ASKING
        self.in_flight = 0
        self._threads = threads
        life = reward.limits
        self.deadline = reward.deadline(worker)
        self._attempts = 1 if reward.instant else spec.attempts or worker.attempts
        self._backoff = worker.backoff
        self._on_failure: Literal["drop_sample", "dead", "retry"] = spec.on_failure or worker.on_failure
        self._retry_for = worker.retry_for
        self._counts = life.counts
        self._concurrency = spec.concurrency or life.concurrency
        self._asked_slots = life.slots
        self._away = life.away
        self._slots = Slots(lambda: self.slots)
        self._circuit_moved = asyncio.Event()

    @property
    def slots(self) -> int | None:
        limits = [limit for limit in (self._concurrency, self._asked_slots()) if limit is not None]
        return max(1, min(limits)) if limits else None

    @property
    def away(self) -> str:
        """Why the reward cannot score now; empty: it can, or nothing is known yet."""
        if self.circuit.open_since is not None:
            return self.circuit.why
        try:
            return utf8(str(self._away() or "")[:WHY_CHARACTERS])
        except Exception:
            logger.warning("away() of a reward failed", extra={"reward": self.reward.name}, exc_info=True)
            self._away = str  # do not ask it again
            return ""

    def own_counts(self) -> dict[str, Any]:
        """The reward's own counts; empty if it raises or returns no JSON, which is noted and logged once."""
        try:
            own: dict[str, Any] = orjson.loads(orjson.dumps(dict(self._counts())))
        except Exception as error:
            if not self.figures.miscounts:
                logger.warning("a reward cannot count", extra={"reward": self.reward.name}, exc_info=True)
            self.figures.miscounts = utf8(f"{type(error).__name__}: {error}"[:WHY_CHARACTERS])
            return {}
        self.figures.miscounts = ""
        return own

    async def instant(self, sample: RewardSample) -> Score:
        """Call a rule that cannot hang: once, in this task, without a deadline."""
        began = time.perf_counter()
        try:
            score = _score(await self._call(sample))
        except Exception as error:
            self.figures.failures["error"] += 1
            raise self.failed(error, 1) from error
        self.figures.took(time.perf_counter() - began)
        self.figures.gave(score.value, score.tokens)
        return score

    async def score(self, subject: Subject, state: SampleState) -> list[Score]:
        """Call the reward until it returns one score for each sample. Safe to cancel.

        Raises `ScoringFailed` for the last failed attempt, or any failed attempt after another reward failed for good;
        `RewardUnavailable` if no server could score before the lease ends; `RewardImpossible` if none ever can.
        """
        with remembering_failed_servers():
            return await self._until_scored(subject, state)

    async def _until_scored(self, subject: Subject, state: SampleState) -> list[Score]:
        faults, rounds, began = 0, 0, time.monotonic()
        while True:
            asked, waits = time.monotonic(), False
            try:
                return await self._attempt(subject, state.until)
            except NoTime as error:
                if state.failure is not None:
                    raise state.failure from error
                if state.fault is None:
                    raise
                cause = state.fault if faults else error
                state.failure = self.failed(cause, faults, "lease.max_hold leaves no time for another")
                raise state.failure from error
            except RewardImpossible as error:
                state.failure = ScoringFailed(error.message)  # the worker ends: the other rewards stop trying
                raise
            except Exception as error:
                if state.failure is not None:
                    raise state.failure from error
                if isinstance(error, RewardUnavailable):
                    waits, state.fault = True, None
                else:
                    faults, state.fault = faults + 1, error
                    if self._is_last(error, faults, time.monotonic() - began):
                        state.failure = self.failed(error, faults)
                        raise state.failure from error
            self.figures.retried += 1
            rounds += 1
            left = max(0.0, state.until - self.deadline - time.monotonic())
            pause = min(self._backoff * 2 ** min(rounds - 1, 16), _LONGEST_PAUSE, left)
            await asyncio.sleep(random.uniform(0, pause))  # noqa: S311 (full jitter, no secret)
            if waits:
                began += time.monotonic() - asked  # `retry_for` does not include outages

    def _is_last(self, error: Exception, attempt: int, seconds: float) -> bool:
        if isinstance(error, ConfigError):  # refused: by a server, or by the reward itself
            return True
        if self._on_failure == "retry" and not self.reward.instant:
            return seconds >= self._retry_for
        return attempt >= self._attempts

    def failed(self, error: BaseException, attempts: int, why: str = "") -> ScoringFailed:
        self.figures.dead += 1
        notes = [*([f"{attempts} attempts"] if attempts > 1 else []), *([why] if why else [])]
        tries = f" ({'; '.join(notes)})" if notes else ""
        kind = "deadline" if isinstance(error, TimeoutError) else type(error).__name__
        said = error.message if isinstance(error, StreamrlError) else str(error)
        message = f"{kind}: {said}"[:WHY_CHARACTERS] + tries
        if self.reward.name[:40] not in message:
            message += f" [{self.reward.name[:40]}]"
        return ScoringFailed(message[:250], detail_of(error), self._on_failure == "dead")

    async def _attempt(self, subject: Subject, until: float) -> list[Score]:
        latest = until - self.deadline
        try:
            await self._slots.acquire(latest - time.monotonic())
        except TimeoutError as error:
            raise NoTime(f"no free slot for a call of {self.reward.name} in time") from error
        try:
            return await self._with_slot(subject, latest)
        finally:
            self._slots.release()

    async def _with_slot(self, subject: Subject, latest: float) -> list[Score]:
        probe = await self._enter(latest)
        began = time.perf_counter()
        self.in_flight += 1
        try:
            async with asyncio.timeout(self.deadline) as limit:
                result = await self._call(subject)
            scores = _scores(result, subject) if self.reward.group else [_score(result)]
        except Exception as error:
            failure = error
            if isinstance(error, TimeoutError) and limit.expired():
                failure = TimeoutError(f"{self.reward.name}: no score within {self.deadline:g} s")
            self._note(failure, subject, probe=probe)
            if failure is error:
                raise
            raise failure from error
        except BaseException:
            self.circuit.inconclusive(probe=probe)
            self._circuit_moved.set()
            raise
        finally:
            self.in_flight -= 1
        self._succeeded(scores, time.perf_counter() - began)
        return scores

    async def _enter(self, latest: float) -> bool:
        """Wait until the circuit lets a call through, for at most the deadline. True: this call is its probe."""
        now = time.monotonic()
        if now >= latest:
            raise NoTime(f"no time is left for a call of {self.reward.name}")
        end = min(now + self.deadline, latest)
        while (wait := self.circuit.wait(now)) > 0 and now < end:
            self._circuit_moved.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(wait, end - now)):
                    await self._circuit_moved.wait()
            now = time.monotonic()
        if wait > 0:
            away = now - (self.circuit.open_since or now)
            self.figures.failures["unavailable"] += 1
            raise RewardUnavailable(f"no score for {away:.0f} s: {self.circuit.why}"[:WHY_CHARACTERS])
        return self.circuit.enter()

    def _succeeded(self, scores: Sequence[Score], seconds: float) -> None:
        if self.circuit.open_since is not None:
            logger.info("circuit closed", extra={"reward": self.reward.name})
        self.circuit.success()
        self._circuit_moved.set()
        self.figures.took(seconds)
        for score in scores:
            self.figures.gave(score.value, score.tokens)

    def _note(self, error: Exception, subject: Subject, *, probe: bool) -> None:
        outcome: FailureKind = "error"
        if isinstance(error, RewardUnavailable):
            outcome = "unavailable"
        elif isinstance(error, TimeoutError | DeadlineExceeded):
            outcome = "deadline"
        self.figures.failures[outcome] += 1
        if self._has_pool or isinstance(error, (*_OF_THE_SAMPLE, RewardBusy)):
            self.circuit.inconclusive(probe=probe)  # a pool of servers ejects faulty ones by itself
        else:
            was_open = self.circuit.open_since is not None
            unavailable = outcome == "unavailable"
            now = time.monotonic()
            why = utf8(described(error)[:WHY_CHARACTERS])
            self.circuit.failure(now, _identity(subject), why, probe=probe, unavailable=unavailable)
            if self.circuit.open_since is not None and not was_open:
                extra = {"reward": self.reward.name, "why": self.circuit.why}
                logger.warning("circuit open: samples wait for this reward", extra=extra)
        self._circuit_moved.set()

    async def _call(self, subject: Subject) -> Any:
        """Call the reward once. `watch.py` looks for this frame and its locals `self` and `subject`."""
        try:
            if self.reward.blocking and not self.reward.instant:
                result = await self._threads.run(self.reward.call, subject)
            else:
                result = self.reward.call(subject)
            while inspect.isawaitable(result):  # an async wrapper may return an awaitable
                result = await result
        except SystemExit as error:  # asyncio would end the whole worker with it
            raise RuntimeError(f"the reward called sys.exit({error.code!r})") from error
        except CallEnded as error:
            raise TimeoutError(f"{self.reward.name} {error}") from error
        return result

    def held_loop(self, seconds: float) -> None:
        self.figures.held_loop(seconds)
        if self.figures.blocked & (self.figures.blocked - 1) == 0:  # the first, second, fourth, ... time
            extra = {"reward": self.reward.name, "seconds": round(seconds, 3), "times": self.figures.blocked}
            hint = "await what takes long, or make it a sync reward, which runs in a thread"
            logger.warning("a reward held the event loop", extra=extra | {"hint": hint})


def described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error.message if isinstance(error, StreamrlError) else error}"


def detail_of(error: BaseException) -> str:
    text = "".join(traceback.format_exception(error)).encode(errors="replace")
    return text[-DETAIL_BYTES:].decode(errors="ignore")


def _score(result: Any) -> Score:
    return result if type(result) is Score else Score(result)


def _scores(results: Any, samples: Subject) -> list[Score]:
    wanted = len(samples) if isinstance(samples, Sequence) else 1
    if not isinstance(results, Sequence) or isinstance(results, str | bytes):
        raise TypeError(f"a group reward returned a {type(results).__name__}, not a sequence of {wanted} scores")
    if len(results) != wanted:
        raise ValueError(f"a group reward returned {len(results)} scores for {wanted} samples")
    return [_score(result) for result in results]


def _identity(subject: Subject) -> Hashable:
    first = subject[0] if isinstance(subject, Sequence) else subject
    return first.prompt.evaluation, first.group_id, first.index

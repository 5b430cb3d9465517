"""What `HfEngine` asks of a decode loop: the static slots of our own and transformers' continuous batching.

A decoder runs its loop in a thread of its own. `submit` and `discard` are called by the event loop's thread,
everything else by one control thread at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from streamrl.engine import Finish, Request, Runs
from streamrl.producers.stopping import StopTexts


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """A checked request: `ticket` is never used again, `limit` fits the context; `streams`: it has a listener.

    `request`: for what else it asks of sampling, None: nothing; `stop` are its texts that end it.
    """

    ticket: int
    prompt: tuple[int, ...]
    limit: int
    temperature: float
    streams: bool = False
    request: Request | None = None
    stop: StopTexts | None = None


@dataclass(frozen=True, slots=True, eq=False)
class JobOutcome:
    """How a job ended; with `error` the other fields mean nothing."""

    ticket: int
    tokens: list[int]
    logprobs: list[float]
    runs: Runs
    finish: Finish
    error: Exception | None = None


@dataclass(frozen=True, slots=True, eq=False)
class JobProgress:
    ticket: int
    tokens: list[int]
    logprobs: list[float]


@dataclass(frozen=True, slots=True)
class Counts:
    running: int
    waiting: int
    tokens_sampled: int
    busy_seconds: float
    cache_use: float
    preemptions: int


class Spans:
    """The version runs of one request, `[(first token, version), ...]`; swaps without a token between are one."""

    __slots__ = ("_runs",)

    def __init__(self, version: int) -> None:
        self._runs: Runs = [(0, version)]

    def swap(self, sampled: int, version: int) -> None:
        if self._runs[-1][0] == sampled:
            self._runs.pop()
        self._runs.append((sampled, version))

    def runs(self, sampled: int) -> Runs:
        return [run for run in self._runs if run[0] < sampled]


Deliver: TypeAlias = Callable[[list[JobOutcome]], None]
Tell: TypeAlias = Callable[[list[JobProgress]], None]


class Decoder(Protocol):
    """A decode loop over one model.

    `deliver`, given to its constructor, gets the jobs that ended, in any thread, at once and each job once. `tell` gets
    what jobs with `streams` have sampled, in any thread, each token once and none after the job's outcome; the last
    tokens may come with the outcome alone.
    """

    def start(self) -> None: ...
    def stop(self) -> None:
        """End the loop and free its memory; jobs in flight get no outcome. Works on a loop that died; repeatable."""

    def abandon(self) -> None:
        """End a loop that hangs as soon as its step ends, if ever; returns at once."""

    def submit(self, jobs: Sequence[Job]) -> None:
        """Take jobs on; never blocks. Jobs with the same prompt should come in one call: they share its prefill."""

    def discard(self, ticket: int) -> None:
        """Drop a job without an outcome at the next step; unknown tickets (ended meanwhile) are ignored."""

    def exclusive(self) -> AbstractContextManager[None]:
        """Hold the loop between two steps: inside, model and cache belong to the caller. May be nested.

        `Unreachable`: the loop is dead. `DeadlineExceeded`: the running step does not end.
        """
        ...

    def take(self, tickets: Collection[int] | None) -> list[JobOutcome]:
        """Inside `exclusive`: end these jobs (all when None) and return what they have, `finish="abort"`."""
        ...

    def swapped(self, version: int) -> None:
        """Inside `exclusive`, after the weights have changed: later tokens belong to `version`."""

    def recompute(self) -> None:
        """Inside `exclusive`: compute the keys and values of all jobs in flight again, with the weights in force."""

    def release(self) -> None:
        """Inside `exclusive`: free the cache; `Refused` when a job is being decoded, and then nothing has changed."""

    def restore(self) -> None: ...
    def counts(self) -> Counts: ...

    def progress(self) -> tuple[bool, int]:
        """(whether there is a step to make and the loop is not held, steps so far), from any thread."""
        ...

    def failure(self) -> BaseException | None:
        """What killed the loop, None while it lives or after `stop`."""
        ...

"""All errors that streamrl raises on purpose, with their exit codes.

```
StreamrlError            70  a bug in streamrl, unless a subclass says otherwise
├── UsageError            2  the command line itself is wrong
├── ConfigError          78  configuration, data set or plug-in is wrong: restarting does not help
│   ├── DataError        78  a line of the data set
│   │   └── DeadlyRequest 78 engines died under it
│   ├── PluginError      78  a reward that cannot be loaded
│   ├── RewardImpossible 78  none of the configured servers can ever score (wrong key, route or model)
│   └── Refused          78  to continue would break a promise (older checkpoint, other data, second learner)
│       └── LedgerDamaged 78 keys of the run in Redis hold values that streamrl never writes
├── CannotCreate         73  a file or directory cannot be made (full disk, no permission, already there)
├── Unreachable          69  a service (Redis, a learner, an engine) does not answer
│   ├── NotFetched       69  a server did not get the files of a version: it keeps the one before
│   └── RewardUnavailable 69 no server can score now (all are away, or the circuit is open)
│       └── RewardBusy   69 the servers are there but busy: the circuit stays closed
├── DeadlineExceeded     75  something took longer than its deadline; another try may help
├── RetryLater           75  what a piece of work needs is not available: its lease is returned
├── WireError            70  bytes that are not a valid message (they go to the dead letters)
├── WeightsError         70  a version of the weights that must not be applied
├── Fenced                0  a newer process of the same role took over: this one ends
└── Forgotten            75  Redis lost its last seconds and does not know this process: restart
```

Every error says what happened and where; `hint` says how to fix it. All take positional arguments only, so that they
can cross process boundaries.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from enum import IntEnum, StrEnum
from importlib.util import find_spec
from typing import Final

UNKNOWN_NAME: Final = "this host does not know that name: fix it, or its DNS or /etc/hosts; an IP address works too"
"""Hint for an address whose host name does not resolve."""


class ExitCode(IntEnum):
    """Exit codes of all commands and roles (docs/reference/cli.md lists what a supervisor does with each)."""

    OK = 0
    FAILURE = 1
    USAGE = 2
    NOT_READY = 3
    LAG_CRITICAL = 4
    UNREACHABLE = 69
    INTERNAL = 70
    CANNOT_CREATE = 73
    TEMPORARY = 75
    CONFIG = 78
    INTERRUPTED = 130
    TERMINATED = 143


class ExitClass(StrEnum):
    """What an exit code means for the restart."""

    FINISHED = "finished"
    HOPELESS = "hopeless"
    CRASHED = "crashed"


def classify(code: int) -> ExitClass:
    """Return the class of an exit code; negative codes are signals, as in `asyncio.subprocess`.

    | exit code | meaning | what the supervisor does |
    |---|---|---|
    | 0 | finished | nothing; the learner's means that the run is finished |
    | 3 | failed before it was ready | no restart, the run fails |
    | 64-78, without 69 and 75 | configuration, data, plug-in or a broken promise | no restart, the run fails |
    | 69, 75 | a service is away, or a deadline is over | restart |
    | anything else, every signal | crash | restart |
    """
    if code == ExitCode.OK:
        return ExitClass.FINISHED
    if code in {ExitCode.UNREACHABLE, ExitCode.TEMPORARY}:
        return ExitClass.CRASHED
    if code == ExitCode.NOT_READY or 64 <= code <= 78:
        return ExitClass.HOPELESS
    return ExitClass.CRASHED


class StreamrlError(Exception):
    """Base of all errors raised on purpose.

    Args:
        message: what happened and where, one sentence.
        hint: how to fix it; empty when there is nothing a person can do.
    """

    exit_code: ExitCode = ExitCode.INTERNAL

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message, hint)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n  hint: {self.hint}" if self.hint else self.message


class UsageError(StreamrlError):
    """The command line is wrong."""

    exit_code = ExitCode.USAGE


class ConfigError(StreamrlError, ValueError):
    """Configuration, data or plug-in is wrong; a restart does not help."""

    exit_code = ExitCode.CONFIG


class DataError(ConfigError):
    """A line of a data set cannot be used; the message names file and line."""


class DeadlyRequest(DataError):
    """Engines died under a request, one after the other."""


class PluginError(ConfigError):
    """A plug-in cannot be imported or does not keep its contract."""


class RewardImpossible(ConfigError):
    """None of the configured servers can ever score (wrong key, route or model). The run ends; no sample fails.

    A server that has scored before gets the benefit of the doubt: the same answer then counts as a temporary failure.
    """


class Refused(ConfigError):
    """To continue would break a promise: a checkpoint older than what Redis has retired, another data set."""


class LedgerDamaged(Refused):
    """Keys of the run in Redis hold values that streamrl never writes. The message names them."""


class CannotCreate(StreamrlError, OSError):
    """A file or directory cannot be made."""

    exit_code = ExitCode.CANNOT_CREATE


class Unreachable(StreamrlError, ConnectionError):
    """A service does not answer within its deadline."""

    exit_code = ExitCode.UNREACHABLE


class NotFetched(Unreachable):
    """A server did not get the files of a version in time; it goes on with the one before."""


class RewardUnavailable(Unreachable):
    """No server can score any sample now: all are away, or the circuit of the reward is open.

    The worker opens the circuit of the reward at once, so that samples wait instead of failing one after the other.
    Waiting uses none of their attempts. A sample that has been held for too long goes back into the queue.
    """


class RewardBusy(RewardUnavailable):
    """The servers are there but had no free slot for this sample in time. The circuit stays closed."""


class DeadlineExceeded(StreamrlError, TimeoutError):
    """Something took longer than its deadline."""

    exit_code = ExitCode.TEMPORARY


class RetryLater(StreamrlError):
    """No engine, program or server that a piece of work needs is available.

    Its lease is returned: another process takes it, and it does not count as a death.
    """

    exit_code = ExitCode.TEMPORARY


class WireError(StreamrlError, ValueError):
    """Bytes that are not a valid message: too large, truncated, foreign, or of an unknown schema version."""


class WeightsError(StreamrlError):
    """A version of the weights that must not be applied: checksum, names, shapes or order do not fit."""


class Fenced(StreamrlError):
    """A newer process of the same role took over. A process that gets this error stops without another write."""

    exit_code = ExitCode.OK


class Forgotten(StreamrlError):
    """Redis lost its last seconds, and with them the take-over by this process. No newer process exists: restart."""

    exit_code = ExitCode.TEMPORARY


def unwrap(error: BaseException) -> BaseException:
    """Return the error inside nested exception groups that says most: the one that decides the end of a process.

    First what no restart can cure, then other known errors, then bugs, then `Fenced`. Ctrl-C comes before all of them.
    """
    return min(leaves(error), key=_rank)


def _rank(error: BaseException) -> int:
    if isinstance(error, (KeyboardInterrupt, SystemExit)):
        return 0
    if isinstance(error, Fenced):
        return 4
    if not isinstance(error, StreamrlError):
        return 3 if isinstance(error, Exception) else 5
    return 1 if classify(error.exit_code) is ExitClass.HOPELESS else 2


@contextlib.contextmanager
def unwrapped() -> Iterator[None]:
    """Raise what `unwrap` finds instead of the exception group of a task group."""
    try:
        yield
    except BaseExceptionGroup as group:
        raise unwrap(group) from group


@contextlib.contextmanager
def writing(path: object = None, *, inside: object = None) -> Iterator[None]:
    """Raise CannotCreate for an OSError of this block; it names `path`, or the file of the error, or `inside`."""
    try:
        yield
    except StreamrlError:
        raise
    except OSError as error:
        what = f"{path or error.filename or inside}: {error.strerror or error}"
        raise CannotCreate(what, "check space and permissions") from error


def need_packages(purpose: str, *names: str, extra: str = "train", otherwise: str = "") -> None:
    """Raise ConfigError when packages are missing that an extra of streamrl installs.

    Args:
        purpose: what needs them, as the subject of a sentence.
        names: of the packages.
        extra: of streamrl.
        otherwise: what to do without them.
    """
    if missing := [name for name in names if find_spec(name) is None]:
        or_else = f", or {otherwise}" if otherwise else ""
        raise ConfigError(f"{purpose} needs {', '.join(missing)}", f"pip install 'streamrl[{extra}]'{or_else}")


def leaves(error: BaseException) -> Iterator[BaseException]:
    """Yield all errors inside nested exception groups; a plain error yields itself."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from leaves(inner)
    else:
        yield error

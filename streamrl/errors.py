"""The one tree of errors, with what the shell and a person need of each.

```
StreamrlError            70  a bug of ours unless a subclass says otherwise
├── UsageError            2  the command line itself is wrong
├── ConfigError          78  configuration, data set or plug-in is wrong: restarting does not help
│   ├── DataError        78  a line of the data set
│   ├── PluginError      78  a reward that cannot be loaded
│   ├── RewardImpossible 78  those who are asked for a score will never give one (wrong key, no such route)
│   └── Refused          78  going on would break a promise (older checkpoint, other data, second learner)
│       └── LedgerDamaged 78 keys of the run in Redis hold what streamrl never writes
├── CannotCreate         73  a file or directory cannot be made (full disk, no permission, already there)
├── Unreachable          69  a service (Redis, a learner, an engine) does not answer
│   └── RewardUnavailable 69 nobody can score now (all servers away, circuit open): never a score
│       └── RewardBusy   69 those who can have no place now: no reason to open the circuit
├── DeadlineExceeded     75  something took longer than its deadline; trying again may help
├── WireError            70  bytes that are no message of ours (the message goes to the dead letters)
├── WeightsError         70  a version of the weights that must not be applied
├── Fenced                0  a newer process of the same role took over: leave quietly
└── Forgotten            75  Redis came back from the past and does not know this process: start again
```

Every error says what happened, where, and in `hint` how to mend it. All are picklable and take keyword-free
arguments only, so that they survive process boundaries and logs.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum


class ExitCode(IntEnum):
    """What a process of streamrl tells the shell (docs/reference/cli.md lists what a supervisor does with each)."""

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


class StreamrlError(Exception):
    """Base of all errors raised on purpose.

    Args:
        message: what happened and where, one sentence.
        hint: how to mend it; empty when there is nothing a person can do.
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


class PluginError(ConfigError):
    """A plug-in cannot be imported or does not keep its contract."""


class RewardImpossible(ConfigError):
    """Those who are asked for a score will never give one, for any sample: it ends the run, and no sample dies of it.

    Where they once gave one, the same answer is taken for a bad moment, and this is not raised.
    """


class Refused(ConfigError):
    """Going on would break a promise: older checkpoint than Redis retired for, other data set, and the like."""


class LedgerDamaged(Refused):
    """Keys of the run in Redis hold what streamrl never writes; the message names them."""


class CannotCreate(StreamrlError, OSError):
    """A file or directory cannot be made."""

    exit_code = ExitCode.CANNOT_CREATE


class Unreachable(StreamrlError, ConnectionError):
    """A service does not answer within its deadline."""

    exit_code = ExitCode.UNREACHABLE


class RewardUnavailable(Unreachable):
    """Nobody can give a score now, whatever the sample: all servers are away, or the circuit of the reward is open.

    It says nothing of the sample. The worker opens the circuit of the reward at once, so that samples wait instead of
    failing one after the other. It spends none of their attempts: they wait for as long as they may be held, and then
    go back into the queue.
    """


class RewardBusy(RewardUnavailable):
    """Those who can give a score are there, and had no place for this sample in time: the circuit stays closed."""


class DeadlineExceeded(StreamrlError, TimeoutError):
    """Something took longer than its deadline."""

    exit_code = ExitCode.TEMPORARY


class WireError(StreamrlError, ValueError):
    """Bytes that are no message of ours: too large, truncated, foreign or of an unknown schema version."""


class WeightsError(StreamrlError):
    """A version of the weights that must not be applied: checksum, names, shapes or order do not fit."""


class Fenced(StreamrlError):
    """A newer process of the same role has taken over; the holder of this error stops without a further write."""

    exit_code = ExitCode.OK


class Forgotten(StreamrlError):
    """Redis lost some seconds and with them the take-over of this process; nobody newer is there, so start again."""

    exit_code = ExitCode.TEMPORARY


def unwrap(error: BaseException) -> BaseException:
    """Return what a task group wraps, however deep: the first error of ours, else the first of all."""
    found = list(leaves(error))
    return next((leaf for leaf in found if isinstance(leaf, StreamrlError)), found[0])


def leaves(error: BaseException) -> Iterator[BaseException]:
    """All errors that task groups wrap, however deep; of another error itself."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from leaves(inner)
    else:
        yield error

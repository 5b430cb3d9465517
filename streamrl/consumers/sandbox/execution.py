"""What is run in a sandbox, within which limits, and what came of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

import msgspec

from streamrl.errors import StreamrlError

SMALLEST_MEMORY: Final = 64 << 20
SLOWEST: Final = 10
"""A host on which a program takes so many times its `wall`, for want of a processor, is too busy to say anything."""


class SandboxError(StreamrlError):
    """The sandbox itself failed, which says nothing of the program in it."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one run.

    Attributes:
        cpu: seconds of processor time of each process, rounded up.
        wall: seconds from the start to the end, whatever it waits for but a processor that others have.
        memory: bytes resident in all its processes together, looked at twenty times a second.
        address_space: bytes of each process, at once; None: no limit, for runtimes that reserve much and use little.
        disk: bytes of all files together where it has a file system of its own, else of each file.
        open_files: of each process.
        processes: and threads, at the same time.
        output: bytes on standard output and standard error together.
    """

    cpu: float = 5.0
    wall: float = 11.0
    memory: int = 512 << 20
    address_space: int | None = 1 << 30
    disk: int = 64 << 20
    open_files: int = 64
    processes: int = 16
    output: int = 1 << 20

    def __post_init__(self) -> None:
        numbers = {name: getattr(self, name) for name in self.__slots__}
        for name, number in numbers.items():
            if number is not None and not 0 < number < math.inf:
                raise ValueError(f"{name} is {number}; it must be above 0, and finite")
        if self.memory < SMALLEST_MEMORY:
            raise ValueError(f"memory is {self.memory} bytes; no program starts in less than {SMALLEST_MEMORY}")


@dataclass(frozen=True, slots=True)
class Program:
    """A program.

    Attributes:
        argv: the command; its first word is an absolute path.
        files: plain names and texts of the files in its directory.
        visible: directories of the host that it may read, besides those of the system.
        environ: all of its environment.
    """

    argv: tuple[str, ...]
    files: Mapping[str, str] = field(default_factory=dict)
    visible: tuple[str, ...] = ()
    environ: Mapping[str, str] = field(default_factory=dict)


class Execution(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one run.

    Attributes:
        outcome: `ended` by itself with `code`; `signal`: it was killed, by itself or for a limit of the kernel's;
            `time`, `memory`, `output`: it was killed for that limit.
        code: exit code, minus the number of a signal; None when nobody could tell.
        stdout: as UTF-8, bytes that are none replaced; cut off shortly after the limit.
        stderr: as above.
        result: what it wrote to its descriptor 3.
        cpu: seconds of processor time, of all processes that were waited for.
        wall: seconds with the set-up of the sandbox.
        delay: seconds of these in which it waited for a processor that others had, as far as the kernel tells; waiting
            for its own threads and processes is none.
    """

    outcome: Literal["ended", "signal", "time", "memory", "output"]
    code: int | None
    stdout: str
    stderr: str
    result: str
    cpu: float
    wall: float
    delay: float

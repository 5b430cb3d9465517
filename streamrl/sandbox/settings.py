"""What users may set of a sandbox: limits and isolation, in the words of the run file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from streamrl.errors import PluginError
from streamrl.plugin_import import one_of
from streamrl.sandbox.sandbox import Interpreter, Isolation, Sandbox, SandboxLimits, interpreter


@dataclass(frozen=True, kw_only=True)
class SandboxSettings:
    """Arguments of the reward `code` and of the tool `run_python`, which docs/guides/code-rewards.md describes.

    Raises:
        ValueError: a limit cannot be kept, or a word is not known.
        PluginError: an isolation that is no longer supported.
    """

    python: str = ""
    visible: Sequence[str] = ()
    seconds: float = 5.0
    wall: float | None = None
    memory_mib: int = 512
    address_space_mib: int | None = 1024
    disk_mib: int = 64
    processes: int = 16
    output_kib: int = 1024
    network: Literal["deny", "allow"] = "deny"
    isolation: Isolation = "auto"

    def __post_init__(self) -> None:
        one_of("network", self.network, ("deny", "allow"))
        if str(self.isolation) in {"bubblewrap", "namespaces", "nsjail"}:
            raise PluginError(f"isolation: {self.isolation} is gone", "leave isolation out, or say strict")
        one_of("isolation", self.isolation, ("auto", "strict", "none"))
        self._limits(0)

    @property
    def longest(self) -> float:
        """Seconds that a program may take, without those in which others have the processor."""
        return self._limits(0).wall

    def sandbox(self, *, ours: int = 0) -> Sandbox:
        """A sandbox. `ours`: processes of streamrl in it, beside those of the program. ConfigError as `Sandbox`."""
        return Sandbox(self._limits(ours), network=self.network == "allow", isolation=self.isolation)

    def interpreter(self) -> Interpreter:
        """The interpreter of the programs, which sees the directories in `visible` too."""
        found = interpreter(self.python)
        return Interpreter(found.path, (*found.visible, *map(os.path.abspath, self.visible)))

    def _limits(self, ours: int) -> SandboxLimits:
        return SandboxLimits(
            cpu=self.seconds,
            wall=2 * self.seconds + 1 if self.wall is None else self.wall,
            memory=self.memory_mib << 20,
            address_space=None if self.address_space_mib is None else self.address_space_mib << 20,
            disk=self.disk_mib << 20,
            processes=self.processes + ours,
            output=self.output_kib << 10,
        )

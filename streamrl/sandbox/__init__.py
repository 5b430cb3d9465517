"""Untrusted programs in processes of their own: isolated, without network, under limits, killed at the end.

`Sandbox.open` finds an isolation that works here. `Sandbox.start` gives a session that runs one program once per input.
docs/reference/sandbox.md says what this does not protect from.
"""

from streamrl.sandbox.sandbox import (
    Execution,
    Isolation,
    Program,
    Sandbox,
    SandboxError,
    SandboxLimits,
    Session,
)
from streamrl.sandbox.settings import SandboxSettings

__all__ = [
    "Execution",
    "Isolation",
    "Program",
    "Sandbox",
    "SandboxError",
    "SandboxLimits",
    "SandboxSettings",
    "Session",
]

"""Untrusted programs in processes of their own: without network, with limits, and gone when they end.

`Sandbox.open` finds a way to isolate that works here, `Sandbox.start` gives a session in which one program is run as
often as there are inputs. What this does not protect from is said in docs/reference/sandbox.md.
"""

from streamrl.consumers.sandbox.sandbox import (
    Execution,
    Isolation,
    Program,
    Sandbox,
    SandboxError,
    SandboxLimits,
    Session,
)

__all__ = ["Execution", "Isolation", "Program", "Sandbox", "SandboxError", "SandboxLimits", "Session"]

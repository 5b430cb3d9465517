"""The child's side of the status pipe: what a role tells its supervisor (see `process`)."""

from __future__ import annotations

import contextlib
import os

from streamrl.runtime.process import STATUS_FD


class StatusPipe:
    """Writes lines to the supervisor; without one (Kubernetes, Ray, a shell) it writes nothing.

    A supervisor that is gone or does not read is no concern of the role: the lifeline and the log see to that.
    """

    def __init__(self) -> None:
        number = os.environ.pop(STATUS_FD, None)
        self._handle = None if number is None else int(number)
        if self._handle is not None:
            os.set_inheritable(self._handle, False)
            os.set_blocking(self._handle, False)

    def ready(self) -> None:
        """The role can do work. A repeat changes nothing."""
        self._tell("READY", "1")

    def beat(self) -> None:
        """The event loop of the role lives."""
        self._tell("BEAT", "1")

    def error(self, text: str) -> None:
        """Why the role is about to end, for the supervisor to show."""
        self._tell("ERROR", text)

    def fenced(self, text: str) -> None:
        """The role ends because a newer process has taken over."""
        self._tell("FENCED", text)

    def _tell(self, name: str, value: str) -> None:
        if self._handle is not None:
            line = f"{name}={' '.join(value.split())[:2000]}\n".encode(errors="replace")
            with contextlib.suppress(BlockingIOError, BrokenPipeError):
                os.write(self._handle, line)

"""What a role tells the process that started it, in lines on a pipe.

```
READY=1            it can do work
BEAT=1             its event loop lives (once a second)
ERROR=text         why it is about to end
FENCED=text        it ends because a newer process has taken over
```
"""

from __future__ import annotations

import contextlib
import os
from typing import Final

STATUS_FD: Final = "STREAMRL_STATUS_FD"


class StatusPipe:
    """Writes lines to the supervisor; without one (Kubernetes, Ray, a shell) it writes nothing.

    Errors are ignored: if the supervisor is gone or does not read, the lifeline and the log handle it.
    """

    def __init__(self) -> None:
        number = os.environ.pop(STATUS_FD, None)
        self._handle = None if number is None else int(number)
        if self._handle is not None:
            os.set_inheritable(self._handle, False)
            os.set_blocking(self._handle, False)

    def ready(self) -> None:
        self._tell("READY", "1")

    def beat(self) -> None:
        self._tell("BEAT", "1")

    def error(self, text: str) -> None:
        self._tell("ERROR", text)

    def fenced(self, text: str) -> None:
        self._tell("FENCED", text)

    def _tell(self, name: str, value: str) -> None:
        if self._handle is not None:
            line = f"{name}={' '.join(value.split())[:2000]}\n".encode(errors="replace")
            with contextlib.suppress(BlockingIOError, BrokenPipeError):
                os.write(self._handle, line)

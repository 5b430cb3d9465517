"""The child's side of the lifeline: no process of a run outlives its supervisor."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Final

LIFELINE_FD: Final = "STREAMRL_LIFELINE_FD"
"""Variable with the number of the reading end."""


def hold(grace: float) -> bool:
    """Watch the lifeline that the supervisor gave this process; return whether there is one.

    When the supervisor dies this process gets SIGTERM (a drain), and after `grace` seconds it and all of its session
    get SIGKILL. Without a lifeline (Kubernetes, Ray, a shell) nothing is watched.
    """
    number = os.environ.pop(LIFELINE_FD, None)
    if number is None:
        return False
    threading.Thread(target=_watch, args=(int(number), grace), name="lifeline", daemon=True).start()
    return True


def _watch(handle: int, grace: float) -> None:
    while os.read(handle, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(grace)
    if os.getpgid(0) == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)

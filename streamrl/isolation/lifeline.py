"""Ends each process of a run with its supervisor, and each server with the process that started it."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from typing import Final

LIFELINE_FD: Final = "STREAMRL_LIFELINE_FD"
"""Environment variable with the descriptor of the reading end."""
_PR_SET_PDEATHSIG: Final = 1


def hold(grace: float) -> bool:
    """Watch the lifeline that the supervisor gave this process; False if there is none (Kubernetes, Ray, a shell).

    When the supervisor dies, this process gets SIGTERM (a drain), and after `grace` seconds it and its session get
    SIGKILL.
    """
    number = os.environ.pop(LIFELINE_FD, None)
    if number is None:
        return False
    threading.Thread(target=_watch, args=(int(number), grace), name="lifeline", daemon=True).start()
    return True


def die_with_parent(number: signal.Signals) -> None:
    """Have the kernel signal this process when the thread that started it ends. Does nothing except on Linux."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)


def _watch(handle: int, grace: float) -> None:
    while os.read(handle, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(grace)
    if os.getpgid(0) == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)

"""Directories that programs wrote into."""

from __future__ import annotations

import os
import subprocess

_SECONDS = 30.0


def remove(folder: str) -> None:
    """Remove a directory with all a program may have made of it: depth, modes, names and links of any kind.

    A repeat does nothing. What cannot be removed within 30 seconds stays.
    """
    for command in (["chmod", "-R", "u+rwX", "--", folder], ["rm", "-rf", "--", folder]):
        process = subprocess.Popen(  # noqa: S603
            command, env={"PATH": os.defpath}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            process.wait(_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

# A module that Python looks for by its name on the path.
# ruff: noqa: INP001
"""What SGLang lacks on a CPU; Python runs this file at the start of each of its processes there.

They are forked, since each would import everything again, which takes ten seconds of a core.
"""

from __future__ import annotations

import multiprocessing

import torchvision_operators  # type: ignore[import-not-found]  # beside this file

torchvision_operators.define()

_set_start_method = multiprocessing.set_start_method
multiprocessing.set_start_method = lambda method, force=False: _set_start_method(method and "fork", force)

# A module that Python looks for by its name on the path.
# ruff: noqa: INP001
"""Makes torchvision, which PyPI has for CUDA only, importable next to a torch for CPUs.

Its extension cannot be loaded there, so the operators that it registers fakes for have to exist before `import
torchvision` runs. SGLang's processes are forked, since each would import everything again, which takes ten seconds of a
core. This file is on the PYTHONPATH of SGLang servers on a CPU; Python runs it at start.
"""

from __future__ import annotations

import multiprocessing
import sys
from typing import Any


class _TorchvisionOperators:
    """Defines the operators in front of the first `import torchvision`, and leaves the import to the others."""

    library: Any = None

    @classmethod
    def find_spec(cls, name: str, _path: Any = None, _target: Any = None) -> None:
        if name == "torchvision":
            sys.meta_path.remove(cls)
            import torch

            cls.library = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
            for operator in ("nms", "qnms"):
                cls.library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


sys.meta_path.insert(0, _TorchvisionOperators)

_set_start_method = multiprocessing.set_start_method
multiprocessing.set_start_method = lambda method, force=False: _set_start_method(method and "fork", force)

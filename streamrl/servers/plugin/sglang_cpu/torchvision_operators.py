# A module that Python finds by its name on the path of a server.
# ruff: noqa: INP001
"""Makes torchvision, which PyPI has for CUDA only, importable next to a torch for CPUs.

Its extension cannot be loaded there, so the operators that it registers fakes for have to exist before `import
torchvision` runs. Servers read and resize images with it, which takes none of these operators.
"""

from __future__ import annotations

import sys
from typing import Any


class TorchvisionOperators:
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


def define() -> None:
    """A repeat does nothing: Python looks for files that it runs at its start in `lib` and `lib64`."""
    if TorchvisionOperators not in sys.meta_path:
        sys.meta_path.insert(0, TorchvisionOperators)

"""`streamrl engines install`: the virtual environment of an engine's servers."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from streamrl.commands import output
from streamrl.servers.environments import computes_on_cpu, default_folder
from streamrl.servers.installation import install as make


def install(kind: Literal["vllm", "sglang"], into: Path | None, *, cpu: bool | None) -> int:
    """Make the environment of `kind`, or do nothing when it is there; progress goes to stderr, the folder to stdout.

    Args:
        kind: of the engine.
        into: folder of the environment; None: where runs look for it.
        cpu: None: whether this machine has no NVIDIA device.

    Raises:
        StreamrlError: see `installation.install`.
    """
    folder = (into if into is not None else default_folder(kind)).expanduser().absolute()
    make(kind, folder, cpu=computes_on_cpu("auto") if cpu is None else cpu, say=output.note)
    if into is not None:
        output.note(f"runs use it with  engine.environment: {folder}")
    output.write(str(folder))
    return 0

"""Where the virtual environments of engine servers are, and for which devices.

vLLM, SGLang and the learner want different versions of torch. `installation` makes such an environment, with one file
more, `MARKER`, that says what was installed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import orjson

from streamrl.config import EngineConfig
from streamrl.config.base import ServerKind
from streamrl.cores import has_gpu
from streamrl.errors import ConfigError

FOLDER: Final = ".engines"
VARIABLE: Final = "STREAMRL_ENGINES"
MARKER: Final = "streamrl-engine.json"


def install_command(kind: str) -> str:
    """The command that makes the environment of `kind`, for the hint of every error about a missing one."""
    return f"streamrl engines install {kind}"


def computes_on_cpu(device: str) -> bool:
    """Whether `device` of a run file is the CPU of this machine; decided only here."""
    return device == "cpu" or (device == "auto" and not has_gpu())


def on_cpu(engine: EngineConfig) -> bool:
    """Whether the engine servers of a run compute on a CPU; `ConfigError`: no device, or a GPU that is not here."""
    check_device("engine.device", engine.device, there=not engine.url)  # nothing is known of machines at a URL
    return computes_on_cpu(engine.device)


def check_device(key: str, device: str, *, there: bool = True) -> None:
    """Raise ConfigError if `device` is none, or, where it has to be `there`, a GPU that this machine lacks."""
    if re.fullmatch(r"auto|cpu|cuda(:\d+)?", device) is None:
        raise ConfigError(f"{key} {device!r} is no device", "auto, cpu, cuda or cuda:N")
    if there and device.startswith("cuda") and not has_gpu():
        said = f"{key} is {device}, and this machine has no NVIDIA GPU (no /dev/nvidia0)"
        raise ConfigError(said, f"set {key} to auto or cpu; in a container, start it with the GPUs (--gpus all)")


def find_environment(given: Path | None, kind: ServerKind, *, key: str = "engine.environment") -> Path:
    """The folder of the environment for servers of `kind`: `given`, else the first found, else `ConfigError`."""
    command = install_command(kind)
    looked = list(_places(kind)) if given is None else [given.expanduser()]
    if found := next((folder for folder in looked if (folder / "bin" / "python").exists()), None):
        return found.absolute()
    if given is not None:
        said = f"{key} {given} is no virtual environment: bin/python is missing"
        raise ConfigError(said, f"{command} --into {given}, or leave out {key}")
    raise ConfigError(f"there is no environment for {kind} servers: {looked[0]} does not exist", command)


def default_folder(kind: ServerKind) -> Path:
    if os.environ.get(VARIABLE):
        return next(_places(kind))
    nearest = next((folder for folder in _upwards() if (folder / FOLDER).is_dir()), Path.cwd())
    return nearest / FOLDER / kind


def installed(folder: Path) -> dict[str, Any] | None:
    """What `MARKER` says; None without one: the environment was made by hand, or is not there."""
    try:
        return dict(orjson.loads((folder / MARKER).read_bytes()))
    except FileNotFoundError:
        return None


def _places(kind: ServerKind) -> Iterator[Path]:
    if root := os.environ.get(VARIABLE):
        yield Path(root).expanduser() / kind
    for folder in _upwards():
        yield folder / FOLDER / kind
    yield Path(__file__).parents[2] / FOLDER / kind  # beside the package, in a checkout


def _upwards() -> list[Path]:
    return [Path.cwd(), *Path.cwd().parents]

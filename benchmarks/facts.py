"""What the figures of a benchmark depend on: machine, versions, commit."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import time
from pathlib import Path
from typing import Any

import orjson


def machine_facts() -> dict[str, Any]:
    """CPU, cores, memory, load, versions of what matters, and the commit measured."""
    return {
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "cpu": _first(Path("/proc/cpuinfo"), "model name"),
        "cores": os.cpu_count(),
        "memory_kib": _first(Path("/proc/meminfo"), "MemTotal"),
        "load_average": os.getloadavg(),
        "python": platform.python_version(),
        "system": platform.platform(),
        "packages": {name: _version(name) for name in ("torch", "transformers", "numpy", "redis", "msgspec")},
        "commit": _commit(),
    }


def _first(path: Path, key: str) -> str:
    lines = path.read_text().splitlines() if path.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(key)), "")


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def write_json(path: Path, results: dict[str, Any]) -> None:
    """Write figures with the facts they depend on (key `facts`)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(orjson.dumps(results | {"facts": machine_facts()}, option=orjson.OPT_INDENT_2))

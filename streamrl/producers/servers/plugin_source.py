"""How a version is described to our plug-in inside a server (`streamrl_engine.files.Source`)."""

from __future__ import annotations

from typing import Any

from streamrl.errors import WeightsError
from streamrl.weight_sync.manifest import folder_name
from streamrl.weight_sync.tensors import Version


def describe_version(version: Version) -> dict[str, Any]:
    """Return what `streamrl_engine.files.Source.parse` reads.

    Raises:
        WeightsError: the version has no files.
    """
    if version.folder is None or not version.parts:
        raise WeightsError(f"version {version.number} has no files that a server could read")
    source: dict[str, Any] = {
        "folder": str(version.folder),
        "parts": {name: list(files) for name, files in version.parts.items()},
    }
    if version.sources:  # for a server on a host that does not see the folder
        source["url"] = f"{version.sources[0].rstrip('/')}/{folder_name(*version.pair)}"
    return source

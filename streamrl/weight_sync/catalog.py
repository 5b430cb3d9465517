"""Which versions are there: on the transport of this host, and pinned in the run directory. Needs no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from streamrl.errors import UsageError, WeightsError
from streamrl.weight_sync.manifest import MANIFEST_FILE, Manifest, Pair, decode, folder_name, parse_folder

PINNED: Final = "pinned"
"""Folder in the run directory with the versions that a person wants to keep, whole and durable."""


def versions(root: Path) -> dict[Pair, Manifest]:
    """Versions in a folder, ascending; what cannot be read is left out. A folder that is not there has none."""
    found: dict[Pair, Manifest] = {}
    if not root.is_dir():
        return found
    pairs = sorted(pair for entry in root.iterdir() if (pair := parse_folder(entry.name)) is not None)
    for pair in pairs:
        try:
            found[pair] = read_manifest(root / folder_name(*pair))
        except (OSError, WeightsError):
            continue
    return found


def read_manifest(folder: Path) -> Manifest:
    """The manifest of the version in a folder.

    Raises:
        WeightsError: it is no manifest.
        OSError: it cannot be read.
    """
    return decode((folder / MANIFEST_FILE).read_bytes())


def newest_with(number: int, among: dict[Pair, Manifest]) -> Manifest | None:
    """The version with this number, of the newest epoch that has one; None when there is none."""
    return next((among[pair] for pair in sorted(among, reverse=True) if pair[1] == number), None)


def find(number: int, root: Path, run_dir: Path) -> tuple[Manifest, Path]:
    """The version with this number, and the folder that holds it: pinned, else on the transport.

    Raises:
        UsageError: it is not here (any more).
    """
    for folder in (run_dir / PINNED, root):
        manifest = newest_with(number, versions(folder))
        if manifest is not None:
            return manifest, folder
    raise UsageError(
        f"version {number} is neither in {root} nor pinned",
        "`streamrl weights ls` shows what is here; a version goes when newer ones come, unless it is pinned in time",
    )

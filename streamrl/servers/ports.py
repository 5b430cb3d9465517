"""Ports of the loopback interface: a free one, and whose it has become."""

from __future__ import annotations

import random
import socket
from pathlib import Path
from typing import Final

from streamrl.errors import Unreachable

PORTS: Final = range(20_000, 32_000)
"""Below those from which the kernel takes the local ends of connections: a free one stays free until a server that
loads its model first gets to it."""
_ATTEMPTS: Final = 200
_LISTENING: Final = "0A"


def free_port() -> int:
    """Return a port of the loopback interface that nobody listens on.

    Raises:
        Unreachable: there is none.
    """
    for port in random.sample(PORTS, _ATTEMPTS):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise Unreachable("no free port between 20000 and 31999 on 127.0.0.1")


def listens(group: int, port: int) -> bool:
    """Whether a process of this process group listens on the port; True where the system does not tell (no /proc)."""
    tables = [Path("/proc/net") / name for name in ("tcp", "tcp6")]
    if not tables[0].exists():
        return True
    wanted = {f"socket:[{inode}]" for table in tables for inode in _inodes(table, port)}
    return any(wanted & _open_files(folder) for folder in _members(group))


def _inodes(table: Path, port: int) -> set[str]:
    found = set()
    for line in table.read_text().splitlines()[1:] if table.exists() else ():
        fields = line.split()
        if fields[3] == _LISTENING and int(fields[1].rpartition(":")[2], 16) == port:
            found.add(fields[9])
    return found


def _members(group: int) -> list[Path]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            # the name in parentheses may hold anything; after it come state, parent and group
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended
        if fields[2] == str(group):
            found.append(folder)
    return found


def _open_files(process: Path) -> set[str]:
    found = set()
    try:
        for handle in (process / "fd").iterdir():
            found.add(str(handle.readlink()))
    except OSError:
        return found  # it has ended meanwhile
    return found

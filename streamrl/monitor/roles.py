"""`supervisor.json`: what the supervisor of a run knows of its roles, for `streamrl status` in another shell."""

from __future__ import annotations

import os
import socket
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import orjson

FILE: Final = "supervisor.json"


@dataclass(frozen=True, slots=True)
class KnownRole:
    """The last state of one process of a role, as the supervisor told it; `since` is seconds since 1970."""

    state: str
    since: float
    restarts: int = 0
    pid: int | None = None
    reason: str = ""
    exit_code: int | None = None


class RoleStates:
    """Keeps `supervisor.json` up to date; one writer, the supervising process.

    A run directory that cannot be written (full disk) loses the file, not the run.
    """

    def __init__(self, run_dir: Path) -> None:
        self.roles: dict[str, KnownRole] = {}
        self._path = run_dir / FILE

    def note(self, name: str, role: KnownRole) -> None:
        """Write the new state of a role."""
        self.roles[name] = role
        self._write({"pid": os.getpid(), "host": socket.gethostname()})

    def close(self) -> None:
        """Say that the supervisor has left."""
        self._write({"pid": None, "host": socket.gethostname()})

    def _write(self, holder: dict[str, Any]) -> None:
        data = {**holder, "roles": {name: asdict(role) for name, role in self.roles.items()}}
        draft = self._path.with_suffix(".draft")
        try:
            draft.write_bytes(orjson.dumps(data))
            draft.rename(self._path)
        except OSError:
            draft.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class Supervised:
    """What `supervisor.json` says; `alive` when the supervisor is a living process of this machine."""

    alive: bool
    roles: dict[str, KnownRole]


def read_states(run_dir: Path) -> Supervised:
    """Read what the last supervisor wrote; nothing when there was none.

    After kill -9 of the supervisor the file still names it, so it counts only while its process is there; roles
    whose process is gone are `lost`.
    """
    try:
        data = orjson.loads((run_dir / FILE).read_bytes())
        roles = {name: KnownRole(**known) for name, known in data["roles"].items()}
    except (OSError, orjson.JSONDecodeError, KeyError, TypeError):
        return Supervised(alive=False, roles={})
    here = data.get("host") == socket.gethostname()
    return Supervised(alive=here and _is_alive(data.get("pid")), roles=roles)


def _is_alive(pid: int | None) -> bool:
    if pid is None:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True

"""The supervisor's states of its roles, for `status`: in `supervisor.json`, and in Redis for other machines."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, Self

import orjson

from streamrl.atomic import write_whole
from streamrl.queues.replies import read_number
from streamrl.queues.supervision import parsed

FILE: Final = "supervisor.json"


@dataclass(frozen=True, slots=True)
class KnownRole:
    """The last state of one process of a role; `since` is seconds since 1970."""

    state: str
    since: float
    restarts: int = 0
    pid: int | None = None
    reason: str = ""
    exit_code: int | None = None


class RoleStates:
    """Keeps `supervisor.json` up to date; one writer, the supervising process.

    If the run directory cannot be written (full disk), the file is lost and the run goes on.
    """

    def __init__(self, run_dir: Path) -> None:
        self.roles: dict[str, KnownRole] = {}
        self._path = run_dir / FILE

    def note(self, name: str, role: KnownRole) -> None:
        self.roles[name] = role
        self._write({"pid": os.getpid(), "host": socket.gethostname()})

    def forget(self, name: str) -> None:
        self.roles.pop(name, None)
        self._write({"pid": os.getpid(), "host": socket.gethostname()})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._write({"pid": None, "host": socket.gethostname()})

    def _write(self, holder: dict[str, Any]) -> None:
        data = {**holder, "roles": {name: asdict(role) for name, role in self.roles.items()}}
        with contextlib.suppress(OSError):
            write_whole(self._path, orjson.dumps(data))


@dataclass(frozen=True, slots=True)
class Supervised:
    """What a supervisor says of its roles; `alive`: it is a living process of this machine, or its heart beats."""

    alive: bool
    roles: dict[str, KnownRole]


def read_states(run_dir: Path) -> Supervised:
    """States of the last supervisor; empty if there was none.

    After kill -9 of the supervisor the file still names it, so it counts only while its process is there; roles whose
    process is gone are `lost`.
    """
    try:
        data = orjson.loads((run_dir / FILE).read_bytes())
        roles = _roles(data["roles"])
    except (OSError, orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
        return Supervised(alive=False, roles={})
    here = data.get("host") == socket.gethostname()
    return Supervised(alive=here and is_alive(data.get("pid")), roles=roles)


def states_said(said: Mapping[str, str]) -> Supervised:
    """States in the heartbeat of a supervisor, which is alive; `since` by the clock of this host."""
    try:
        ahead = (read_number(said["beat"]) or 0.0) - time.time()
        roles = _roles(parsed(said, "states"))
        return Supervised(
            alive=True, roles={name: replace(role, since=role.since - ahead) for name, role in roles.items()}
        )
    except (KeyError, TypeError, AttributeError):
        return Supervised(alive=True, roles={})


def _roles(data: Any) -> dict[str, KnownRole]:
    return {name: KnownRole(**known) for name, known in data.items()}


def is_alive(pid: int | None) -> bool:
    if pid is None:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True

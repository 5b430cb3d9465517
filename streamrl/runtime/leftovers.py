"""What processes of a run leave behind when they are killed, and its removal.

| what | where |
|---|---|
| a Redis server whose supervisor was killed | `redis/server.lock` names it |
| files of a killed rewrite of the append-only file | `redis/temp-*.aof`, `redis/temp-*.rdb` |
| files in which the ranks of a learner found each other | `rendezvous/` |
| weights in shared memory | `/dev/shm/streamrl-UID-HASH*` |
"""

from __future__ import annotations

from pathlib import Path

from streamrl.queues import embedded
from streamrl.queues.server_lock import end_orphan
from streamrl.runtime.plan import RENDEZVOUS
from streamrl.weight_sync.files import memory_of, release_memory


async def sweep(run_dir: Path) -> list[str]:
    """Remove what dead processes of a run left behind; return it, one line each. A repeat finds nothing.

    Only for the holder of the supervisor's lock: no process of the run is alive then, but for some seconds roles of a
    killed supervisor, which have what they map, and commands that look at the run with a Redis of their own.
    """
    found = ["a Redis server that a killed process had left behind"] if await end_orphan(run_dir) else []
    rendezvous = run_dir / RENDEZVOUS
    rendezvous.mkdir(exist_ok=True)
    files = [*rendezvous.iterdir(), *await embedded.sweep_stopped(run_dir)]
    found += [str(path) for path in (*files, *memory_of(run_dir))]
    for file in files:
        file.unlink(missing_ok=True)
    release_memory(run_dir)
    return found

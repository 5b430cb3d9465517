"""Removes what killed processes of a run leave behind.

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
from streamrl.queues.embedded import end_orphan
from streamrl.runtime.plan import RENDEZVOUS
from streamrl.weight_sync.files import memory_of, release_memory


async def sweep(run_dir: Path) -> list[str]:
    """Remove what dead processes of a run left behind; return it, one line each. A repeat finds nothing.

    Call it only while holding the supervisor's lock: then no process of the run is alive, except for a few seconds the
    roles of a killed supervisor (they keep what they have mapped) and commands that read the run with their own Redis.
    """
    found = ["a Redis server of a killed process"] if await end_orphan(run_dir) else []
    rendezvous = run_dir / RENDEZVOUS
    rendezvous.mkdir(exist_ok=True)
    files = [*rendezvous.iterdir(), *await embedded.sweep_stopped(run_dir)]
    found += [str(path) for path in (*files, *memory_of(run_dir))]
    for file in files:
        file.unlink(missing_ok=True)
    release_memory(run_dir)
    return found

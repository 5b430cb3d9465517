"""Versions of the weights on their way from the learner to the engines.

```
learner, each rank: its rows -> RankWriter -> files in the draft of v-EPOCH-VERSION
learner, rank 0:    all parts -> Publisher -> manifest.json, one rename
                    -> the encoded manifest, which `consume` puts into the weights stream
                    -> Outlet: serves or broadcasts the files, for `http` and `collective`
rollout replica: weights stream -> Follower -> Arrivals: Source brings the files near, Mirror applies deltas
                    -> sizes, checksums, names and shapes are checked -> apply (the engine copies)
```

A version is the pair (epoch, number); it is applied whole or not at all, and never an older one after a newer one.
How the shards get near the engine is a transport: `shm` (same host), `directory` (shared file system), `http` (pulled
from the learner's host or a neighbour) or `collective` (broadcast, and pulled by whoever missed it);
see docs/internals/weights.md.

The names below are loaded when they are first used: `transports` needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from streamrl.weight_sync.follower import Follower as Follower
    from streamrl.weight_sync.manifest import Manifest as Manifest
    from streamrl.weight_sync.publisher import Publisher as Publisher

_HOME = {"Follower": "follower", "Manifest": "manifest", "Publisher": "publisher"}
__all__ = ["Follower", "Manifest", "Publisher"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)

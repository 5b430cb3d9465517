"""Versions of the weights on their way from the learner to the engines.

```
learner rank 0:  tensors -> Publisher -> v-EPOCH-VERSION/{shards, manifest.json}   (temporary name, then one rename)
                                      -> the encoded manifest, which `consume` puts into the weights stream
rollout replica: weights stream -> Follower -> map, check sizes and checksums -> apply (the engine copies)
```

A version is the pair (epoch, number); it is applied whole or not at all, and never an older one after a newer one.
How the shards get near the engine is a transport: `shm` (same host) or `directory` (shared file system).
"""

from streamrl.weight_sync.follower import Follower
from streamrl.weight_sync.manifest import Manifest
from streamrl.weight_sync.publisher import Publisher

__all__ = ["Follower", "Manifest", "Publisher"]

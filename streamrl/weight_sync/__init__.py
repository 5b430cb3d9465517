"""Versions of the weights on their way from the learner to the engines.

```
learner: all ranks' rows -> gathered on rank 0 (learner/weight_copy.py)
                 -> Publisher: files in the draft of v-EPOCH-VERSION -> manifest.json, one rename
                 -> the encoded manifest, which `finish_step` puts into the weights stream
                 -> WeightServer: serves the files, for `http` and `collective`, and broadcasts them (`collective`)
replica: weights stream -> Follower -> Staging: WeightSource brings the files near, deltas change a copy of their base
                 -> sizes and checksums are proven -> apply (the engine copies)
```

A version is the pair (epoch, number); it is applied whole or not at all, and never an older one after a newer one. How
the shards get near the engine is a transport: `shm` (same host), `directory` (shared file system), `http` (pulled from
the learner's host or from a store) or `collective` (broadcast into servers, and pulled by all who missed it):
docs/internals/weights.md.
"""

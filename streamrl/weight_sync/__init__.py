"""Versions of the weights on their way from the learner to the engines.

```
learner, each rank: its rows -> RankWriter -> files in the draft of v-EPOCH-VERSION
learner, rank 0:    all parts -> Publisher -> manifest.json, one rename
                    -> the encoded manifest, which `finish_step` puts into the weights stream
                    -> WeightServer: serves or broadcasts the files, for `http` and `collective`
rollout replica: weights stream -> Follower -> Staging: WeightSource brings the files near, DeltaBase applies deltas
                    -> sizes, checksums, names and shapes are checked -> apply (the engine copies)
```

A version is the pair (epoch, number); it is applied whole or not at all, and never an older one after a newer one. How
the shards get near the engine is a transport: `shm` (same host), `directory` (shared file system), `http` (pulled from
the learner's host or from a store) or `collective` (broadcast, and pulled by replicas that missed it):
docs/internals/weights.md.
"""

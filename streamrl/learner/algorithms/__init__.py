"""The algorithms as small pure functions: nothing here knows of ranks, files or Redis.

```
rewards, values -> advantages                                        numpy, float64, one group or one step at a time
log-probabilities -> corrections (gates) -> losses -> aggregation    torch, one micro-batch at a time
                     kl (in the reward: numpy; in the loss: torch)
recipe.py resolves the run's configuration to these functions and puts the torch side together
```
"""

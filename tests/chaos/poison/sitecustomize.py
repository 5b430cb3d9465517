"""Loaded by every process of the chaos run (PYTHONPATH): plays engine faults for marked prompts.

A prompt that kills or breaks its engine cannot be made with a real model at will, so the fault is played here; the
process that dies is the real replica, by a real SIGKILL.
"""

import os
import signal
import sys


def poison(sampler):
    sample = sampler.sample

    async def poisoned(self, order):
        fault = order.prompt.metadata.get("poison")
        if fault == "kill rollout":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "break rollout":
            raise RuntimeError("played: the engine fails on this prompt")
        return await sample(self, order)

    sampler.sample = poisoned


if "rollout" in getattr(sys, "orig_argv", []):
    from streamrl.producers.episodes.sampler import EpisodeSampler
    from streamrl.producers.sampler import SingleTurn

    poison(SingleTurn)
    poison(EpisodeSampler)

"""One rank with a critic and a frozen reference: `value_process.py MODEL OUT`."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).parent))
from tiny_policy import run_config
from value_kit import value_batch
from weights_kit import full_tensors

from streamrl.errors import StreamrlError
from streamrl.learner.batch import TrainSample
from streamrl.learner.critic import Critic
from streamrl.learner.ranks import Ranks
from streamrl.learner.reference import Frozen

STEPS = 2
OPTIONS: dict[str, Any] = {
    "tokens_per_microbatch": 128,
    "lr": 1e-3,
    "clip_norm": 0.5,
    "advantage": {"use": "gae"},
    "reference": {"kind": "frozen"},
}


def mine(batch: list[TrainSample], rank: int, world: int) -> list[TrainSample]:
    """Uneven on purpose, groups cut in the middle."""
    return batch if world == 1 else (batch[:5] if rank == 0 else batch[5:])


def gathered(ranks: Ranks, arrays: list[np.ndarray], batch: list[TrainSample]) -> list[float]:
    """What was computed for the whole batch, one number after the other, on all ranks."""
    whole = torch.zeros(sum(len(sample.tokens) for sample in batch), dtype=torch.float64)
    first = 0 if ranks.rank == 0 else sum(len(sample.tokens) for sample in batch[:5])
    values = torch.from_numpy(np.concatenate(arrays)).double()
    whole[first : first + len(values)] = values
    return [float(value) for value in ranks.all_sum(whole)]


def play(model: Path, out: Path, ranks: Ranks) -> None:
    """Two updates of a critic; then values and reference of the last batch."""
    found: dict[str, Any] = {}
    rank, world = ranks.rank, ranks.world
    for units, small in (("whole", 1 << 26), ("layers", 0)):
        critic_options = {"kind": "model", "lr": 1e-3, "clip": 0.2}
        config = run_config(model, ranks=world, critic=critic_options, **OPTIONS)
        critic, reference = Critic(config, ranks, small=small), Frozen(config, ranks, small=small)
        norms = []
        for step in range(STEPS):
            batch = mine(value_batch(step), rank, world)
            stats = critic.update_critic(batch)
            norms += [stats.grad_norm, stats.trained.loss]
        last = value_batch(STEPS)
        own = mine(last, rank, world)
        found |= {
            f"{units}.norms": norms,
            f"{units}.values": gathered(ranks, critic.compute_values(own), last),
            f"{units}.reference": gathered(ranks, reference.compute_ref_log_prob(own), last),
        }
        again = Critic(config, ranks, small=small)
        again.load_shard_state(critic.shard_state())
        first, second = (part.update_critic(own) for part in (critic, again))
        found[f"{units}.continued"] = first == second
        save_file(full_tensors(critic), out / f"{units}-critic-{rank}.safetensors")
    if world > 1:
        found["refused"] = refused(critic, own, rank)
    (out / f"found-{rank}.json").write_bytes(orjson.dumps(found))


def refused(critic: Critic, batch: list[TrainSample], rank: int) -> str:
    """A sample that the second rank must refuse ends the step on both."""
    bad = [replace(batch[0], prompt=batch[0].prompt + 1000), *batch[1:]]
    try:
        critic.compute_values(bad if rank else batch)
    except (ValueError, StreamrlError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def main() -> None:
    """Join as the environment says, and play."""
    model, out = Path(sys.argv[1]), Path(sys.argv[2])
    ranks = Ranks.from_environment(run_config(model, ranks=int(os.environ["WORLD_SIZE"]), device="cpu").learner)
    play(model, out, ranks)
    ranks.close()


if __name__ == "__main__":
    main()

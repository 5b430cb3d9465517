"""One rank of a learner that computes log-probs and gradients with models of several families.

`family_process.py OUT KIND=MODEL ...`; test_families.py starts and judges it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).parent))
from tiny_policy import make_batch, run_config

from streamrl.learner.batch import TrainSample
from streamrl.learner.policy import Actor
from streamrl.learner.ranks import Ranks

OPTIONS = {"tokens_per_microbatch": 192, "rows": "packed"}


def share_of(batch: list[TrainSample], rank: int, world: int) -> list[TrainSample]:
    """Uneven on purpose: the first rank has three groups of four."""
    return batch if world == 1 else (batch[:12], batch[12:])[rank]


def play(ranks: Ranks, models: dict[str, Path], out: Path) -> None:
    """Log-probs of my samples, and the gradient of all of them, of every model, as one FSDP unit and as many."""
    for kind, model in models.items():
        for name, small in (("whole", 1 << 26), ("layers", 0)):
            actor = Actor(run_config(model, ranks=ranks.world, **OPTIONS), ranks, small=small)
            mine = share_of(make_batch(0), ranks.rank, ranks.world)
            logprobs = {str(index): torch.from_numpy(values) for index, values in enumerate(log_probs(actor, mine))}
            save_file(logprobs, out / f"{kind}-{name}-logprobs-{ranks.rank}.safetensors")
            actor.accumulate(mine)
            gradients = {
                # FSDP averages over ranks.
                key: (parameter.grad.full_tensor() * ranks.world).contiguous()
                for key, parameter in actor.parameters.items()
            }
            if ranks.rank == 0:
                save_file(gradients, out / f"{kind}-{name}-gradients.safetensors")


def log_probs(actor: Actor, batch: list[TrainSample]) -> list[object]:
    """Of the sampled tokens of each sample."""
    return list(actor.compute_log_prob(batch).logprobs)


def main() -> None:
    """Join as the environment says, and play."""
    out, *models = sys.argv[1:]
    config = run_config(Path(), ranks=int(os.environ["WORLD_SIZE"]), device="cpu").learner
    ranks = Ranks.from_environment(config)
    play(ranks, {kind: Path(path) for kind, _, path in (model.partition("=") for model in models)}, Path(out))
    ranks.close()


if __name__ == "__main__":
    main()

"""One rank that goes both ways through steps: `step_process.py MODEL OUT`; test_step_two_ranks.py judges it."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import orjson
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).parent))
from step_kit import estimated, rewarded, weights
from tiny_policy import run_config

from streamrl.learner.batch import TrainSample, sizes
from streamrl.learner.rank_group import RankWorker
from streamrl.learner.ranks import Ranks
from streamrl.learner.step import make_models

STEPS = 2
RECIPES: dict[str, dict[str, Any]] = {
    "streaming, sequence mean": {"loss": {"aggregate": "sequence_mean", "entropy": 0.01}},
    "passes and mini-batches": {"passes": 2, "mini_batches": 2, "loss": {"aggregate": "constant_length"}},
    "whitened, learning rate by ess": {
        "advantage": {"use": "reinforce_plus_plus"},
        "correction": {"lr_scale": "ess"},
    },
    "m2po over the step": {"correction": {"gates": [{"use": "m2po", "args": {"tau": 0.005}}]}, "mini_batches": 2},
    "kl in the reward, adaptive": {
        "kl": {"where": "reward", "estimator": "k3", "controller": "adaptive", "target": 1e-4, "coefficient": 0.1},
        "reference": {"kind": "frozen"},
        "advantage": {"use": "grpo_batch_std"},
    },
    "kl in the loss": {"kl": {"where": "loss", "coefficient": 0.1}, "reference": {"kind": "frozen"}},
    "gae with a critic": {
        "advantage": {"use": "gae"},
        "critic": {"kind": "model", "lr": 1e-3, "lam": 0.9, "warmup_steps": 1},
        "passes": 2,
    },
}


def share(batch: list[TrainSample], ranks: Ranks) -> list[TrainSample]:
    """Whole groups, uneven on purpose."""
    if ranks.world == 1:
        return batch
    return [sample for sample in batch if (sample.group_id % 3 == 0) == (ranks.rank == 1)]


def play(model: Path, out: Path, ranks: Ranks) -> None:
    """Two steps of each recipe, in two micro-batches; in the second all groups are the first rank's."""
    found: dict[str, Any] = {}
    for number, (name, learner) in enumerate(RECIPES.items()):
        config = run_config(model, ranks=ranks.world, **{"lr": 1e-3, "tokens_per_microbatch": 128, **learner})
        models = make_models(config, ranks)
        worker, actor = RankWorker(config, ranks, models, out), models.actor
        records = []
        for step in range(STEPS):
            worker.step = step + 10 if step else step
            batch = estimated(rewarded(step), actor)
            first = [sample for sample in batch if sample.group_id < 4]
            rest = [sample for sample in batch if sample.group_id >= 4]
            worker.train([0, 1, 2, 3], share(first, ranks), idle=False)
            worker.train([4, 5], rest if ranks.rank == 0 else [], idle=False)
            stats = worker.apply(*sizes(batch))
            critic = [one.trained.loss for one in stats.critic]
            records.append([stats.loss, stats.grad_norm, stats.lr, stats.kl_coefficient, stats.trained.masked, *critic])
        found[name] = records
        save_file(weights(actor), out / f"{number}-{ranks.rank}.safetensors")
    (out / f"found-{ranks.rank}.json").write_bytes(orjson.dumps(found))


def main() -> None:
    """Join as the environment says, and play."""
    model, out = Path(sys.argv[1]), Path(sys.argv[2])
    config = run_config(model, ranks=int(os.environ["WORLD_SIZE"]), device="cpu").learner
    play(model, out, Ranks.from_environment(config))


if __name__ == "__main__":
    main()

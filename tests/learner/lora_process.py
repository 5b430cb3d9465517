"""One rank of a learner that trains an adapter, as a process: `lora_process.py MODEL OUT`; see test_lora_ranks.py."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import orjson
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).parent))
from rank_process import STEP_OPTIONS, pieces, train
from tiny_policy import run_config
from weights_kit import export, full_tensors

from streamrl.config import WeightsConfig
from streamrl.learner.policy import Actor
from streamrl.learner.rank_group import NO_BASE, RankWorker
from streamrl.learner.ranks import Ranks
from streamrl.learner.step import Models
from streamrl.weight_sync.publisher import Publisher
from streamrl.weight_sync.rank_writer import RankWriter

# A rank below the number of its rows, and one that leaves the second rank without rows of A.
KINDS = {"lora": {"rank": 4}, "dora": {"rank": 3, "dora": True}, "thin": {"rank": 1, "publish": "adapter"}}
WEIGHTS = WeightsConfig(transport="directory", shard_bytes=4096)


def play(model: Path, out: Path, ranks: Ranks) -> None:
    """Train each kind of adapter, publish a version, export it; keep what a test asks for."""
    found = {}
    for name, lora in KINDS.items():
        for small in (1 << 26, 0):
            kind = f"{name}-{'layers' if small == 0 else 'whole'}"
            found[kind] = adapt(model, out / kind, ranks, lora, small)
    (out / f"found-{ranks.rank}.json").write_bytes(orjson.dumps(found))


def adapt(model: Path, out: Path, ranks: Ranks, lora: dict[str, object], small: int) -> dict[str, object]:
    """One adapter; all ranks end up with all files of the merged model of rank 0."""
    out.mkdir(exist_ok=True)
    config = run_config(model, ranks=ranks.world, lora={"alpha": 8.0, **lora}, **STEP_OPTIONS)
    actor = Actor(config, ranks, small=small)
    batch = pieces(0, ranks.world)[0][ranks.rank]
    fresh = [values.tolist() for values in actor.compute_log_prob(batch).logprobs]
    records = train(actor, range(2))
    with actor.adapter_disabled():
        base = [values.tolist() for values in actor.compute_log_prob(batch).logprobs]
    worker = RankWorker(actor.config, ranks, Models(actor=actor), out)
    snapshot = worker.snapshot()
    if ranks.rank == 0:
        publisher = Publisher(WEIGHTS, "r", out)
        publisher.publish(
            epoch=1,
            version=1,
            step=2,
            tensors=snapshot.tensors,
            shapes=snapshot.shapes,
            world=ranks.world,
            adapter=snapshot.adapter,
        )
    else:
        RankWriter(WEIGHTS, out, ranks.rank).deliver((1, 1), None, snapshot.tensors, snapshot.shapes)
    merged = full_tensors(actor)
    if ranks.rank == 0:
        save_file(merged, out / "merged.safetensors")
    refused: list[tuple[int, int]] = []
    if ranks.rank:
        worker._parts = SimpleNamespace(busy=True, refuse=refused.append)
    left_out = worker.publish(1, 2, NO_BASE, NO_BASE) is None
    export(actor, out / "export")
    return {
        "records": records,
        "base_unchanged": fresh == base,
        "left_out": left_out,
        "refused": refused,
        "parameters": {key: list(p.to_local().shape) for key, p in actor.parameters.items()},
    }


def main() -> None:
    """Join as the environment says, and play."""
    model, out = Path(sys.argv[1]), Path(sys.argv[2])
    ranks = Ranks.from_environment(run_config(model, ranks=int(os.environ["WORLD_SIZE"]), device="cpu").learner)
    play(model, out, ranks)


if __name__ == "__main__":
    main()

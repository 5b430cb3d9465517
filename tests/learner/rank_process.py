"""One rank of a learner, as a process: `rank_process.py MODEL OUT`; test_two_ranks.py starts and judges it."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import orjson
import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).parent))
from tiny_policy import count_tokens, make_batch, run_config
from weights_kit import export, full_tensors

from streamrl.config import WeightsConfig
from streamrl.errors import StreamrlError
from streamrl.learner.batch import TrainSample
from streamrl.learner.policy import Actor
from streamrl.learner.ranks import Ranks
from streamrl.learner.snapshot import Copies
from streamrl.weight_sync.publisher import Publisher
from streamrl.weight_sync.rank_writer import RankWriter

STEPS = 3
STEP_OPTIONS = {"tokens_per_microbatch": 128, "lr": 1e-3, "clip_norm": 0.5, "warmup_steps": 2}


def pieces(step: int, world: int) -> list[list[list[TrainSample]]]:
    """Samples of a step by accumulate call and rank: uneven on purpose, once with nothing for the second rank."""
    batch = make_batch(step, groups=4, size=4, zero=1)
    first, second = batch[:11], batch[11:]
    if world == 1:
        return [[first], [second]]
    return [[first[:3], first[3:]], [second, []]]


def train(actor: Actor, steps: range) -> list[dict[str, float]]:
    """Run steps; what each update reported."""
    records = []
    for step in steps:
        batch = make_batch(step, groups=4, size=4, zero=1)
        passes = [actor.accumulate(part[actor.ranks.rank]).passes for part in pieces(step, actor.ranks.world)]
        stats = actor.apply_update(count_tokens(batch))
        records.append(
            {
                "loss": stats.loss,
                "norm": stats.grad_norm,
                "tokens": stats.trained.tokens,
                "ess": stats.trained.ess,
                "passes": passes,
            }
        )
    return records


def play(model: Path, out: Path, ranks: Ranks) -> None:
    """Train with one unit and with one unit per layer; keep everything a test could ask for."""
    found: dict[str, object] = {}
    for name, small in (("whole", 1 << 26), ("layers", 0)):
        config = run_config(model, ranks=ranks.world, **STEP_OPTIONS)
        actor = Actor(config, ranks, small=small)
        found[f"{name}.shapes"] = {
            key: [list(p.to_local().shape), list(p.shape), str(p.placements)] for key, p in actor.parameters.items()
        }
        found[f"{name}.records"] = train(actor, range(STEPS))
        whole = full_tensors(actor)
        if ranks.rank == 0:
            save_file(whole, out / f"{name}-0.safetensors")
        found[f"{name}.logprobs"] = [
            values.tolist() for values in actor.compute_log_prob(pieces(0, ranks.world)[0][ranks.rank]).logprobs
        ]
        state = actor.shard_state()
        ahead = train(actor, range(STEPS, STEPS + 1))
        again = Actor(config, ranks, small=small)
        again.load_shard_state(state)
        found[f"{name}.continued"] = train(again, range(STEPS, STEPS + 1)) == ahead and all(
            torch.equal(tensor, actor.shard_state()[key]) for key, tensor in again.shard_state().items()
        )
    publish(actor, ranks, out)
    export(actor, out / "export")
    if ranks.world > 1:
        found |= disagreements(actor, ranks)
    (out / f"found-{ranks.rank}.json").write_bytes(orjson.dumps(found))


def publish(actor: Actor, ranks: Ranks, out: Path) -> None:
    """Each rank writes its share of a version."""
    config = WeightsConfig(transport="directory", shard_bytes=8192)
    snapshot, whole = Copies(actor.parameters, torch.float32).take(), full_tensors(actor)
    if ranks.rank == 0:
        publisher = Publisher(config, "r", out / "run")
        publisher.publish(
            epoch=1, version=1, step=1, tensors=snapshot.tensors, shapes=snapshot.shapes, world=ranks.world
        )
        save_file(whole, out / "published.safetensors")
    else:
        RankWriter(config, out / "run", ranks.rank).deliver((1, 1), None, snapshot.tensors, snapshot.shapes)


def disagreements(actor: Actor, ranks: Ranks) -> dict[str, object]:
    """Small collectives, and a batch that one rank must refuse."""
    (good,) = make_batch(0, groups=1, size=1)
    bad = replace(good, group_id=7, prompt=good.prompt + 1000)
    try:
        actor.accumulate([bad if ranks.rank else good])
        refused = ""
    except (ValueError, StreamrlError) as error:
        refused = f"{type(error).__name__}: {error}"
    return {
        "refused": refused,
        "broadcast": ranks.broadcast_ints([3, -(1 << 62), 5] if ranks.rank == 0 else ()),
        "broadcast_empty": ranks.broadcast_ints([]),
        "max": ranks.all_max(ranks.rank, -ranks.rank),
        "min": ranks.all_min(ranks.rank, -ranks.rank),
        "sum": ranks.all_sum(torch.tensor([1.5 + ranks.rank])).tolist(),
    }


def leave(ranks: Ranks, out: Path) -> None:
    """The second rank dies without a word; the first must find out."""
    if ranks.rank == 1:
        os._exit(0)
    try:
        ranks.all_max(1)
        (out / "left.txt").write_text("nothing noticed")
    except StreamrlError as error:
        (out / "left.txt").write_text(f"{type(error).__name__}: {error}")


def main() -> None:
    """Join as the environment says, and play."""
    model, out = Path(sys.argv[1]), Path(sys.argv[2])
    config = run_config(model, ranks=int(os.environ["WORLD_SIZE"]), device="cpu").learner
    ranks = Ranks.from_environment(config)
    play(model, out, ranks)
    leave(ranks, out)
    os._exit(0)  # as a role ends: with a process group that is broken, the end of the interpreter may abort


if __name__ == "__main__":
    main()

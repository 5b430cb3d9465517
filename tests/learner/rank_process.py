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

from streamrl.config import WeightsConfig
from streamrl.errors import StreamrlError
from streamrl.learner.actor import Actor
from streamrl.learner.batch import TrainSample
from streamrl.learner.ranks import Ranks
from streamrl.learner.snapshot import Copies, Snapshot
from streamrl.learner.steps import Trainer
from streamrl.weight_sync.chain import pin
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


def weights(actor: Actor, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """All weights, on this rank."""
    return dict(actor.full_tensors(dtype))


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
        save_file(weights(actor), out / f"{name}-{ranks.rank}.safetensors")
        save_file(weights(actor, torch.bfloat16), out / f"{name}-{ranks.rank}-bf16.safetensors")
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
    found |= publish_and_go_back(actor, ranks, out)
    actor.export(out / "export")
    if ranks.world > 1:
        found |= disagreements(actor, ranks)
    (out / f"found-{ranks.rank}.json").write_bytes(orjson.dumps(found))


def copy(actor: Actor) -> Snapshot:
    """This rank's share of the weights."""
    return Copies(actor.parameters, torch.float32).take()


def publish_and_go_back(actor: Actor, ranks: Ranks, out: Path) -> dict[str, object]:
    """Each rank writes its share of a version; later all ranks take that version as their weights."""
    run_dir = out / "run"
    config = WeightsConfig(transport="directory", shard_bytes=8192)
    snapshot = copy(actor)
    kept = {name: tensor.clone() for name, tensor in snapshot.tensors}
    if ranks.rank == 0:
        publisher = Publisher(config, "r", run_dir)
        publisher.publish(
            epoch=1, version=1, step=1, tensors=snapshot.tensors, shapes=snapshot.shapes, world=ranks.world
        )
        pin(publisher.root, run_dir, (1, 1))
        save_file(weights(actor), out / "published.safetensors")
    else:
        RankWriter(config, run_dir, ranks.rank).deliver((1, 1), None, snapshot.tensors, snapshot.shapes)
        weights(actor)
    trainer = Trainer(actor.config, ranks, actor)
    train(actor, range(1))
    updates = actor.updates
    moved = any(not torch.equal(tensor, kept[name]) for name, tensor in copy(actor).tensors)
    half = run_dir / "pinned" / ("v-1-1" if ranks.rank == 0 else "v-9-9")  # one rank does not find it
    refused = ranks.world > 1 and not trainer.adopt(half)
    taken = trainer.adopt(run_dir / "pinned" / "v-1-1")
    state = actor.shard_state()
    back = all(torch.equal(tensor, kept[name]) for name, tensor in copy(actor).tensors)
    fresh = not any(bool(tensor.any()) for name, tensor in state.items() if name.startswith("exp_avg"))
    ahead = train(actor, range(1, 2))
    after = actor.shard_state()
    actor.load_shard_state(state)
    again = train(actor, range(1, 2)) == ahead
    same = all(torch.equal(tensor, after[name]) for name, tensor in actor.shard_state().items())
    return {
        "moved": moved,
        "refused_together": refused or ranks.world == 1,
        "back": taken and back and fresh,
        "updates": [updates, int(state["updates"])],
        "continued_after_going_back": again and same,
    }


def disagreements(actor: Actor, ranks: Ranks) -> dict[str, object]:
    """Small collectives, and a batch that one rank must refuse."""
    (good,) = make_batch(0, groups=1, size=1)
    bad = replace(good, gid=7, prompt=good.prompt + 1000)
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

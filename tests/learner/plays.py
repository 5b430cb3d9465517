"""What one rank of a learner plays: by itself in the test, or with a second one in `ranks_process.py`.

Each play has the arguments (model, folder for what it finds, ranks) and is judged by test_two_ranks.py.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import orjson
import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).parent))
from step_kit import estimated, rewarded, weights
from tiny_policy import count_tokens, lay_out, make_batch, passes_of, run_config, untried
from tree_kit import THREE, make_episodes
from value_kit import value_batch
from vision_samples import Samples, vision_config
from weights_kit import export, full_tensors

from streamrl.config import RunConfig, WeightsConfig
from streamrl.learner.batch import TrainSample, sizes
from streamrl.learner.checkpoint import FORMAT, Checkpoints, Meta
from streamrl.learner.checkpoint_files import WriteProgress
from streamrl.learner.critic import Critic
from streamrl.learner.model_loading import load_rows
from streamrl.learner.policy import Actor
from streamrl.learner.rank_group import Command, RankWorker, scatter
from streamrl.learner.ranks import Ranks
from streamrl.learner.reference import FrozenReference
from streamrl.learner.step import Models, make_models
from streamrl.learner.weight_copy import Copies, PolicySnapshot
from streamrl.weight_sync.publisher import Publisher

UNITS = {"whole": 1 << 26, "layers": 0}
"""One FSDP unit, and one per layer."""


def keep(found: dict[str, Any], out: Path, ranks: Ranks) -> None:
    (out / f"found-{ranks.rank}.json").write_bytes(orjson.dumps(found))


def rows(model: Path, out: Path, ranks: Ranks) -> None:
    """The rows that a rank reads, by the names of the model, and its buffers, which are whole."""
    made, own = load_rows(run_config(model).model, ranks)
    tensors = {name: own[weight].clone() for name, weight in made.named_parameters()}
    save_file(tensors | dict(made.named_buffers()), out / f"rows-{ranks.rank}.safetensors")


def loading(model: Path, out: Path, ranks: Ranks) -> None:
    """Most bytes of its own that a rank takes while it loads a frozen model; pages of the files are not its own.

    Of the twenty passes of a start it makes two: each gathers one layer after another.
    """

    def own() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("RssAnon")).split()[1])

    before, seen, done = own(), [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.005):
            seen.append(own() - before)

    watching = threading.Thread(target=watch)
    watching.start()
    with mock.patch("streamrl.learner.sharding.checked", untried):
        FrozenReference(run_config(model, ranks=ranks.world, reference={"kind": "frozen"}), ranks)
    done.set()
    watching.join()
    keep({"most": max(seen)}, out, ranks)


def publish(snapshot: PolicySnapshot, config: WeightsConfig, run_dir: Path, ranks: Ranks) -> None:
    """Write version 1, which rank 0 holds whole."""
    assert not (ranks.rank and snapshot.tensors)
    if not ranks.rank:
        publisher = Publisher(config, "r", run_dir)
        publisher.publish(epoch=1, version=1, step=1, tensors=snapshot.tensors, adapter=snapshot.adapter)


# ---- the policy

STEPS = 3
STEP_OPTIONS = {"tokens_per_microbatch": 128, "lr": 1e-3, "clip_norm": 0.5, "warmup_steps": 2}


def pieces(step: int, world: int) -> list[list[list[TrainSample]]]:
    """Samples of a step by accumulate call and rank: uneven on purpose, once with nothing for the second rank."""
    batch = make_batch(step, groups=4, size=4, zero=1)
    first, second = batch[:11], batch[11:]
    if world == 1:
        return [[first], [second]]
    return [[first[:3], first[3:]], [second, []]]


def train(actor: Actor, steps: range) -> list[dict[str, Any]]:
    """Run steps; what each update reported."""
    records = []
    for step in steps:
        batch = make_batch(step, groups=4, size=4, zero=1)
        passes, counts = passes_of(actor), [0]
        for part in pieces(step, actor.ranks.world):
            actor.accumulate(part[actor.ranks.rank])
            counts.append(len(passes))
        stats = actor.apply_update(count_tokens(batch))
        trained = {"tokens": stats.trained.tokens, "ess": stats.trained.ess}
        records.append({"loss": stats.loss, "norm": stats.grad_norm, "passes": np.diff(counts).tolist(), **trained})
    return records


def images(model: Path, out: Path, ranks: Ranks) -> None:
    """Updates in which the first rank has the images and the second one text alone, or nothing."""
    samples = Samples(model)
    batch = samples.batch()
    shown, text = [one for one in batch if one.blobs], [one for one in batch if not one.blobs]
    for name, small in UNITS.items():
        for train_vision in (False, True):
            config = vision_config(model, ranks=ranks.world, train_vision=train_vision, tokens_per_microbatch=64)
            actor = Actor(config, ranks, small=small)
            for mine in ([shown, text], [shown, []], [text, shown]):
                actor.compute_log_prob(batch if ranks.world == 1 else mine[ranks.rank])
                actor.accumulate([*mine[0], *mine[1]] if ranks.world == 1 else mine[ranks.rank])
            actor.apply_update(count_tokens(batch))
            snapshot = Copies(actor.published, torch.float32).take()
            if ranks.rank == 0:
                save_file(dict(snapshot.tensors), out / f"{name}-{train_vision}.safetensors")
    keep({}, out, ranks)


def episodes(model: Path, out: Path, ranks: Ranks) -> None:
    """One update with episodes of three branches; the second rank has more rows than the first one."""
    batch = make_episodes(3, groups=3, size=2, rows=THREE) + make_episodes(4, groups=2, size=3)
    mine = batch if ranks.world == 1 else (batch[:2], batch[2:])[ranks.rank]
    for layout in ("rows of like length", "packed"):
        actor = lay_out(Actor(run_config(model, ranks=ranks.world, **STEP_OPTIONS), ranks), layout)
        actor.accumulate(mine)
        actor.apply_update(count_tokens(batch))
        whole = full_tensors(actor)
        if ranks.rank == 0:
            save_file(whole, out / f"{layout}.safetensors")
    keep({}, out, ranks)


def dealt(ranks: Ranks) -> list[list[TrainSample]]:
    """What rank 0 deals out: trees beside single answers, and for the second rank all of the first one's too."""
    batch = make_episodes(5, groups=2, size=3)
    return [batch[:2], batch] if ranks.rank == 0 else []


def policy(model: Path, out: Path, ranks: Ranks) -> None:
    """Train, go on from the state, publish and export; small collectives, and samples that travel."""
    found: dict[str, Any] = {}
    for name, small in UNITS.items():
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
    snapshot, whole = Copies(actor.parameters, torch.float32).take(), full_tensors(actor)
    publish(snapshot, WeightsConfig(transport="directory", shard_bytes=8192), out / "run", ranks)
    if ranks.rank == 0:
        save_file(whole, out / "published.safetensors")
    export(actor, out / "export")
    if ranks.world > 1:
        found |= {
            "dealt": [sample.tokens.tolist() for sample in scatter(ranks, dealt(ranks))],
            "broadcast": ranks.broadcast_ints([3, -(1 << 62), 5] if ranks.rank == 0 else ()),
            "broadcast_empty": ranks.broadcast_ints([]),
            "max": ranks.all_max(ranks.rank, -ranks.rank),
            "min": ranks.all_min(ranks.rank, -ranks.rank),
            "sum": ranks.all_sum(torch.tensor([1.5 + ranks.rank])).tolist(),
        }
    keep(found, out, ranks)


# ---- whole steps

RECIPES: dict[str, dict[str, Any]] = {
    "streaming, sequence mean": {"loss": {"aggregate": "sequence_mean", "entropy": 0.01}},
    "passes and mini-batches": {"passes": 2, "mini_batches": 2, "loss": {"aggregate": "constant_length"}},
    "whitened, learning rate by ess": {
        "advantage": {"use": "reinforce_plus_plus"},
        "correction": {"lr_scale": "ess"},
    },
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


def steps(model: Path, out: Path, ranks: Ranks) -> None:
    """Two steps of each recipe, in two micro-batches; in the second all groups are the first rank's."""
    found: dict[str, Any] = {}
    for number, (name, learner) in enumerate(RECIPES.items()):
        config = run_config(model, ranks=ranks.world, **{"lr": 1e-3, "tokens_per_microbatch": 128, **learner})
        models = make_models(config, ranks)
        worker, actor = RankWorker(config, ranks, models, Checkpoints(out / "checkpoints")), models.actor
        records = []
        for step in range(2):
            worker.step = step + 10 if step else step
            batch = estimated(rewarded(step), actor)
            first = [sample for sample in batch if sample.group_id < 4]
            rest = [sample for sample in batch if sample.group_id >= 4]
            # Whole groups, uneven on purpose.
            mine = [sample for sample in first if ranks.world == 1 or (sample.group_id % 3 == 0) == (ranks.rank == 1)]
            worker.train([0, 1, 2, 3], mine, idle=False)
            worker.train([4, 5], rest if ranks.rank == 0 else [], idle=False)
            stats = worker.apply(*sizes(batch))
            critic = [one.trained.loss for one in stats.critic]
            records.append([stats.loss, stats.grad_norm, stats.lr, stats.kl_coefficient, stats.trained.masked, *critic])
        found[name] = records
        save_file(weights(actor), out / f"{number}-{ranks.rank}.safetensors")
    keep(found, out, ranks)


# ---- critic and reference

VALUE_OPTIONS: dict[str, Any] = {
    "tokens_per_microbatch": 128,
    "lr": 1e-3,
    "clip_norm": 0.5,
    "advantage": {"use": "gae"},
    "reference": {"kind": "frozen"},
    "critic": {"kind": "model", "lr": 1e-3, "clip": 0.2},
}


def gathered(ranks: Ranks, arrays: list[np.ndarray], batch: list[TrainSample]) -> list[float]:
    """What was computed for the whole batch, one number after the other, on all ranks."""
    whole = torch.zeros(sum(len(sample.tokens) for sample in batch), dtype=torch.float64)
    first = 0 if ranks.rank == 0 else sum(len(sample.tokens) for sample in batch[:5])
    values = torch.from_numpy(np.concatenate(arrays)).double()
    whole[first : first + len(values)] = values
    return [float(value) for value in ranks.all_sum(whole)]


def values(model: Path, out: Path, ranks: Ranks) -> None:
    """Two updates of a critic; then values and reference of the last batch."""
    found: dict[str, Any] = {}

    def mine(batch: list[TrainSample]) -> list[TrainSample]:
        """Uneven on purpose, groups cut in the middle."""
        return batch if ranks.world == 1 else (batch[5:] if ranks.rank else batch[:5])

    for units, small in UNITS.items():
        config = run_config(model, ranks=ranks.world, **VALUE_OPTIONS)
        critic, reference = Critic(config, ranks, small=small), FrozenReference(config, ranks, small=small)
        norms = []
        for step in range(2):
            stats = critic.update_critic(mine(value_batch(step)))
            norms += [stats.grad_norm, stats.trained.loss]
        last = value_batch(2)
        own = mine(last)
        found |= {
            f"{units}.norms": norms,
            f"{units}.values": gathered(ranks, critic.compute_values(own), last),
            f"{units}.reference": gathered(ranks, reference.compute_ref_log_prob(own), last),
        }
        again = Critic(config, ranks, small=small)
        again.load_shard_state(critic.shard_state())
        first, second = (part.update_critic(own) for part in (critic, again))
        found[f"{units}.continued"] = first == second
        save_file(full_tensors(critic), out / f"{units}-critic-{ranks.rank}.safetensors")
    keep(found, out, ranks)


# ---- adapters

# A rank below the number of its rows, and one that leaves the second rank without rows of A.
ADAPTERS = {"lora": {"rank": 4}, "dora": {"rank": 3, "dora": True}, "thin": {"rank": 1, "publish": "adapter"}}


def adapters(model: Path, out: Path, ranks: Ranks) -> None:
    """Train each kind of adapter, publish a version, export it."""
    found = {
        f"{name}-{units}": adapt(model, out / f"{name}-{units}", ranks, lora, small)
        for name, lora in ADAPTERS.items()
        for units, small in UNITS.items()
    }
    keep(found, out, ranks)


def adapt(model: Path, out: Path, ranks: Ranks, lora: dict[str, object], small: int) -> dict[str, object]:
    """One adapter; rank 0 keeps the whole merged model."""
    out.mkdir(exist_ok=True)
    config = run_config(model, ranks=ranks.world, lora={"alpha": 8.0, **lora}, **STEP_OPTIONS)
    actor = Actor(config, ranks, small=small)
    batch = pieces(0, ranks.world)[0][ranks.rank]
    fresh = [values.tolist() for values in actor.compute_log_prob(batch).logprobs]
    records = train(actor, range(2))
    with actor.lora.disabled():
        base = [values.tolist() for values in actor.compute_log_prob(batch).logprobs]
    worker = RankWorker(config, ranks, Models(actor=actor), Checkpoints(out / "checkpoints"))
    publish(worker.snapshot(), WeightsConfig(transport="directory", shard_bytes=4096), out, ranks)
    merged = full_tensors(actor)
    if ranks.rank == 0:
        save_file(merged, out / "merged.safetensors")
    export(actor, out / "export")
    return {
        "records": records,
        "base_unchanged": fresh == base,
        "parameters": {key: list(p.to_local().shape) for key, p in actor.parameters.items()},
    }


# ---- families of models


def family(model: Path, out: Path, ranks: Ranks) -> None:
    """Log-probs of my samples, and the gradient of all of them, in packed rows."""
    for name, small in UNITS.items():
        config = run_config(model, ranks=ranks.world, tokens_per_microbatch=192)
        actor, batch = lay_out(Actor(config, ranks, small=small), "packed"), make_batch(0)
        # Uneven on purpose: the first rank has three groups of four.
        mine = batch if ranks.world == 1 else (batch[:12], batch[12:])[ranks.rank]
        logprobs = actor.compute_log_prob(mine).logprobs
        first = 12 * ranks.rank
        found = {str(first + place): torch.from_numpy(values) for place, values in enumerate(logprobs)}
        save_file(found, out / f"{name}-logprobs-{ranks.rank}.safetensors")
        actor.accumulate(mine)
        gradients = dict(whole_gradients(actor))
        if ranks.rank == 0:
            save_file(gradients, out / f"{name}-gradients.safetensors")
    keep({}, out, ranks)


def whole_gradients(actor: Actor) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in actor.parameters.items():
        # FSDP averages over ranks.
        yield name, (parameter.grad.full_tensor() * actor.ranks.world).contiguous()


# ---- hosts that share no run directory


def no_shared_fs(model: Path, out: Path, ranks: Ranks) -> None:
    """A checkpoint of ranks with a run directory each, in a store, read again by ranks with others; a whole version."""
    found: dict[str, Any] = {}
    bare = run_config(model, ranks=ranks.world, lora={"rank": 2, "alpha": 8.0}, **STEP_OPTIONS)
    config = RunConfig.model_validate({**bare.model_dump(), "checkpoint": {"store": f"dir::file://{out}/store"}})
    first, second = (out / f"{name}-{ranks.rank}" for name in ("first", "second"))
    worker = RankWorker(config, ranks, make_models(config, ranks), Checkpoints.of(config, first))
    train(worker.actor, range(STEPS))
    meta = written(worker)
    found["sent"] = sorted(path.name for path in (out / "store").rglob("rank-*"))
    again = RankWorker(config, ranks, make_models(config, ranks), Checkpoints.of(config, second))
    if ranks.rank == 0:
        assert again.checkpoints.greatest(None, 0) == meta
    ranks.all_min(1)  # it is there
    again.execute(Command.FETCH_CHECKPOINT, meta.position)
    assert settled(again) is WriteProgress.WRITTEN
    again.execute(Command.LOAD, meta.position)
    ours, theirs = again.actor.shard_state(), worker.actor.shard_state()
    found["same"] = ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)
    found["here"] = sorted(path.name for path in (second / "fetched").rglob("*"))
    snapshot = again.snapshot()
    found["published"] = len(snapshot.tensors)
    merged = full_tensors(again.actor)
    if ranks.rank == 0:
        save_file(merged, out / "merged.safetensors")
        save_file(dict(snapshot.tensors), out / "published.safetensors")
    keep(found, out, ranks)


def settled(worker: RankWorker) -> WriteProgress:
    while (progress := worker.state.saved()) is WriteProgress.WRITING:
        pass
    return progress


def written(worker: RankWorker) -> Meta:
    """Rank 0's part of a checkpoint as the leader has it."""
    ranks, place = worker.ranks, (1, 1)
    worker.step = 1
    if ranks.rank == 0:
        worker.checkpoints.begin(place)
    ranks.all_min(1)  # it is there
    worker.execute(Command.SAVE, place)
    assert settled(worker) is WriteProgress.WRITTEN
    if ranks.rank:
        return Meta(epoch=1, step=1, version=1)
    meta = worker.state.describe(Meta(format=FORMAT, epoch=1, step=1, version=1, model=worker.actor.config.model.path))
    meta = msgspec.structs.replace(meta, shards=worker.state.shards)
    worker.checkpoints.finish(meta)
    return meta

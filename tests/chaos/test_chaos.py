"""Promise 1 under fire: the demo's model in training while every role is killed, and Redis comes back in the past.

A kill -9 of each role and of both learner ranks, one of them inside a step and one inside a checkpoint, two roll-backs
of Redis, one Redis that hangs, an old learner that wakes up next to its successor, and prompts that kill or break
whoever touches them. The supervisor is killed alone, while Redis starts, with everything else, and with all but a Redis
that hangs. It ends with `streamrl audit`: lost 0, twice 0. Seed and blows are printed. `make chaos BLOWS=200` goes
through all of these again and again, in another order each time.

One with episodes of several turns, whose groups are scored whole: what is different then is in the hands of
feeder, replica, worker and Redis, so these are killed and cut back, and the learner once inside a step. Tools
hang, and give no answer twice. At its end, what the learner trained is compared with the archive, step by step.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
import yaml

from streamrl import wire
from streamrl.archive.reader import RecordedGroup, archive_files, read_file
from streamrl.commands.rundir import find_run, ledgers_to_look
from streamrl.learner.checkpoint import Checkpoints
from streamrl.learner.lineage import greatest_version, ids_of
from streamrl.monitor.tail import Tail
from streamrl.producers.tokenizer import Tokenizer
from streamrl.runfile import read_saved
from tests.chaos.fire import Fire, until

Blow: TypeAlias = Callable[[], None]
POISONED = {60: "break rollout", 75: "break reward", 90: "nan reward", 110: "kill reward", 130: "kill rollout"}
HANGING = (20, 50, 100, 140)
EPISODE = {"environment": "poisoned_tools:LookUp", "max_turns": 3, "max_tool_response": 32, "tool_deadline": 1.0}
SEED = int(os.environ.get("CHAOS_SEED", "1"))
BLOWS = int(os.environ.get("CHAOS_BLOWS", "12"))


def write_run(
    folder: Path, cache: Path, reward: str, poison: dict[int, str], ranks: int = 2, **sections: dict[str, Any]
) -> Path:
    """A run whose prompts at these places have their poison."""
    prompts = [json.loads(line) for line in (cache / "train.jsonl").read_text().splitlines()]
    lines = [row | ({"poison": poison[place]} if place in poison else {}) for place, row in enumerate(prompts)]
    (folder / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = yaml.safe_load((cache.parent / "run.yaml").read_text())
    config |= {"name": "chaos", "model": config["model"] | {"path": str(cache / "model")}}
    config["data"] |= {"train": "train.jsonl", "held_out": str(cache / "held_out.jsonl"), "shuffle": False}
    config["sampling"] |= {"group_size": 4}
    config["rewards"] = [{"use": f"poisoned_reward:{reward}", "name": "poisoned"}]
    config["learner"] |= {"ranks": ranks, "groups_per_step": 8, "steps": None, "stop_at_accuracy": None}
    config["learner"] |= {"collective_deadline": 30}
    config["redis"] = {**config.get("redis", {}), "patience": 12}
    config["checkpoint"] = {"every": 2}
    config["evaluation"] = {"every": 10, "prompts": 8}
    config["lease"] = {"seconds": 2, "max_deliveries": 5}
    # Roles whose supervisor was killed, and Redis with it, wait for Redis until the grace is over.
    config["supervisor"] = {"max_restarts": 500, "backoff": 0.1, "max_backoff": 0.5, "liveness_deadline": 200}
    config["supervisor"]["term_grace"] = 3
    config |= sections
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


@pytest.mark.chaos
@pytest.mark.timeout(700 + 60 * BLOWS)
def test_nothing_is_lost_and_nothing_is_trained_twice(tmp_path: Path, sort_cache: Path):
    fire = Fire(write_run(tmp_path, sort_cache, "Poisoned", POISONED), tmp_path / "run", SEED)
    roles = ("feeder.0", "rollout.0", "reward.0", "learner.0", "learner.1", "redis")
    blows: list[Blow] = [functools.partial(fire.kill, role) for role in roles]
    blows += [fire.kill_in_step, fire.kill_in_checkpoint, fire.replace_paused_learner, fire.hang_redis]
    blows += [functools.partial(fire.roll_back_redis, seconds) for seconds in (1.5, 4.0)]
    ends = [fire.kill_supervisor, fire.kill_everything]
    ends += [fire.kill_all_but_a_hanging_redis, fire.kill_supervisor_while_redis_starts]
    audit = under(fire, blows, ends)
    assert {*roles, "inside a step", "inside a checkpoint", "woken zombie", "hanging redis"} <= set(fire.kills)
    assert {"supervisor", "everything", "all but a hanging redis", "supervisor while redis starts"} <= set(fire.kills)
    assert fire.kills["roll-back"] >= 2
    assert audit["trained"] >= 10 * 8


@pytest.mark.chaos
@pytest.mark.timeout(700 + 60 * BLOWS)
def test_episodes_that_are_scored_whole_go_on_and_are_neither_lost_nor_trained_twice(tmp_path: Path, tools_cache: Path):
    sections = {"episode": EPISODE, "archive": {"enabled": True}}
    poison = POISONED | dict.fromkeys(HANGING, "hang tool")
    fire = Fire(write_run(tmp_path, tools_cache, "PoisonedGroup", poison, ranks=1, **sections), tmp_path / "run", SEED)
    roles = ("feeder.0", "rollout.0", "reward.0")
    blows: list[Blow] = [functools.partial(fire.kill, role) for role in roles]
    blows += [fire.kill_in_episode, fire.kill_in_episode, fire.kill_in_step]
    blows.append(functools.partial(fire.roll_back_redis, 3.0))
    audit = under(fire, blows, [])
    assert all(fire.kills[role] for role in ("feeder.0", "reward.0", "inside a step", "roll-back"))
    assert all(fire.kills[role] >= 2 for role in ("rollout.0", "inside an episode"))
    archived = list(recorded(fire.run_dir))
    check_trained(fire.run_dir, archived, audit["trained"])
    samples = check_turns(fire.run_dir, archived)
    assert sum(sample.replayed for sample in samples) > 0, "no sample went on from its journal"
    assert asyncio.run(journals(fire.run_dir)) == []


def under(fire: Fire, blows: list[Blow], ends: list[Blow]) -> dict:
    """Run under these blows in orders of the seed, and until all poisoned prompts have met their end; the audit.

    `ends` are those that nothing survives, or no more than Redis: the run is started again after each.
    """
    rounds = max(1, BLOWS // 12)
    try:
        fire.up()
        fire.moves_on(2)
        blows, ends = ([blow for _ in range(rounds) for blow in shuffled(fire, each)] for each in (blows, ends))
        after = {len(blows) * (place + 1) // (len(ends) + 1): end for place, end in enumerate(ends)}
        for place, blow in enumerate(blows):
            blow()
            if place in after:
                after[place]()
                if not fire.family():
                    check(fire)
                fire.up()
            # Past a checkpoint: or three learners would die in the same step, and its groups would be blamed.
            fire.moves_on(fire.random.randint(3, 4))
        cursor_past_poison(fire)
        live_groups_end(fire)
        assert fire.drain() == 0
        audit = check(fire)
    finally:
        fire.close()
        print(f"\nseed {SEED}, kills {dict(fire.kills)}, {fire.steps()} steps")
        print("\n".join(f"{seconds:8.1f}  {what}" for seconds, what in fire.log))
        print(fire.last_words())
    print("audit", audit)
    _, letters = fire.streamrl("dead", "ls")
    guilty = {letter["group"] for letter in letters["letters"]}
    assert guilty <= set(POISONED), f"prompts died that were not poisoned: {guilty - set(POISONED)}"
    assert {60, 75, 90, 110, 130} <= guilty
    return audit


def shuffled(fire: Fire, blows: list[Blow]) -> list[Blow]:
    return fire.random.sample(blows, len(blows))


def cursor_past_poison(fire: Fire) -> None:
    """Every poisoned prompt has been admitted and has met its end."""
    store = fire.store()
    last = max(POISONED)

    def over() -> bool:
        live = {int(group_id) for group_id in store.zrange("{sr:chaos}:live", 0, -1)}
        return int(store.hget("{sr:chaos}:state", "cursor") or 0) > last and not live & set(POISONED)

    until(over, "the end of all poisoned prompts", 240)


def live_groups_end(fire: Fire) -> None:
    """Wait until every group that is live now has ended.

    After a blow Redis holds leases that no living process works on, and a drain does not wait until they expire. Groups
    that are admitted later are held by living processes, which finish them when they drain.
    """
    store = fire.store()
    spaces = ("{sr:chaos}:live", "{sr:chaos}:eval:live")
    met = {space: set(store.zrange(space, 0, -1)) for space in spaces}

    def over() -> bool:
        return not any(met[space] & set(store.zrange(space, 0, -1)) for space in spaces)

    until(over, "the end of all groups that the last blow met", 120)


def check(fire: Fire) -> dict:
    code, audit = fire.streamrl("audit")
    assert (audit["lost"], audit["twice"], audit["faults"]) == (0, 0, []), audit
    assert code == 0
    assert audit["admitted"] == sum(audit[key] for key in ("trained", "dropped", "dead", "live"))
    held_out = audit["held_out"]
    assert held_out["admitted"] == audit["evaluated"] + sum(held_out[key] for key in ("dropped", "dead", "live"))
    return audit


def recorded(run_dir: Path) -> Iterator[tuple[RecordedGroup, list[wire.Sample], list[float]]]:
    """All groups of the archive with responses and scores, also those that closed again after Redis went back."""
    for file in archive_files(run_dir):
        for group in read_file(file)[1]:
            samples = [wire.decode(sample, wire.Sample) for sample, _ in group.samples]
            yield group, samples, [wire.decode(score, wire.SampleScore).value for _, score in group.samples]


def check_trained(run_dir: Path, archived: list, count: int) -> None:
    """Each group that the surviving weights know was trained once, with its scores and all tokens that were sampled."""
    checkpoints = Checkpoints(run_dir / "checkpoints")
    newest = checkpoints.validate(checkpoints.positions()[-1])
    ids = set(ids_of(newest.trained))
    assert len(ids) == newest.count == count
    known: dict[int, list] = {}
    for group, samples, scores in archived:
        known.setdefault(group.group_id, []).append((scores, sum(len(sample.token_ids) for sample in samples)))
    steps: dict[int, dict] = {}  # of the line that survived: who made a step last
    for line in Tail(run_dir / "metrics" / "learner.0.jsonl").read():
        steps |= {group_id: line for group_id, _ in line.get("trained", ())}
    for group_id in ids:
        line = steps[group_id]
        attempts = itertools.product(*(known[other] for other, _ in line["trained"]))
        assert any(
            sum(tokens for _, tokens in found) == line["tokens"]
            and np.mean([score for scores, _ in found for score in scores]) == pytest.approx(line["reward_mean"])
            for found in attempts
        ), line
    sampled = {version for _, samples, _ in archived for each in samples for version in each.token_versions}
    assert 0 < min(sampled) <= max(sampled) <= greatest_version(run_dir)


def check_turns(run_dir: Path, archived: list) -> list[wire.Sample]:
    """What the model was told is what its environment remembers, in all lives of each of these samples."""
    flat = [sample for _, samples, _ in archived for sample in samples]
    tokenizer = Tokenizer.load(read_saved(run_dir / "run.json").config.model)
    for sample in flat:
        told = 0
        for turn in [turn for turn in sample.turns if turn.role == "tool"]:
            ids = turn.observed_ids  # an answer that quotes `<|tool|>` has its letters, and not the token
            texts = [tokenizer.decode(part) for part in np.split(ids, np.flatnonzero(ids == ids[0])[1:])]
            told += sum(int(text) for text, use in zip(texts, turn.tools, strict=True) if use.outcome == "ok")
        if sample.stop == "completed":  # or else a tool ran after the last turn
            assert told == sample.score.value
    outcomes = {use.outcome for sample in flat for turn in sample.turns for use in turn.tools}
    assert {"ok", "timeout"} <= outcomes
    assert sum(sample.restarts for sample in flat) == 0
    return flat


async def journals(run_dir: Path) -> list[int]:
    """Groups that have a journal after the drain."""
    async with ledgers_to_look(find_run(run_dir)) as ledgers:
        found = []
        for ledger in (ledgers.train, ledgers.evaluation):
            for group_id in await ledger.connection.read("ZRANGE", ledger.keys.live, 0, -1):
                if (await ledger.trace(int(group_id)))["journaled"]:
                    found.append(int(group_id))
    return found

"""Memory of Redis over a long run with a trivial engine: it must stay where it was after the first steps.

    python benchmarks/memory.py [--json FILE] [--steps N]

One asyncio process plays all roles on the real ledger of a real server: a feeder (the real `Admitter`), two rollout
replicas and two reward workers (the real `Leases`) that come and go, a learner that trains, retires at checkpoints
(some of them late, so that the hard cap is met) and is replaced now and then, a held-out round every few steps,
consumers that die with a lease in their hands, samples and whole groups that die, groups dropped as stale, and a person
who looks after the dead letters. Payloads have the sizes of the wire (`wire.py`).

At 10 %, 50 % and 100 % of the steps the run is drained: nothing is live then, and what Redis still uses is what a run
leaves behind. Growth between these marks would be a leak, whatever the phase of the run.

Buffers of clients and of the append-only file are told apart (`buffers_max_bytes`), and so is the peak while that file
is rewritten: 6.2 then collects in memory, in blocks of 10 MiB, what is written meanwhile, and does not count it against
`maxmemory`.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
from facts import write_json

from streamrl.config import LeaseConfig, RedisConfig, RunConfig
from streamrl.producers.admission import BURST, AdmissionTerms, Admitter
from streamrl.queues import Lease, Leases, Ledgers, embedded, open_ledgers
from streamrl.queues.keys import GROUP
from streamrl.queues.records import AdmitOutcome

SAMPLES, GROUPS_PER_STEP, MAX_STALENESS, CHECKPOINT_EVERY, MAX_DEAD = 4, 4, 1, 5, 100
BUDGET = (MAX_STALENESS + 1) * GROUPS_PER_STEP
HARD_CAP = BUDGET + CHECKPOINT_EVERY * GROUPS_PER_STEP
HELD_OUT, HELD_OUT_BUDGET = 8, 4
# 512 prompt tokens of 4 bytes; 64 to 2,048 sampled tokens of 8 bytes, and their text; manifest of about 70 tensors.
PROMPT, SMALLEST, LARGEST, MANIFEST = 512 * 4, 1 << 10, 26 << 10, 6 << 10
NOISE = np.random.default_rng(0).bytes(1 << 20)
TRACEBACK = "x" * 5000
MARKS = {"10%": 0.1, "50%": 0.5, "100%": 1.0}
# The wait of a learner for the disk of Redis, once per start, is no memory.
CONFIG = RunConfig(name="memory", redis=RedisConfig(maxmemory=1 << 30, fsync_period=1e-6))
LEASE = LeaseConfig(seconds=2.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--steps", type=int, default=2000)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        results = asyncio.run(measure(Path(folder) / "run", arguments.steps))
    for name, value in results.items():
        print(f"{name:24} {value}")
    if arguments.json:
        write_json(arguments.json, results)


async def measure(run_dir: Path, steps: int) -> dict[str, Any]:
    """Play a run of so many steps and return the figures."""
    async with embedded.running(CONFIG.redis, run_dir), open_ledgers(CONFIG, run_dir) as ledgers:
        began = time.perf_counter()
        play = Play(ledgers, steps)
        figures = await play.run()
        return figures | {
            "seconds": time.perf_counter() - began,
            "server": ".".join(map(str, embedded.find_server().version)),
        }


def size_of(group_id: int, sample: int) -> int:
    """Bytes of a payload: skewed, as lengths of responses are."""
    share = ((group_id * SAMPLES + sample) * 2654435761 % (1 << 32)) / (1 << 32)
    return int(SMALLEST + share * share * (LARGEST - SMALLEST))


@dataclass
class Seen:
    """What the sampler saw: maxima, and the newest value of what only the server can tell."""

    used: int = 0
    peak: int = 0
    rewriting_peak: int = 0
    buffers: int = 0
    live: int = 0
    held_out_live: int = 0
    dead: int = 0
    weights: int = 0
    consumers: int = 0
    aof: int = 0
    aof_now: int = 0
    rewrites: int = 0
    samples: int = 0


class Play:
    """All roles of a run on one connection."""

    def __init__(self, ledgers: Ledgers, steps: int) -> None:
        self.ledgers, self.steps = ledgers, steps
        self.train, self.held_out = ledgers.train, ledgers.evaluation
        self.step = self.version = 0
        self.trained: set[int] = set()
        self.fresh: list[int] = []
        self.counts: Counter[str] = Counter()
        self.seen = Seen()
        self.marks: dict[str, Any] = {}
        self.open = asyncio.Event()
        self.open.set()
        self.over = asyncio.Event()
        self.stops: dict[str, asyncio.Event] = {}
        self.nonce = self.checkpoint = ""

    async def run(self) -> dict[str, Any]:
        """Play until the last step is drained; return the figures."""
        async with asyncio.TaskGroup() as tasks:
            for role in (self.feed(), self.evaluate(), self.watch()):
                tasks.create_task(role)
            for i in range(2):
                tasks.create_task(self.serve("prompts", f"rollout.{i}", 4, self.generate))
                tasks.create_task(self.serve("rollouts", f"reward.{i}", 16, self.score))
            await self.learn()
            self.over.set()
            for wakes in (self.open, *self.stops.values()):
                wakes.set()
        return await self.figures()

    # Feeder, engines, rewards.

    async def feed(self) -> None:
        """Admit while there is room; when the last answers were FULL, mostly one group at a time."""
        terms = AdmissionTerms("memory", SAMPLES, 2, BUDGET, HARD_CAP, MAX_DEAD)
        admitter = Admitter(self.train, terms, lambda group_id: NOISE[group_id % 1000 :][:PROMPT])
        while not self.over.is_set():
            await self.open.wait()
            if self.over.is_set():
                return
            outcome = await admitter.admit(self.version, limit=BURST if self.counts["full"] % 8 == 0 else 1)
            self.counts["full"] += outcome is AdmitOutcome.FULL
            if outcome in {AdmitOutcome.FULL, AdmitOutcome.TOO_MANY_DEAD}:
                await asyncio.sleep(0.002)

    async def serve(self, stage: Any, name: str, width: int, handle: Callable[[Lease], Awaitable[None]]) -> None:
        """One process after the other under the same name: each drains, hands back, and the next one starts."""
        while not self.over.is_set():
            self.stops[name] = asyncio.Event()
            ledgers = [self.train, self.held_out]
            await Leases(ledgers, stage, name, LEASE, width, handle, drain=0.01).run(self.stops[name])
            self.counts["restarts"] += 1

    async def generate(self, lease: Lease) -> None:
        """A trivial engine: payloads at once; some samples and some whole prompts die, once."""
        work = await lease.ledger.open_work(lease)
        if work is None:
            return
        if lease.group_id % 97 == 13 and lease.attempt == 1:
            await lease.ledger.fail_prompt(lease, "no message of ours", TRACEBACK)
            return
        async with asyncio.TaskGroup() as tasks:
            for k in work.missing:
                number = lease.group_id * SAMPLES + k
                if number % 211 == 5:
                    tasks.create_task(lease.ledger.fail_sample(lease, k, "engine", TRACEBACK))
                else:
                    tasks.create_task(self.generate_one(lease, k, number))

    async def generate_one(self, lease: Lease, k: int, number: int) -> None:
        """Some samples are episodes of three turns; some of these begin again, some die."""
        payload = NOISE[number % 1000 :][: size_of(lease.group_id, k)]
        if number % 29 == 0:
            for turn in range(3):
                self.counts["turns"] += await lease.ledger.journal(lease, k, turn, payload[: len(payload) // 3])
            if number % 5 == 0:
                await lease.ledger.forget_journal(lease, k)
            if number % 11 == 0:
                await lease.ledger.fail_sample(lease, k, "episode", TRACEBACK)
                return
        await lease.ledger.emit(lease, k, payload)

    async def score(self, lease: Lease) -> None:
        """A trivial reward; some samples die of it."""
        sample = await lease.ledger.leased_sample(lease)
        if sample is None:
            return
        if (lease.group_id * SAMPLES + sample.sample) % 307 == 7:
            await lease.ledger.fail_score(lease, "reward", TRACEBACK)
        else:
            await lease.ledger.score(lease, NOISE[:40])

    async def evaluate(self) -> None:
        """A round of held-out prompts every twenty steps, retired as they close."""
        ledger, nonce, end, due = self.held_out, uuid4().hex, 0, 1
        terms = AdmissionTerms("held out", 1, 1, HELD_OUT_BUDGET, HELD_OUT_BUDGET, MAX_DEAD)
        admitter = Admitter(ledger, terms, lambda group_id: NOISE[group_id % 1000 :][:PROMPT])
        await ledger.fence(nonce, 0)
        while not self.over.is_set() or await ledger.oldest_live(1):
            if self.step >= due and self.open.is_set() and not self.over.is_set():
                end, due = end + HELD_OUT, self.step + 20
            await admitter.admit(self.version, limit=BURST, end=end)
            closed = await ledger.closed()
            self.counts["evaluated"] += await ledger.retire(nonce, "1-0", 0, closed) if closed else 0
            await ledger.wait_closed(0.02)

    # Learner and person.

    async def learn(self) -> None:
        """Train up to each mark, drain there, go on."""
        await self.take_over()
        for name, share in MARKS.items():
            while self.step < self.steps * share:
                await self.train_step()
            await self.mark(name)

    async def take_over(self) -> None:
        """A new learner; the one before it had saved."""
        self.nonce = uuid4().hex
        fence = await self.train.fence(self.nonce, 0)
        await self.train.resume(self.nonce, fence.checkpoint or "0-0", fence.epoch)
        self.counts["epoch"] = fence.epoch

    async def candidates(self) -> list[int]:
        """The oldest closed groups that are not trained; some are dropped as stale on the way."""
        fresh = set(self.fresh)
        found = []
        for group_id in await self.train.closed():
            if group_id % 61 == 3 and group_id not in fresh:
                await self.train.drop(self.nonce, group_id, "stale")
            elif group_id not in fresh:
                found.append(group_id)
        return found[:GROUPS_PER_STEP]

    async def train_step(self, least: int = GROUPS_PER_STEP) -> None:
        """Train the oldest closed groups; without enough of them wait, and save when nothing else frees a place."""
        group_ids = await self.candidates()
        if len(group_ids) < least:
            if len(self.fresh) >= CHECKPOINT_EVERY * GROUPS_PER_STEP and (await self.train.state()).live >= HARD_CAP:
                await self.save()
            await self.train.wait_closed(0.05)
            return
        await self.train.start_step(self.nonce, group_ids)
        await asyncio.gather(*(self.train.read_group(group_id) for group_id in group_ids))
        assert self.trained.isdisjoint(group_ids)
        self.trained.update(group_ids)
        self.fresh += group_ids
        self.step, self.version = self.step + 1, self.version + 1
        await self.train.finish_step(self.nonce, len(self.fresh), self.version, NOISE[:MANIFEST], group_ids)
        late = self.step // CHECKPOINT_EVERY % 20 == 0
        if self.step % CHECKPOINT_EVERY == 0 and not late:
            await self.save()
        await self.events()

    async def save(self) -> None:
        """A checkpoint: all that was trained is retired."""
        checkpoint = f"{self.counts['epoch']}-{self.step}"
        retired = await self.train.retire(self.nonce, checkpoint, 0, self.fresh)
        assert retired == len(self.fresh)
        self.fresh.clear()

    async def events(self) -> None:
        """What happens to a run: restarts, deaths, a new learner, somebody who looks after the dead letters."""
        for name in self.stops:
            await self.ledgers.roles.beat(name, {"pid": 1, "state": "ready", "step": self.step}, 10)
        if self.step % 25 == 0:
            names = sorted(self.stops)
            self.stops[names[self.step // 25 % len(names)]].set()
        if self.counts["killed"] < self.step // 100:
            await self.die_with_a_lease()
        if self.step % 50 == 0:
            await self.look_after_the_dead()
        if self.step % 400 == 0:
            await self.save()
            await self.take_over()

    async def die_with_a_lease(self) -> None:
        """A process takes work, if the others leave it some, and is never heard of again."""
        stream = (self.train.keys.prompts, self.train.keys.rollouts)[self.counts["killed"] % 2]
        name = f"killed-{uuid4().hex[:8]}"
        command = ("XREADGROUP", "GROUP", GROUP, name, "COUNT", 1, "BLOCK", 20, "STREAMS", stream, ">")
        self.counts["killed"] += bool(await self.ledgers.connection.block(*command, milliseconds=20))

    async def look_after_the_dead(self) -> None:
        """Replay the oldest dead group, drop all other letters."""
        for ledger in (self.train, self.held_out):
            letters = await ledger.dead_letters()
            whole = [letter.group_id for letter in letters if letter.sample is None]
            if whole and ledger is self.train and self.open.is_set():
                await ledger.replay_each([whole[0]], budget=BUDGET, hard_cap=HARD_CAP)
            await ledger.drop_dead([letter.entry for letter in await ledger.dead_letters()])

    # Measuring.

    async def watch(self) -> None:
        """Sample the server until the run is over."""
        while not self.over.is_set():
            await self.sample()
            await asyncio.sleep(0.02)

    async def sample(self) -> None:
        """Look at the server once."""
        read, keys, seen = self.ledgers.connection.read, self.train.keys, self.seen
        info, clients, live, held_out, dead, weights = await asyncio.gather(
            read("INFO", "all"),
            read("CLIENT", "LIST"),
            read("ZCARD", keys.live),
            read("ZCARD", self.held_out.keys.live),
            read("XLEN", keys.dead),
            read("XLEN", keys.weights),
        )
        streams = (ledger.keys.prompts for ledger in (self.train, self.held_out))
        names = await asyncio.gather(*(read("XINFO", "CONSUMERS", stream, GROUP) for stream in streams))
        fields = info_fields(info)
        seen.used, seen.buffers = data_bytes(fields, clients), max(seen.buffers, buffer_bytes(fields, clients))
        if fields["aof_rewrite_in_progress"] == "1":
            seen.rewriting_peak = max(seen.rewriting_peak, seen.used)
        else:
            seen.peak = max(seen.peak, seen.used)
        seen.live, seen.held_out_live = max(seen.live, live), max(seen.held_out_live, held_out)
        seen.dead, seen.weights = max(seen.dead, dead), max(seen.weights, weights)
        seen.consumers = max(seen.consumers, *map(len, names))
        size = int(fields["aof_current_size"])
        seen.rewrites += size < seen.aof_now
        seen.aof, seen.aof_now = max(seen.aof, size), size
        seen.samples += 1

    async def mark(self, name: str) -> None:
        """Note the figures of a running run, drain it, note what is left, and let it go on."""
        await self.sample()
        step, used = self.step, self.seen.used
        self.open.clear()
        while await self.train.live() or await self.held_out.live():
            await self.train_step(least=1)
            if len(await self.train.live()) == len(self.fresh):
                await self.save()
        await self.look_after_the_dead()
        self.marks[name] = {"step": step, "peak": self.seen.peak, "used": used, **await self.left()}
        if name != "100%":
            self.open.set()

    async def left(self) -> dict[str, Any]:
        """Memory of a drained run, and bytes by key."""
        read = self.ledgers.connection.read
        fields = info_fields(await read("INFO", "all"))
        while int(fields["lazyfree_pending_objects"]):
            fields = info_fields(await read("INFO", "all"))
        names = sorted(await read("KEYS", "*"))
        sizes = await asyncio.gather(*(read("MEMORY", "USAGE", name, "SAMPLES", 0) for name in names))
        keys = {name.decode().partition("}:")[2]: size for name, size in zip(names, sizes, strict=True)}
        drained = data_bytes(fields, await read("CLIENT", "LIST"))
        return {"drained": drained, "keys": keys, "keys_bytes": sum(sizes)}

    async def figures(self) -> dict[str, Any]:
        """What was seen; it fails when a group is in no place or in two."""
        state, seen = await self.train.state(), self.seen
        dropped = set(await self.train.dropped())
        assert self.trained.isdisjoint(dropped)
        assert self.trained | dropped == set(range(state.cursor)), "a group was lost"
        info = info_fields(await self.ledgers.connection.read("INFO", "all"))
        first, last = self.marks["10%"], self.marks["100%"]
        return {
            "steps": self.step,
            "live_max": seen.live,
            "hard_cap": HARD_CAP,
            "held_out_live_max": seen.held_out_live,
            "held_out_cap": HELD_OUT_BUDGET,
            "peak_bytes": {name: mark["peak"] for name, mark in self.marks.items()},
            "used_bytes": {name: mark["used"] for name, mark in self.marks.items()},
            "drained_bytes": {name: mark["drained"] for name, mark in self.marks.items()},
            "drained_keys_bytes": {name: mark["keys_bytes"] for name, mark in self.marks.items()},
            "growth_bytes_per_step": (last["drained"] - first["drained"]) / (last["step"] - first["step"]),
            "peak_while_rewriting_bytes": seen.rewriting_peak,
            "buffers_max_bytes": seen.buffers,
            "payload_bytes_at_hard_cap": HARD_CAP * (PROMPT + SAMPLES * LARGEST),
            "aof": {"max_bytes": seen.aof, "rewrites": seen.rewrites, "written": int(info["total_net_input_bytes"])},
            "dead_max": seen.dead,
            "max_dead": MAX_DEAD,
            "weights_max": seen.weights,
            "consumers_max": seen.consumers,
            "groups": {"admitted": state.cursor, "trained": len(self.trained), "dropped": len(dropped)},
            "played": dict(self.counts),
            "samples": seen.samples,
            "keys": {name: mark["keys"] for name, mark in self.marks.items()},
        }


def info_fields(info: bytes) -> dict[str, str]:
    """Lines of INFO as a map."""
    pairs = (line.partition(":") for line in info.decode().splitlines())
    return {name: value for name, colon, value in pairs if colon}


def buffer_bytes(fields: dict[str, str], clients: bytes) -> int:
    """Memory of clients (CLIENT LIST) and of the append-only file on its way to the disk.

    `mem_clients_normal` of INFO is up to a second old, and a second ago a client may have held large messages.
    """
    return sum(map(int, re.findall(rb"tot-mem=(\d+)", clients))) + int(fields["mem_aof_buffer"])


def data_bytes(fields: dict[str, str], clients: bytes) -> int:
    """`used_memory` without these buffers."""
    return int(fields["used_memory"]) - buffer_bytes(fields, clients)


if __name__ == "__main__":
    main()

"""The ledger against a plain dict, under every order of calls that hypothesis can think of.

Workers die, take over, come back as zombies and say everything twice; learners replace each other; Redis restarts. On
6.2 and 7.0.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from streamrl.config import RunConfig
from streamrl.errors import Fenced
from streamrl.queues import Lease, open_ledgers
from streamrl.queues.records import AdmitOutcome, Cause, ReplayOutcome, ScoreOutcome
from tests.queues.conftest import find_version
from tests.queues.ledger_kit import admit, everything, faults, lease, replay, take
from tests.redis_kit import RedisRun

BUDGET, CAP, MAX_DEAD = 4, 6, 25


@dataclass
class Group:
    """What the ledger should know of one group."""

    size: int
    least: int
    attempt: int = 1
    state: str = "open"
    payload: dict[int, bytes] = field(default_factory=dict)
    score: dict[int, bytes] = field(default_factory=dict)
    cause: dict[int, str] = field(default_factory=dict)
    journal: dict[int, list[bytes]] = field(default_factory=dict)
    states: dict[int, bytes] = field(default_factory=dict)
    crashes: set[str] = field(default_factory=set)
    whole: bool = False
    doomed: bool = False

    @property
    def waiting(self) -> list[int]:
        return [k for k in self.payload if not self.fate(k)]

    @property
    def missing(self) -> list[int]:
        return [k for k in range(self.size) if k not in self.payload and k not in self.cause]

    @property
    def journal_fields(self) -> set[bytes]:
        counts = {k: len(turns) for k, turns in self.journal.items() if turns}
        turns = {b"j:%d:%d" % (k, i) for k, count in counts.items() for i in range(count)}
        return {b"j:%d" % k for k in counts} | turns | {b"j:%d:s" % k for k in counts if k in self.states}

    def end_journal(self, k: int) -> None:
        self.journal.pop(k, None)
        self.states.pop(k, None)

    def fate(self, k: int) -> bool:
        return k in self.score or k in self.cause

    def close_if_complete(self) -> str:
        if all(self.fate(k) for k in range(self.size)):
            self.state = "closed" if len(self.score) >= self.least and not self.doomed else "dead"
        return self.state


class LedgerMachine(RuleBasedStateMachine):
    """`self.groups` is the model; after each rule the ledger must agree with it."""

    version = "6.2"

    @initialize()
    def start(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.folder = tempfile.TemporaryDirectory()
        self.redis = RedisRun(Path(self.folder.name) / "run", find_version(self.version))
        self.redis.start()
        self.stack = contextlib.AsyncExitStack()
        config = RunConfig(name="model", redis=self.redis.config)
        self.ledger = self.wait(self.stack.enter_async_context(open_ledgers(config, self.redis.run_dir))).train
        self.groups: dict[int, Group] = {}
        self.letters: list[tuple[int, int | None]] = []
        self.fates: dict[int, str] = {}
        self.queued: set[int] = set()
        self.dead_groups: dict[int, Group] = {}
        self.prompts: list[Lease] = []
        self.samples: list[Lease] = []
        self.wholes: list[Lease] = []
        self.said = False
        self.owners: dict[str, Lease] = {}
        self.taken = 0
        self.nonce, self.old_nonces, self.epoch, self.held, self.version_number = "", [], 0, 0, 0
        self.restarts = 0

    def teardown(self) -> None:
        if hasattr(self, "loop"):
            self.wait(self.stack.aclose())
            self.redis.kill()
            self.folder.cleanup()
            self.loop.close()

    def wait(self, coroutine):
        return self.loop.run_until_complete(coroutine)

    def twice(self, make, unchanged=None):
        """Run a call, then the same call again: the second changes nothing."""
        first = self.wait(make())
        before = self.wait(everything(self.ledger))
        second = self.wait(make())
        assert self.wait(everything(self.ledger)) == before
        if unchanged is not None:
            assert second == unchanged
        return first

    # The feeder.

    @rule(size=st.integers(1, 3), least=st.integers(1, 3))
    def admit(self, size, least):
        cursor, least = len(self.fates) + len(self.groups), min(size, least)
        live = len(self.groups)
        bounds = {"budget": BUDGET, "hard_cap": CAP, "max_dead": MAX_DEAD}
        found = self.twice(lambda: admit(self.ledger, cursor, samples=size, min_group=least, **bounds))
        if len(self.letters) >= MAX_DEAD:
            assert found.outcome is AdmitOutcome.TOO_MANY_DEAD
        elif live - self.held >= BUDGET or live >= CAP:
            assert found.outcome is AdmitOutcome.FULL
        else:
            assert (found.outcome, found.cursor) == (AdmitOutcome.ADMITTED, cursor + 1)
            self.groups[cursor] = Group(size, least, whole=self.said)

    @rule(offset=st.integers(1, 3))
    def admit_elsewhere(self, offset):
        cursor = len(self.fates) + len(self.groups)
        for wrong in {max(0, cursor - offset), cursor + offset} - {cursor}:
            found = self.wait(admit(self.ledger, wrong))
            assert (found.outcome, found.cursor) == (AdmitOutcome.MOVED, cursor)

    # Workers. Leases are never forgotten: whoever once held one may act on it at any time, as a zombie would.

    @rule(stage=st.sampled_from(["prompts", "rollouts"]), count=st.integers(1, 3))
    def lease(self, stage, count):
        for found in self.wait(lease(self.ledger, stage, "first", count)):
            (self.prompts if stage == "prompts" else self.wholes if found.is_group else self.samples).append(found)
            group = self.groups[found.group_id]
            assert found.attempt == group.attempt
            if stage == "prompts":
                assert group.missing
                self.write_a_turn(found)
            elif found.is_group:
                assert group.whole
                assert group.waiting
                assert not group.missing
            else:
                assert found.sample in group.payload
                assert not group.fate(found.sample)
                assert not group.whole

    def known(self, lease: Lease) -> Group | None:
        """The open group of a lease, when it is still on that attempt."""
        group = self.groups.get(lease.group_id)
        return group if group is not None and group.state == "open" and group.attempt == lease.attempt else None

    def awaits(self, lease: Lease) -> Group | None:
        """The group of a lease that is still waiting for what was leased: a prompt, a sample, or the whole group."""
        group = self.known(lease)
        if group is None:
            return None
        if lease.is_group:
            return group if group.whole and not group.missing else None
        if lease.sample is not None and group.whole:
            return None
        if lease.sample is None:
            return group if group.missing else None
        return group if lease.sample in group.payload and not group.fate(lease.sample) else None

    @precondition(lambda self: self.prompts)
    @rule(data=st.data())
    def open_work(self, data):
        held = data.draw(st.sampled_from(self.prompts))
        work = self.twice(lambda: self.ledger.open_work(held))
        group = self.awaits(held)
        assert (None if work is None else list(work.missing)) == (None if group is None else group.missing)

    @precondition(lambda self: self.prompts)
    @rule(data=st.data(), sample=st.integers(0, 2))
    def emit(self, data, sample):
        held = data.draw(st.sampled_from(self.prompts))
        group, sample = self.known(held), self.sample_of(held, sample)
        payload = b"%d.%d" % (held.group_id, sample)
        written = self.twice(lambda: self.ledger.emit(held, sample, payload), unchanged=False)
        assert written == (group is not None and sample in group.missing)
        if written:
            group.payload[sample] = payload
            group.end_journal(sample)

    def write_a_turn(self, held: Lease) -> None:
        """Each missing sample gets one turn more, so that most of what happens to a group meets a journal."""
        group = self.groups[held.group_id]
        for sample in group.missing:
            turns = group.journal.setdefault(sample, [])
            assert self.wait(self.ledger.journal(held, sample, len(turns), b"turn"))
            turns.append(b"turn")

    def sample_of(self, held: Lease, sample: int) -> int:
        group = self.known(held)
        return sample % group.size if group is not None else sample

    def may_journal(self, held: Lease, sample: int) -> Group | None:
        """The group, when this lease is the newest one of its entry and the sample is still to be generated."""
        group = self.known(held)
        newest = self.owners.get(held.entry, held).consumer == held.consumer
        return group if group is not None and newest and sample in group.missing else None

    @precondition(lambda self: self.prompts)
    @rule(
        data=st.data(),
        sample=st.integers(0, 2),
        turns=st.integers(1, 3),
        skipped=st.sampled_from([0, 0, 0, -1, 1]),
        state=st.sampled_from([None, b"a", b"b"]),
    )
    def journal(self, data, sample, turns, skipped, state):
        held = data.draw(st.sampled_from(self.prompts))
        sample = self.sample_of(held, sample)
        group = self.may_journal(held, sample)
        turn = b"%d by %d" % (sample, held.deliveries)
        for _ in range(turns):
            known = group.journal.setdefault(sample, []) if group is not None else []
            number = max(0, len(known) + skipped)
            written = self.twice(lambda n=number: self.ledger.journal(held, sample, n, turn, state), unchanged=False)
            assert written == (group is not None and number == len(known))
            if written:
                known.append(turn)
                if state is not None:
                    group.states[sample] = state

    @precondition(lambda self: self.prompts)
    @rule(data=st.data(), sample=st.integers(0, 2))
    def read_journal(self, data, sample):
        """Also an old holder of this attempt may read: it has been told nothing that it could spoil."""
        held = data.draw(st.sampled_from(self.prompts))
        group = self.known(held)
        left = self.twice(lambda: self.ledger.read_journal(held, sample))
        known = (group.journal.get(sample, []), group.states.get(sample)) if group is not None else ([], None)
        assert left == known

    @precondition(lambda self: self.prompts)
    @rule(data=st.data(), sample=st.integers(0, 2))
    def forget_journal(self, data, sample):
        held = data.draw(st.sampled_from(self.prompts))
        sample = self.sample_of(held, sample)
        group = self.may_journal(held, sample)
        assert self.twice(lambda: self.ledger.forget_journal(held, sample)) == (group is not None)
        if group is not None:
            group.end_journal(sample)

    @precondition(lambda self: self.prompts)
    @rule(data=st.data(), sample=st.integers(0, 2))
    def fail_sample(self, data, sample):
        held = data.draw(st.sampled_from(self.prompts))
        group, sample = self.known(held), self.sample_of(held, sample)
        died = self.twice(lambda: self.ledger.fail_sample(held, sample, "engine"), unchanged=False)
        assert died == (group is not None and sample in group.missing)
        if died:
            self.die(held.group_id, [sample], "engine")

    @precondition(lambda self: self.prompts)
    @rule(data=st.data())
    def fail_prompt(self, data):
        held = data.draw(st.sampled_from(self.prompts))
        group = self.awaits(held)
        died = self.twice(lambda: self.ledger.fail_prompt(held, "prompt"), unchanged=False)
        assert died == (group is not None)
        if died:
            self.die(held.group_id, group.missing, "prompt")

    @precondition(lambda self: self.samples)
    @rule(data=st.data())
    def leased_sample(self, data):
        held = data.draw(st.sampled_from(self.samples))
        found = self.twice(lambda: self.ledger.leased_sample(held))
        group = self.awaits(held)
        assert (found is None) == (group is None)
        if found is not None:
            assert (found.prompt, found.payload) == (b"prompt %d" % held.group_id, group.payload[held.sample])

    @precondition(lambda self: self.samples)
    @rule(data=st.data())
    def score(self, data):
        held = data.draw(st.sampled_from(self.samples))
        group = self.awaits(held)
        outcome = self.twice(lambda: self.ledger.score(held, b"s"), unchanged=ScoreOutcome.LOST)
        if group is None:
            assert outcome in (ScoreOutcome.LOST, ScoreOutcome.GONE)
            return
        group.score[held.sample] = b"s"
        state = group.close_if_complete()
        assert outcome is {"open": ScoreOutcome.SCORED, "closed": ScoreOutcome.CLOSED, "dead": ScoreOutcome.DEAD}[state]
        self.settle(held.group_id)

    @precondition(lambda self: self.samples)
    @rule(data=st.data())
    def fail_score(self, data):
        held = data.draw(st.sampled_from(self.samples))
        group = self.awaits(held)
        died = self.twice(lambda: self.ledger.fail_score(held, "reward"), unchanged=False)
        assert died == (group is not None)
        if died:
            self.die(held.group_id, [held.sample], "reward")

    @precondition(lambda self: any(group.state == "open" for group in self.groups.values()))
    @rule(data=st.data(), scored=st.integers(0, 3))
    def finish_a_group(self, data, scored):
        """The honest way, so that closed and dead groups are common: the first `scored` samples succeed."""
        group_id = data.draw(
            st.sampled_from(sorted(group_id for group_id, group in self.groups.items() if group.state == "open"))
        )
        self.lease("prompts", 10)
        prompt = [held for held in self.prompts if held.group_id == group_id][-1]
        for k in self.groups[group_id].missing:
            assert self.wait(self.ledger.emit(prompt, k, b"%d.%d" % (group_id, k)))
            self.groups[group_id].payload[k] = b"%d.%d" % (group_id, k)
            self.groups[group_id].end_journal(k)
        self.lease("rollouts", 100)
        for held in [held for held in self.samples if held.group_id == group_id]:
            group = self.awaits(held)
            if group is not None and len(group.score) < scored:
                self.wait(self.ledger.score(held, b"s"))
                group.score[held.sample] = b"s"
                group.close_if_complete()
                self.settle(group_id)
            elif group is not None:
                assert self.wait(self.ledger.fail_score(held, "reward"))
                self.die(group_id, [held.sample], "reward")
        for held in [held for held in self.wholes if held.group_id == group_id]:
            group = self.awaits(held)
            if group is not None:
                self.settle_whole(held, sorted(group.waiting)[:scored])

    def settle_whole(self, held: Lease, scored: list[int], doom: str = "") -> None:
        """Settle a leased group that waits: these samples have a score, the others die."""
        group = self.awaits(held)
        scores = dict.fromkeys(scored, b"w")
        causes = {k: Cause("compared", "trace") for k in sorted(group.waiting) if k not in scores}
        outcome = self.twice(
            lambda: self.ledger.score_group(held, scores, causes, fail_group=doom), unchanged=ScoreOutcome.LOST
        )
        group.score |= scores
        group.doomed = group.doomed or bool(doom)
        self.die(held.group_id, list(causes), "compared")
        assert outcome is {"closed": ScoreOutcome.CLOSED, "dead": ScoreOutcome.DEAD}[group.state]

    def die(self, group_id: int, samples: list[int], why: str) -> None:
        group = self.groups[group_id]
        for sample in list(samples):
            group.cause[sample] = why
            group.end_journal(sample)
            self.letters.append((group_id, sample))
        group.close_if_complete()
        self.settle(group_id)

    def settle(self, group_id: int) -> None:
        if self.groups[group_id].state == "dead":
            self.bury(group_id)

    def bury(self, group_id: int) -> None:
        self.letters.append((group_id, None))
        self.fates[group_id] = "dead"
        self.dead_groups[group_id] = self.groups.pop(group_id)

    @precondition(lambda self: self.prompts or self.samples or self.wholes)
    @rule(data=st.data())
    def take_over(self, data):
        """The holder died or was slow: somebody else holds the entry, and the old lease goes on as a zombie's."""
        held = data.draw(st.sampled_from(self.prompts + self.samples + self.wholes))
        held = self.owners.get(held.entry, held)
        stage, mine = "rollouts", self.wholes if held.is_group else self.samples
        if held.sample is None and not held.is_group:
            stage, mine = "prompts", self.prompts
        self.taken += 1
        found = self.wait(take(self.ledger, stage, held, f"taker-{self.taken}"))
        assert (found is not None) == (self.awaits(held) is not None)
        if found is not None:
            mine.append(found)
            self.owners[held.entry] = found
            if stage == "prompts":
                assert not self.wait(self.ledger.forget_journal(held, 0)), "it is the zombie's no more"
                self.write_a_turn(found)

    # The learner.

    def closed(self) -> list[int]:
        return sorted(group_id for group_id, group in self.groups.items() if group.state == "closed")

    @rule(floor=st.integers(0, 3))
    def fence(self, floor):
        nonce = f"nonce{len(self.old_nonces)}"
        fence = self.twice(lambda: self.ledger.fence(nonce, floor))
        self.epoch = max(self.epoch, floor) + 1
        assert (fence.epoch, fence.version) == (self.epoch, self.version_number)
        self.old_nonces.append(self.nonce or "never was")
        self.nonce, self.held = nonce, 0
        self.twice(lambda: self.ledger.resume(nonce, f"{fence.epoch}-0", fence.epoch))

    @precondition(lambda self: self.nonce)
    @rule(data=st.data(), publish=st.booleans())
    def step(self, data, publish):
        group_ids = data.draw(st.lists(st.sampled_from(self.closed()), unique=True)) if self.closed() else []
        self.twice(lambda: self.ledger.start_step(self.nonce, group_ids))
        for group_id in group_ids:
            self.groups[group_id].crashes.add(self.nonce)
            assert self.wait(self.ledger.read_group(group_id)).crashes == len(self.groups[group_id].crashes)
        if data.draw(st.booleans()):
            return  # it crashes inside the step
        self.held = data.draw(st.integers(0, len(self.closed())))
        number = self.version_number + 1
        manifest = b"m%d" % number if publish else None
        self.twice(lambda: self.ledger.finish_step(self.nonce, self.held, number, manifest, group_ids))
        self.version_number += publish
        for group_id in group_ids:
            self.groups[group_id].crashes.clear()

    @precondition(lambda self: self.nonce)
    @rule(data=st.data(), how=st.sampled_from(["drop", "bury", "retire"]))
    def let_go(self, data, how):
        group_id = data.draw(st.sampled_from(sorted(self.fates | self.groups) or [0]))
        group = self.groups.get(group_id)
        closed = group is not None and group.state == "closed"
        if how == "drop":
            assert self.twice(lambda: self.ledger.drop(self.nonce, group_id, "stale"), unchanged=False) == closed
        elif how == "retire":
            held = max(0, self.held - 1)
            assert self.twice(lambda: self.ledger.retire(self.nonce, "1-1", held, [group_id]), unchanged=0) == closed
            self.held = held
        else:
            lost = self.fates.get(group_id) == "retired"
            died = self.twice(lambda: self.ledger.fail_group(self.nonce, group_id, "poison"), unchanged=False)
            assert died == (closed or lost)
            if lost:
                self.letters.append((group_id, None))
                self.fates[group_id] = "lost"
            elif died:
                self.bury(group_id)
        if closed and how != "bury":
            del self.groups[group_id]
            self.fates[group_id] = "dropped" if how == "drop" else "retired"

    @precondition(lambda self: self.old_nonces)
    @rule(data=st.data())
    def an_old_learner_wakes_up(self, data):
        nonce = data.draw(st.sampled_from(self.old_nonces))
        group_id = data.draw(st.sampled_from(sorted(self.groups) or [0]))
        before = self.wait(everything(self.ledger))
        for call in (
            lambda: self.ledger.resume(nonce, "9-9", 9),
            lambda: self.ledger.start_step(nonce, [group_id]),
            lambda: self.ledger.finish_step(nonce, 0, 99, b"zombie", [group_id]),
            lambda: self.ledger.drop(nonce, group_id, "zombie"),
            lambda: self.ledger.fail_group(nonce, group_id, "zombie"),
            lambda: self.ledger.retire(nonce, "9-9", 0, [group_id]),
        ):
            with pytest.raises(Fenced):
                self.wait(call())
        assert self.wait(everything(self.ledger)) == before

    # People, and Redis.

    @precondition(lambda self: "dead" in self.fates.values())
    @rule(data=st.data())
    def replay(self, data):
        group_id = data.draw(
            st.sampled_from(sorted(group_id for group_id, fate in self.fates.items() if fate == "dead"))
        )
        outcome = self.wait(replay(self.ledger, group_id, budget=BUDGET, hard_cap=CAP))
        live = len(self.groups)
        if live - self.held >= BUDGET or live >= CAP:
            assert outcome is ReplayOutcome.FULL
            return
        assert outcome is ReplayOutcome.REPLAYED
        assert self.wait(replay(self.ledger, group_id, budget=BUDGET, hard_cap=CAP)) is ReplayOutcome.GONE
        self.live_again(group_id)

    def live_again(self, group_id):
        old = self.dead_groups[group_id]
        self.groups[group_id] = Group(old.size, old.least, old.attempt + 1, whole=self.said)
        del self.fates[group_id]
        self.letters = [letter for letter in self.letters if letter[0] != group_id]
        self.queued.discard(group_id)

    @precondition(lambda self: self.fates)
    @rule(data=st.data())
    def queue_replays(self, data):
        group_ids = data.draw(st.lists(st.sampled_from(sorted(self.fates)), unique=True))
        wanted = {"dead": ReplayOutcome.QUEUED, "lost": ReplayOutcome.NO_PROMPT}
        answers = {group_id: wanted.get(self.fates[group_id], ReplayOutcome.GONE) for group_id in group_ids}
        assert self.twice(lambda: self.ledger.queue_replays(group_ids), unchanged=answers) == answers
        self.queued.update(group_id for group_id in group_ids if self.fates[group_id] == "dead")

    @precondition(lambda self: self.queued)
    @rule(data=st.data())
    def replay_queued(self, data):
        group_id, letters = data.draw(st.sampled_from(list(self.wait(self.ledger.queued_replays()).items())))
        outcome = self.twice(lambda: self.ledger.replay_queued(group_id, letters, budget=BUDGET, hard_cap=CAP))
        live = len(self.groups)
        if self.fates[group_id] != "dead":
            assert outcome is ReplayOutcome.GONE
            self.queued.discard(group_id)
        elif live - self.held >= BUDGET or live >= CAP:
            assert outcome is ReplayOutcome.FULL
        else:
            assert outcome is ReplayOutcome.REPLAYED
            self.live_again(group_id)

    @precondition(lambda self: self.letters)
    @rule(data=st.data())
    def drop_dead(self, data):
        letters = self.wait(self.ledger.dead_letters())
        letter = data.draw(st.sampled_from(letters))
        assert self.twice(lambda: self.ledger.drop_dead([letter.entry]), unchanged=0) == 1
        self.letters.remove((letter.group_id, letter.sample))
        if letter.sample is None:
            self.fates[letter.group_id] = "dropped"

    @precondition(lambda self: self.restarts < 1)
    @rule()
    def redis_restarts(self):
        self.restarts += 1
        before = self.wait(everything(self.ledger))
        self.redis.stop()
        self.redis.restart()
        assert self.wait(everything(self.ledger)) == before

    @invariant()
    def the_ledger_agrees_with_the_model(self):
        if not hasattr(self, "ledger"):
            return
        assert self.wait(faults(self.ledger)) == []
        state = self.wait(self.ledger.state())
        assert self.wait(self.ledger.live()) == sorted(self.groups)
        assert self.wait(self.ledger.closed()) == self.closed()
        assert state.cursor == len(self.groups) + len(self.fates), "a group is neither live nor accounted for"
        assert (state.unretired, state.version, state.live) == (self.held, self.version_number, len(self.groups))
        assert state.group_scored == self.said
        assert state.live <= CAP
        assert list(self.wait(self.ledger.queued_replays())) == sorted(self.queued)
        assert state.replays == len(self.queued)
        assert self.wait(self.ledger.dropped()) == sorted(
            group_id for group_id, f in self.fates.items() if f == "dropped"
        )
        letters = self.wait(self.ledger.dead_letters())
        assert [(letter.group_id, letter.sample) for letter in letters] == self.letters
        for group_id, model in self.groups.items():
            names = self.wait(self.ledger.connection.read("HKEYS", self.ledger.keys.group(group_id)))
            assert {name for name in names if name.startswith(b"j:")} == model.journal_fields
        for group_id in self.closed():
            group, model = self.wait(self.ledger.read_group(group_id)), self.groups[group_id]
            assert group.samples == {k: (model.payload[k], score) for k, score in sorted(model.score.items())}
            assert group.causes == model.cause


class LedgerMachine70(LedgerMachine):
    version = "7.0"


def thorough(examples: int) -> settings:
    return settings(
        max_examples=examples,
        stateful_step_count=40,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
    )


TestLedgerOn62 = pytest.mark.usefixtures("version_62")(LedgerMachine.TestCase)
TestLedgerOn62.settings = thorough(12)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("machine", [LedgerMachine, LedgerMachine70])
def test_the_ledger_thoroughly(machine):
    find_version(machine.version)
    run_state_machine_as_test(machine, settings=thorough(20))

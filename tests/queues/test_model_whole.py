"""Groups that are scored whole, against the same model as `test_model.py`, mixed with groups that are not.

Workers say now one thing, now the other; single samples are gathered in the middle of scoring; zombies come back.
"""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule, run_state_machine_as_test

from streamrl.queues.records import Cause, ScoreOutcome
from tests.queues.conftest import find_version
from tests.queues.ledger_kit import everything
from tests.queues.test_model import LedgerMachine, thorough


class WholeMachine(LedgerMachine):
    """The rules of the ledger, and those of whole groups."""

    @rule(whole=st.booleans())
    def set_group_scored(self, whole):
        self.twice(lambda: self.ledger.set_group_scored(whole))
        self.said = whole

    @rule(size=st.integers(2, 3))
    def admit_a_whole_one(self, size):
        self.set_group_scored(True)
        self.admit(size, 1)

    @precondition(lambda self: self.samples)
    @rule(data=st.data())
    def gather(self, data):
        held = data.draw(st.sampled_from(self.samples))
        group = self.awaits(held)
        self.twice(lambda: self.ledger.make_group_scored(held))
        if group is not None:
            group.whole = self.said = True
            group.score.clear()

    @precondition(lambda self: self.wholes)
    @rule(data=st.data())
    def leased_group(self, data):
        held = data.draw(st.sampled_from(self.wholes))
        found = self.twice(lambda: self.ledger.leased_group(held))
        group = self.awaits(held)
        assert (found is None) == (group is None)
        if found is not None:
            waiting = {k: group.payload[k] for k in sorted(group.waiting)}
            assert (found.prompt, found.payloads) == (b"prompt %d" % held.group_id, waiting)
            assert (found.least, found.size) == (group.least, group.size)

    @precondition(lambda self: self.wholes)
    @rule(data=st.data(), doom=st.sampled_from(["", "", "hopeless"]))
    def score_group(self, data, doom):
        held = data.draw(st.sampled_from(self.wholes))
        group = self.awaits(held)
        if group is None:
            outcome = self.twice(
                lambda: self.ledger.score_group(held, {0: b"zombie"}, {1: Cause("zombie")}, fail_group=doom)
            )
            assert outcome in (ScoreOutcome.LOST, ScoreOutcome.GONE)
            return
        waiting = sorted(group.waiting)
        self.settle_whole(held, data.draw(st.lists(st.sampled_from(waiting), unique=True)), doom)

    @precondition(lambda self: any(self.awaits(held) for held in self.wholes))
    @rule(data=st.data())
    def score_other_samples(self, data):
        """A program that leaves a sample out, or invents one, changes nothing."""
        held = data.draw(st.sampled_from([held for held in self.wholes if self.awaits(held)]))
        waiting = set(self.awaits(held).waiting)
        named = data.draw(st.sets(st.integers(0, 4)).filter(lambda named: named != waiting))
        split = data.draw(st.integers(0, len(named)))
        scores = dict.fromkeys(sorted(named)[:split], b"w")
        causes = dict.fromkeys(sorted(named)[split:], Cause("no"))
        before = self.wait(everything(self.ledger))
        with pytest.raises(ValueError, match="not the samples that wait"):
            self.wait(self.ledger.score_group(held, scores, causes))
        assert self.wait(everything(self.ledger)) == before

    @precondition(lambda self: self.wholes)
    @rule(data=st.data())
    def fail_group(self, data):
        held = data.draw(st.sampled_from(self.wholes))
        group = self.awaits(held)
        died = self.twice(lambda: self.ledger.fail_score(held, "reward"), unchanged=False)
        assert died == (group is not None)
        if died:
            self.die(held.group_id, sorted(group.waiting), "reward")


class WholeMachine70(WholeMachine):
    version = "7.0"


TestWholeOn70 = pytest.mark.usefixtures("version_70")(WholeMachine70.TestCase)
TestWholeOn70.settings = thorough(12)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("machine", [WholeMachine, WholeMachine70])
def test_whole_groups_thoroughly(machine):
    find_version(machine.version)
    run_state_machine_as_test(machine, settings=thorough(16))  # the other rules have more in test_model

"""Groups that were recorded elsewhere: closed from their first moment on, and under the same bounds."""

from __future__ import annotations

import pytest

from streamrl.errors import Refused
from streamrl.queues import Ledgers
from streamrl.queues.ledger import MAX_SAMPLES
from streamrl.queues.records import AdmitOutcome
from tests.queues.conftest import both_versions
from tests.queues.ledger_kit import admit, faults


async def admit_closed(ledger, cursor, samples=((b"a", b"1"), (b"b", b"2")), **changed):
    terms = {"fingerprint": "recorded", "min_group": 1, "budget": 100, "hard_cap": 100, "max_dead": 100, **changed}
    return await ledger.admit_closed(cursor=cursor, prompt=b"prompt %d" % cursor, samples=list(samples), **terms)


@both_versions
async def test_a_group_is_closed_at_once_and_nobody_else_sees_it(ledgers: Ledgers):
    train = ledgers.train
    await train.ensure()
    answer = await admit_closed(train, 0)
    assert (answer.outcome, answer.cursor) == (AdmitOutcome.ADMITTED, 1)
    group = await train.read_group(0)
    assert (group.prompt, group.samples, group.causes) == (b"prompt 0", {0: (b"a", b"1"), 1: (b"b", b"2")}, {})
    assert (group.size, group.attempt, group.version, group.crashes) == (2, 1, 0, 0)
    assert await train.closed() == [0] == await train.live()
    for stream in (train.keys.prompts, train.keys.rollouts):
        assert await train.connection.read("XLEN", stream) == 0
    assert await faults(train) == []
    again = await admit_closed(train, 0)  # a repeat writes nothing
    assert (again.outcome, again.cursor) == (AdmitOutcome.MOVED, 1)
    assert await train.connection.read("XLEN", train.keys.scored) == 1
    nonce = "n"
    await train.fence(nonce, 0)
    assert await train.retire(nonce, "1-1", 0, [0]) == 1
    assert await faults(train) == []


async def test_the_bounds_and_the_data_are_those_of_admit(ledgers: Ledgers):
    train = ledgers.train
    await train.fence("n", 0)
    for cursor in range(2):
        assert (await admit_closed(train, cursor, budget=2, hard_cap=3)).outcome is AdmitOutcome.ADMITTED
    assert (await admit_closed(train, 2, budget=2, hard_cap=3)).outcome is AdmitOutcome.FULL
    await train.finish_step("n", 2, 1, None)
    assert (await admit_closed(train, 2, budget=2, hard_cap=3)).outcome is AdmitOutcome.ADMITTED
    assert (await admit_closed(train, 3, budget=9, hard_cap=3)).outcome is AdmitOutcome.FULL
    assert (await admit_closed(train, 3, max_dead=0)).outcome is AdmitOutcome.TOO_MANY_DEAD
    assert (await admit_closed(train, 9)).cursor == 3
    with pytest.raises(Refused, match="other data"):
        await admit_closed(train, 3, fingerprint="another recording")
    with pytest.raises(Refused, match="other data"):
        await admit(train, 3)


async def test_the_largest_group_fits_into_one_script(ledgers: Ledgers):
    samples = [(b"s%d" % k, b"r%d" % k) for k in range(MAX_SAMPLES)]
    await admit_closed(ledgers.train, 0, samples)
    group = await ledgers.train.read_group(0)
    assert [group.samples[k] for k in range(MAX_SAMPLES)] == samples

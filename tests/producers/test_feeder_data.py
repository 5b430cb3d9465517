"""The feeder with data that is code, a mixture, or faulty behind the records that are looked at before the start."""

import asyncio

import pytest
from producer_kit import Hands, until

from streamrl.errors import DataError, Refused
from streamrl.producers.feeder import run_feeder
from tests.producers.data_kit import numbered, write, write_module

COUNTED = "import itertools\ndef prompts(): return ({'prompt': f'p{n}'} for n in itertools.count())"
CLOCK = """
started = 0
def prompts():
    global started
    started += 1
    for n in range(10_000):
        yield {"prompt": f"p{n}" if n < 1024 else f"q{n + 7000 * (started > 3)}"}
"""


def of_code(run, monkeypatch, tmp_path, name, text, **data):
    for key, value in write_module(monkeypatch, tmp_path, name, text).items():
        run.overrides[key] = value
    return run.set("data", train=f"{name}:prompts", epochs=None, **data)


async def test_an_iterable_goes_on_at_the_cursor_after_a_restart(run, monkeypatch, tmp_path):
    of_code(run, monkeypatch, tmp_path, "counted_prompts", COUNTED)
    async with run.open() as ledgers:
        hands = await Hands(ledgers.train).fence()
        for want in (4, 8, 12):
            async with run.running(run_feeder, "feeder.0", ledgers) as (role, _):
                await until(lambda want=want, role=role: role.status.get("admitted") == want)
                assert "epoch" not in role.status
            await hands.step()
    assert hands.prompts == {group_id: [f"p{group_id}"] for group_id in range(12)}


async def test_an_iterable_that_is_not_deterministic_is_refused_when_the_run_goes_on(run, monkeypatch, tmp_path):
    """Its first records are the same, so that only the groups that are live can tell."""
    of_code(run, monkeypatch, tmp_path, "clock_prompts", CLOCK).set("learner", groups_per_step=600)
    async with run.open() as ledgers:
        async with run.running(run_feeder, "feeder.0", ledgers) as (role, _):
            await until(lambda: role.status.get("admitted") == 1200)
        with pytest.raises(Refused, match="not deterministic: it gives another prompt for group 1024") as caught:
            await run_feeder(run.role("feeder.0", ledgers))
        assert "a seed" in caught.value.hint
        run.overrides["data"]["train"] = numbered(tmp_path / "other.jsonl", 2)
        with pytest.raises(Refused, match="started with other prompts"):
            await run_feeder(run.role("feeder.0", ledgers))


async def test_a_missing_column_in_line_90000_ends_the_run_while_it_is_full(run, tmp_path):
    lines = [b'{"prompt": "p0"}'] * 90_005
    lines[89_999] = b'{"answer": "1"}'
    run.set("data", train=write(tmp_path / "large.jsonl", *lines), shuffle=False)
    async with run.open() as ledgers:
        with pytest.raises(DataError, match=r"large\.jsonl:90000: needs either `prompt`"):
            await asyncio.wait_for(run_feeder(run.role("feeder.0", ledgers)), 60)
        assert (await ledgers.train.state()).cursor == 4


async def test_prompts_of_a_mixture_say_their_source(run, tmp_path):
    sources = [
        {"source": numbered(tmp_path / "a.jsonl", 3, "a"), "weight": 1},
        {"source": numbered(tmp_path / "b.jsonl", 3, "b"), "weight": 1, "name": "second"},
    ]
    run.set("data", train=sources, epochs=None)
    async with run.open() as ledgers:
        hands = await Hands(ledgers.train).fence()
        async with run.running(run_feeder, "feeder.0", ledgers):
            while len(hands.prompts) < 20:
                await hands.step()
    assert {text[0] for [text] in hands.prompts.values()} == {"a", "b"}

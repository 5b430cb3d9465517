"""A learner on episodes that come through Redis, and one episode that cannot be trained."""

from __future__ import annotations

import random

import playing
import pytest

from streamrl import wire
from streamrl.wire import NOTHING, ToolUse, Turn


def episode(group_id: int, sample: int, version: int, *, observed: int = 6) -> wire.Sample:
    """Three sampled turns on two branches and one in a context of its own; a function of group and number."""
    chance = random.Random(f"{group_id} {sample}")
    counts = [chance.randint(1, 5) for _ in range(4)]

    def ids(count: int) -> bytes:
        return wire.pack_int32([chance.randrange(playing.VOCABULARY) for _ in range(count)])

    turns = [
        Turn(sampled=counts[0]),
        Turn(parent=0, role="tool", observed=ids(observed), tools=[ToolUse(name="find")], tool_seconds=0.5),
        Turn(parent=1, sampled=counts[1], reward=chance.random()),
        Turn(parent=1, sampled=counts[2]),
        Turn(parent=NOTHING, role="user", observed=ids(4)),
        Turn(parent=4, sampled=counts[3]),
    ]
    count = sum(counts)
    return wire.Sample(
        v=2,
        tokens=ids(count),
        logprobs=wire.pack_float32([-chance.uniform(2.5, 4.5) for _ in range(count)]),
        runs=[(0, version)],
        finish="stop",
        turns=turns,
        stop="completed",
    )


@pytest.mark.parametrize(
    "learner",
    [{}, {"critic": {"kind": "model"}, "advantage": {"use": "gae"}}],
    ids=["streamed", "collected"],
)
async def test_episodes_are_trained_and_audited_and_a_too_long_one_is_a_dead_letter(run, monkeypatch, learner):
    monkeypatch.setattr(
        playing, "response", lambda group_id, sample, version, _greedy: episode(group_id, sample, version)
    )
    run.configure(steps=3, **learner)
    long = wire.encode(episode(2, 1, 1, observed=60))
    async with run.play(spoil={(2, 1): long}) as player:
        assert await run.learn() == 0, run.log()
        found = await run.audit()
        letters = await player.ledger.dead_letters()
    assert found.trained == 12
    steps = run.steps()
    assert [line["step"] for line in steps] == [1, 2, 3]
    assert all(line["grad_norm"] > 0 and not line["skipped"] for line in steps)
    assert all(line["turns_per_sample"] == 4 and line["branches_per_sample"] == 3 for line in steps)
    assert all(line["stops"] == {"completed": 12} and line["tool_calls"] == 12 for line in steps)
    assert all(sum(line["staleness"].values()) == line["tokens"] for line in steps)
    assert "tokens on one branch of an episode, the model takes 64" in str(letters)

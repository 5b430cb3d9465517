"""What `streamrl status` says of tools."""

from __future__ import annotations

import asyncio

import pytest

from streamrl.producers.episodes import sampler
from streamrl.producers.episodes.sampler import ToolFigures
from streamrl.producers.episodes.tools import LeftBehind
from streamrl.wire import SCHEMA, Outcome, Sample, ToolUse, Turn, pack_float32, pack_int32


@pytest.fixture(autouse=True)
def left(monkeypatch: pytest.MonkeyPatch) -> LeftBehind:
    """What the process of these tests has left behind."""
    monkeypatch.setattr(sampler, "left_behind", left := LeftBehind())
    return left


def sample(*uses: ToolUse) -> Sample:
    turns = [Turn(parent=-1, sampled=1)]
    if uses:
        turns += [
            Turn(parent=0, role="tool", observed=pack_int32([1]), tools=list(uses)),
            Turn(parent=1, sampled=1),
        ]
    count = sum(turn.sampled for turn in turns)
    return Sample(
        v=SCHEMA,
        tokens=pack_int32([7] * count),
        logprobs=pack_float32([-1.0] * count),
        runs=[(0, 1)],
        finish="stop",
        text="",
        engine="",
        seconds=0.0,
        turns=turns,
    )


def told(*samples: Sample) -> str:
    figures = ToolFigures()
    for each in samples:
        figures.add(each)
    return figures.trouble()


def use(outcome: Outcome = "ok") -> ToolUse:
    return ToolUse(name="search", outcome=outcome, seconds=0.1)


def test_a_tool_that_fails_in_half_of_its_newest_calls_is_named():
    good, bad = [sample(use())] * 4, [sample(use("timeout"))] * 4
    assert told(*good, *bad) == "tool search: 4 of the last 8 calls failed"
    assert told(*good, *good, *bad) == ""
    assert told(*bad) == "", "four calls say nothing"
    assert told(*[sample(use("error"))] * 32, *[sample(use())] * 32) == "", "only the newest 32 count"


async def test_code_that_goes_on_after_it_was_given_up_is_named(
    left: LeftBehind, monkeypatch: pytest.MonkeyPatch
) -> None:
    works = [asyncio.get_running_loop().create_future() for _ in range(3)]
    for work, what in zip(works, ("tool search", "tool search", "Shop.reset"), strict=True):
        left.add(work, what)
    assert told() == "", "it may end soon"
    monkeypatch.setattr(sampler, "_LASTING_SECONDS", 0)
    assert told() == "Shop.reset goes on after its cancellation, 1x; tool search goes on after its cancellation, 2x"


def test_agents_that_fail_in_half_of_the_newest_episodes_are_named():
    figures = ToolFigures()
    for stop in ("completed", None, "agent_failed", "agent_failed") * 2:
        figures.ended(stop)
    assert figures.trouble() == "the agent failed in 4 of the last 8 episodes"
    figures.ended("max_turns")
    assert (figures.trouble(), figures.agents_failed) == ("", 4)


def test_tools_that_are_not_there_are_no_trouble_of_a_tool():
    assert told(*[sample(use("unknown"), use("malformed"))] * 20) == ""
    assert told() == ""

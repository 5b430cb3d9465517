"""What a reward did, counted in a worker, and put together from all workers."""

import io

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from streamrl.consumers.figures import RewardFigures, quantile
from streamrl.monitor.reward_figures import reward_views, with_reward_rates
from streamrl.monitor.tables import rewards_table


@given(st.lists(st.floats(1e-5, 1e4), min_size=1, max_size=200), st.floats(0.01, 1))
def test_a_quantile_is_right_to_a_tenth(seconds, share):
    figures = RewardFigures()
    for value in seconds:
        figures.took(value)
    rank = min(len(seconds) - 1, max(0, -(-share * len(seconds) // 1) - 1))
    exact = sorted(seconds)[int(rank)]
    assert quantile(figures._latency, share) == pytest.approx(exact, rel=0.1)


def test_values_are_counted_to_one_digit_and_their_number_is_bounded():
    figures = RewardFigures()
    for value in (0.0, 0.04, 0.96, 1.0, -3.4, 12_345.0):
        figures.gave(value, 0)
    assert figures.line()["values"] == {"-3": 1, "0": 1, "0.04": 1, "1": 2, "10000": 1}
    for exponent in range(-300, 300):
        figures.gave(10.0**exponent, 0)
    assert len(figures.values) <= 200
    assert figures.ok == 606


def status(**lines):
    return {"rewards": orjson.dumps(lines).decode(), "state": "ready"}


def line(ok, mean=None, **more):
    return {"ok": ok, "failed": {"error": 1, "deadline": 0}, "retried": 1, "dead": 0, "tokens": 5, "mean": mean, **more}


def test_the_workers_are_put_together():
    views = reward_views(
        {
            "reward.0": status(judge=line(10, 0.5, p50=0.1, p95=0.2), math=line(10, 1.0)),
            "reward.1": status(judge=line(30, 0.1, p50=0.3, p95=2.0, trouble="nobody scores: 502"), math=line(0)),
            "rollout.0": {"state": "ready"},
        }
    )
    judge, rule = views
    assert (judge.name, judge.workers, judge.ok, judge.failed, judge.retried, judge.tokens) == (
        "judge",
        2,
        40,
        2,
        2,
        10,
    )
    assert (judge.mean, judge.p50, judge.p95) == (pytest.approx(0.2), pytest.approx(0.2), 2.0)
    assert judge.trouble == ("reward.1: nobody scores: 502",)
    assert (rule.mean, rule.p50, rule.p95, rule.trouble) == (1.0, None, None, ())


def test_rates_between_two_looks():
    before = reward_views({"reward.0": status(judge=line(10))})
    now = reward_views({"reward.0": status(judge=line(40), fresh=line(5))})
    judge, fresh = with_reward_rates(now, before, 10.0)
    assert (judge.per_second, fresh.per_second) == (3.0, None)
    (again,) = with_reward_rates(before, now, 10.0)
    assert again.per_second == 0, "a worker that began anew"


def test_the_table_shows_what_is_wrong_and_steers_no_terminal():
    named = {"judge[helpful]": line(1), "\x1b[2J[/b]": line(2)}
    judge = line(40, 0.25, p50=0.0004, p95=1.5, trouble="\x1b[2Jgone")
    views = reward_views({"reward.0": status(judge=judge, **named)})
    console = Console(file=io.StringIO(), width=150, force_terminal=False)
    console.print(rewards_table(views))
    shown = console.file.getvalue()
    assert "\x1b" not in shown
    for text in (
        "judge",
        "40",
        "0.25",
        "400us",
        "1.5s",
        "judge  reward.0: \\x1b[2Jgone",
        "judge[helpful]",
        "\\x1b[2J[/b]",
    ):
        assert text in shown

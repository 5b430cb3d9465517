"""The calls of one reward: what is tried again, for how long, how many at a time, and how it ends."""

import asyncio

import pytest

from streamrl.consumers import Score, limits
from streamrl.consumers import calls as module
from streamrl.consumers.calls import ScoringFailed
from streamrl.consumers.processes import CallFailed
from streamrl.errors import DataError, RewardUnavailable
from tests.consumers.calls_kit import calls_of, failing, lease_end, leased, loaded, numbered
from tests.consumers.samples import seen


async def outcome(calls, sample=None):
    (score,) = await calls.score(sample or seen(), leased())
    return score.value


@pytest.mark.parametrize("on_failure", ["drop_sample", "dead", "retry"])
async def test_what_is_refused_is_never_tried_again(on_failure):
    reward, made = failing(DataError("no answer in line 3"))
    with pytest.raises(ScoringFailed, match="no answer in line 3") as caught:
        await outcome(calls_of(loaded(reward, on_failure=on_failure, attempts=5)))
    assert len(made) == 1
    assert caught.value.fail_group == (on_failure == "dead")


async def test_attempts_of_the_reward_come_before_those_of_the_worker():
    reward, made = failing(ValueError("no"))
    with pytest.raises(ScoringFailed, match=r"ValueError: no \(4 attempts\) \[reward\]"):
        await outcome(calls_of(loaded(reward, attempts=4), attempts=2))
    assert len(made) == 4


async def test_a_wrapper_that_forgets_to_await_is_awaited_to_its_end():
    async def inner(_sample):
        return 0.5

    async def outer(sample):
        return inner(sample)

    assert await outcome(calls_of(loaded(outer))) == 0.5


async def test_retry_goes_on_beyond_the_attempts(monkeypatch):
    monkeypatch.setattr(module, "_LONGEST_PAUSE", 0.001)
    reward, made = failing(RuntimeError("starting"), times=20, value=0.5)
    assert await outcome(calls_of(loaded(reward, on_failure="retry"), attempts=1)) == 0.5
    assert len(made) == 21


async def test_retry_ends_with_its_time_and_then_only_the_sample_dies(monkeypatch):
    reward, made = failing(RuntimeError("away"))
    now = iter(range(10_000))
    monkeypatch.setattr(module.time, "monotonic", lambda: float(next(now)))
    with pytest.raises(ScoringFailed, match="away") as caught:
        await outcome(calls_of(loaded(reward, on_failure="retry"), retry_for=30))
    assert len(made) > 2
    assert not caught.value.fail_group


async def test_while_the_circuit_is_open_samples_wait_and_one_tries(monkeypatch):
    monkeypatch.setattr(module, "_LONGEST_PAUSE", 0.0)
    monkeypatch.setattr(limits, "FIRST_PAUSE", 0.01)
    back = asyncio.Event()
    during, together, most = [], 0, 0

    async def reward(sample):
        nonlocal together, most
        during.append(sample.index)
        together += 1
        most = max(most, together)
        await asyncio.sleep(0)
        together -= 1
        if not back.is_set():
            raise RewardUnavailable("starting")
        return 1.0

    calls = calls_of(loaded(reward, on_failure="retry", deadline=60))
    first = asyncio.create_task(outcome(calls, numbered(0)))
    while calls.circuit.open_since is None:  # noqa: ASYNC110 (nobody announces it)
        await asyncio.sleep(0)
    most = 0
    others = [asyncio.create_task(outcome(calls, numbered(index))) for index in range(1, 20)]
    while len(during) < 3:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    assert most == 1, "one at a time while it is open"
    back.set()
    assert await asyncio.gather(first, *others) == [1.0] * 20
    assert calls.circuit.open_since is None
    assert calls.figures.dead == 0


async def test_a_wait_for_the_circuit_ends_with_the_deadline():
    async def reward(sample):
        if sample.index:
            await asyncio.Event().wait()
        raise RewardUnavailable("away")

    calls = calls_of(loaded(reward, deadline=0.05))
    with pytest.raises(RewardUnavailable, match="away"):
        await calls._attempt(numbered(0), lease_end())
    calls.circuit.wait = lambda now: 60.0
    with pytest.raises(RewardUnavailable, match=r"no score for \d+ s: RewardUnavailable: away"):
        await calls._attempt(numbered(0), lease_end())


async def test_a_cancelled_try_leaves_the_circuit_to_the_next(monkeypatch):
    entered = asyncio.Event()
    answers = asyncio.Event()

    async def reward(sample):
        if sample.index == 0:
            raise RewardUnavailable("away")
        entered.set()
        await answers.wait()
        return 1.0

    calls = calls_of(loaded(reward))
    with pytest.raises(RewardUnavailable):
        await calls._attempt(numbered(0), lease_end())
    trying = asyncio.create_task(outcome(calls, numbered(1)))
    await entered.wait()
    trying.cancel()
    with pytest.raises(asyncio.CancelledError):
        await trying
    answers.set()
    assert await outcome(calls, numbered(2)) == 1.0
    assert calls.in_flight == 0


@pytest.mark.parametrize("error", [KeyError("ground_truth"), CallFailed("jsonschema: ValueError: no")])
async def test_errors_of_samples_do_not_open_the_circuit(error):
    reward, _ = failing(error)
    calls = calls_of(loaded(reward, attempts=1))
    for index in range(50):
        with pytest.raises(ScoringFailed):
            await outcome(calls, numbered(index))
    assert calls.circuit.opened == 0


class HttpError(Exception):
    """As the clients of services have them: of no family."""


@pytest.mark.parametrize("error", [ConnectionResetError("reset"), HttpError("502"), TimeoutError("of the client")])
async def test_failures_of_a_service_open_the_circuit(error):
    reward, _ = failing(error)
    calls = calls_of(loaded(reward, attempts=1))
    for index in range(5):
        with pytest.raises(ScoringFailed):
            await outcome(calls, numbered(index))
    assert calls.circuit.opened == 1


@pytest.mark.parametrize("use", ["judge", "reward_model"])
@pytest.mark.parametrize("error", [ConnectionResetError("reset"), RewardUnavailable("all away")])
async def test_failures_of_a_reward_with_a_pool_open_no_circuit(use, error):
    """The pool knows which of its servers are away, and a circuit would keep samples from those that work."""
    reward, made = failing(error)
    calls = calls_of(loaded(reward, use=use, deadline=0.1))
    for index in range(20):
        with pytest.raises(type(error)):
            await calls._attempt(numbered(index), lease_end())
    assert len(made) == calls.figures.failures.total() == 20
    assert calls.circuit.opened == 0


async def test_concurrency_of_a_reward_and_waiting_takes_nothing_from_the_deadline():
    release, running, most = asyncio.Event(), 0, 0

    async def reward(sample):
        nonlocal running, most
        running += 1
        most = max(most, running)
        if sample.index == 0:
            await release.wait()
        running -= 1
        return 1.0

    calls = calls_of(loaded(reward, concurrency=2, deadline=60, attempts=1))
    tasks = [asyncio.create_task(outcome(calls, numbered(index))) for index in range(10)]
    while calls.figures.ok < 9:  # noqa: ASYNC110
        await asyncio.sleep(0)
    release.set()
    assert await asyncio.gather(*tasks) == [1.0] * 10
    assert most == 2


async def test_a_rule_is_tried_once_whatever_the_keys_say():
    reward, made = failing(ValueError("line 3 has no answer"))
    calls = calls_of(loaded(reward, instant=True, on_failure="dead"), attempts=5)
    with pytest.raises(ScoringFailed, match="no answer") as caught:
        await calls.instant(seen())
    assert len(made) == 1
    assert caught.value.fail_group


async def test_figures_count_attempts_values_and_cost():
    given = iter([Score(0.5, tokens=7), ValueError("x"), "text", Score(-1, tokens=3)])

    async def reward(sample):
        found = next(given)
        if isinstance(found, Exception):
            raise found
        return found

    calls = calls_of(loaded(reward), attempts=3)
    assert await outcome(calls) == 0.5
    assert await outcome(calls) == -1.0
    line = calls.figures.line()
    assert (line["ok"], line["failed"]["error"], line["retried"], line["tokens"]) == (2, 2, 2, 10)
    assert line["values"] == {"-1": 1, "0.5": 1}
    assert (line["mean"], line["std"]) == (-0.25, 0.75)
    assert 0 < line["p50"] <= line["p95"]
    assert "p50" not in calls.figures.line(), "quantiles are of what came since the last line"


async def test_a_group_reward_gives_one_score_for_each_sample():
    async def compare(samples):
        return [float(sample.index) for sample in samples]

    calls = calls_of(loaded(compare, group=True))
    scores = await calls.score([numbered(index) for index in range(3)], leased())
    assert [score.value for score in scores] == [0.0, 1.0, 2.0]
    assert calls.figures.ok == 3


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ([1.0], "1 scores for 2 samples"),
        (1.0, "a float, not a sequence"),
        ("ab", "a str"),
        ([1.0, None], "None"),
        (None, "NoneType"),
    ],
)
async def test_a_group_reward_that_returns_something_else_fails(result, message):
    async def compare(samples):
        return result

    with pytest.raises(ScoringFailed, match=message):
        await calls_of(loaded(compare, group=True)).score([numbered(0), numbered(1)], leased())

"""What a leased sample waits for, and for how long: queueing and outages are nobody's fault, and nothing is lost."""

import asyncio
import time

import pytest

from streamrl.config import RewardSpec, RunConfig
from streamrl.consumers import Reward
from streamrl.consumers import calls as module
from streamrl.consumers.calls import NoTime, ScoringFailed
from streamrl.consumers.opening import open_scorer
from streamrl.consumers.plugins import load_rewards
from streamrl.consumers.reward import RewardContext
from streamrl.consumers.worker import width_of
from streamrl.errors import ConfigError, RewardBusy, RewardUnavailable
from tests.consumers.calls_kit import LEASE, calls_of, failing, lease_end, leased, loaded, numbered, scorer
from tests.consumers.samples import seen


async def score(calls, together=None, sample=None):
    (found,) = await calls.score(sample or seen(), together or leased())
    return found.value


@pytest.mark.parametrize("on_failure", ["drop_sample", "dead", "retry"])
@pytest.mark.parametrize("error", [RewardUnavailable("all away"), RewardBusy("all busy")])
async def test_an_absence_or_a_queue_spends_no_attempt(on_failure, error):
    reward, made = failing(error, times=7, value=0.5)
    calls = calls_of(loaded(reward, on_failure=on_failure, attempts=2), retry_for=0.001)
    calls.circuit.wait = lambda now: 0.0
    assert await score(calls) == 0.5
    assert len(made) == 8
    assert calls.figures.dead == 0
    assert calls.figures.failures["unavailable"] == 7


async def test_a_busy_service_opens_no_circuit(monkeypatch):
    monkeypatch.setattr(module, "_LONGEST_PAUSE", 0.001)
    reward, _ = failing(RewardBusy("all busy"), times=20)
    calls = calls_of(loaded(reward))
    assert await score(calls) == 1.0
    assert calls.circuit.opened == 0


async def test_failures_count_as_attempts_whatever_comes_between_them():
    ends = [ValueError("first"), RewardBusy("full"), RewardUnavailable("away"), ValueError("second")]

    async def reward(sample):
        raise ends.pop(0)

    with pytest.raises(ScoringFailed, match=r"second \(2 attempts\)"):
        await score(calls_of(loaded(reward), attempts=2))


async def test_retry_ends_with_the_time_of_its_failures_whatever_comes_between_them(monkeypatch):
    clock, passed, failures = time.monotonic, [0.0], []
    monkeypatch.setattr(module.time, "monotonic", lambda: clock() + passed[0])

    async def reward(sample):
        if len(failures) % 2:
            failures.append(RewardBusy("full"))
            passed[0] += 500
        else:
            failures.append(ValueError("no"))
            passed[0] += 100
        raise failures[-1]

    with pytest.raises(ScoringFailed, match="no"):
        await score(calls_of(loaded(reward, on_failure="retry"), retry_for=350), leased(1e6))
    assert len(failures) == 7, "four failures of 100 s, and three waits that do not count"


@pytest.mark.parametrize("on_failure", ["drop_sample", "dead", "retry"])
async def test_a_sample_that_nobody_could_score_goes_back_before_its_lease_ends(on_failure):
    reward, made = failing(RewardUnavailable("all away"))
    calls = calls_of(loaded(reward, on_failure=on_failure, deadline=0.2, attempts=1))
    together = leased(0.5)
    with pytest.raises(NoTime):
        await score(calls, together)
    assert made
    assert together.failure is None
    assert (calls.figures.dead, calls.figures.ok) == (0, 0)
    assert calls.figures.failures["unavailable"] >= 1
    assert calls.circuit.opened == 1


async def test_an_absence_after_a_failure_kills_nothing_either():
    ends = [ValueError("once")]

    async def reward(sample):
        raise ends.pop() if ends else RewardUnavailable("away")

    with pytest.raises(RewardUnavailable):
        await score(calls_of(loaded(reward, deadline=0.2), attempts=3), leased(1.5))


async def test_no_attempt_may_outlast_the_lease_and_then_on_failure_decides():
    reward, made = failing(ValueError("no"))
    calls = calls_of(loaded(reward, on_failure="dead", deadline=LEASE / 2), attempts=1000, backoff=0.001)
    together = leased(LEASE / 2 + 0.5)
    with pytest.raises(ScoringFailed, match=r"ValueError: no \(.*lease.max_hold leaves no time") as caught:
        await score(calls, together)
    assert caught.value.fail_group
    assert made


async def test_who_gets_no_place_in_time_goes_back():
    running, release = asyncio.Event(), asyncio.Event()

    async def reward(sample):
        running.set()
        await release.wait()
        return 1.0

    calls = calls_of(loaded(reward, concurrency=1, deadline=60))
    first = asyncio.create_task(score(calls, sample=numbered(0)))
    await running.wait()
    with pytest.raises(NoTime, match="no free slot"):
        await score(calls, leased(60.1), numbered(1))
    release.set()
    assert await first == 1.0


async def test_whole_groups_go_back_too():
    reward, _ = failing(RewardUnavailable("all away"))
    both = scorer(loaded(reward, deadline=0.2), loaded(_compares, group=True))
    with pytest.raises(RewardUnavailable):
        await both.score_group([numbered(0), numbered(1)], lease_end(0.5))


async def _compares(samples):
    return [1.0] * len(samples)


class Asks(Reward):
    """Asks somebody who has two places."""

    most = 2
    deadline = 10.0

    def slots(self):
        return self.most

    async def score(self, sample):
        return 1.0


def config_of(use, max_hold=900, **keys):
    rewards = [{"use": f"{__name__}:{use}", **keys}]
    return RunConfig.model_validate({"name": "t", "rewards": rewards, "lease": {"max_hold": max_hold, "seconds": 1}})


async def test_places_are_those_of_whom_it_asks_as_they_are_now(tmp_path):
    config = config_of("Asks", concurrency=50)
    async with open_scorer(config, RewardContext(config, tmp_path)) as opened:
        (calls,) = opened.calls
        assert calls.slots == 2
        assert width_of(opened, config) == 8
        calls.reward.life.most = 5
        assert calls.slots == 5
        assert width_of(opened, config) == 20
        calls.reward.life.most = 1000
        assert calls.slots == 50
        short = config_of("Asks", max_hold=22)
        assert width_of(opened, short) == 64, "more than the worker's own places are never held"
        calls.reward.life.most = 5
        assert width_of(opened, short) == 10, "the third in line would be too late"


class Plain:
    """A reward of no base class, with a life."""

    async def open(self, context):
        self.opened = context.deadline

    async def close(self):
        pass

    async def score(self, sample):
        return self.opened


async def test_a_class_of_its_own_may_have_a_life(tmp_path):
    config = config_of("Plain", deadline=7)
    async with open_scorer(config, RewardContext(config, tmp_path)) as opened:
        assert (await opened.score(seen(), lease_end())).value == 7.0


def test_deadlines_that_no_lease_is_long_enough_for_are_refused_at_the_start():
    assert load_rewards(config_of("Asks", max_hold=11))
    with pytest.raises(ConfigError, match="may take 10 s") as caught:
        load_rewards(config_of("Asks", max_hold=10))
    assert "lease.max_hold to 11s" in caught.value.hint
    last = config_of("Asks", max_hold=20)
    gate = RewardSpec(use=f"{__name__}:Asks", name="first", gate=0.5)
    with pytest.raises(ConfigError, match="may take 20 s"):
        load_rewards(last.model_copy(update={"rewards": [gate, *last.rewards]}))

"""A sample and a group through several rewards: stages up to gates, parts that failed, opening and closing."""

import asyncio
import errno
import socket
from dataclasses import replace
from unittest.mock import AsyncMock
from urllib.error import HTTPError

import pytest

from streamrl.config import RunConfig
from streamrl.consumers import Reward, RewardContext, RewardSample, RewardUnavailable
from streamrl.consumers.calls import ScoringFailed
from streamrl.consumers.opening import is_transient, open_scorer
from streamrl.errors import ConfigError, DeadlineExceeded, PluginError, Unreachable
from tests.consumers.calls_kit import lease_end, loaded, scorer
from tests.consumers.samples import prompt, response, seen


def group(*texts):
    return [RewardSample.of(prompt(), response(text), 5, index) for index, text in enumerate(texts)]


async def is_formatted(sample):
    if sample.text == "raise":
        raise ValueError("the format cannot be told")
    return float(sample.text != "bad")


def counting(name, value=1.0):
    asked = []

    async def reward(sample):
        asked.append(sample.index)
        return value

    reward.__name__ = name
    return reward, asked


async def test_rewards_behind_a_gate_are_saved_when_it_does_not_let_through():
    before, asked_before = counting("before")
    behind, asked_behind = counting("behind", 3.0)
    scoring = scorer(loaded(before), loaded(is_formatted, gate=1), loaded(behind), scoring={"gated": -1})
    assert (await scoring.score(seen("good"))).value == 4.0
    score = await scoring.score(seen("bad"))
    assert (score.value, len(asked_before), len(asked_behind)) == (-1.0, 2, 1)
    assert score.parts == {"before": 1.0, "is_formatted": 0.0, "is_formatted/passed": 0.0}


async def test_two_gates_are_two_stages():
    first, asked_first = counting("first", 0.0)
    second, asked_second = counting("second")
    last, _ = counting("last")
    scoring = scorer(loaded(first, gate=0.5), loaded(second, gate=0.5), loaded(last))
    assert (await scoring.score(seen())).value == 0.0
    assert (asked_first, asked_second) == ([0], [])


async def test_rewards_of_a_stage_run_at_the_same_time():
    both = asyncio.Barrier(2)

    async def left(sample):
        await both.wait()
        return 1.0

    async def right(sample):
        await both.wait()
        return 1.0

    assert (await scorer(loaded(left), loaded(right)).score(seen())).value == 2.0


async def test_one_that_failed_for_good_ends_the_attempts_of_the_others():
    failed = asyncio.Event()
    tries = []

    async def fails(sample):
        failed.set()
        raise ConfigError("no such rubric")

    async def retries(sample):
        tries.append(sample.index)
        await failed.wait()
        raise ConnectionError("away")

    scoring = scorer(loaded(fails), loaded(retries, on_failure="retry"), backoff=0.001)
    with pytest.raises(ScoringFailed, match="no such rubric"):
        await scoring.score(seen())
    assert tries == [0]
    assert [calls.figures.dead for calls in scoring.calls] == [1, 0]


async def test_values_that_make_no_number_end_as_the_worker_says():
    async def negative(sample):
        return -1.0

    scoring = scorer(loaded(negative, weight=0.5), scoring={"combine": "product"}, on_failure="dead")
    with pytest.raises(ScoringFailed, match=r"has no power 0\.5") as caught:
        await scoring.score(seen())
    assert caught.value.fail_group


async def compared(samples):
    if any(sample.text == "poison" for sample in samples):
        raise RuntimeError("cannot compare these")
    return [float(len(samples)) for _ in samples]


async def test_a_group_is_compared_without_those_that_a_gate_held_back_or_that_failed():
    scoring = scorer(loaded(is_formatted, gate=1), loaded(compared, group=True), scoring={"gated": -1}, attempts=1)
    results = await scoring.score_group(group("good", "bad", "raise", "good"))
    assert [result.value for result in results if not isinstance(result, ScoringFailed)] == [2.0, -1.0, 2.0]
    assert isinstance(results[2], ScoringFailed)
    assert "cannot be told" in results[2].message


def is_short(sample):
    if sample.text == "untold":
        raise ValueError("its length cannot be told")
    return 1.0


async def test_what_an_instant_rule_fails_is_not_compared_although_there_is_no_gate_between():
    rules = [loaded(compared, group=True), loaded(is_short, instant=True)]
    scoring = scorer(*rules, attempts=1)
    results = await scoring.score_group(group("good", "untold", "good"))
    assert [result.value for result in results if not isinstance(result, ScoringFailed)] == [3.0, 3.0]
    assert "cannot be told" in results[1].message
    assert [calls.figures.ok for calls in scoring.calls] == [2, 2], "each was called once for each sample"
    gone = await scoring.score_group(group("untold", "untold"))
    assert all(isinstance(result, ScoringFailed) for result in gone)
    assert scoring.calls[0].figures.ok == 2, "nothing was left to compare"


async def test_a_slow_reward_of_the_stage_of_a_comparison_runs_beside_it():
    """So what it fails may have been compared: the documentation says what to do about it."""
    both = asyncio.Barrier(2)
    seen_by_it = []

    async def slow(sample):
        if sample.text == "late":
            await both.wait()
            raise ValueError("too late for the comparison")
        return 1.0

    async def ranked(samples):
        seen_by_it.extend(sample.text for sample in samples)
        await both.wait()
        return [1.0 for _ in samples]

    results = await scorer(loaded(slow), loaded(ranked, group=True), attempts=1).score_group(group("good", "late"))
    assert (results[0].value, seen_by_it) == (2.0, ["good", "late"])
    assert "too late" in results[1].message


async def test_a_comparison_that_fails_leaves_no_sample_with_a_score():
    steady, _ = counting("steady")
    scoring = scorer(loaded(steady), loaded(compared, group=True, on_failure="dead"), attempts=1)
    results = await scoring.score_group(group("good", "poison"))
    assert all(isinstance(result, ScoringFailed) and result.fail_group for result in results)


async def test_a_group_of_which_no_sample_goes_on_is_not_compared():
    scoring = scorer(loaded(is_formatted, gate=1), loaded(compared, group=True))
    results = await scoring.score_group(group("bad", "bad"))
    assert [result.value for result in results] == [0.0, 0.0]
    assert scoring.calls[1].figures.ok == 0


async def test_a_single_sample_is_a_group_of_one_for_what_compares():
    scoring = scorer(loaded(compared, group=True))
    assert scoring.group_scored
    assert (await scoring.score(seen())).value == 1.0


class Lives(Reward):
    def __init__(self, log, name, error=None, hang=False):
        self.log, self.name, self.error, self.hang = log, name, error, hang

    async def open(self, context):
        self.log.append(f"open {self.name} in {context.worker}")
        if self.hang:
            await asyncio.Event().wait()
        if self.error is not None:
            raise self.error

    async def close(self):
        self.log.append(f"close {self.name}")
        if self.error is not None:
            raise self.error

    async def score(self, sample):
        return 1.0


def living(log, name, **options):
    life = Lives(log, name, **options)
    return replace(loaded(life.score, name=name), life=life)


def context(tmp_path, **changes):
    config = RunConfig.model_validate(changes)
    return config, RewardContext(config, tmp_path, worker="reward.3")


async def test_rewards_are_opened_in_order_and_closed_in_the_other(tmp_path):
    log = []
    config, about = context(tmp_path)
    async with open_scorer(config, about, [living(log, "a"), living(log, "b")]) as scoring:
        assert (await scoring.score(seen(), lease_end())).value == 2.0
    assert log == ["open a in reward.3", "open b in reward.3", "close b", "close a"]


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (ConfigError("no model critic", "add it to reward_models"), ConfigError, "no model critic"),
        (FileNotFoundError("rubric.txt"), PluginError, "reward b cannot be opened: FileNotFoundError: rubric.txt"),
        (KeyError("model"), PluginError, "reward b cannot be opened: KeyError: 'model'"),
        (HTTPError("http://judge", 401, "who are you", None, None), PluginError, "HTTP Error 401: who are you"),
        (OSError("libjudge.so: cannot open shared object file"), PluginError, "cannot be opened: OSError: libjudge.so"),
        (OSError(errno.ENOSPC, "disk full"), PluginError, r"cannot be opened: OSError: \[Errno 28\] disk full"),
    ],
)
async def test_one_that_cannot_be_opened_closes_those_before_and_is_named(tmp_path, error, kind, message):
    log = []
    config, about = context(tmp_path, supervisor={"start_deadline": 20})
    with pytest.raises(kind, match=message):
        async with open_scorer(config, about, [living(log, "a"), living(log, "b", error=error), living(log, "c")]):
            pass
    assert log == ["open a in reward.3", "open b in reward.3", "close b", "close a"]


def raised_from(error, cause):
    error.__cause__ = cause
    return error


def raised_while(error, context):
    error.__context__ = context
    return error


def no_such_model(status):
    """As transformers raises it after an answer of the hub."""
    answer = HTTPError("http://hub", status, "of the hub", None, None)
    return raised_from(OSError("typo/model is not a local folder"), raised_from(OSError("not found"), answer))


async def nobody_listens():
    """The error of a host with several addresses, as asyncio raises it."""
    with socket.socket() as one, socket.socket() as two:
        one.bind(("127.0.0.1", 0))
        two.bind(("127.0.0.2", 0))
        found = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", bound.getsockname()) for bound in (one, two)]
        loop = asyncio.get_running_loop()
        loop.getaddrinfo = AsyncMock(return_value=found)
        with pytest.raises(OSError, match="Multiple exceptions") as caught:
            await loop.create_connection(asyncio.Protocol, "judge", 8000)
        del loop.getaddrinfo
    return caught.value


async def test_an_error_of_a_library_is_told_by_what_led_to_it():
    refused, of_anyio = ConnectionRefusedError("judge:8000"), OSError("All connection attempts failed")
    assert is_transient(raised_from(of_anyio, ExceptionGroup("several", [refused, refused])))
    assert is_transient(raised_while(OSError("as requests wraps it"), raised_from(RuntimeError("of urllib3"), refused)))
    assert is_transient(await nobody_listens())
    assert is_transient(socket.gaierror(socket.EAI_AGAIN, "try again"))
    assert is_transient(no_such_model(503))
    assert not is_transient(no_such_model(404))
    assert not is_transient(raised_from(PluginError("no"), refused))


@pytest.mark.parametrize(
    "error",
    [
        ConnectionRefusedError("judge:8000"),
        TimeoutError("of the reward itself"),
        RewardUnavailable("the judge loads its model"),
        HTTPError("http://judge", 503, "loading", None, None),
        raised_from(RuntimeError("of a client library"), OSError(errno.EHOSTUNREACH, "no route")),
    ],
)
async def test_a_service_that_is_away_while_a_reward_opens_is_waited_for(tmp_path, caplog, error):
    log = []
    config, about = context(tmp_path)
    reward = living(log, "a")
    life = reward.life
    life.open = AsyncMock(side_effect=[error, error, error, None])
    async with open_scorer(config, about, [reward]) as scoring:
        assert (await scoring.score(seen(), lease_end())).value == 1.0
    assert life.open.await_count == 4
    assert log == ["close a"] * 4  # each that failed is closed before the next
    assert [record.reward for record in caplog.records if record.msg == "a reward cannot be opened yet"] == ["a", "a"]


async def test_a_worker_that_is_stopped_before_another_attempt_closes_once_what_it_opened(tmp_path):
    log = []
    config, about = context(tmp_path)
    reward = living(log, "a", error=ConnectionRefusedError("judge:8000"))

    async def opened():
        async with open_scorer(config, about, [reward]):
            pass

    opening = asyncio.create_task(opened())
    async with asyncio.timeout(60):
        while "close a" not in log:  # noqa: ASYNC110
            await asyncio.sleep(0)
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    assert log == ["open a in reward.3", "close a"]


@pytest.mark.parametrize(("scored", "kind"), [(False, PluginError), (True, Unreachable)])
async def test_a_service_that_stays_away_ends_the_worker_which_comes_back_when_the_run_had_scores(
    tmp_path, scored, kind
):
    config, about = context(tmp_path, supervisor={"start_deadline": 0.2})
    about = replace(about, scored=AsyncMock(return_value=scored))
    refused = living([], "a", error=ConnectionRefusedError("judge:8000"))
    with pytest.raises(kind, match=r"reward a cannot be opened, \d+ times within .* s: ConnectionRefusedError: judge"):
        async with open_scorer(config, about, [refused]):
            pass


async def test_one_that_does_not_open_meets_a_deadline(tmp_path):
    log = []
    config, about = context(tmp_path, supervisor={"start_deadline": 0.05})
    with pytest.raises(DeadlineExceeded, match=r"reward a was not open within 0.05 s"):
        async with open_scorer(config, about, [living(log, "a", hang=True)]):
            pass
    assert log[-1] == "close a"


async def test_an_error_of_close_ends_nothing_and_is_said(tmp_path, caplog):
    log = []
    config, about = context(tmp_path)
    broken = living(log, "a")
    async with open_scorer(config, about, [broken, living(log, "b")]):
        broken.life.error = RuntimeError("socket is gone")
    assert log[-2:] == ["close b", "close a"]
    assert "a reward did not close" in caplog.text

"""Rewards are opened, retried while a service is away, and closed; what a worker holds of them."""

import asyncio
import errno
import socket
from dataclasses import replace
from unittest.mock import AsyncMock
from urllib.error import HTTPError

import pytest

from streamrl.config import RunConfig
from streamrl.consumers import Reward, RewardContext, RewardUnavailable
from streamrl.consumers.opening import is_transient, open_scorer
from streamrl.consumers.worker import width_of
from streamrl.errors import ConfigError, DeadlineExceeded, PluginError, Unreachable
from tests.consumers.calls_kit import lease_end, loaded
from tests.consumers.samples import seen


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
    config, about = context(tmp_path)
    about = replace(about, scored=AsyncMock(return_value=scored))
    refused = living([], "a", error=ConnectionRefusedError("judge:8000"))
    with pytest.raises(kind, match=r"reward a cannot be opened, \d+ times within .* s: ConnectionRefusedError: judge"):
        async with open_scorer(config, about, [refused], patience=0.2):
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


class Asks(Reward):
    """Its servers take two calls at a time."""

    most = 2
    deadline = 10.0

    def slots(self):
        return self.most

    async def score(self, sample):
        return 1.0


def config_of(use, max_hold=900, **keys):
    rewards = [{"use": f"{__name__}:{use}", **keys}]
    return RunConfig.model_validate({"name": "t", "rewards": rewards, "lease": {"max_hold": max_hold, "seconds": 1}})


async def test_slots_are_those_of_its_servers_now_and_bound_what_a_worker_holds(tmp_path):
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
        assert width_of(opened, short) == 64, "never more than the worker's own concurrency"
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

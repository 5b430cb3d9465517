"""A model of rewards as a reward asks it, with real HTTP servers that fail in every way."""

from __future__ import annotations

import asyncio
import contextlib
import random
import traceback
from collections.abc import AsyncIterator
from typing import Any

import pytest

from streamrl.config import RewardModelConfig
from streamrl.consumers.calls import ScoringFailed, failed_servers, remembering_failed_servers
from streamrl.consumers.models import ModelClient
from streamrl.consumers.models import client as module
from streamrl.consumers.models.dialects import DIALECTS, read_score
from streamrl.consumers.models.router import PoolServerState
from streamrl.errors import RewardBusy, RewardUnavailable, WireError
from streamrl.http import BadAnswer, BadRequest, Lost
from tests.consumers.calls_kit import calls_of, leased, loaded
from tests.consumers.models.faulty_server import FaultyServer, score_of, servers, serving
from tests.consumers.samples import seen
from tests.queues.ledger_kit import until

DIALECT = DIALECTS["vllm", "classify"]
LONG = 60.0
IDS = [1, 2, 3]


@contextlib.asynccontextmanager
async def client_of(*urls: str, limit: Any = None, key: str | None = None, **config: Any) -> AsyncIterator[ModelClient]:
    """A client whose servers were looked at once, and are looked at again when a test says so."""
    made = RewardModelConfig(url=urls or ("http://127.0.0.1:9",), **config)
    client = ModelClient("critic", made, api_key=key, limit=limit)
    try:
        await client.follow(urls)
        await client.check()
        yield client
    finally:
        await client.close()


async def ask(client: ModelClient, ids: list[int] = IDS, deadline: float = LONG, tokens: int = 0) -> float:
    def read(answer: Any) -> float:
        return read_score(DIALECT, answer, None)

    return await client.ask("/classify", DIALECT.body("", ids), read, deadline=deadline, tokens=tokens)


@contextlib.asynccontextmanager
async def looking(client: ModelClient) -> AsyncIterator[None]:
    """The health of the servers is checked all the time."""

    async def look() -> None:
        while True:
            await client.check()
            await asyncio.sleep(0.05)

    task = asyncio.create_task(look())
    try:
        yield
    finally:
        task.cancel()


def row(client: ModelClient, server: FaultyServer) -> Any:
    return next(row for row in client.standings() if row.url == server.url)


async def test_scores_come_back_and_the_load_is_shared():
    async with servers(["well"], ["well"]) as (one, two), client_of(one.url, two.url) as client:
        prompts = [[1, index] for index in range(40)]
        scores = await asyncio.gather(*(ask(client, ids) for ids in prompts))
        assert scores == [score_of(ids) for ids in prompts]
        assert len(one.asked) == len(two.asked) == 20
        answer = await client.call("/classify", {"input": IDS}, deadline=LONG)
        assert answer["data"][0]["probs"] == [score_of(IDS)]


async def test_a_request_that_every_server_fails_ends_at_once_with_the_cause():
    async with servers(["500"], ["nan"]) as (one, two), client_of(one.url, two.url) as client:
        with pytest.raises((BadAnswer, WireError)):
            await ask(client)
        assert len(one.asked) == len(two.asked) == 1


async def test_a_server_that_is_wrong_says_nothing_of_the_sample():
    async with servers(["404"]) as (bad,), client_of(bad.url) as client:
        with pytest.raises(RewardUnavailable, match=bad.url) as caught:
            await ask(client, deadline=0.5)
        assert caught.value.__cause__ is not None
        assert "reward servers ls critic" in caught.value.hint


async def test_without_any_server_a_request_waits_for_one():
    async with client_of() as client:
        with pytest.raises(RewardUnavailable, match="it has none"):
            await ask(client, deadline=0.1)
        waiting = asyncio.create_task(ask(client))
        async with servers(["well"]) as (one,):
            await client.follow([one.url])
            await client.check()
            assert await waiting == score_of(IDS)


async def test_a_lone_server_that_dies_and_comes_back_costs_no_request():
    one = FaultyServer()
    async with client_of() as client:
        async with serving(one):
            await client.follow([one.url])
            await client.check()
            assert await ask(client) == score_of(IDS)
        waiting = [asyncio.create_task(ask(client)) for _ in range(8)]
        await until(lambda: row(client, one).state is PoolServerState.EJECTED)
        assert not any(task.done() for task in waiting)
        async with serving(one), looking(client):
            assert await asyncio.gather(*waiting) == [score_of(IDS)] * 8
        assert row(client, one).state is PoolServerState.SERVING
        assert sum(row.in_flight for row in client.standings()) == 0


async def test_a_server_that_hangs_is_left_after_the_deadline_and_the_next_attempt_goes_elsewhere():
    async with servers(["hangs"], ["well"]) as (slow, good), client_of(slow.url, good.url) as client:
        with pytest.raises(Lost, match=slow.url) as caught:
            await ask(client, deadline=0.5)
        assert caught.value.late
        assert [await ask(client) for _ in range(4)] == [score_of(IDS)] * 4
        assert (len(slow.asked), row(client, slow).failed) == (1, 1)


@pytest.mark.parametrize(("before", "end"), [([], RewardBusy), (["busy"], RewardUnavailable)])
async def test_a_server_that_got_a_request_when_its_time_was_almost_over_is_not_to_blame(monkeypatch, before, end):
    monkeypatch.setattr(module, "_FAIR_SHARE", 2.0)  # as if the request had waited for longer than it flew
    async with servers([*before, "hangs"]) as (one,), client_of(one.url) as client:
        with pytest.raises(RewardUnavailable) as caught:
            await ask(client, deadline=0.7)
        assert type(caught.value) is end, "most of the time was spent on a server that is full, or does not work"
        assert (len(one.asked), row(client, one).failed, row(client, one).in_flight) == (1 + len(before), 0, 0)


async def test_a_server_that_had_less_time_than_its_answers_take_is_not_to_blame():
    """As the second try of a judge: it gets what the first one left."""
    async with servers(["well", "hangs"]) as (one,), client_of(one.url) as client:
        await ask(client)
        assert client._mean_seconds > 0
        client._mean_seconds = 20.0
        for _ in range(3):
            with pytest.raises(Lost):
                await ask(client, deadline=0.01)
        assert (row(client, one).failed, row(client, one).state) == (0, PoolServerState.SERVING)


@pytest.mark.parametrize("deadline", [0.3, 0.0])
async def test_no_place_at_a_server_that_works_is_busy_and_not_away(deadline):
    async with servers(["held"]) as (one,), client_of(one.url, concurrency=1) as client:
        first = asyncio.create_task(ask(client))
        await one.has(1)
        with pytest.raises(RewardBusy, match="no free slot"):
            await ask(client, deadline=deadline)
        one.let_go.set()
        assert await first == score_of(IDS)


class Turns:
    """A rate limit. `held` are the numbers of the requests that wait until `open` is set, and `none` gets no turn."""

    def __init__(self, *held: int, none: int = 0) -> None:
        self.open = asyncio.Event()
        self.held, self.none = held, none
        self.taken: list[int] = []
        self.settled: list[tuple[int, int]] = []

    async def take(self, tokens: int, deadline: float) -> int:
        assert 0 < deadline <= LONG
        self.taken.append(tokens)
        number = len(self.taken)
        if number == self.none:
            raise RewardUnavailable("no tokens in this minute")
        if number in self.held:
            await self.open.wait()
        return number

    def settle(self, turn: int, tokens: int) -> None:
        self.settled.append((turn, tokens))


async def test_the_rate_limit_is_asked_once_for_each_request_that_goes_out():
    turns = Turns()
    async with servers(["500"], ["well"]) as (bad, good), client_of(bad.url, good.url, limit=turns) as client:
        assert await ask(client, tokens=17) == score_of(IDS)
        assert turns.taken == [17] * (len(bad.asked) + len(good.asked))
        assert turns.settled == [(number + 1, 17) for number in range(len(turns.taken))], "nobody said what it cost"


async def test_a_server_that_was_removed_while_a_request_waited_for_its_turn_gets_nothing():
    turns = Turns(1)
    async with servers(["well"], ["well"]) as (old, new), client_of(old.url, limit=turns) as client:
        asking = asyncio.create_task(ask(client))
        await until(lambda: turns.taken)
        await client.follow([new.url])
        await client.check()
        turns.open.set()
        assert await asking == score_of(IDS)
        assert (old.asked, len(turns.taken), len(turns.settled)) == ([], 1, 1), "one turn, which another server got"


async def test_a_turn_without_a_request_is_given_back_and_tokens_that_never_went_out_are_not_paid():
    turns = Turns(1)
    async with servers(["well"]) as (old,), client_of(old.url, limit=turns) as client:
        asking = asyncio.create_task(ask(client, deadline=1.0, tokens=17))
        await until(lambda: turns.taken)
        await client.follow([])
        turns.open.set()
        with pytest.raises(RewardUnavailable):
            await asking
        assert (old.asked, turns.settled) == ([], [(1, 0)])
        url = old.url
        turns.settled.clear()
    async with client_of(limit=turns) as client:
        client._router.follow([url])
        client._router.checked(url, 0.0, healthy=True)
        with pytest.raises(RewardUnavailable):
            await ask(client, deadline=0.5, tokens=17)
        assert {tokens for _, tokens in turns.settled} == {0}


async def test_a_request_that_waits_for_its_turn_holds_no_place():
    """The only one of a server that tries whether it is well again, say."""
    turns = Turns(1)
    async with servers(["well"]) as (one,), client_of(one.url, limit=turns, concurrency=1) as client:
        waiting = asyncio.create_task(ask(client))
        await until(lambda: turns.taken)
        assert row(client, one).in_flight == 0
        assert await ask(client) == score_of(IDS)
        turns.open.set()
        assert await waiting == score_of(IDS)


async def test_a_request_that_gets_no_turn_is_busy_and_leaves_its_place_to_the_next_in_line():
    async with servers(["held"]) as (one,), client_of(one.url, limit=Turns(none=2), concurrency=1) as client:
        asking = [asyncio.create_task(ask(client)) for _ in range(3)]
        await one.has(1)
        await until(lambda: len(client._waiting) == 2)
        one.let_go.set()
        ends = await asyncio.gather(*asking, return_exceptions=True)
        assert [type(end) for end in ends] == [float, RewardBusy, float]
        assert "no tokens" in str(ends[1])
        assert len(one.asked) == 2


@pytest.mark.parametrize(("answer", "used"), [({"usage": {"total_tokens": 5}}, 5), ({"usage": {}}, 17), ({}, 17)])
def test_what_an_answer_says_it_cost_is_what_is_paid(answer, used):
    assert module.used_tokens(answer, 17) == used


async def test_a_server_that_repeats_the_key_in_an_answer_does_not_get_it_into_a_message():
    async with servers(["echoes"]) as (one,), client_of(one.url, key="sesame-sesame") as client:
        with pytest.raises(WireError, match=r"\[key\]") as caught:
            await ask(client)
        assert "sesame" not in "".join(traceback.format_exception(caught.value)) + repr(caught.value)
        assert "sesame" not in row(client, one).why


async def test_the_key_goes_along_and_is_in_no_message():
    async with serving(FaultyServer(key="sesame")) as one:
        async with client_of(one.url, key="sesame") as client:
            assert await ask(client) == score_of(IDS)
        async with client_of(one.url, key="simsalabim") as client:
            with pytest.raises(RewardUnavailable) as caught:
                await ask(client, deadline=0.5)
            assert "simsalabim" not in f"{caught.value} {caught.value.__cause__}"
            assert "reward_models.critic.api_key_file" in str(caught.value.__cause__)


async def test_a_busy_server_is_asked_again_after_its_rest():
    async with servers(["busy", "busy", "well"]) as (one,), client_of(one.url) as client:
        assert await ask(client) == score_of(IDS)
        assert (len(one.asked), row(client, one).failed) == (3, 0)
        assert row(client, one).state is PoolServerState.SERVING


async def test_json_that_is_said_to_be_text_is_refused_with_the_reason():
    async with servers(["text"]) as (one,), client_of(one.url) as client:
        with pytest.raises(WireError, match="Content-Type names no JSON"):
            await ask(client)


async def test_an_ejected_server_comes_back_through_one_request():
    async with servers(["500", "500", "500", "held", "well"]) as (one,), client_of(one.url) as client:
        for _ in range(3):
            with pytest.raises(BadAnswer):
                await ask(client)
        assert row(client, one).state is PoolServerState.EJECTED
        waiting = [asyncio.create_task(ask(client)) for _ in range(5)]
        async with looking(client):
            await one.has(4)
        assert (one.here, row(client, one).state) == (1, PoolServerState.TRIAL)
        one.let_go.set()
        assert await asyncio.gather(*waiting) == [score_of(IDS)] * 5
        assert row(client, one).state is PoolServerState.SERVING


async def test_places_are_kept_and_come_back_when_a_request_is_cancelled():
    async with servers(["held"]) as (one,), client_of(one.url, concurrency=3) as client:
        tasks = [asyncio.create_task(ask(client, [index])) for index in range(12)]
        await one.has(3)
        assert one.here == 3
        for task in tasks[:6]:
            task.cancel()
        await one.has(6)
        one.let_go.set()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [isinstance(result, asyncio.CancelledError) for result in results] == [True] * 6 + [False] * 6
        assert one.most <= 6  # three cancelled ones may still be on their way out
        assert row(client, one).in_flight == 0


async def test_many_wait_for_one_place_and_all_get_it():
    async with servers(["well"]) as (one,), client_of(one.url, concurrency=1) as client:
        prompts = [[index] for index in range(100)]
        assert await asyncio.gather(*(ask(client, ids) for ids in prompts)) == [score_of(ids) for ids in prompts]
        assert one.most == 1


async def test_servers_come_and_go_while_requests_run():
    async with servers(["held"], ["well"]) as (old, new), client_of(old.url, concurrency=3) as client:
        running = asyncio.create_task(ask(client))
        await old.has(1)
        await client.follow([old.url, new.url])
        await client.check()
        assert client.slots == 6
        await client.follow([new.url])
        assert client.slots == 3
        assert [await ask(client) for _ in range(5)] == [score_of(IDS)] * 5
        assert len(old.asked) == 1
        assert row(client, old).leaving
        old.let_go.set()
        assert await running == score_of(IDS)
        assert [row.url for row in client.standings()] == [new.url]
        await client.follow([])
        assert client.slots == 3, "those of one, where there is none"


async def test_a_request_whose_last_server_was_removed_waits_for_another():
    async with servers(["closes"], ["well"]) as (old, new), client_of(old.url) as client:
        waiting = asyncio.create_task(ask(client))
        await old.has(1)
        await client.follow([])
        await client.follow([new.url])
        await client.check()
        assert await waiting == score_of(IDS)


async def test_whatever_happens_no_place_is_lost():
    """Four servers that fail at random, and requests that are cancelled at random: at the end none is in flight."""
    draw = random.Random(3)
    acts = ["well", "well", "well", "500", "closes", "half", "nan", "busy", "404", "400"]

    def act(_: list[int]) -> str:
        return draw.choice(acts)

    async with contextlib.AsyncExitStack() as stack:
        four = await stack.enter_async_context(servers([act], [act], [act], ["well"]))
        urls = [server.url for server in four]
        client = await stack.enter_async_context(client_of(*urls, concurrency=4))

        async def one(index: int) -> str:
            task = asyncio.create_task(ask(client, [index]))
            if index % 5 == 0:
                await asyncio.sleep(draw.uniform(0, 0.05))
                task.cancel()
            try:
                assert await task == score_of([index])
            except asyncio.CancelledError:
                return "cancelled"
            except (BadRequest, BadAnswer, WireError) as error:
                return type(error).__name__
            return "scored"

        async with looking(client):
            ends = await asyncio.gather(*(one(index) for index in range(300)))
        assert ends.count("scored") > 150
        assert sum(row.in_flight for row in client.standings()) == 0


# The next attempt for the same sample.


async def test_the_next_attempt_waits_for_another_server_and_does_not_go_back_to_the_one_that_failed():
    async with (
        servers(["hangs"], ["held"]) as (bad, good),
        client_of(bad.url, good.url, concurrency=1) as client,
    ):
        with remembering_failed_servers():
            failing = asyncio.create_task(ask(client, deadline=1.0))
            await bad.has(1)
            other = asyncio.create_task(ask(client))
            await good.has(1)
            with pytest.raises(Lost, match=bad.url):
                await failing
            again = asyncio.create_task(ask(client))
            await until(lambda: any(client._waiting.values()) or len(bad.asked) > 1)
            good.let_go.set()
            assert await asyncio.gather(again, other) == [score_of(IDS)] * 2
        assert (len(bad.asked), len(good.asked)) == (1, 2), "though it had room all the time"


async def test_the_only_server_that_works_may_be_asked_again():
    async with servers(["500", "well"], ["well"]) as (one, gone), client_of(one.url) as client:
        await client.follow([one.url, gone.url])  # and its health is not asked: it does not work
        with remembering_failed_servers():
            with pytest.raises(BadAnswer):
                await ask(client)
            assert await ask(client) == score_of(IDS)
        assert len(one.asked) == 2


async def test_when_all_have_failed_the_latest_failure_is_forgotten_last():
    async with (
        servers(["500", "well"], ["500", "held"]) as (first, last),
        client_of(first.url, last.url, concurrency=1) as client,
    ):
        with remembering_failed_servers():
            with pytest.raises(BadAnswer):
                await ask(client)
            assert list(failed_servers()) == [first.url, last.url]
            assert await ask(client) == score_of(IDS)
        assert (len(first.asked), len(last.asked)) == (2, 1)


async def test_a_server_that_failed_the_sample_is_asked_again_when_no_other_has_room_for_long():
    """And each attempt ends with what it failed with: a wait for the others would end none."""
    async with (
        servers(["500"], ["held"]) as (bad, full),
        client_of(bad.url, full.url, concurrency=1) as client,
    ):
        holds = asyncio.create_task(_ask_only(client, full, bad))
        await full.has(1)

        async def reward(sample):
            return await ask(client, deadline=0.5)

        with pytest.raises(ScoringFailed, match=r"BadAnswer: .*\(3 attempts\)"):
            await calls_of(loaded(reward, attempts=3)).score(seen(), leased())
        assert len(bad.asked) == 3
        assert row(client, bad).state is PoolServerState.EJECTED
        full.let_go.set()
        assert await holds == score_of(IDS)


async def test_one_that_hangs_gets_time_enough_to_fail_again(monkeypatch):
    assert module._CHOOSY + module._FAIR_SHARE < 1
    monkeypatch.setattr(module, "_FAIR_SHARE", 0.0)  # so that a busy machine takes nothing from its share
    async with (
        servers(["hangs"], ["busy"]) as (bad, full),
        client_of(bad.url, full.url, concurrency=1) as client,
    ):
        with remembering_failed_servers():
            failed_servers()[bad.url] = None
            with pytest.raises(Lost, match=bad.url):
                await ask(client, deadline=1.0)
        assert len(bad.asked) == 1


async def test_what_a_server_failed_counts_also_when_the_next_one_has_too_little_time(monkeypatch):
    monkeypatch.setattr(module, "_FAIR_SHARE", 2.0)  # as if the place had come late
    async with servers(["500"], ["hangs"]) as (bad, slow), client_of(bad.url, slow.url) as client:
        with pytest.raises(BadAnswer, match=bad.url):
            await ask(client, deadline=0.5)
        assert (len(bad.asked), len(slow.asked), row(client, slow).failed) == (1, 1, 0)


async def _ask_only(client, server, other):
    """A request that `server` gets."""
    with remembering_failed_servers():
        failed_servers()[other.url] = None
        return await ask(client)


async def test_it_says_why_when_no_server_is_there_and_before_anybody_asked():
    async with servers(["well"]) as (here,), client_of("http://127.0.0.1:9") as client:
        assert "127.0.0.1:9" in client.away
        await client.follow(["http://127.0.0.1:9", here.url])
        assert client.away == "", "nobody has looked at the new one"
        await client.check()
        assert client.away == ""

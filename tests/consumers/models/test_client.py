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
from streamrl.consumers.models import ModelClient
from streamrl.consumers.models import client as module
from streamrl.consumers.models.dialects import DIALECTS, read_score
from streamrl.consumers.models.router import PoolServerState
from streamrl.errors import RewardBusy, RewardUnavailable, WireError
from streamrl.http import BadAnswer, BadRequest, Lost
from tests.consumers.models.faulty_server import ODD, FaultyServer, score_of, servers, serving

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


async def ask(client: ModelClient, ids: list[int] = IDS, deadline: float = LONG) -> float:
    body = DIALECT.body("", ids)
    return await client.ask("/classify", body, lambda answer: read_score(DIALECT, answer, None), deadline=deadline)


def row(client: ModelClient, server: FaultyServer) -> Any:
    return next(row for row in client.standings() if row.url == server.url)


async def until(condition: Any, seconds: float = 60.0) -> None:
    async with asyncio.timeout(seconds):
        while True:
            if condition():
                return
            await asyncio.sleep(0.01)


async def test_scores_come_back_and_the_load_is_shared():
    async with servers(["well"], ["well"]) as (one, two), client_of(one.url, two.url) as client:
        prompts = [[1, index] for index in range(40)]
        scores = await asyncio.gather(*(ask(client, ids) for ids in prompts))
        assert scores == [score_of(ids) for ids in prompts]
        assert len(one.asked) == len(two.asked) == 20


async def test_call_returns_the_answer_as_it_is():
    async with servers(["well"]) as (one,), client_of(one.url) as client:
        answer = await client.call("/classify", {"input": IDS}, deadline=LONG)
        assert answer["data"][0]["probs"] == [score_of(IDS)]


FAULTS = [*(act for act in ODD if act != "too long"), "500", "502", "closes", "half", "404", "401", "501"]


@pytest.mark.parametrize("act", FAULTS)
async def test_what_one_server_fails_another_one_does(act):
    """And nothing goes to the first one again before the request has its answer."""
    async with servers([act], ["well"]) as (bad, good), client_of(bad.url, good.url) as client:
        for _ in range(6):
            assert await ask(client) == score_of(IDS)
        assert len(good.asked) == 6
        assert 1 <= len(bad.asked) <= 3, "once per request, and out after three"
        assert row(client, bad).failed == len(bad.asked)
        assert row(client, bad).why


async def test_an_answer_that_is_too_long_is_not_read():
    async with (
        servers(["too long"], ["well"]) as (bad, good),
        client_of(bad.url, good.url, max_answer=100_000) as client,
    ):
        assert await ask(client) == score_of(IDS)
        assert "more than 100000 bytes" in row(client, bad).why


async def test_a_request_that_every_server_fails_ends_at_once_with_the_cause():
    async with servers(["500"], ["nan"]) as (one, two), client_of(one.url, two.url) as client:
        with pytest.raises((BadAnswer, WireError)):
            await ask(client)
        assert len(one.asked) == len(two.asked) == 1


async def test_a_refused_request_goes_nowhere_else_and_is_no_fault():
    async with servers(["400"], ["400"]) as (one, two), client_of(one.url, two.url) as client:
        for _ in range(5):
            with pytest.raises(BadRequest, match="status 400"):
                await ask(client)
        assert len(one.asked) + len(two.asked) == 5
        assert {row.state for row in client.standings()} == {PoolServerState.SERVING}


@pytest.mark.parametrize("act", ["404", "401", "closes"])
async def test_a_server_that_is_wrong_or_away_says_nothing_of_the_sample(act):
    """So nobody can score, which is no failure of this sample."""
    async with servers([act]) as (bad,), client_of(bad.url) as client:
        with pytest.raises(RewardUnavailable, match=bad.url) as caught:
            await ask(client, deadline=1.0)
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


async def test_a_server_that_is_down_at_the_start_is_used_once_it_is_there():
    one = FaultyServer()
    async with serving(one):
        pass
    async with client_of(one.url) as client:
        assert row(client, one).state is PoolServerState.UNCHECKED
        waiting = asyncio.create_task(ask(client))
        await client.check()
        assert not waiting.done()
        async with serving(one):
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
        async with serving(one):

            async def look() -> None:
                while True:
                    await client.check()
                    await asyncio.sleep(0.05)

            looking = asyncio.create_task(look())
            assert await asyncio.gather(*waiting) == [score_of(IDS)] * 8
            looking.cancel()
        assert row(client, one).state is PoolServerState.SERVING
        assert sum(row.in_flight for row in client.standings()) == 0


async def test_a_server_that_hangs_is_left_after_the_deadline_and_the_next_attempt_goes_elsewhere():
    async with servers(["hangs"], ["well"]) as (slow, good), client_of(slow.url, good.url) as client:
        with pytest.raises(Lost, match=slow.url) as caught:
            await ask(client, deadline=1.0)
        assert caught.value.late
        assert [await ask(client) for _ in range(4)] == [score_of(IDS)] * 4
        assert len(slow.asked) == 1
        assert row(client, slow).failed == 1


async def test_a_server_that_got_a_request_when_its_time_was_almost_over_is_not_to_blame(monkeypatch):
    monkeypatch.setattr(module, "_FAIR_SHARE", 2.0)  # as if the request had waited for a place for longer than it flew
    async with servers(["hangs"]) as (one,), client_of(one.url) as client:
        with pytest.raises(RewardBusy):
            await ask(client, deadline=0.5)
        assert row(client, one).failed == 0
        assert row(client, one).in_flight == 0


async def test_when_most_of_the_time_was_spent_on_servers_that_do_not_work_they_are_away_and_not_full(monkeypatch):
    monkeypatch.setattr(module, "_FAIR_SHARE", 2.0)
    async with servers(["busy", "hangs"]) as (one,), client_of(one.url) as client:
        with pytest.raises(RewardUnavailable, match="429") as caught:
            await ask(client, deadline=1.0)
        assert not isinstance(caught.value, RewardBusy)
        assert (len(one.asked), row(client, one).failed) == (2, 0)


async def test_a_server_that_had_less_time_than_its_answers_take_is_not_to_blame():
    """As the second try of a judge: it gets what the first one left."""
    async with servers(["well", "hangs"]) as (one,), client_of(one.url) as client:
        await ask(client)
        assert client._usual > 0
        client._usual = 20.0
        for _ in range(3):
            with pytest.raises(Lost):
                await ask(client, deadline=0.01)
        assert (row(client, one).failed, row(client, one).state) == (0, PoolServerState.SERVING)


@pytest.mark.parametrize("deadline", [1.0, 0.0])
async def test_no_place_at_a_server_that_works_is_busy_and_not_away(deadline):
    async with servers(["held"]) as (one,), client_of(one.url, concurrency=1) as client:
        first = asyncio.create_task(ask(client))
        await one.has(1)
        with pytest.raises(RewardBusy, match="no free slot"):
            await ask(client, deadline=deadline)
        one.let_go.set()
        assert await first == score_of(IDS)


async def test_room_follows_the_servers():
    async with servers(["well"], ["well"]) as (one, two), client_of(one.url, two.url, concurrency=3) as client:
        assert client.slots == 6
        await client.follow([one.url])
        assert client.slots == 3
        await client.follow([])
        assert client.slots == 3


class Turns:
    """A rate limit that lets requests out when a test says so."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.asked = 0
        self.settled: list[int] = []

    async def take(self, tokens: int, deadline: float) -> int:
        self.asked += 1
        await self.open.wait()
        return self.asked

    async def settle(self, turn: int, tokens: int) -> None:
        self.settled.append(tokens)


async def test_a_server_that_was_removed_while_a_request_waited_for_its_turn_gets_nothing():
    turns = Turns()
    async with servers(["well"], ["well"]) as (old, new), client_of(old.url, limit=turns) as client:
        asking = asyncio.create_task(ask(client))
        await until(lambda: turns.asked)
        await client.follow([new.url])
        await client.check()
        turns.open.set()
        assert await asking == score_of(IDS)
        assert (old.asked, turns.asked, len(turns.settled)) == ([], 1, 1), "one turn, which another server got"


async def test_tokens_that_never_went_out_are_not_paid():
    turns = Turns()
    turns.open.set()
    async with servers(["well"]) as (one,), client_of(one.url, limit=turns) as client:
        url = one.url
        await client.check()
    async with client_of(limit=turns) as client:
        client._router.follow([url])
        client._router.checked(url, 0.0, healthy=True)
        with pytest.raises(RewardUnavailable):
            await client.call("/classify", {}, deadline=1.0, tokens=17)
        assert turns.settled
        assert set(turns.settled) == {0}


async def test_a_turn_that_nobody_used_is_given_back():
    turns = Turns()
    async with servers(["well"]) as (old,), client_of(old.url, limit=turns) as client:
        asking = asyncio.create_task(client.call("/classify", {}, deadline=2.0, tokens=17))
        await until(lambda: turns.asked)
        await client.follow([])
        turns.open.set()
        with pytest.raises(RewardUnavailable):
            await asking
        assert (old.asked, turns.settled) == ([], [0])


async def test_a_request_that_waits_for_its_turn_holds_no_place():
    """The only one of a server that tries whether it is well again, say."""

    class FirstWaits(Turns):
        async def take(self, tokens: int, deadline: float) -> int:
            self.asked += 1
            if self.asked == 1:
                await self.open.wait()
            return self.asked

    turns = FirstWaits()
    async with servers(["well"]) as (one,), client_of(one.url, limit=turns, concurrency=1) as client:
        waiting = asyncio.create_task(ask(client))
        await until(lambda: turns.asked)
        assert row(client, one).in_flight == 0
        assert await ask(client) == score_of(IDS)
        turns.open.set()
        assert await waiting == score_of(IDS)


async def test_a_request_that_gets_no_turn_leaves_its_place_to_the_next_in_line():
    class NoneForTheSecond(Turns):
        async def take(self, tokens: int, deadline: float) -> int:
            self.asked += 1
            if self.asked == 2:
                raise RewardUnavailable("no tokens in this minute")
            return self.asked

    async with servers(["held"]) as (one,), client_of(one.url, limit=NoneForTheSecond(), concurrency=1) as client:
        asking = [asyncio.create_task(ask(client)) for _ in range(3)]
        await one.has(1)
        await until(lambda: len(client._waiting) == 2)
        one.let_go.set()
        ends = await asyncio.gather(*asking, return_exceptions=True)
        assert [type(end) for end in ends] == [float, RewardBusy, float]


async def test_a_server_that_repeats_the_key_in_an_answer_does_not_get_it_into_a_message():
    async with servers(["echoes"]) as (one,), client_of(one.url, key="sesame-sesame") as client:
        with pytest.raises(WireError, match=r"\[key\]") as caught:
            await ask(client)
        assert "sesame" not in "".join(traceback.format_exception(caught.value)) + repr(caught.value)
        assert "sesame" not in row(client, one).why


async def test_a_busy_server_is_asked_again_after_its_rest():
    async with servers(["busy", "busy", "well"]) as (one,), client_of(one.url) as client:
        assert await ask(client) == score_of(IDS)
        assert len(one.asked) == 3
        assert row(client, one).failed == 0
        assert row(client, one).state is PoolServerState.SERVING


async def test_servers_that_stay_busy_are_no_failure_of_the_sample():
    async with servers(["busy"], ["503"]) as (one, two), client_of(one.url, two.url) as client:
        with pytest.raises(RewardUnavailable, match="answered 429") as caught:
            await ask(client, deadline=1.0)
        assert not isinstance(caught.value, RewardBusy)


async def test_json_that_is_said_to_be_text_is_refused_with_the_reason():
    async with servers(["text"]) as (one,), client_of(one.url) as client:
        with pytest.raises(WireError, match="Content-Type names no JSON"):
            await ask(client, deadline=1.0)


async def test_an_ejected_server_comes_back_through_one_request():
    async with servers(["500", "500", "500", "held", "well"]) as (one,), client_of(one.url) as client:
        for _ in range(3):
            with pytest.raises(BadAnswer):
                await ask(client)
        assert row(client, one).state is PoolServerState.EJECTED
        waiting = [asyncio.create_task(ask(client)) for _ in range(5)]
        async with asyncio.timeout(LONG):
            while row(client, one).state is not PoolServerState.TRIAL:
                await client.check()
                await asyncio.sleep(0.05)
        await one.has(4)
        assert one.here == 1
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
    async with servers(["held"], ["well"]) as (old, new), client_of(old.url) as client:
        running = asyncio.create_task(ask(client))
        await old.has(1)
        await client.follow([new.url])
        await client.check()
        assert [await ask(client) for _ in range(5)] == [score_of(IDS)] * 5
        assert len(old.asked) == 1
        assert row(client, old).leaving
        old.let_go.set()
        assert await running == score_of(IDS)
        assert [row.url for row in client.standings()] == [new.url]


async def test_a_request_whose_last_server_was_removed_waits_for_another():
    async with servers(["closes"], ["well"]) as (old, new), client_of(old.url) as client:
        waiting = asyncio.create_task(ask(client))
        await old.has(1)
        await client.follow([])
        await client.follow([new.url])
        await client.check()
        assert await waiting == score_of(IDS)


async def test_the_rate_limit_is_asked_once_for_each_request_that_goes_out():
    taken: list[int] = []
    settled: list[tuple[int, int]] = []

    class Counting:
        async def take(self, tokens: int, deadline: float) -> int:
            assert 0 < deadline <= LONG
            taken.append(tokens)
            return len(taken)

        async def settle(self, reservation: int, tokens: int) -> None:
            settled.append((reservation, tokens))

    async with servers(["500"], ["well"]) as (bad, good), client_of(bad.url, good.url, limit=Counting()) as client:
        read = lambda answer: read_score(DIALECT, answer, None)  # noqa: E731
        body = DIALECT.body("", IDS)
        assert await client.ask("/classify", body, read, deadline=LONG, tokens=17) == score_of(IDS)
        assert taken == [17] * (len(bad.asked) + len(good.asked))
        assert settled == [(number + 1, 17) for number in range(len(taken))], "nobody said what it cost"


@pytest.mark.parametrize(("answer", "used"), [({"usage": {"total_tokens": 5}}, 5), ({"usage": {}}, 17), ({}, 17)])
def test_what_an_answer_says_it_cost_is_what_is_paid(answer, used):
    assert module.used_tokens(answer, 17) == used


async def test_a_used_up_rate_limit_ends_the_request_and_nothing_goes_out():
    class Empty:
        async def take(self, tokens: int, deadline: float) -> None:
            raise RewardUnavailable("no tokens in this minute")

    async with servers(["well"]) as (one,), client_of(one.url, limit=Empty()) as client:
        with pytest.raises(RewardBusy, match="no tokens"):
            await ask(client)
        assert one.asked == []


async def test_the_key_goes_along_and_is_in_no_message():
    async with serving(FaultyServer(key="sesame")) as one:
        async with client_of(one.url, key="sesame") as client:
            assert await ask(client) == score_of(IDS)
        async with client_of(one.url, key="simsalabim") as client:
            with pytest.raises(RewardUnavailable) as caught:
                await ask(client, deadline=0.5)
            assert "simsalabim" not in f"{caught.value} {caught.value.__cause__}"
            assert "reward_models.critic.api_key_file" in str(caught.value.__cause__)


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

        async def look() -> None:
            while True:
                await client.check()
                await asyncio.sleep(0.1)

        looking = asyncio.create_task(look())
        ends = await asyncio.gather(*(one(index) for index in range(300)))
        looking.cancel()
        assert ends.count("scored") > 150
        assert sum(row.in_flight for row in client.standings()) == 0

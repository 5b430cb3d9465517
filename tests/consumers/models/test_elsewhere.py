"""An attempt goes to a server that has not failed the sample, as long as another one works."""

from __future__ import annotations

import asyncio

import pytest

from streamrl.consumers.calls import ScoringFailed, failed_servers, remembering_failed_servers
from streamrl.consumers.models import client as module
from streamrl.consumers.models.router import PoolServerState
from streamrl.http import BadAnswer, Lost
from tests.consumers.calls_kit import calls_of, leased, loaded
from tests.consumers.models.faulty_server import score_of, servers
from tests.consumers.models.test_client import IDS, ask, client_of, row
from tests.consumers.samples import seen
from tests.queues.ledger_kit import until


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

"""Numbers that members of a role claim, in a real Redis."""

from __future__ import annotations

import asyncio

import pytest

from streamrl.errors import DeadlineExceeded
from streamrl.queues import member_index
from streamrl.queues.keys import Keys
from streamrl.queues.member_index import claimed_index
from tests.redis_kit import Probe


async def test_many_at_once_get_a_number_each_and_a_free_one_is_taken_again(run, config):
    folder = run.run_dir
    all_there, leave = asyncio.Barrier(20), asyncio.Event()

    async def member() -> int:
        async with claimed_index("rollout", config, folder) as index:
            await all_there.wait()
            await leave.wait()
            return index

    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        members = [tasks.create_task(member()) for _ in range(19)]
        async with claimed_index("rollout", config, folder) as own, claimed_index("reward", config, folder) as other:
            await all_there.wait()
            assert other == 0
            leave.set()
            await asyncio.wait(members)
            assert sorted([own, *(task.result() for task in members)]) == list(range(20))
            async with claimed_index("rollout", config, folder) as again:
                assert again == (1 if own == 0 else 0)


async def test_who_lost_its_number_ends(run, config, monkeypatch):
    monkeypatch.setattr(member_index, "_RENEW", 0.05)
    with pytest.raises(DeadlineExceeded, match="another one has its number"):
        async with asyncio.timeout(20), claimed_index("reward", config, run.run_dir) as index:
            with Probe(run.config.url) as probe:
                probe.call("SET", Keys(config.name).member("reward", index), "somebody else")
            await asyncio.Event().wait()
    with Probe(run.config.url) as probe:
        kept = probe.call("GET", Keys(config.name).member("reward", 0))
        assert kept == b"somebody else"


async def test_a_number_that_is_renewed_stays(run, config, monkeypatch):
    monkeypatch.setattr(member_index, "_RENEW", 0.05)
    async with claimed_index("reward", config, run.run_dir) as index:
        key = Keys(config.name).member("reward", index)
        with Probe(run.config.url) as probe:
            probe.call("PEXPIRE", key, 1000)
            async with asyncio.timeout(20):
                while probe.call("PTTL", key) <= 1000:  # noqa: ASYNC110 (Redis tells nobody)
                    await asyncio.sleep(0.01)


async def test_a_number_that_was_free_meanwhile_is_kept(run, config, monkeypatch):
    """A host was cut off for longer than its number lasts, and nobody else came."""
    monkeypatch.setattr(member_index, "_RENEW", 0.05)
    async with claimed_index("reward", config, run.run_dir) as index:
        key = Keys(config.name).member("reward", index)
        with Probe(run.config.url) as probe:
            nonce = probe.call("GETDEL", key)
            async with asyncio.timeout(20):
                while probe.call("GET", key) != nonce:  # noqa: ASYNC110 (Redis tells nobody)
                    await asyncio.sleep(0.01)

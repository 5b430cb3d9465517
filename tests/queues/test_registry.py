"""The list of engine servers of a run, in a real Redis."""

import asyncio

from streamrl.queues.registry import Enlisted


async def test_adding_and_removing_are_said_once_and_numbers_stay(ledgers):
    servers = ledgers.servers
    assert await servers.enlisted() == {}
    assert await servers.enlist("http://a:1", present=True)
    assert not await servers.enlist("http://a:1", present=True)
    assert await servers.enlist("http://b:1", present=True)
    assert await servers.enlist("rollout.0.server1", present=False)
    assert not await servers.enlist("rollout.0.server1", present=False)
    assert await servers.enlist("http://a:1", present=False)
    assert await servers.enlisted() == {
        "http://a:1": Enlisted(False, 1),
        "http://b:1": Enlisted(True, 2),
        "rollout.0.server1": Enlisted(False, 0),
    }
    assert await servers.enlist("http://a:1", present=True)
    assert await servers.enlist("http://c:1", present=True)
    found = await servers.enlisted()
    assert found["http://a:1"] == Enlisted(True, 1)
    assert found["http://c:1"] == Enlisted(True, 3)
    assert [found[f"http://{letter}:1"].owner(2) for letter in "abc"] == [0, 1, 0]


async def test_the_first_life_of_a_role_is_known_by_its_nonce(ledgers):
    lives = [("rollout.0", "a"), ("rollout.0", "a"), ("rollout.0", "b"), ("rollout.1", "b"), ("rollout.0", "a")]
    assert [await ledgers.roles.first_life(*life) for life in lives] == [True, True, False, True, True]


async def test_many_hands_at_once_give_every_server_a_number_of_its_own(ledgers):
    names = [f"http://host{at}:1" for at in range(40)]
    await asyncio.gather(*(ledgers.servers.enlist(name, present=True) for name in names * 2))
    found = await ledgers.servers.enlisted()
    assert sorted(entry.number for entry in found.values()) == list(range(1, 41))


async def test_reports_are_whole_and_vanish_with_who_made_them(ledgers):
    servers = ledgers.servers
    assert await servers.reports() == {}
    await servers.report("rollout.0", {"http://a:1": {"state": "ready", "cache_use": 0.5}, "x": {"state": "gone"}})
    await servers.report("rollout.1", {})
    await servers.report("rollout.0", {"http://a:1": {"state": "behind", "cache_use": 0.25}})
    assert await servers.reports() == {
        "rollout.0": {"http://a:1": {"state": "behind", "cache_use": 0.25}},
        "rollout.1": {},
    }
    key = ledgers.train.keys.server_report("rollout.0")
    assert 0 < await ledgers.connection.read("PTTL", key) <= 10_000
    await ledgers.connection.read("DEL", key)
    assert set(await servers.reports()) == {"rollout.1"}

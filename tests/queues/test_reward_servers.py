"""Who answers for a reward model, as reward workers read it, in a real Redis."""

from __future__ import annotations

import socket

from streamrl.queues import Ledgers
from streamrl.queues.reward_servers import RewardServer, RewardServers

A, B = "http://a:1", "http://b:1"


async def beat(ledgers: Ledgers, role: str, ttl: float = 10.0, **fields: str) -> None:
    await ledgers.roles.beat(role, {"host": socket.gethostname(), "state": "ready", **fields}, ttl)


async def test_servers_of_the_configuration_of_roles_and_of_people(ledgers: Ledgers):
    servers = RewardServers(ledgers)
    assert await servers.present("critic") == []
    await beat(ledgers, "reward_model.critic.1", url="http://127.0.0.1:2", server="asleep")
    await beat(ledgers, "reward_model.critic.0", url="http://127.0.0.1:1", server="ready")
    await beat(ledgers, "reward_model.critic.2")  # is being started
    await beat(ledgers, "reward_model.critics.0", url="http://127.0.0.1:9")
    await beat(ledgers, "reward.0")
    assert await servers.enlist("critic", B, present=True)
    assert await servers.present("critic", [A]) == [
        RewardServer(A, A),
        RewardServer("reward_model.critic.0", "http://127.0.0.1:1"),
        RewardServer("reward_model.critic.1", "http://127.0.0.1:2", awake=False),
        RewardServer(B, B),
    ]
    assert await servers.present("judge", [A]) == [RewardServer(A, A)]


async def test_what_people_take_away_is_not_asked_until_they_bring_it_back(ledgers: Ledgers):
    servers = RewardServers(ledgers)
    await beat(ledgers, "reward_model.critic.0", url="http://127.0.0.1:1")
    for name in (A, "reward_model.critic.0"):
        assert await servers.enlist("critic", name, present=False)
        assert not await servers.enlist("critic", name, present=False)
    assert await servers.present("critic", [A]) == []
    assert await servers.removed("critic") == {A, "reward_model.critic.0"}
    assert await servers.removed("judge") == set()
    for name in (A, "reward_model.critic.0"):
        assert await servers.enlist("critic", name, present=True)
    assert [server.url for server in await servers.present("critic", [A])] == [A, "http://127.0.0.1:1"]


async def test_a_role_that_is_silent_takes_its_server_with_it(ledgers: Ledgers):
    await beat(ledgers, "reward_model.critic.0", url="http://127.0.0.1:1")
    key = ledgers.train.keys.role("reward_model.critic.0")
    assert 0 < await ledgers.connection.read("PTTL", key) <= 10_000
    await ledgers.connection.read("DEL", key)
    assert await RewardServers(ledgers).present("critic") == []


async def test_the_loopback_interface_of_another_host_is_out_of_reach(ledgers: Ledgers):
    await ledgers.roles.beat("reward_model.critic.0", {"host": "elsewhere", "url": "http://127.0.0.1:1"}, 10)
    await ledgers.roles.beat("reward_model.critic.1", {"host": "elsewhere", "url": "http://10.0.0.7:1"}, 10)
    assert [server.name for server in await RewardServers(ledgers).present("critic")] == ["reward_model.critic.1"]

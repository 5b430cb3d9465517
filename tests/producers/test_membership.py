"""Which servers belong to which replica, and a group that follows the list of a real Redis."""

import asyncio
import sys
from pathlib import Path

import pytest
from producer_kit import until

sys.path.insert(0, str(Path(__file__).parent / "group"))

from group_kit import Player

from streamrl.config import RunConfig
from streamrl.producers import replica
from streamrl.producers.group.fleet import Fleet, stop_tokens_of
from streamrl.producers.group.group import EngineGroup, ServerSpec
from streamrl.producers.group.server import ServerEngine
from streamrl.producers.replica import Membership
from streamrl.queues.registry import Enlisted


def fleet(index=0, **config):
    return Fleet(RunConfig.model_validate(config), 7, Path(), f"rollout.{index}")


def test_servers_of_the_configuration_go_to_the_replicas_in_turn():
    config = {"engine": {"kind": "vllm", "url": [f"http://h:{n}" for n in range(5)]}, "rollout": {"replicas": 2}}
    assert fleet(0, **config).wanted({}) == ["http://h:0", "http://h:2", "http://h:4"]
    assert fleet(1, **config).wanted({}) == ["http://h:1", "http://h:3"]
    enlisted = {"http://h:2": Enlisted(False, 0), "http://new:1": Enlisted(True, 1), "http://new:2": Enlisted(True, 2)}
    assert fleet(0, **config).wanted(enlisted) == ["http://h:0", "http://h:4", "http://new:1"]
    assert fleet(1, **config).wanted(enlisted) == ["http://h:1", "http://h:3", "http://new:2"]
    back = {"http://h:2": Enlisted(True, 1)}  # removed and added: whose it was, and not twice
    assert fleet(0, **config).wanted(back) == ["http://h:0", "http://h:2", "http://h:4"]
    assert fleet(1, **config).wanted(back) == ["http://h:1", "http://h:3"]


def test_servers_that_streamrl_starts_have_names_and_devices():
    config = {"engine": {"kind": "vllm", "servers": 2, "devices": ["0,1", "2,3", "4,5"]}, "rollout": {"replicas": 2}}
    first, second = fleet(0, **config), fleet(1, **config)
    assert first.wanted({}) == ["rollout.0.server0", "rollout.0.server1"]
    assert second.wanted({"rollout.1.server0": Enlisted(False, 0)}) == ["rollout.1.server1"]
    assert second.wanted({"rollout.0.server0": Enlisted(True, 1)}) == ["rollout.1.server0", "rollout.1.server1"]
    devices = [one._devices(name) for one in (first, second) for name in one.wanted({})]
    assert devices == ["0,1", "2,3", "4,5", "0,1"]


def test_every_life_of_every_server_draws_other_numbers():
    one = fleet(0, engine={"kind": "vllm", "servers": 2})
    assert len({spec.make()._server._seed for spec in map(one.spec, one.wanted({})) for _ in range(5)}) == 10


def test_engines_of_servers_are_made_lazily_and_anew_for_each_life():
    spec = fleet(0, engine={"kind": "vllm", "url": ["http://h:1"]}).spec("http://h:1")
    first, second = spec.make(), spec.make()
    assert isinstance(first, ServerEngine)
    assert first is not second
    assert not spec.ours


def test_stop_tokens_are_those_of_the_model(tiny_dir, tmp_path):
    assert stop_tokens_of(str(tiny_dir)) == frozenset()
    with pytest.raises(ValueError, match="cannot be read"):
        stop_tokens_of(str(tmp_path / "none"))


class PlayedFleet(Fleet):
    """Servers in the hands of the test."""

    def spec(self, name):
        return ServerSpec(name, lambda: Player(name), ours=not name.startswith("http"))


async def test_the_group_follows_the_list_and_says_how_its_servers_are(run, monkeypatch):
    monkeypatch.setattr(replica, "_LOOK_SECONDS", 0.02)
    run.set("engine", kind="vllm", servers=1)
    async with run.open() as ledgers:
        role = run.role("rollout.0", ledgers)
        fleet = PlayedFleet(run.config, 7, run.run_dir, role.name)
        group = EngineGroup(run.config, [fleet.spec(name) for name in fleet.wanted({})])
        await group.start()
        membership = Membership(role, group, fleet)
        task = asyncio.create_task(membership.run())
        try:

            async def reported(*names):
                found = (await ledgers.servers.reports()).get("rollout.0", {})
                return sorted(found) == sorted(names) and all(row["state"] == "ready" for row in found.values())

            await until(lambda: reported("rollout.0.server0"))
            await ledgers.servers.enlist("http://late:1", present=True)
            await until(lambda: reported("rollout.0.server0", "http://late:1"))
            await ledgers.servers.enlist("rollout.0.server0", present=False)
            await until(lambda: reported("http://late:1"))
            await ledgers.servers.enlist("http://late:1", present=False)
            await until(reported)
            await group.health()  # an empty group waits
            await ledgers.servers.enlist("rollout.0.server0", present=True)
            await until(lambda: reported("rollout.0.server0"))
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await group.close()


async def test_a_server_that_comes_back_while_it_leaves_is_there_again(run):
    run.set("engine", kind="vllm", servers=1)
    async with run.open() as ledgers:
        role = run.role("rollout.0", ledgers)
        fleet = PlayedFleet(run.config, 7, run.run_dir, role.name)
        group = EngineGroup(run.config, [fleet.spec(name) for name in fleet.wanted({})])
        await group.start()
        membership = Membership(role, group, fleet)
        try:
            for _ in range(2):
                await ledgers.servers.enlist("rollout.0.server0", present=False)
                await membership.look()
                await ledgers.servers.enlist("rollout.0.server0", present=True)

                async def back():
                    await membership.look()
                    return group.rows().get("rollout.0.server0", {}).get("state") == "ready"

                await until(back)
        finally:
            await group.close()

"""Servers of a group come and go: added, removed, given up, refused, late."""

import asyncio

import pytest
from group_kit import Stage, answer, until, version

from streamrl.errors import ConfigError, Unreachable


async def test_a_server_that_is_removed_ends_what_it_has():
    async with Stage("a", "b") as stage:
        task = stage.ask()
        await until(stage.where)
        leaving = stage.where()
        stage.group.remove(leaving)
        stage.group.remove(leaving)
        later = stage.ask("later")
        await stage.on("b" if leaving == "a" else "a", "later")
        stage[leaving].give(8)
        assert len((await answer(task)).tokens) == 8
        await until(lambda: leaving not in stage.group.rows())
        assert stage[leaving].closed
        assert len(stage.lives[leaving]) == 1
        await stage.group.abort()
        await answer(later)


async def test_what_stays_too_long_on_a_server_that_leaves_moves_with_what_it_has():
    async with Stage("a", "b", supervisor={"drain_deadline": 0.01}) as stage:
        task = stage.ask()
        await until(stage.where)
        leaving = stage.where()
        other = "b" if leaving == "a" else "a"
        stage[leaving].give(3)
        stage.group.remove(leaving)
        player = await stage.on(other)
        assert player.asked[-1].tokens.tolist() == [1, 2, 3, 103, 104, 105]
        player.give(5)
        assert (await answer(task)).tokens.tolist() == list(range(103, 111))
        await until(lambda: leaving not in stage.group.rows())


async def test_a_server_that_is_added_takes_its_share_with_the_newest_weights():
    async with Stage("a") as stage:
        await stage.group.apply(version(7))
        stage.group.add(stage.spec("b", ours=False))
        stage.group.add(stage.spec("b", ours=False))
        await until(lambda: stage.group.load().servers == 2)
        assert len(stage.lives["b"]) == 1
        assert stage["b"].applied == [(1, 7)]
        tasks = [stage.ask(f"r{at}") for at in range(4)]
        await until(lambda: len(stage["b"].flying) == 2)
        for name in ("a", "b"):
            stage[name].give(8)
        await asyncio.gather(*tasks)


async def test_a_server_removed_while_it_starts_goes_at_once_and_can_come_again():
    async with Stage("a") as stage:
        stage.prepare = lambda player: setattr(player, "starting", asyncio.Event())
        stage.group.add(stage.spec("b"))
        await until(lambda: stage.lives.get("b"))
        stage.group.remove("b")
        await until(lambda: "b" not in stage.group.rows())
        assert stage["b"].closed
        stage.prepare = lambda player: None
        stage.group.add(stage.spec("b"))
        await until(lambda: stage.group.load().servers == 2)


async def test_a_server_of_others_comes_back_however_often_and_ours_is_given_up():
    async with Stage("a", "theirs", supervisor={"max_restarts": 2}) as stage:
        stage.group.remove("theirs")
        await until(lambda: "theirs" not in stage.group.rows())
        stage.group.add(stage.spec("theirs", ours=False))
        for name, lives in (("theirs", 5), ("a", 3)):
            for at in range(lives):
                await until(lambda name=name: stage.group.rows()[name]["state"] == "ready")
                player = stage[name]
                player.die()
                if name == "theirs" or at < 2:
                    await until(lambda name=name, player=player: stage[name] is not player)
        await until(lambda: stage.group.rows()["a"]["state"] == "gone")
        await stage.group.health()  # the other one serves


async def test_the_group_is_dead_when_no_server_is_left_and_says_why():
    async with Stage("a", supervisor={"max_restarts": 1}) as stage:
        task = stage.ask()
        for _ in range(2):
            (await stage.on("a")).die("out of memory")
        with pytest.raises(Unreachable, match="out of memory"):
            await answer(task)
        with pytest.raises(Unreachable):
            await stage.group.health()
        with pytest.raises(Unreachable):
            await stage.group.apply(version(1))


async def test_what_loses_its_server_after_the_end_of_the_group_does_not_wait_for_another():
    async with Stage("a") as stage:
        task = stage.ask()
        player = await stage.on("a")
        stage.group._balancer.fail(Unreachable("no server is left"))
        player.die()
        with pytest.raises(Unreachable, match="no server is left"):
            await answer(task)


async def test_the_group_is_dead_when_nobody_serves_for_too_long():
    stage = Stage("a", ours=False, engine={"start_deadline": 0.3})
    stage.prepare = lambda player: setattr(player, "start_error", Unreachable("connection refused"))
    with pytest.raises(Unreachable, match="connection refused"):
        await asyncio.wait_for(stage.group.start(), 10)
    assert len(stage.lives["a"]) > 3
    await stage.group.close()


async def test_a_server_that_cannot_be_used_ends_the_start_and_later_only_itself():
    stage = Stage("a")
    stage.prepare = lambda player: setattr(player, "start_error", ConfigError("another model", "mend it"))
    with pytest.raises(ConfigError, match="another model"):
        await asyncio.wait_for(stage.group.start(), 10)
    await stage.group.close()
    async with Stage("a") as stage:
        stage.prepare = lambda player: setattr(player, "start_error", ConfigError("another model"))
        stage.group.add(stage.spec("b"))
        await until(lambda: stage.group.rows()["b"]["state"] == "refused")
        assert stage.group.rows()["b"]["why"] == "another model"
        await stage.group.health()


async def test_an_empty_group_waits_for_servers():
    async with Stage() as stage:
        task = stage.ask()
        assert stage.group.load().capacity == 0
        await stage.group.health()
        stage.group.add(stage.spec("a"))
        (await stage.on("a")).give(8)
        await answer(task)


async def test_a_late_server_is_paused_like_the_others_and_none_starts_while_they_sleep():
    async with Stage("a") as stage:
        await stage.group.pause()
        await stage.group.sleep(1)
        stage.group.add(stage.spec("b"))
        await stage.group.wake(["weights"])
        await asyncio.sleep(0)
        assert "b" not in stage.lives
        await stage.group.wake()
        await until(lambda: stage.group.load().servers == 2)
        assert stage["b"].controls == ["pause"]
        await stage.group.resume()
        assert stage["b"].controls[1:] == ["resume"]
        stage["a"].die()
        await until(lambda: len(stage.lives["a"]) == 2 and stage.group.load().servers == 2)
        assert stage["a"].controls == []

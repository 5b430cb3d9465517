"""Requests and weights in a group of servers under every mishap: deaths, slow and refused weights, poison, aborts."""

import asyncio

import numpy as np
import pytest
from group_kit import STOP, Stage, answer, until, version

from streamrl.engine import Request
from streamrl.errors import DataError, Unreachable, WeightsError
from streamrl.producers.group.load_balancing import Affinities


async def test_a_response_goes_on_where_its_server_died_and_is_one_response():
    async with Stage("a", "b") as stage:
        await stage.group.apply(version(1))
        task = stage.ask()
        await until(stage.where)
        first = stage.where()
        other = "b" if first == "a" else "a"
        stage[first].give(3)
        await stage.group.apply(version(2))
        dying = stage[first]
        dying.give(0)
        dying.die()
        player = await stage.on(other)
        assert player.asked[-1].tokens.tolist() == [1, 2, 3, 103, 104, 105]
        assert player.asked[-1].max_new_tokens == 5
        player.give(2)
        await stage.group.apply(version(3))
        player.give(3)
        done = await answer(task)
    assert done.tokens.tolist() == [103, 104, 105, 106, 107, 108, 109, 110]
    assert done.logprobs.tolist() == [-3.0, -4.0, -5.0, -6.0, -7.0, -8.0, -9.0, -10.0]
    assert done.runs == [(0, 1), (3, 2), (5, 3)]
    assert (done.finish, done.prompt_tokens) == ("length", 3)


async def test_only_tokens_whose_version_is_sure_are_kept():
    async with Stage("a") as stage:
        await stage.group.apply(version(1))
        task = stage.ask()
        player = await stage.on("a")
        player.give(2)
        await stage.group.apply(version(2))
        player.give(3)  # sampled, but the boundary was only observed
        assert stage.group.load().tokens_sampled == 5
        player.die()
        await until(lambda: len(stage.lives["a"]) == 2)
        player = await stage.on("a")
        assert player.asked[-1].tokens.tolist() == [1, 2, 3, 103, 104]
        player.give(6)
        done = await answer(task)
    assert done.tokens.tolist() == list(range(103, 111))
    assert done.runs == [(0, 1), (2, 2)]


async def test_a_restarted_server_gets_the_newest_weights_before_its_first_prompt():
    async with Stage("a") as stage:
        await stage.group.apply(version(40))
        task = stage.ask()
        (await stage.on("a")).die()
        player = await stage.on("a")
        assert player is stage.lives["a"][1]
        assert player.applied == [(1, 40)]
        player.give(8)
        assert (await answer(task)).runs == [(0, 40)]
        assert stage.lives["a"][0].closed


async def test_a_prefix_that_had_ended_is_the_completion():
    async with Stage("a", "b") as stage:
        tasks = [stage.ask("stop"), stage.ask("length", limit=2), stage.ask("context", prompt=range(1, 63))]
        await until(lambda: all(stage.where(name) for name in ("stop", "length", "context")))
        for name in ("stop", "length", "context"):
            flying = stage[stage.where(name)].flying[name]
            flying.tokens, flying.logprobs = [7, STOP if name == "stop" else 8], [-1.0, -2.0]
        for player in (stage["a"], stage["b"]):
            player.die()
        done = [await answer(task) for task in tasks]
    assert [completion.finish for completion in done] == ["stop", "length", "length"]
    assert [completion.tokens.tolist() for completion in done] == [[7, STOP], [7, 8], [7, 8]]
    assert all(completion.runs == [(0, 0)] for completion in done)


async def test_a_request_that_kills_servers_dies_alone_and_its_neighbours_live():
    async with Stage("a", "b", supervisor={"max_restarts": 100}) as stage:
        poison = stage.ask("poison")
        neighbours = [stage.ask(f"n{at}", limit=3) for at in range(4)]
        company = []
        while not poison.done():
            await asyncio.sleep(0.001)
            name = stage.where("poison")
            if name is not None:
                company.append(len(stage[name].flying) - 1)
                stage[name].die("of the poison")
            elif len(company) >= 2:
                for server in ("a", "b"):  # what it waits for
                    stage[server].give(1)
        with pytest.raises(DataError, match="3 servers died"):
            await poison
        assert company[2:] == [0]
        for _ in range(5):
            await asyncio.sleep(0.01)
            for server in ("a", "b"):
                stage[server].give(3)
        for task in neighbours:
            assert len((await answer(task)).tokens) == 3


async def test_deaths_with_progress_in_between_are_no_suspicion():
    async with Stage("a", supervisor={"max_restarts": 100}) as stage:
        task = stage.ask()
        for _ in range(6):
            player = await stage.on("a")
            player.give(1)
            player.die()
            await until(lambda player=player: stage["a"] is not player)
        (await stage.on("a")).give(2)
        assert (await answer(task)).tokens.tolist() == list(range(103, 111))


async def test_a_slow_server_delays_only_itself():
    """The newest version reaches the fast one at once; the slow one gets no prompt until it has the newest."""
    versions = [version(1)]

    async def newest(apply):
        await apply(versions[-1])

    async def publish(number):
        versions.append(version(number))
        await asyncio.wait_for(stage.group.apply(versions[-1]), 10)

    async with Stage("fast", "slow") as stage:
        stage.group.follow(newest)
        await stage.group.apply(versions[0])
        gate = stage["slow"].slow = asyncio.Event()
        await publish(2)
        assert stage["fast"].version == 2
        assert stage["slow"].version == 1
        assert stage.group.load().servers == 2  # one version behind, and taking it: still good for prompts
        await publish(3)
        assert stage["fast"].version == 3
        assert stage.group.load().servers == 1
        assert stage.group.rows()["slow"]["state"] == "behind"
        tasks = [stage.ask(f"r{at}") for at in range(6)]
        await until(lambda: len(stage["fast"].flying) == 6)
        assert not stage["slow"].asked
        gate.set()
        await until(lambda: stage["slow"].version == 3)
        assert stage["slow"].applied[-1] == (1, 3)
        await until(lambda: stage.group.load().servers == 2)
        stage["fast"].give(8)
        for task in tasks:
            await answer(task)


async def test_a_version_that_all_refuse_is_refused_and_the_old_one_goes_on():
    async with Stage("a", "b") as stage:
        await stage.group.apply(version(1))
        for name in ("a", "b"):
            stage[name].refuse = WeightsError("unknown names")
        with pytest.raises(WeightsError, match="unknown names"):
            await stage.group.apply(version(2))
        assert stage.group.load().servers == 2
        task = stage.ask()
        await until(stage.where)
        stage[stage.where()].give(8)
        assert (await answer(task)).runs == [(0, 1)]
        with pytest.raises(WeightsError, match="older"):
            await stage.group.apply(version(1, epoch=0))


async def test_a_server_that_alone_refuses_is_tried_again_and_then_started_anew(monkeypatch):
    monkeypatch.setattr("streamrl.producers.group.pool._REFUSED_PAUSE", 0.001)
    async with Stage("good", "bad") as stage:
        await stage.group.apply(version(1))
        stage["bad"].refuse = WeightsError("a broken copy")
        await stage.group.apply(version(2))
        await until(lambda: len(stage.lives["bad"]) == 2)
        await until(lambda: stage["bad"].version == 2)
        assert len(stage.lives["good"]) == 1


async def test_the_versions_of_one_response_never_go_back():
    """A response that has a token of version 2 waits for the server that still takes it."""
    async with Stage("a", "b") as stage:
        stage.group.follow(lambda apply: apply(version(2)))
        await stage.group.apply(version(2, epoch=0))
        task = stage.ask()
        await until(stage.where)
        first = stage.where()
        other = "b" if first == "a" else "a"
        gate = stage[other].slow = asyncio.Event()
        await stage.group.apply(version(2))
        second = stage.ask("late")
        await until(lambda: stage.where("late"))
        stage[first].flying["r"].spans = stage[first].flying["r"].spans.__class__(2)
        stage[first].give(2)
        stage[first].starting = None
        stage.prepare = lambda player: setattr(player, "starting", asyncio.Event())
        stage[first].die()
        await asyncio.sleep(0.02)
        assert stage.where("r") is None or stage[stage.where("r")].version == 2
        gate.set()
        player = await stage.on(other)
        assert player.version == 2
        await until(lambda: "late" in player.flying)
        player.give(8)
        done = await answer(task)
        await answer(second)
    numbers = [number for _, number in done.runs]
    assert numbers == sorted(numbers)


@pytest.mark.parametrize("affinity", ["g{g}", "g{g}/{k}"], ids=["samples", "samples with turns"])
async def test_one_group_of_samples_stays_on_one_server_and_others_spread(affinity):
    async with Stage("a", "b", sampling={"group_size": 4, "max_new_tokens": 8}) as stage:
        prompt = range(1, 33)
        tasks = [stage.ask(f"{g}.{k}", prompt, affinity=affinity.format(g=g, k=k)) for g in range(4) for k in range(4)]
        await until(lambda: len(stage["a"].flying) + len(stage["b"].flying) == 16)
        for g in range(4):
            assert len({stage.where(f"{g}.{k}") for k in range(4)}) == 1
        assert len(stage["a"].flying) == len(stage["b"].flying) == 8
        for name in ("a", "b"):
            stage[name].give(8)
        await asyncio.gather(*tasks)


def test_a_sample_with_turns_begins_where_its_group_is_and_stays_there():
    last = Affinities()
    last.set("g1/a", "one")
    last.set("g1/b", "two")
    assert [last.get(key) for key in ("g1/a", "g1/b", "g1/c", "g2/a", "/a", "")] == [
        "one",
        "two",
        "two",
        None,
        None,
        None,
    ]


async def test_affinity_gives_way_when_its_server_is_far_busier():
    async with Stage("a", "b") as stage:
        tasks = [stage.ask(f"r{at}", range(1, 33), affinity="same") for at in range(14)]
        await until(lambda: len(stage["a"].flying) + len(stage["b"].flying) == 14)
        assert min(len(stage["a"].flying), len(stage["b"].flying)) >= 4
        for name in ("a", "b"):
            stage[name].give(8)
        await asyncio.gather(*tasks)


async def test_requests_wait_here_and_go_to_the_first_server_with_room():
    async with Stage("a", engine={"slots": 2}) as stage:
        tasks = [stage.ask(f"r{at}", limit=1 + at) for at in range(4)]
        await until(lambda: len(stage["a"].flying) == 2)
        load = stage.group.load()
        assert (load.running, load.waiting, load.capacity, load.servers) == (2, 2, 2, 1)
        stage["a"].give(1)
        await answer(tasks[0])
        await until(lambda: set(stage["a"].flying) == {"r1", "r2"})
        stage["a"].give(4)
        await until(lambda: "r3" in stage["a"].flying)
        stage["a"].give(4)
        assert [len((await answer(task)).tokens) for task in tasks] == [1, 2, 3, 4]
        assert stage.group.load().tokens_sampled == 10
        assert stage.group.load().busy_seconds > 0


async def test_abort_reaches_those_that_wait_and_those_on_servers():
    async with Stage("a", engine={"slots": 1}) as stage:
        flying, waiting, late = stage.ask("flying"), stage.ask("waiting"), stage.ask("late")
        player = await stage.on("a", "flying")
        player.give(2)
        assert await stage.group.abort("waiting") == 1
        assert await stage.group.abort("unknown") == 0
        done = await answer(waiting)
        assert (done.finish, len(done.tokens), done.runs) == ("abort", 0, [])
        assert await stage.group.abort() == 2
        done = await answer(flying)
        assert (done.finish, done.tokens.tolist()) == ("abort", [103, 104])
        assert (await answer(late)).finish == "abort"


async def test_an_aborted_response_keeps_the_prefix_of_a_dead_server():
    async with Stage("a") as stage:
        stage.prepare = lambda player: setattr(player, "starting", asyncio.Event())
        task = stage.ask()
        player = await stage.on("a")
        player.give(3)
        player.die()
        await until(lambda: stage.group.load().waiting == 1)
        assert await stage.group.abort("r") == 1
        done = await answer(task)
        assert (done.finish, done.tokens.tolist(), done.runs) == ("abort", [103, 104, 105], [(0, 0)])


async def test_a_response_that_breaks_off_at_a_living_server_goes_on_and_not_for_ever():
    async with Stage("a") as stage:
        await stage.group.apply(version(1))
        task = stage.ask()
        player = await stage.on("a")
        player.give(2)
        await stage.group.apply(version(2))
        player.give(1)  # behind a boundary that nobody proves
        await player.abort("r")
        await until(lambda: len(player.asked) == 2 and "r" in player.flying)
        assert player.asked[1].tokens.tolist() == [1, 2, 3, 103, 104]
        player.give(6)
        done = await answer(task)
        assert (done.tokens.tolist(), done.finish) == (list(range(103, 111)), "length")
        assert done.runs == [(0, 1), (2, 2)]
        hopeless = stage.ask("h")
        for count in (3, 4, 5):
            await until(lambda count=count: len(player.asked) == count and "h" in player.flying)
            await player.abort("h")
        assert (await answer(hopeless)).finish == "abort"


async def test_ids_are_unique_while_in_flight_and_cancelling_frees_the_place():
    async with Stage("a", engine={"slots": 1}) as stage:
        task, waiting = stage.ask(), stage.ask("w")
        await stage.on("a")
        with pytest.raises(ValueError, match="in flight"):
            await stage.group.generate(Request("r", np.asarray([1], dtype=np.int32), 1))
        waiting.cancel()
        task.cancel()
        await asyncio.gather(task, waiting, return_exceptions=True)
        again = stage.ask()
        (await stage.on("a")).give(8)
        assert len((await answer(again)).tokens) == 8


async def test_close_aborts_all_and_what_comes_later_fails():
    async with Stage("a", engine={"slots": 1}) as stage:
        tasks = [stage.ask("r"), stage.ask("w")]
        (await stage.on("a")).give(2)
        await stage.group.close()
        await stage.group.close()
        done = [await answer(task) for task in tasks]
        assert [(c.finish, len(c.tokens)) for c in done] == [("abort", 2), ("abort", 0)]
        with pytest.raises(Unreachable):
            await stage.ask("late")


async def test_concurrency_follows_what_each_server_shows():
    async with Stage("a", "b", engine={"slots": 32}) as stage:
        assert stage.group.load().capacity == 32  # 16 each at the beginning
        tasks = [stage.ask(f"r{at}") for at in range(70)]
        await until(lambda: stage.group.load().capacity == 64)  # both used in full, and quiet
        stage["a"].preemptions = 5
        await until(lambda: stage.group.rows()["a"]["limit"] == 24)
        assert stage.group.rows()["b"]["limit"] == 32
        assert stage.group.load().preemptions == 5
        stage["a"].die()
        await until(lambda: len(stage.lives["a"]) == 2)
        assert stage.group.load().preemptions == 5  # only grows, also over a restart
        await stage.group.abort()
        await asyncio.gather(*tasks)

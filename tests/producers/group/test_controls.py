"""Controls over a real small server: nobody passes while it stands still, and it always goes on."""

from __future__ import annotations

import asyncio

import pytest
from test_server import config, engine_on, engine_on_stepped, heard, request, version
from toy import Toy, make_dialect, until

from streamrl import http
from streamrl.errors import Refused, Unreachable, WeightsError
from streamrl.producers.group import server
from streamrl.producers.group.server import ServerDied


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(http, "_FIRST_PAUSE", 0.01)


def paths(toy, *wanted):
    return [path for path, _ in toy.bodies if path in wanted]


def held_at(toy, path):
    """Hold the next call of a path: the first event says that it has come, the second lets it go on."""
    come, go = asyncio.Event(), asyncio.Event()

    async def hold():
        come.set()
        await go.wait()

    toy.faults[path] = [hold]
    return come, go


async def test_one_response_under_two_versions_without_an_abort():
    toy = Toy()
    async with engine_on_stepped(toy) as engine:
        await engine.apply(version(1))
        task = asyncio.create_task(engine.generate(request("a")))
        await toy.started(1)
        await toy.step(2)
        await heard(engine, 2)
        await engine.apply(version(5))
        assert 0 < engine.pause_seconds < 5
        await toy.step(1)
        await heard(engine, 3)
        await engine.apply(version(7))
        await toy.step(3)
        done = await task
        assert done.finish == "length"
        assert done.runs == [(0, 1), (2, 5), (3, 7)]
        assert engine.load().version == 7
        order = ["/pause", "/update", "/resume"]
        assert paths(toy, "/pause", "/update", "/resume") == ["/resume", *order * 3]  # resumed once at connect


async def test_runs_are_observed_where_the_server_does_not_tell_them():
    toy = Toy()
    toy.tell_runs = False
    async with engine_on_stepped(toy) as engine:
        await engine.apply(version(1))
        task = asyncio.create_task(engine.generate(request("a")))
        await toy.started(1)
        await engine.apply(version(2))  # nothing heard before: all tokens are of 2
        await toy.step(2)
        await heard(engine, 2)
        await engine.apply(version(3))
        await engine.apply(version(4))  # nothing sampled by 3
        await toy.step(4)
        assert (await task).runs == [(0, 2), (2, 4)]


async def test_prefetch_while_generating_and_new_requests_wait_for_the_change_only():
    toy = Toy()
    async with engine_on_stepped(toy) as engine:
        fetching, go = held_at(toy, "/prefetch")
        changing, change = held_at(toy, "/update")
        applying = asyncio.create_task(engine.apply(version(1)))
        await fetching.wait()
        assert not toy.paused
        before = asyncio.create_task(engine.generate(request("before")))
        await toy.started(1)
        go.set()
        await changing.wait()
        assert toy.paused
        during = asyncio.create_task(engine.generate(request("during")))
        await asyncio.wait([during], timeout=0.05)
        assert len(toy.running) == 1
        assert (engine.load().running, engine.load().waiting) == (1, 1)
        change.set()
        await applying
        toy.free = True
        await toy.step()
        assert (await before).runs == (await during).runs == [(0, 1)]
        assert [body["salt"] for path, body in toy.bodies if path == "/generate"] == [0, 0, 1]


async def test_the_present_version_again_does_nothing_and_an_older_one_is_refused():
    toy = Toy()
    async with engine_on(toy) as engine:
        await engine.apply(version(4))
        await engine.apply(version(4))
        assert toy.calls["/update"] == 1
        for older in (version(3), version(3, epoch=2), version(9, epoch=0)):
            with pytest.raises(WeightsError, match="older"):
                await engine.apply(older)
        await engine.apply(version(5, epoch=2))


@pytest.mark.parametrize("fault", [400, 500, "junk"])
async def test_an_error_of_the_prefetch_leaves_the_old_weights_and_no_pause(fault):
    toy = Toy()
    async with engine_on(toy) as engine:
        await engine.apply(version(1))
        toy.faults["/prefetch"] = [fault]
        with pytest.raises(WeightsError, match="version 2"):
            await engine.apply(version(2))
        assert (toy.calls["/pause"], toy.calls["/update"]) == (1, 1)
        assert (await engine.generate(request("a"))).runs == [(0, 1)]
        await engine.apply(version(3))


async def test_an_update_that_is_refused_leaves_the_old_weights_and_the_server_goes_on():
    toy = Toy()
    async with engine_on(toy) as engine:
        await engine.apply(version(1))
        toy.faults["/update"] = [400]
        with pytest.raises(WeightsError, match="refuses version 2"):
            await engine.apply(version(2))
        assert not toy.paused
        assert (await engine.generate(request("a"))).runs == [(0, 1)]
        assert engine.load().version == 1


async def test_an_update_that_fails_is_sent_once_more_while_the_server_is_still_paused():
    toy = Toy()
    async with engine_on(toy) as engine:
        toy.faults["/update"] = [500]
        await engine.apply(version(1))
        assert paths(toy, "/prefetch", "/pause", "/update", "/resume")[1:] == [
            "/prefetch", "/pause", "/update", "/prefetch", "/update", "/resume",
        ]  # fmt: skip
        assert (await engine.generate(request("a"))).runs == [(0, 1)]


@pytest.mark.parametrize("again", [400, 500, "junk", "drop"])
async def test_an_update_that_fails_twice_is_the_end_and_torn_weights_are_never_resumed(again):
    toy = Toy()
    async with engine_on_stepped(toy) as engine:
        task = asyncio.create_task(engine.generate(request("a")))
        await toy.started(1)
        await toy.step(1)
        await heard(engine, 1)
        toy.faults["/update"] = [500, again]
        with pytest.raises(ServerDied, match="a mixture of two versions"):
            await engine.apply(version(1))
        with pytest.raises(ServerDied) as caught:
            await task
        assert caught.value.tokens == [1]
        assert toy.paused
    assert toy.paused
    assert toy.calls["/resume"] == 1  # at connect


@pytest.mark.parametrize("path", ["/prefetch", "/pause", "/update", "/resume"])
async def test_a_control_without_an_answer_is_the_death_of_the_server(path):
    toy = Toy()
    async with engine_on_stepped(toy, settings=config(weights={"deadline": 0.4})) as engine:
        toy.faults[path] = ["hang"] * 9
        task = asyncio.create_task(engine.generate(request("a")))
        await toy.started(1)
        with pytest.raises(ServerDied, match=rf"{path}: no answer"):
            await engine.apply(version(1))
        with pytest.raises(ServerDied):
            await task
        toy.faults[path] = []


async def test_an_update_ends_although_its_caller_left():
    toy = Toy()
    async with engine_on(toy) as engine:
        changing, change = held_at(toy, "/update")
        task = asyncio.create_task(engine.apply(version(1)))
        await changing.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()
        change.set()
        done = await engine.generate(request("a"))  # waits for the end of the change
        assert done.runs == [(0, 1)]


async def test_pause_holds_and_resume_goes_on():
    toy = Toy()
    async with engine_on_stepped(toy) as engine:
        first = asyncio.create_task(engine.generate(request("a")))
        await toy.started(1)
        await toy.step(1)
        await heard(engine, 1)
        await engine.pause()
        await engine.pause()
        assert paths(toy, "/pause") == ["/pause"]
        toy.free = True
        second = asyncio.create_task(engine.generate(request("b")))
        await engine.apply(version(2))  # no pause and no resume of its own
        await asyncio.wait([first, second], timeout=0.1)
        assert not first.done()
        assert not second.done()
        assert toy.paused
        await engine.health()  # 503 is what it should say
        await engine.resume()
        await engine.resume()
        assert paths(toy, "/resume") == ["/resume"] * 2
        assert (await first).runs == [(0, 0), (1, 2)]
        assert (await second).runs == [(0, 2)]


async def test_an_abort_while_paused_ends_all_and_what_comes_later_waits():
    toy = Toy()
    async with engine_on_stepped(toy, settings=config(engine={"slots": 2})) as engine:
        tasks = [asyncio.create_task(engine.generate(request(name))) for name in "abc"]
        await toy.started(2)
        await toy.step(1)
        await heard(engine, 2)
        await engine.pause()
        assert await engine.abort() == 3
        assert toy.paused
        await asyncio.wait(tasks)
        assert [(task.result().finish, task.result().tokens.size) for task in tasks] == [
            ("abort", 1), ("abort", 1), ("abort", 0),
        ]  # fmt: skip
        later = asyncio.create_task(engine.generate(request("later")))
        toy.free = True
        await asyncio.wait([later], timeout=0.05)
        assert not later.done()
        assert await engine.abort("later") == 1
        assert (await later).finish == "abort"
        await engine.resume()
        assert (await engine.generate(request("d"))).finish == "length"


async def test_sleep_and_wake():
    toy = Toy()
    async with engine_on_stepped(toy) as engine:
        task = asyncio.create_task(engine.generate(request("a")))
        await toy.started(1)
        with pytest.raises(Refused, match="requests are at the server"):
            await engine.sleep()
        toy.free = True
        await toy.step()
        await task
        await engine.wake()  # nothing to undo
        await engine.sleep(1)
        await engine.sleep(1)
        waiting = asyncio.create_task(engine.generate(request("b")))
        await engine.apply(version(2))  # wakes the weights for it, and lets them sleep again
        await engine.wake(["kv_cache"])
        await asyncio.wait([waiting], timeout=0.05)
        assert not waiting.done()
        await engine.wake()
        assert (await waiting).runs == [(0, 2)]
        told = [(path, body) for path, body in toy.bodies if path in {"/sleep", "/wake"}][1:]  # woken at connect
        assert [(path, body.get("tags") or body.get("level")) for path, body in told] == [
            ("/sleep", 1), ("/wake", ["weights"]), ("/sleep", 1), ("/wake", ["kv_cache"]), ("/wake", ["weights"]),
        ]  # fmt: skip


async def test_a_sleep_that_the_server_refuses():
    toy = Toy()
    async with engine_on(toy) as engine:
        toy.faults["/sleep"] = [500]
        with pytest.raises(Refused, match="cannot sleep at level 1"):
            await engine.sleep()
        assert (await engine.generate(request("a"))).finish == "length"


async def test_a_server_that_was_paused_stays_paused_after_its_sleep():
    toy = Toy()
    async with engine_on(toy) as engine:
        await engine.pause()
        await engine.sleep(0)
        await engine.wake()
        told = paths(toy, "/pause", "/sleep", "/wake", "/resume")
        assert told == ["/wake", "/resume", "/pause", "/sleep", "/wake", "/pause"]  # the first two at connect
        task = asyncio.create_task(engine.generate(request("a")))
        await asyncio.wait([task], timeout=0.05)
        assert not task.done()
        await engine.resume()
        assert (await task).finish == "length"


async def test_closing_a_paused_server_lets_it_go_on():
    toy = Toy()
    async with engine_on(toy) as engine:
        await engine.pause()
        await engine.close()
        assert not toy.paused


async def test_closing_waits_for_an_update_that_has_begun():
    toy = Toy()
    async with engine_on(toy) as engine:
        changing, change = held_at(toy, "/update")
        task = asyncio.create_task(engine.apply(version(1)))
        await changing.wait()
        closing = asyncio.create_task(engine.close())
        await asyncio.wait([closing], timeout=0.05)
        assert not closing.done()
        change.set()
        await closing
        await task
        assert (toy.version, toy.paused) == (1, False)


async def test_a_server_whose_weights_are_its_own_keeps_the_first_version(caplog):
    toy = Toy()
    toy.about["can_update"] = False
    async with engine_on(toy) as engine:
        for number in (3, 4, 5):
            await engine.apply(version(number))
        assert toy.calls["/update"] == toy.calls["/resume"] == 0
        assert (await engine.generate(request("a"))).runs[0][1] == 0  # as the toy itself says
        toy.tell_runs = False
        assert (await engine.generate(request("a"))).runs == [(0, 3)]
    assert sum("stay as they are" in record.message for record in caplog.records) == 1
    assert sum("keeps its own weights" in record.message for record in caplog.records) == 1


async def test_a_dialect_that_fails_is_the_requests_error(monkeypatch):
    dialect = make_dialect()
    async with engine_on(Toy(), dialect=dialect) as engine:
        monkeypatch.setattr(dialect, "chunk", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            await engine.generate(request("a"))
        await engine.health()


async def test_a_task_of_the_engine_that_fails_is_its_death(monkeypatch):
    monkeypatch.setattr(server, "_POLL_SECONDS", 0.01)
    dialect = make_dialect()
    async with engine_on(Toy(), dialect=dialect) as engine:
        monkeypatch.setattr(dialect, "read_metrics", lambda _: 1 / 0)
        await until(lambda: engine.dead)
        with pytest.raises(Unreachable, match="engine-poll failed"):
            await engine.health()

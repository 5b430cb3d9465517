"""The controls of one server, over a real small one: what is sent in which order, and what a failure leaves."""

from __future__ import annotations

import asyncio

import pytest
from toy import Toy
from toy_kit import ask, bodies, control_on, held_at, paths, version

from streamrl.errors import ConfigError, NotFetched, Unreachable, WeightsError
from streamrl.servers.dialect import BUSY, NOT_FETCHED

pytestmark = pytest.mark.usefixtures("short_pauses")
UPDATE = ["/prefetch", "/pause", "/update", "/finish", "/resume"]
SWITCH = ["/sleep", "/wake", *UPDATE]


async def test_one_response_under_three_versions(tmp_path):
    toy = Toy(free=False)
    async with control_on(toy, tmp_path / "adapters") as controlled:
        control = controlled.control
        await control.apply(version(1))
        task = ask(controlled)
        await toy.started(1)
        await toy.step(2)
        await control.apply(version(5))
        assert 0 < control.pause_seconds < 5
        await toy.step(1)
        await control.apply(version(7))
        await toy.step(3)
        assert (await task).runs == [(0, 1), (2, 5), (3, 7)]
        assert paths(toy, *UPDATE) == UPDATE * 3
        assert (control.pair, control.step, control.held) == ((1, 7), 7, False)
        assert controlled.announced == [(1, False), (5, False), (7, False)]


async def test_the_server_generates_while_it_fetches_and_stands_still_for_the_change_only(tmp_path):
    toy = Toy()
    async with control_on(toy, tmp_path / "adapters") as controlled:
        control = controlled.control
        fetching, go = held_at(toy, "/prefetch")
        changing, change = held_at(toy, "/update")
        applying = asyncio.create_task(control.apply(version(1)))
        await fetching.wait()
        assert not toy.paused
        assert not control.held
        assert (await ask(controlled)).runs == [(0, 0)]
        go.set()
        await changing.wait()
        assert toy.paused
        assert control.held
        assert not control.blocked, "requests are sent all the same: it is short"
        during = ask(controlled, "during")
        await toy.started(1)
        waiting = asyncio.create_task(control.idle())
        await asyncio.wait([waiting], timeout=0.05)
        assert not waiting.done()
        change.set()
        await waiting
        assert (await during).runs == [(0, 1)]
        await applying


async def test_a_server_that_fetches_is_asked_again_and_generates_meanwhile(tmp_path):
    toy = Toy()
    async with control_on(toy, tmp_path / "adapters", seconds=1) as controlled:
        control = controlled.control
        toy.fetch = [BUSY, BUSY]
        await control.apply(version(1))
        assert paths(toy, *UPDATE) == ["/prefetch", "/prefetch", *UPDATE]
        toy.fetch = [BUSY, f"rank 1: {NOT_FETCHED}no room"]
        with pytest.raises(NotFetched, match="no room"):
            await control.apply(version(2))
        toy.fetch = [BUSY, "no layers.7"]
        with pytest.raises(WeightsError, match="refuses version 2: no layers"):
            await control.apply(version(2))
        toy.fetch = [BUSY, BUSY]
        with pytest.raises(NotFetched, match="before a newer learner published"):
            await control.apply(version(2), lambda: not toy.fetch)
        toy.fetch = [BUSY] * 1000
        with pytest.raises(NotFetched, match="within 1 s"):
            await control.apply(version(2))
        assert (toy.calls["/pause"], control.held, control.pair) == (1, False, (1, 1))


@pytest.mark.parametrize(("path", "fault"), [("/prefetch", 400), ("/prefetch", 500), ("/update", 400)])
async def test_a_version_that_is_refused_leaves_the_one_before(tmp_path, path, fault):
    toy = Toy()
    async with control_on(toy, tmp_path / "adapters") as controlled:
        control = controlled.control
        await control.apply(version(1))
        toy.faults[path] = [fault]
        with pytest.raises(WeightsError, match="refuses version 2"):
            await control.apply(version(2))
        assert toy.calls["/pause"] == (1 if path == "/prefetch" else 2)
        assert (toy.paused, control.held, control.pair) == (False, False, (1, 1))
        assert (await ask(controlled)).runs == [(0, 1)]
        await control.apply(version(3))
        assert controlled.announced == [(1, False), (3, False)]


@pytest.mark.parametrize(
    ("path", "fault"),
    [("/update", 500), ("/update", "junk"), ("/update", "drop"), ("/finish", 400), ("/finish", 500)],
)
async def test_a_server_whose_update_fails_in_the_midst_is_lost_and_never_resumed(tmp_path, path, fault):
    toy = Toy()
    async with control_on(toy, tmp_path / "adapters", attached=True) as controlled:
        control = controlled.control
        await control.apply(version(1))
        toy.faults[path] = [fault]
        with pytest.raises(Unreachable):
            await control.apply(version(2))
        assert control.pair == (1, 1)
    assert toy.paused
    assert toy.calls["/resume"] == 1
    assert controlled.watchdog._process.returncode == 0, "it leaves the server alone too"


@pytest.mark.parametrize("path", UPDATE)
async def test_a_call_without_an_answer_is_the_end(tmp_path, path):
    toy = Toy()
    async with control_on(toy, tmp_path / "adapters", seconds=0.4) as controlled:
        toy.faults[path] = ["hang"] * 9
        with pytest.raises(Unreachable, match=rf"{path}: no answer"):
            await controlled.control.apply(version(1))


async def test_a_server_asleep_gets_its_version_between_its_weights_and_its_cache(tmp_path):
    toy = Toy(free=False)
    async with control_on(toy, tmp_path / "adapters") as controlled:
        control = controlled.control
        await control.apply(version(1))
        task = ask(controlled)
        await toy.started(1)
        await toy.step(2)
        await control.sleep()
        assert (control.blocked, control.held) == (True, True)
        applying = asyncio.create_task(control.apply(version(2)))
        await asyncio.wait([applying], timeout=0.05)
        assert not applying.done()
        assert toy.calls["/prefetch"] == 1, "there is no room for them yet"
        await control.wake()
        await applying
        assert paths(toy, *SWITCH)[5:] == ["/sleep", "/wake", "/prefetch", "/update", "/finish", "/wake", "/resume"]
        assert [body["tags"] for body in bodies(toy, "/wake")] == [["weights"], ["kv_cache"]]
        assert controlled.announced == [(1, False), (1, True), (2, True), (2, False)]
        toy.free = True
        await toy.step()
        assert (await task).runs == [(0, 1), (2, 2)]
        assert toy.calls["/generate"] == 1


async def test_others_know_that_it_sleeps_before_it_does(tmp_path):
    toy = Toy()
    async with control_on(toy, tmp_path / "adapters") as controlled:
        asleep, go = held_at(toy, "/sleep")
        sleeping = asyncio.create_task(controlled.control.sleep())
        await asleep.wait()
        assert controlled.announced == [(0, True)]
        go.set()
        await sleeping
        await controlled.control.wake()
        assert paths(toy, *SWITCH) == ["/sleep", "/wake", "/resume"]


async def test_a_version_that_is_refused_while_it_wakes_does_not_keep_it_asleep(tmp_path):
    toy = Toy()
    async with control_on(toy, tmp_path / "adapters") as controlled:
        control = controlled.control
        await control.sleep()
        applying = asyncio.create_task(control.apply(version(2)))
        await asyncio.wait([applying], timeout=0.05)
        toy.faults["/update"] = [400]
        await control.wake()
        with pytest.raises(WeightsError):
            await applying
        assert (toy.paused, control.held) == (False, False)


@pytest.mark.parametrize("attached", [True, False])
async def test_the_end_wakes_and_resumes_a_server_that_goes_on_without_us(tmp_path, attached):
    toy = Toy()
    async with control_on(toy, tmp_path / "adapters", attached=attached) as controlled:
        await controlled.control.sleep()
    assert paths(toy, *SWITCH) == (["/sleep", "/wake", "/resume"] if attached else ["/sleep"])
    assert toy.paused != attached


@pytest.mark.parametrize(("path", "resumed"), [("/prefetch", 0), ("/pause", 1), ("/update", 0)])
async def test_an_update_that_is_cancelled(tmp_path, path, resumed):
    """A server that may be paused goes on, one that may have weights of two versions does not."""
    toy = Toy()
    async with control_on(toy, tmp_path / "adapters", attached=True) as controlled:
        come, _ = held_at(toy, path)
        task = asyncio.create_task(controlled.control.apply(version(1)))
        await come.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()
        assert controlled.control.pair == (0, 0)
    assert toy.calls["/resume"] == resumed
    assert toy.paused == (path == "/update")


async def test_a_server_whose_weights_are_its_own_keeps_the_first_version(tmp_path):
    toy = Toy()
    async with control_on(toy, tmp_path / "adapters") as controlled:
        for number in (3, 4, 5):
            await controlled.control.keep(version(number))
        assert controlled.control.pair == (1, 3)
        assert controlled.announced == [(3, False)]
        assert not toy.bodies


async def test_a_server_whose_weights_somebody_else_changed(tmp_path):
    toy = Toy()
    async with control_on(toy, tmp_path / "adapters", attached=True) as controlled:
        await controlled.control.apply(version(1))
        await controlled.control.apply(version(2))
        toy.label = "7.of-another-run"
        with pytest.raises(ConfigError, match="somebody else changes the weights") as caught:
            await controlled.control.apply(version(3))
        assert "engine.url" in caught.value.hint
        assert toy.version == 2

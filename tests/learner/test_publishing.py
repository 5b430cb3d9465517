"""Versions that could not be written: what a waiting learner does, and when it gives up."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from types import SimpleNamespace

import pytest

from streamrl.errors import CannotCreate, DeadlineExceeded
from streamrl.learner.publishing import Publishing
from streamrl.learner.weight_copy import PolicySnapshot

MANIFEST = SimpleNamespace(total_bytes=10, kind="full")


class Outlet:
    """Takes the manifest of a version, as the server of the weights does."""

    def __init__(self) -> None:
        self.announced = 0
        self.broken = False

    def store(self, manifest) -> None:
        if self.broken:
            raise CannotCreate("the store does not answer")

    def sources(self) -> list[str]:
        return []

    lane = None

    def announce(self, manifest) -> None:
        assert manifest is MANIFEST
        self.announced += 1


class Buffer:
    """Takes a version and the bytes of its manifest, as the buffer of the learner does."""

    def __init__(self) -> None:
        self.shown: list[int] = []

    async def announce(self, version, manifest) -> None:
        assert manifest == b"%d" % version
        self.shown.append(version)


class Shelf:
    """A publisher; `full` refuses every version, `slow` one."""

    manifest = MANIFEST
    density = None

    def __init__(self) -> None:
        self.full = False
        self.slow = self.anew = 0
        self.outlet, self.buffer = Outlet(), Buffer()

    def publish(self, *, version, **_) -> bytes:
        if self.full:
            raise CannotCreate("no room")
        if version == self.slow:
            time.sleep(0.6)  # the fault: it takes longer than its deadline
            raise DeadlineExceeded("not written in time")
        return b"%d" % version

    def force_full_next(self) -> None:
        self.anew += 1

    def holds_newest(self) -> bool:
        return True

    def close(self, **_) -> None:
        pass


async def publish(publishing, *versions) -> None:
    for version, step in versions:
        await publishing.start(version, step, PolicySnapshot([]))
        await publishing.settle()


@pytest.fixture
def make(tmp_path):
    def publishing(shelf, tasks, deadline=60.0):
        return Publishing(shelf, shelf.outlet, tmp_path, shelf.buffer, epoch=1, deadline=deadline, tasks=tasks)

    return publishing


async def test_an_older_version_is_not_repeated_for_one_that_could_not_be_written(make):
    """Engines would go on with it, and with a small staleness limit all they generate would be dropped, for ever."""
    shelf = Shelf()
    async with asyncio.TaskGroup() as tasks:
        publishing = make(shelf, tasks)
        await publish(publishing, (1, 0))
        assert await publishing.repeat()
        shelf.full = True
        await publish(publishing, (2, 1))
        assert not await publishing.repeat()
        await publish(publishing, (3, 1), (4, 1), (5, 1), (6, 1))  # a waiting learner tries the same weights again
        shelf.full = False
        await publish(publishing, (7, 1))
        assert await publishing.repeat()
    assert (publishing.version, shelf.buffer.shown) == (7, [1, 1, 7, 7])
    assert shelf.outlet.announced == 2
    assert publishing.record["published"] == 7
    publishing.close()


async def test_one_slow_version_is_left_out(make):
    """Its writing has taken the whole deadline when it is given up; that alone is no reason to leave."""
    shelf = Shelf()
    shelf.slow = 2
    async with asyncio.TaskGroup() as tasks:
        publishing = make(shelf, tasks, deadline=0.5)
        await publish(publishing, (1, 0), (2, 1), (3, 2))
    assert shelf.buffer.shown == [1, 3]
    publishing.close()


async def test_a_version_that_is_not_in_the_store_is_left_out_and_nothing_builds_on_it(make):
    shelf = Shelf()
    async with asyncio.TaskGroup() as tasks:
        publishing = make(shelf, tasks)
        await publish(publishing, (1, 0))
        shelf.outlet.broken = True
        await publish(publishing, (2, 1))
        shelf.outlet.broken = False
        await publish(publishing, (3, 2))
    assert (shelf.buffer.shown, shelf.outlet.announced, shelf.anew) == ([1, 3], 2, 1)
    publishing.close()


async def test_a_write_that_never_returns_ends_the_learner(make):
    shelf, release = Shelf(), threading.Event()
    shelf.publish = lambda **_: release.wait(60)
    try:
        with pytest.raises(ExceptionGroup) as caught:
            async with asyncio.TaskGroup() as tasks:
                publishing = make(shelf, tasks, deadline=0.01)
                await publish(publishing, (1, 0))
                await asyncio.Event().wait()
        assert caught.group_contains(DeadlineExceeded, match="does not end")
        publishing.close()
    finally:
        release.set()


@pytest.mark.parametrize(("deadline", "steps"), [(60.0, [1, 1, 2, 3]), (0.2, itertools.repeat(1))])
async def test_it_gives_up_after_three_steps_or_the_deadline(make, deadline, steps):
    shelf = Shelf()
    shelf.full = True
    tried = []
    with pytest.raises(ExceptionGroup) as caught:
        async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
            publishing = make(shelf, tasks, deadline)
            for version, step in enumerate(steps, 1):
                tried.append(step)
                await publish(publishing, (version, step))
    assert caught.group_contains(CannotCreate)
    assert len(tried) > 1
    assert deadline < 1 or tried == [1, 1, 2, 3]

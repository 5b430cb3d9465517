"""The line in front of the slots of a reward."""

import asyncio

import pytest

from streamrl.consumers import limits as module
from streamrl.consumers.limits import Slots


async def waiting(slots, order, name):
    await slots.acquire(60.0)
    order.append(name)


async def test_places_are_given_in_the_order_of_coming_and_a_cancelled_one_leaves_the_line():
    slots, order = Slots(lambda: 1), []
    await slots.acquire(60.0)
    tasks = []
    for name in range(5):
        tasks.append(asyncio.create_task(waiting(slots, order, name)))
        await asyncio.sleep(0)
    tasks[0].cancel()
    tasks[2].cancel()
    await asyncio.gather(tasks[0], tasks[2], return_exceptions=True)
    for name in (1, 3, 4):
        slots.release()
        await tasks[name]
    assert order == [1, 3, 4]


async def test_no_place_in_time_leaves_the_line():
    slots = Slots(lambda: 1)
    await slots.acquire(60.0)
    with pytest.raises(TimeoutError):
        await slots.acquire(0.01)
    with pytest.raises(TimeoutError):
        await slots.acquire(-1.0)
    slots.release()
    await slots.acquire(-1.0)


async def test_more_and_fewer_places_while_some_are_taken(monkeypatch):
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.01)
    limit, order = 1, []
    slots = Slots(lambda: limit)
    await slots.acquire(60.0)
    tasks = [asyncio.create_task(waiting(slots, order, name)) for name in range(4)]
    await asyncio.sleep(0)
    assert order == []
    limit = 3
    await asyncio.gather(*tasks[:2])
    assert order == [0, 1]
    limit = 1
    slots.release()
    slots.release()
    assert not tasks[2].done()
    slots.release()
    await tasks[2]
    assert order == [0, 1, 2]
    limit = None
    slots.release()
    await tasks[3]


async def test_a_place_that_came_to_one_who_was_cancelled_goes_to_the_next():
    slots, order = Slots(lambda: 1), []
    await slots.acquire(60.0)
    first = asyncio.create_task(waiting(slots, order, "first"))
    second = asyncio.create_task(waiting(slots, order, "second"))
    await asyncio.sleep(0)
    slots.release()
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    await second
    assert order == ["second"]

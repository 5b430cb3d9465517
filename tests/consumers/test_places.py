"""The line in front of the places of a reward."""

import asyncio

import pytest

from streamrl.consumers import limits as module
from streamrl.consumers.limits import Places


async def waiting(places, order, name):
    await places.take(60.0)
    order.append(name)


async def test_places_are_given_in_the_order_of_coming_and_a_cancelled_one_leaves_the_line():
    places, order = Places(lambda: 1), []
    await places.take(60.0)
    tasks = []
    for name in range(5):
        tasks.append(asyncio.create_task(waiting(places, order, name)))
        await asyncio.sleep(0)
    tasks[0].cancel()
    tasks[2].cancel()
    await asyncio.gather(tasks[0], tasks[2], return_exceptions=True)
    for name in (1, 3, 4):
        places.give()
        await tasks[name]
    assert order == [1, 3, 4]


async def test_no_place_in_time_leaves_the_line():
    places = Places(lambda: 1)
    await places.take(60.0)
    with pytest.raises(TimeoutError):
        await places.take(0.01)
    with pytest.raises(TimeoutError):
        await places.take(-1.0)
    places.give()
    await places.take(-1.0)


async def test_more_and_fewer_places_while_some_are_taken(monkeypatch):
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.01)
    limit, order = 1, []
    places = Places(lambda: limit)
    await places.take(60.0)
    tasks = [asyncio.create_task(waiting(places, order, name)) for name in range(4)]
    await asyncio.sleep(0)
    assert order == []
    limit = 3
    await asyncio.gather(*tasks[:2])
    assert order == [0, 1]
    limit = 1
    places.give()
    places.give()
    assert not tasks[2].done()
    places.give()
    await tasks[2]
    assert order == [0, 1, 2]
    limit = None
    places.give()
    await tasks[3]


async def test_a_place_that_came_to_one_who_was_cancelled_goes_to_the_next():
    places, order = Places(lambda: 1), []
    await places.take(60.0)
    first = asyncio.create_task(waiting(places, order, "first"))
    second = asyncio.create_task(waiting(places, order, "second"))
    await asyncio.sleep(0)
    places.give()
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    await second
    assert order == ["second"]

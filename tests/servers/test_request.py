"""One response of a real small server: what is read, what is refused, and what is lost."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import numpy as np
import pytest
from toy import Toy, make_dialect, serving
from toy_kit import LIMITS, request

from streamrl.errors import DataError, WireError
from streamrl.http import BadAnswer, HttpClient, Lost
from streamrl.servers import request as reading
from streamrl.servers.request import Response, read_response

pytestmark = pytest.mark.usefixtures("short_pauses")


@asynccontextmanager
async def asking(toy):
    """Ask the toy for responses."""
    dialect = make_dialect()
    async with serving(toy) as url:
        client = HttpClient(url)

        async def ask(name="a", *, version=0, adapter="", seconds=5.0):
            response = Response(request(name), LIMITS, version, adapter=adapter)
            return await read_response(client, dialect, response, seconds=seconds)

        try:
            yield ask
        finally:
            await client.close()


async def test_tokens_logprobs_and_runs():
    toy = Toy()
    toy.version = 3
    async with asking(toy) as ask:
        done = await ask()
        assert done.tokens.tolist() == [1, 2, 3, 4, 5, 6]
        assert (done.tokens.dtype, done.logprobs.dtype) == (np.int32, np.float32)
        np.testing.assert_allclose(done.logprobs, -0.53)
        assert (done.runs, done.finish) == ([(0, 3)], "length")
        assert (await ask(version=9, adapter="p@9")).runs == [(0, 9)], "the server knows no version of an adapter"
        toy.tell_runs = False
        assert (await ask(version=2)).runs == [(0, 2)]


@pytest.mark.parametrize("fault", ["nan", "outside"])
async def test_an_answer_that_cannot_be_true(fault):
    toy = Toy()
    async with asking(toy) as ask:
        toy.faults["/generate"] = [fault]
        with pytest.raises(WireError, match=r"request 'a'|JSON"):
            await ask()
        await toy.idle()
        assert (await ask()).finish == "length"


def test_a_response_without_a_token():
    with pytest.raises(WireError, match="without a token"):
        Response(request("a"), LIMITS, 1).completion("stop", None, 1.0)


@pytest.mark.parametrize("fault", ["die", "short", "drop"])
async def test_a_response_that_breaks_off_is_lost_and_never_sent_twice(fault):
    toy = Toy()
    async with asking(toy) as ask:
        toy.faults["/generate"] = [fault]
        with pytest.raises(Lost):
            await ask()
        assert toy.calls["/generate"] == 1


async def test_a_response_that_the_server_aborts_is_lost():
    toy = Toy(free=False)
    async with asking(toy) as ask:
        task = asyncio.create_task(ask())
        await toy.started(1)
        await toy.step(2)
        for one in toy.running.values():
            one["abort"] = True
        await toy.step(1)
        with pytest.raises(Lost, match="gave up a response"):
            await task


async def test_what_was_cached_may_be_told_after_the_last_token(monkeypatch):
    monkeypatch.setattr(reading, "_TAIL_SECONDS", 0.05)
    toy = Toy()
    async with asking(toy) as ask:
        toy.cached, toy.faults["/generate"] = 2, ["late"]
        untold = await ask()
        assert (untold.finish, untold.cached_tokens) == ("length", 0), "the response does without it"
        told = await ask()
        assert (told.tokens.tolist(), told.cached_tokens) == (untold.tokens.tolist(), 2)
        toy.cached = 99
        assert (await ask()).cached_tokens == 3, "no more than the prompt"


async def test_cancelling_closes_the_connection():
    toy = Toy(free=False)
    async with asking(toy) as ask:
        task = asyncio.create_task(ask())
        await toy.started(1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()
        await toy.idle()


async def test_a_server_that_refuses_the_request_or_fails_at_it():
    toy = Toy()
    async with asking(toy) as ask:
        toy.faults["/generate"] = [400, 500, 503, 503]
        with pytest.raises(DataError, match="fault 400"):
            await ask()
        with pytest.raises(BadAnswer, match="fault 500"):
            await ask()
        assert (await ask()).finish == "length"
        toy.faults["/generate"] = [503] * 999
        with pytest.raises(BadAnswer, match="fault 503"):
            await ask(seconds=0.2)

"""How a judge divides its time and its places."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from streamrl.consumers.models.verdicts import Unreadable
from tests.consumers.judge.chat_server import chats, choice
from tests.consumers.judge.test_judge import opened
from tests.consumers.samples import seen


async def test_there_is_no_further_try_in_less_time_than_the_last_one_took():
    asked = []

    async def ask(path, body, read, *, deadline, tokens):
        asked.append(deadline)
        await asyncio.sleep(0.2)
        return read({"choices": [choice("I cannot say.")]})

    async with chats(lambda _: ["Score: 4"]) as (one,), opened([one.url], tries=5) as judge:
        judge._model = SimpleNamespace(config=judge._model.config, ask=ask)
        judge._limit = 0.3
        with pytest.raises(Unreadable, match="0 of 1 votes"):
            await judge.score(seen("Four."))
        assert len(asked) == 1


@pytest.mark.parametrize(("separate", "room"), [(False, 12), (True, 4)])
async def test_as_many_samples_as_the_servers_have_places_for_their_votes(separate, room):
    async with (
        chats(lambda body: ["Score: 4"] * body.get("n", 1)) as (one,),
        opened([one.url], model={"concurrency": 12}, votes=3, separate=separate) as judge,
    ):
        assert judge.slots() == room

"""What rank 0 tells the other ranks: whole orders, and a word before they give up."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace

import pytest

from streamrl.config import RunConfig
from streamrl.errors import Refused
from streamrl.learner import leader
from streamrl.learner.rank_group import Command, RankGroup, TorchThread


class Line:
    """Stands for the collectives of rank 0; `hold` keeps a broadcast from returning."""

    def __init__(self) -> None:
        self.said: list[object] = []
        self.entered, self.hold = threading.Event(), threading.Event()
        self.hold.set()

    def broadcast_ints(self, numbers) -> None:
        self.said.append(list(numbers))
        self.entered.set()
        assert self.hold.wait(20)


class Worker:
    checkpoints = None
    """Says on the same line what it is to do."""

    def __init__(self, line) -> None:
        self.ranks = line
        self.checkpoints = None

    def execute(self, command, arguments, shares) -> None:
        if command in {Command.TRAIN, Command.APPLY}:
            self.ranks.said.append((command, *arguments, shares))


@pytest.fixture
def line():
    return Line()


@pytest.fixture
def group(line):
    torch = TorchThread()
    yield RankGroup(Worker(line), torch)
    torch.close()


async def test_an_order_that_is_cancelled_half_way_is_done_whole(group, line):
    """Else the other ranks sit in a collective until its deadline, and the word to leave never reaches them."""
    line.hold.clear()
    order = asyncio.create_task(group.order(Command.TRAIN, 7, 0, shares=["mine"]))
    await asyncio.to_thread(line.entered.wait, 20)
    order.cancel()
    with pytest.raises(asyncio.CancelledError):
        await order
    line.hold.set()
    await group.order(Command.STOP)
    assert line.said == [[Command.TRAIN, 7, 0], (Command.TRAIN, 7, 0, ["mine"]), [Command.STOP]]
    assert len(group.torch.take_busy()) == 1


async def test_an_order_that_is_cancelled_before_it_began_is_not_given(group, line):
    line.hold.clear()
    first = asyncio.create_task(group.order(Command.IDLE))
    await asyncio.to_thread(line.entered.wait, 20)
    second = asyncio.create_task(group.order(Command.APPLY, 1))
    await asyncio.sleep(0)
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    line.hold.set()
    await first
    await group.order(Command.STOP)
    assert line.said == [[Command.IDLE], [Command.STOP]]


async def test_silence_is_broken_whatever_rank_0_waits_for(group, line):
    talking = asyncio.create_task(group.keep_alive(0.04))
    async with asyncio.timeout(20):
        while len(line.said) < 3:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    talking.cancel()
    assert line.said[:3] == [[Command.IDLE]] * 3


async def test_the_other_ranks_hear_of_rank_0_while_it_reads_checkpoints(group, line, monkeypatch, tmp_path):
    """Else they give up over a large one, and so does every learner after this one."""

    async def read(*_, **__):
        assert await asyncio.to_thread(line.entered.wait, 20)
        raise Refused("there is none")

    monkeypatch.setattr(leader, "take_over", read)
    config = RunConfig.model_validate({"learner": {"collective_deadline": 0.04}})
    role = SimpleNamespace(config=config, run_dir=tmp_path, ledgers=SimpleNamespace(train=None))
    with pytest.raises(Refused):
        await leader._lead(role, group)
    assert line.said[0] == [Command.IDLE]

"""The table of faults of docs/guides/reward-models.md: what becomes of a sample when a reward model's server fails."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from streamrl.config import RunConfig
from streamrl.consumers import RewardContext
from streamrl.consumers.calls import ScoringFailed
from streamrl.consumers.models import open_models
from streamrl.consumers.models.rendering import Renderer
from streamrl.consumers.models.router import PoolServer, PoolServerState
from streamrl.consumers.opening import open_scorer
from streamrl.errors import RewardUnavailable
from tests.consumers.calls_kit import LEASE, lease_end
from tests.consumers.models.faulty_server import Act, FaultyServer, score_of, servers, serving
from tests.consumers.samples import seen
from tests.queues.ledger_kit import until

LATE, NOBODY, ERROR, NO_ANSWER, REFUSED = "Lost", "RewardUnavailable", "BadAnswer", "WireError", "BadRequest"
UNCLEAR = "UnclearScore"
FAULT, BUSY, RIGHT = "a fault", "busy", "right"
TABLE: dict[str, tuple[list[str], str, str]] = {
    "answers nothing within the deadline": (["hangs"], FAULT, LATE),
    "refuses the connection": (["gone"], FAULT, NOBODY),
    "closes the connection": (["closes"], FAULT, NOBODY),
    "breaks off in the middle of its answer": (["half"], FAULT, NOBODY),
    "answers 429 or 503": (["busy", "503"], BUSY, NOBODY),
    "answers 401, 403, 404, 405 or 501": (["401", "403", "404", "405", "501"], FAULT, NOBODY),
    "answers 500 or 502": (["500", "502"], FAULT, ERROR),
    "answers half a JSON, or a list": (["half json", "a list"], FAULT, NO_ANSWER),
    "answers NaN, infinity, null, text or true": (["nan", "huge number", "null", "text", "true"], FAULT, NO_ANSWER),
    "answers in another shape": (
        ["no data", "other data", "wrong shape", "no list", "empty list", "error in 200"],
        FAULT,
        NO_ANSWER,
    ),
    "answers with several numbers, and `label` does not say which": (["several"], FAULT, UNCLEAR),
    "answers more than `max_answer`": (["too long"], FAULT, NO_ANSWER),
    "answers 400, 409, 413, 415 or 422": (["400", "409", "413", "415", "422"], RIGHT, REFUSED),
}
CASES = [(act, to_router, end) for acts, to_router, end in TABLE.values() for act in acts]
SAMPLES = 6
PAGE = Path(__file__).parents[3] / "docs" / "guides" / "reward-models.md"


async def scored(
    *asked: FaultyServer,
    model: Path,
    deadline: float,
    samples: int,
    attempts: int = 2,
    hold: float = LEASE,
    begun: Callable[[], Awaitable[object]] | None = None,
) -> tuple[list[Any], str]:
    """What becomes of some samples, one after the other, and what the first server is to the router then.

    Args:
        asked: the servers.
        model: directory of the tokenizer.
        deadline: of an attempt.
        samples: number of them.
        attempts: of each.
        hold: seconds of its lease.
        begun: what happens once all servers work.
    """
    keys = {
        "name": "t",
        "rewards": [{"use": "reward_model", "args": {"model": "critic"}}],
        "reward_models": {"critic": {"url": [one.url for one in asked], "model": str(model), "max_answer": 100_000}},
        "reward_worker": {"deadline": deadline, "attempts": attempts, "backoff": 0.001},
    }
    config = RunConfig.model_validate(keys)
    found: list[Any] = []
    rows: list[PoolServer] = []
    async with open_models(config) as models, open_scorer(config, RewardContext(config, model, models)) as scorer:
        client = models["critic"]
        await until(lambda: [row.state for row in client.standings()] == [PoolServerState.SERVING] * len(asked))
        if begun is not None:
            await begun()
        for index in range(samples):
            try:
                found.append((await scorer.score(seen(f"It is {index}."), lease_end(hold))).value)
            except (ScoringFailed, RewardUnavailable) as error:
                found.append(error)
        rows = client.standings()
    assert all(row.in_flight == 0 for row in rows)
    if rows[0].failed:
        return found, FAULT
    return found, BUSY if rows[0].why else RIGHT


@functools.cache  # it would keep the loop from the samples of other servers
def ids_of(model: Path, count: int) -> list[list[int]]:
    renderer = Renderer(str(model))
    return [renderer.ids(seen(f"It is {index}.")) for index in range(count)]


def but_well_at_first(act: str, model: Path) -> Act:
    """Well for the question that is asked at the start: it is samples that this is about."""
    samples = ids_of(model, SAMPLES)
    return lambda ids: act if ids in samples else "well"


async def test_alone_a_server_that_fails_gives_no_score(tokenizer):
    """All at once: most of them go on until their deadline."""
    async with asyncio.TaskGroup() as tasks:
        for act, to_router, end in CASES:
            tasks.create_task(fails_alone(tokenizer, act, to_router, end), name=act)


async def fails_alone(model: Path, act: str, to_router: str, end: str) -> None:
    deadline, attempts = (4.0, 1) if end in {LATE, NOBODY} else (60.0, 2)
    hold = 1.5 * deadline if end == NOBODY else LEASE  # one attempt: the next one would end too late
    async with contextlib.AsyncExitStack() as stack:
        one = await stack.enter_async_context(serving(FaultyServer([but_well_at_first(act, model)])))
        leaves = stack.aclose if act == "gone" else None
        (failed,), was = await scored(
            one, model=model, deadline=deadline, samples=1, attempts=attempts, hold=hold, begun=leaves
        )
        asked = [ids for ids in one.asked if ids in ids_of(model, 1)]
    if end == NOBODY:
        assert isinstance(failed, RewardUnavailable), f"{act}: an absence is no failure"
    else:
        assert isinstance(failed, ScoringFailed), f"{act}: a failure is never a number"
        assert failed.message.startswith(end), act
    assert was == to_router, act
    if end == REFUSED:
        assert len(asked) == 1, act
    elif attempts == 2:
        assert len(asked) == 2, f"{act}: once in each attempt"


@pytest.mark.parametrize(("act", "to_router", "end"), CASES, ids=[act for act, _, _ in CASES])
async def test_beside_a_server_that_works_one_that_fails_costs_no_sample(tokenizer, act, to_router, end):
    """Unless it refuses the sample: then nobody else is asked."""
    deadline = 3.0 if end == LATE else 60.0  # two attempts: the one that hangs, and the one that goes elsewhere
    async with contextlib.AsyncExitStack() as stack:
        (good,) = await stack.enter_async_context(servers(["well"]))
        mortal = await stack.enter_async_context(contextlib.AsyncExitStack())
        bad = await mortal.enter_async_context(serving(FaultyServer([but_well_at_first(act, tokenizer)])))
        leaves = mortal.aclose if act == "gone" else None
        found, was = await scored(bad, good, model=tokenizer, deadline=deadline, samples=SAMPLES, begun=leaves)
    samples = ids_of(tokenizer, SAMPLES)
    asked = [ids for ids in bad.asked if ids in samples]
    assert was == to_router
    assert act == "gone" or asked, "it was asked, and failed"
    refused = asked if end == REFUSED else []
    assert [ids for ids in good.asked if ids in samples] == [ids for ids in samples if ids not in refused]
    for ids, end_of_sample in zip(samples, found, strict=True):
        if ids in refused:
            assert end_of_sample.message.startswith(end)
        else:
            assert end_of_sample == score_of(ids)


def row_of(fault: str, to_router: str, end: str) -> str:
    """The line of the page about a fault."""
    routers = {
        LATE: "a fault; none if it had less time than its answers usually take",
        REFUSED: "right: the request is refused",
    }
    router = routers.get(end, "busy: it rests" if to_router == BUSY else to_router)
    beside = {LATE: "the next attempt goes there", REFUSED: "`BadRequest`, nobody else is asked"}.get(end, "the score")
    more = {NOBODY: ", after going on until the deadline", REFUSED: ", no other attempt"}.get(end, "")
    return f"| {fault} | {router} | {beside} | `{end}`{more} |"


def test_the_table_of_the_documentation_is_this_one():
    lines = PAGE.read_text("utf-8").splitlines()
    head = "| a server | is to the router | beside a server that works | alone, the attempt ends with |"
    first = lines.index(head) + 2
    rows = list(itertools.takewhile(lambda line: line.startswith("|"), lines[first:]))
    assert rows == [row_of(fault, to_router, end) for fault, (_, to_router, end) in TABLE.items()]

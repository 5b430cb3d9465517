"""The table of faults in docs/rewards.md: what becomes of a sample when a server of a reward model fails like this."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from streamrl.config import RunConfig
from streamrl.consumers import RewardContext
from streamrl.consumers.models import open_models
from streamrl.consumers.models.rendering import Renderer
from streamrl.consumers.scoring import ScoringFailed, open_scorer
from tests.consumers.models.faulty_server import Act, FaultyServer, score_of, servers, serving
from tests.consumers.models.test_rendering import make_tokenizer
from tests.consumers.samples import seen

LATE, NOBODY, ERROR, NO_ANSWER, REFUSED = "Lost", "RewardUnavailable", "BadAnswer", "WireError", "BadRequest"
UNCLEAR = "UnclearScore"
TABLE: dict[str, tuple[list[str], str]] = {
    "answers nothing within the deadline": (["hangs"], LATE),
    "refuses the connection": (["gone"], NOBODY),
    "closes the connection": (["closes"], NOBODY),
    "breaks off in the middle of its answer": (["half"], NOBODY),
    "answers 429 or 503": (["busy", "503"], NOBODY),
    "answers 500 or 502": (["500", "502"], ERROR),
    "answers 401, 403, 404, 405 or 501": (["401", "403", "404", "405", "501"], NOBODY),
    "answers 400, 409, 413, 415 or 422": (["400", "409", "413", "415", "422"], REFUSED),
    "answers half a JSON, or a list": (["half json", "a list"], NO_ANSWER),
    "answers NaN, infinity, null, text or true": (["nan", "huge number", "null", "text", "true"], NO_ANSWER),
    "answers in another shape": (
        ["no data", "other data", "wrong shape", "no list", "empty list", "error in 200"],
        NO_ANSWER,
    ),
    "answers with several numbers, and `label` does not say which": (["several"], UNCLEAR),
    "answers more than `max_answer`": (["too long"], NO_ANSWER),
}
CASES = [(act, end) for acts, end in TABLE.values() for act in acts]
SAMPLES = 6
PAGE = Path(__file__).parents[3] / "docs" / "rewards.md"


async def scored(urls: list[str], model: Path, deadline: float, samples: int, attempts: int = 2) -> list[Any]:
    """What becomes of some samples, one after the other."""
    keys = {
        "name": "t",
        "rewards": [{"use": "reward_model", "args": {"model": "critic"}}],
        "reward_models": {"critic": {"url": urls, "model": str(model), "max_answer": 100_000}},
        "reward_worker": {"deadline": deadline, "attempts": attempts, "backoff": 0.001},
    }
    config = RunConfig.model_validate(keys)
    found: list[Any] = []
    async with open_models(config) as models, open_scorer(config, RewardContext(config, model, models)) as scorer:
        for index in range(samples):
            try:
                found.append((await scorer.score(seen(f"It is {index}."))).value)
            except ScoringFailed as error:
                found.append(error)
        assert all(row.in_flight == 0 for row in models["critic"].standings())
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_tokenizer(folder)
    return folder


def ids_of(model: Path, count: int) -> list[list[int]]:
    renderer = Renderer.load(str(model))
    return [renderer.ids(seen(f"It is {index}.")) for index in range(count)]


def but_well_at_first(act: str, model: Path) -> Act:
    """Well for the question that is asked at the start: it is samples that this is about."""
    samples = ids_of(model, SAMPLES)
    return lambda ids: act if ids in samples else "well"


async def gone() -> str:
    """The URL of a server that was there."""
    async with serving(FaultyServer()) as one:
        return one.url


async def test_alone_a_server_that_fails_gives_no_score(model):
    """All at once: most of them go on until their deadline."""
    async with asyncio.TaskGroup() as tasks:
        for act, end in CASES:
            tasks.create_task(fails_alone(model, act, end), name=act)


async def fails_alone(model: Path, act: str, end: str) -> None:
    deadline, attempts = (5.0, 1) if end in {LATE, NOBODY} else (60.0, 2)
    async with servers([but_well_at_first(act, model)]) as (one,):
        url = await gone() if act == "gone" else one.url
        (failed,) = await scored([url], model, deadline, 1, attempts)
        asked = [ids for ids in one.asked if ids in ids_of(model, 1)]
    assert isinstance(failed, ScoringFailed), f"{act}: a failure is never a number"
    assert failed.message.startswith(end), act
    if end == REFUSED:
        assert len(asked) == 1, act
    elif attempts == 2:
        assert len(asked) == 2, f"{act}: once in each attempt"


OTHERS = [(act, end) for act, end in CASES if end != REFUSED]


@pytest.mark.parametrize(("act", "end"), OTHERS, ids=[act for act, _ in OTHERS])
async def test_beside_a_server_that_works_one_that_fails_costs_no_sample(model, act, end):
    deadline = 3.0 if end == LATE else 60.0  # two attempts: the one that hangs, and the one that goes elsewhere
    async with servers([but_well_at_first(act, model)], ["well"]) as (bad, good):
        urls = [await gone() if act == "gone" else bad.url, good.url]
        assert await scored(urls, model, deadline, SAMPLES) == [score_of(ids) for ids in ids_of(model, SAMPLES)]
        assert len(good.asked) >= SAMPLES // 2
        assert act == "gone" or [ids for ids in bad.asked if ids in ids_of(model, SAMPLES)], "it was asked, and failed"


def test_the_table_of_the_documentation_is_this_one():
    rows = [line for line in PAGE.read_text("utf-8").splitlines() if line.startswith("| ")]
    first = rows.index("| a server | is to the router | beside a server that works | alone, the attempt ends with |")
    found = {}
    for row in rows[first + 1 : first + 1 + len(TABLE)]:
        fault, _, beside, alone = (cell.strip() for cell in row.strip("| ").split(" | "))
        found[fault] = (beside, alone.split("`")[1])
    others = {LATE: "the next attempt goes there", REFUSED: "`BadRequest`, nobody else is asked"}
    assert found == {fault: (others.get(end, "the score"), end) for fault, (_, end) in TABLE.items()}
    assert rows[first + 1 + len(TABLE)].count(" | ") != rows[first].count(" | "), "and no more of them"

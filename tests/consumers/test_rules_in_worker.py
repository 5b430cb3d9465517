"""Rules that work in processes, in a reward worker on a real Redis."""

import orjson
import psutil

from streamrl.queues import Role, open_ledgers
from streamrl.queues.keys import REWARD_FIGURES
from tests.consumers.rule_kit import TOWER
from tests.consumers.worker_kit import put, scores, until_closed, worker
from tests.queues.ledger_kit import until

MATH = {"use": "math", "args": {"seconds": 0.5, "processes": 1}}


def own_figures(role: Role) -> dict[str, int]:
    """What the rule counts itself. Which of its limits comes first depends on the processor."""
    own = orjson.loads(role.status.get(REWARD_FIGURES, "{}")).get("math", {}).get("own") or {}
    limits = own.pop("too_long", 0) + own.pop("too_large", 0)
    return own | {"ended by a limit": limits}


def runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def test_hostile_answers_are_zeros_that_are_counted_and_their_neighbours_are_scored(redis_run, make_config):
    config = make_config(MATH)
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    async with open_ledgers(config, redis_run.run_dir) as ledgers:
        await put(ledgers.train, 0, ["it is $42$", TOWER, "no idea", r"\boxed{\frac{84}{2}}", "41"], answer="42")
        async with worker(config, redis_run.run_dir, ledgers) as role:
            await until_closed(ledgers.train, [0])
            found, causes = await scores(ledgers.train, 0)
            await until(lambda: own_figures(role) == {"started": 2, "ended by a limit": 1, "lost": 0})
    assert not causes
    assert [found[number].value for number in range(5)] == [1.0, 0.0, 0.0, 1.0, 0.0]
    assert [found[number].parts["math/expensive"] for number in range(5)] == [0, 1, 0, 0, 0]
    assert [found[number].parts["math/unparsable"] for number in range(5)] == [0, 0, 1, 0, 0]
    left = {child.pid for child in psutil.Process().children(recursive=True)} - before
    assert not {pid for pid in left if runs(pid)}


async def test_an_answer_that_is_missing_or_no_use_kills_the_samples_at_once_and_names_the_line(redis_run, make_config):
    config = make_config(MATH, attempts=5, backoff=30)
    async with open_ledgers(config, redis_run.run_dir) as ledgers:
        await put(ledgers.train, 0, ["42", "41"], answer=None)
        await put(ledgers.train, 1, ["42", "41"], answer=TOWER)
        async with worker(config, redis_run.run_dir, ledgers) as role:
            await until(lambda: role.status.get("failed") == 4, 60)
        letters = [letter for letter in await ledgers.train.dead_letters() if letter.stage == "reward"]
    assert sorted((letter.group_id, letter.sample) for letter in letters) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    for letter in letters:
        assert ("line 7 of the data set has no answer", "is too expensive itself")[letter.group_id] in letter.why
        assert "attempts" not in letter.why

"""The rule `code` and functions of other systems through the reward worker."""

import pytest

from streamrl.queues import open_ledgers
from tests.consumers.worker_kit import put, put_whole, scores, until_closed, worker
from tests.queues.ledger_kit import faults, until
from tests.sandbox.sandboxes import keepers, need

FUNCTIONS = "tests.consumers.functions_for_tests"
TESTS = {"tests": [{"input": "1 2", "output": "3"}, {"input": "5 5", "output": "10"}]}
PROGRAMS = {
    "right": "print(sum(map(int, input().split())))",
    "half": "a, b = map(int, input().split()); print(3)",
    "endless": "while True: pass",
    "bomb": "import os\nwhile True: os.fork()",
    "loud": "while True: print('x' * 100_000)",
    "sleeps": "import time; time.sleep(600)",
}


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_hostile_programs_score_what_they_pass_and_hold_up_nobody(redis_run, make_config):
    need("auto")
    args = {"seconds": 1, "wall": 4, "total": 30}
    length = {"use": "length", "weight": 0, "args": {"most": 10}}
    config = make_config({"use": "code", "args": args}, length, deadline=1, attempts=1)
    texts = [f"```python\n{text}\n```" for text in PROGRAMS.values()]
    async with open_ledgers(config, redis_run.run_dir) as ledgers:
        await put(ledgers.train, 0, [*texts, "no program"], metadata=TESTS)
        await put(ledgers.train, 1, texts[:2])
        await put(ledgers.train, 2, texts[:2], metadata={"tests": ["add(1, 2) == 3"]})
        async with worker(config, redis_run.run_dir, ledgers):
            await until_closed(ledgers.train, [0], seconds=500)
        found, causes = await scores(ledgers.train, 0)
        assert not causes
        assert [found[number].value for number in range(7)] == [1.0, 0.5, 0, 0, 0, 0, 0]
        assert (found[2].parts["code/time"], found[4].parts["code/output"], found[6].parts["code/no_code"]) == (2, 2, 1)
        await until(lambda: not keepers())
        letters = [letter for letter in await ledgers.train.dead_letters() if letter.group_id == 1]
        assert any("metadata tests of line 7 is missing" in letter.why for letter in letters)
        unchecked = [letter for letter in await ledgers.train.dead_letters() if letter.group_id == 2]
        assert any("metadata tests of line 7 has code that executes no check" in letter.why for letter in unchecked)
        assert not await faults(ledgers.train)


async def test_functions_of_trl_and_verl_score_whole_groups(redis_run, make_config):
    metadata = {"difficulty": "hard", "index": 3}
    config = make_config(
        {"use": f"{FUNCTIONS}:best_of_group", "adapter": "trl", "name": "best", "group": True},
        {"use": f"{FUNCTIONS}:sometimes", "adapter": "trl", "name": "sometimes"},
        {"use": f"{FUNCTIONS}:detailed", "adapter": "verl", "name": "detailed"},
        {"use": f"{FUNCTIONS}:judged", "adapter": "verl", "name": "judged"},
    )
    async with open_ledgers(config, redis_run.run_dir) as ledgers:
        await put_whole(ledgers.train, 0, ["4", "skip", "5"], metadata=metadata)
        async with worker(config, redis_run.run_dir, ledgers):
            await until_closed(ledgers.train, [0])
        found, causes = await scores(ledgers.train, 0)
        assert not causes
        assert {number: score.value for number, score in found.items()} == {0: 4.0, 1: 0.0, 2: 1.0}
        assert found[0].parts["best/longest"] == 3.0
        assert found[1].parts["sometimes/skipped"] == 1.0
        assert found[2].parts["detailed/index"] == 3.0
        assert not await faults(ledgers.train)

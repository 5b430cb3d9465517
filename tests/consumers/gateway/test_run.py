"""The gateway in a reward worker on a real Redis, and real programs: node, and a shell with curl."""

import asyncio
import contextlib
import os
import re
import subprocess
from pathlib import Path

import aiohttp
import pytest

from streamrl.learner.ending import Finished, write_finished
from streamrl.queues import open_ledgers
from tests.consumers.gateway.kit import Program
from tests.consumers.worker_kit import Workers, put, scores, until_closed, values, worker
from tests.needs import need_programs
from tests.queues.ledger_kit import faults, until

RENEWALS = 4
"""A lease is renewed at every third of it: this is longer than one."""
PAGE = (Path(__file__).parents[3] / "docs" / "guides" / "gateway.md").read_text()


@pytest.fixture
def make_config(make_config):
    def make(*others, args=None, **keys):
        return make_config(*others, {"use": "gateway", "weight": 2.0, "args": args or {}}, gateway_port=0, **keys)

    return make


async def url_of(run_dir):
    """The URL of the gateway once it is open."""
    file = run_dir / "rewards" / "gateway" / "reward.0.url"
    await until(file.exists)
    return file.read_text().strip()


@contextlib.asynccontextmanager
async def a_program(run_dir):
    """A program that has found the gateway of the run."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=90)) as session:
        yield Program(await url_of(run_dir), session)


async def answered(program, count, **end):
    """The program ends so many samples in this way."""
    while count > 0:
        for given in await program.lease(8, wait=30):
            await program.post({"lease": given["lease"], **end})
            count -= 1


async def test_what_a_program_posts_is_one_part_of_the_scores_of_a_run(redis_run, make_config):
    config = make_config({"use": "exact_match"})
    async with open_ledgers(config, redis_run.run_dir) as ledgers:
        await put(ledgers.train, 0, ["4", "5", "6"])
        await put(ledgers.evaluation, 0, ["4"], evaluation=True)
        async with worker(config, redis_run.run_dir, ledgers), a_program(redis_run.run_dir) as program:
            seen = []
            while len(seen) < 4:
                for given in await program.lease(8, wait=30):
                    sample = given["sample"]
                    seen.append((sample["evaluation"], sample["group"], sample["index"]))
                    value = float(sample["response"] == sample["answer"])
                    await program.post({"lease": given["lease"], "value": value, "parts": {"length": 3}})
            await until_closed(ledgers.train, [0])
            await until_closed(ledgers.evaluation, [0])
        assert sorted(seen) == [(False, 0, 0), (False, 0, 1), (False, 0, 2), (True, 0, 0)]
        found, causes = await scores(ledgers.train, 0)
        assert {number: score.value for number, score in found.items()} == {0: 3.0, 1: 0.0, 2: 0.0}
        assert found[0].parts == {"exact_match": 1.0, "gateway": 1.0, "gateway/length": 3.0}
        assert not causes
        assert not await faults(ledgers.train)


async def test_a_failure_that_a_program_posts_ends_as_a_cause_and_never_as_a_zero(redis_run, make_config):
    config = make_config(attempts=2)
    async with open_ledgers(config, redis_run.run_dir) as ledgers:
        await put(ledgers.train, 0, ["4", "5", "bad", "worse"])
        async with worker(config, redis_run.run_dir, ledgers), a_program(redis_run.run_dir) as program:
            fates = []
            while len(fates) < 5:  # the bad one comes twice, the worse one must not be tried again
                for given in await program.lease(8, wait=30):
                    fates.append(given["sample"]["response"])
                    bad = {"error": "no parse", "detail": "line 3 of judge.js"}
                    ends = {"bad": bad, "worse": {**bad, "retry": False}}
                    end = ends.get(given["sample"]["response"], {"value": 1})
                    await program.post({"lease": given["lease"], **end})
            await until_closed(ledgers.train, [0])
        found, causes = await scores(ledgers.train, 0)
        assert set(found) == {0, 1}
        assert "the program says: no parse" in causes[2]
        assert "the program says: no parse" in causes[3]
        assert sorted(fates) == ["4", "5", "bad", "bad", "worse"]
        for letter in await ledgers.train.dead_letters():
            assert "line 3 of judge.js" in letter.detail


async def test_the_ledger_lease_is_held_while_a_program_takes_its_time(redis_run, make_config):
    config = make_config(lease_seconds=0.9)
    async with open_ledgers(config, redis_run.run_dir) as ledgers:
        await put(ledgers.train, 0, ["4"])
        async with worker(config, redis_run.run_dir, ledgers), a_program(redis_run.run_dir) as program:
            (given,) = await program.lease(1, wait=30, seconds=600)
            renewals, idle = 0, 0
            async with asyncio.timeout(60):
                while renewals < RENEWALS:
                    [row] = await ledgers.connection.read("XPENDING", ledgers.train.keys.rollouts, "g", "-", "+", 10)
                    assert row[3] == 1, "delivered once"
                    renewals, idle = renewals + (row[2] < idle), row[2]
                    await asyncio.sleep(0.02)
            answer = await program.post({"lease": given["lease"], "value": 1})
            assert answer["taken"] == [given["lease"]]
            await until_closed(ledgers.train, [0])
        assert not await faults(ledgers.train)


async def test_samples_wait_while_no_program_asks_and_none_of_them_dies(redis_run, make_config):
    config = make_config(args={"patience": 0.3}, on_failure="retry", attempts=1)
    async with open_ledgers(config, redis_run.run_dir) as ledgers:
        for cursor in range(3):
            await put(ledgers.train, cursor, ["4", "4"])
        async with worker(config, redis_run.run_dir, ledgers) as role, a_program(redis_run.run_dir) as program:
            await until(lambda: "no program has asked" in str(role.status.get("rewards")))
            await answered(program, 6, value=1)
            await until_closed(ledgers.train, [0, 1, 2])
        for cursor in range(3):
            assert await values(ledgers.train, cursor) == {0: 2.0, 1: 2.0}
        assert not await ledgers.train.dead_letters()


async def test_a_worker_that_is_killed_offers_its_samples_again_elsewhere(redis_run, make_config):
    config = make_config(lease_seconds=1.0)
    async with open_ledgers(config, redis_run.run_dir) as ledgers:
        await put(ledgers.train, 0, ["4", "5"])
        with Workers(config, redis_run.run_dir) as workers:
            workers.start()
            async with a_program(redis_run.run_dir) as program:
                taken = []
                while len(taken) < 2:
                    taken += await program.lease(2, wait=30, seconds=600)
                workers.kill()
                with pytest.raises(aiohttp.ClientConnectionError):
                    await program.post({"lease": taken[0]["lease"], "value": 1})
            (redis_run.run_dir / "rewards" / "gateway" / "reward.0.url").unlink()
            workers.start()
            async with a_program(redis_run.run_dir) as program:
                assert (await program.post({"lease": taken[0]["lease"], "value": 1}))["lost"] == [taken[0]["lease"]]
                await answered(program, 2, value=0.5)
                await until_closed(ledgers.train, [0])
            assert workers.end() == 0
        assert await values(ledgers.train, 0) == {0: 1.0, 1: 1.0}
        assert not await faults(ledgers.train)


def example(language, tmp_path):
    """The program that the page shows in this language."""
    blocks = re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    (code,) = [block for block in blocks if "ask" in block and "scores" in block]
    file = tmp_path / {"js": "score.mjs", "bash": "score.sh"}[language]
    file.write_text(code)
    return file


@contextlib.contextmanager
def running(command, stderr):
    """A process of a program; killed at the end."""
    with stderr.open("wb") as file:
        process = subprocess.Popen(command, env={**os.environ, "TOKEN": "a-long-random-word"}, stderr=file)
        try:
            yield process
        finally:
            process.kill()
            process.wait()


@pytest.mark.parametrize(
    ("language", "command", "needs"), [("js", "node", ["node"]), ("bash", "bash", ["bash", "curl", "jq"])]
)
async def test_the_programs_of_the_page_score_a_run(redis_run, make_config, tmp_path, language, command, needs):
    need_programs(*needs)
    token = tmp_path / "token"
    token.write_text("a-long-random-word")
    config = make_config(gateway_token_file=str(token) if language == "js" else None)
    stderr = tmp_path / "stderr"
    async with open_ledgers(config, redis_run.run_dir) as ledgers:
        for cursor in range(3):
            await put(ledgers.train, cursor, ["4", "5", "6", "4"])
        async with worker(config, redis_run.run_dir, ledgers):
            url = await url_of(redis_run.run_dir)
            with running([command, str(example(language, tmp_path)), url], stderr) as program:
                closed = asyncio.create_task(until_closed(ledgers.train, [0, 1, 2], 90))
                while not closed.done():
                    assert program.poll() is None, stderr.read_text()
                    await asyncio.wait([closed], timeout=0.2)
                closed.result()
        for cursor in range(3):
            assert await values(ledgers.train, cursor) == {0: 2.0, 1: 0.0, 2: 0.0, 3: 2.0}


async def test_the_loop_of_the_page_ends_after_the_run(tmp_path):
    (loop,) = [
        block for block in re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL) if "score.mjs" in block and "do " in block
    ]
    started, run_dir = tmp_path / "started", tmp_path / "runs" / "my-run"
    run_dir.mkdir(parents=True)
    program = f"node() {{ echo x >> {started}; return 1; }}\n"
    with running(["bash", "-c", f"cd {tmp_path}\n{program}{loop}"], tmp_path / "stderr") as process:
        await until(lambda: started.exists() and len(started.read_text()) > 2)
        assert process.poll() is None, "the program is started again"
        write_finished(run_dir, Finished(reason="steps", step=1, version=1, epoch=1))
        await until(lambda: process.poll() is not None)
        assert process.returncode == 0

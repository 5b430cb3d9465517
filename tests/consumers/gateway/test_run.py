"""The gateway in a reward worker on a real Redis, and real programs: node, and a shell with curl."""

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import aiohttp
import pytest

from streamrl import wire
from streamrl.config import RunConfig
from streamrl.consumers.worker import run_reward_worker
from streamrl.queues import Role, open_ledgers
from streamrl.runfile import LoadedConfig, save
from tests.consumers.gateway.kit import Program
from tests.consumers.samples import prompt, response
from tests.needs import need_programs
from tests.queues.ledger_kit import admit, faults, lease

RENEWALS = 4
"""A lease is renewed at every third of it: this is longer than one."""
PAGE = (Path(__file__).parents[3] / "docs" / "rewards.md").read_text()


@pytest.fixture
def make_config(redis_run):
    def make(*others, lease_seconds=15.0, args=None, **worker):
        return RunConfig.model_validate(
            {
                "name": "t",
                "redis": redis_run.config.model_dump(),
                "rewards": [*others, {"use": "gateway", "weight": 2.0, "args": args or {}}],
                "reward_worker": {"gateway_port": 0, "concurrency": 16, "backoff": 0.01, **worker},
                "lease": {"seconds": lease_seconds, "max_deliveries": 3},
            }
        )

    return make


async def put(ledger, cursor, texts, **fields):
    await admit(ledger, cursor, samples=len(texts), prompt=wire.encode(prompt(**fields)))
    (held,) = await lease(ledger, "prompts")
    for number, text in enumerate(texts):
        assert await ledger.emit(held, number, wire.encode(response(text)))


@contextlib.asynccontextmanager
async def worker(config, run_dir, ledgers, role=None):
    """A worker in this process; yields the URL of its gateway."""
    role = role or Role("reward.0", config, run_dir, ledgers)
    task = asyncio.create_task(run_reward_worker(role))
    try:
        yield await url_of(run_dir, task)
        role.stop.set()
        await asyncio.wait_for(task, 30)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        role.close()


async def url_of(run_dir, running=None):
    """The URL of the gateway once it is open."""
    file = run_dir / "rewards" / "gateway" / "reward.0.url"
    async with asyncio.timeout(60):
        while not file.exists():
            assert running is None or not running.done(), running.exception()
            await asyncio.sleep(0.01)
    return file.read_text().strip()


@contextlib.asynccontextmanager
async def a_program(url):
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=90)) as session:
        yield Program(url, session)


async def until_closed(ledger, gids, seconds=60):
    async with asyncio.timeout(seconds):
        while not set(gids) <= set(await ledger.closed()):
            await ledger.wait_closed(0.2)


async def scores(ledger, gid):
    group = await ledger.read_group(gid)
    return {number: wire.decode(score, wire.Score) for number, (_, score) in group.samples.items()}, group.causes


async def test_all_scores_of_a_run_come_from_a_program(redis_run, make_config):
    config = make_config()
    async with open_ledgers(config, redis_run.run_dir) as ledgers:
        await put(ledgers.train, 0, ["4", "5", "6"])
        await put(ledgers.evaluation, 0, ["4"], evaluation=True)
        async with worker(config, redis_run.run_dir, ledgers) as url, a_program(url) as program:
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
        assert {number: score.value for number, score in found.items()} == {0: 2.0, 1: 0.0, 2: 0.0}
        assert found[0].parts == {"gateway": 1.0, "gateway/length": 3.0}
        assert not causes
        assert not await faults(ledgers.train)


async def test_what_a_program_posts_is_one_part_among_others(redis_run, make_config):
    config = make_config({"use": "exact_match"})
    async with open_ledgers(config, redis_run.run_dir) as ledgers:
        await put(ledgers.train, 0, ["4", "5"])
        async with worker(config, redis_run.run_dir, ledgers) as url, a_program(url) as program:
            done = 0
            while done < 2:
                for given in await program.lease(8, wait=30):
                    await program.post({"lease": given["lease"], "value": 0.25})
                    done += 1
            await until_closed(ledgers.train, [0])
        found, _ = await scores(ledgers.train, 0)
        assert {number: score.value for number, score in found.items()} == {0: 1.5, 1: 0.5}
        assert found[0].parts == {"exact_match": 1.0, "gateway": 0.25}


async def test_a_failure_that_a_program_posts_ends_as_a_cause_and_never_as_a_zero(redis_run, make_config):
    config = make_config(attempts=2)
    async with open_ledgers(config, redis_run.run_dir) as ledgers:
        await put(ledgers.train, 0, ["4", "5", "bad", "worse"])
        async with worker(config, redis_run.run_dir, ledgers) as url, a_program(url) as program:
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
        async with worker(config, redis_run.run_dir, ledgers) as url, a_program(url) as program:
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
        role = Role("reward.0", config, redis_run.run_dir, ledgers)
        async with worker(config, redis_run.run_dir, ledgers, role) as url, a_program(url) as program:
            async with asyncio.timeout(60):
                while "no program has asked" not in str(role.status.get("rewards")):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            done = 0
            while done < 6:
                for given in await program.lease(8, wait=30):
                    await program.post({"lease": given["lease"], "value": 1})
                    done += 1
            await until_closed(ledgers.train, [0, 1, 2])
        for cursor in range(3):
            found, causes = await scores(ledgers.train, cursor)
            assert [score.value for score in found.values()] == [2.0, 2.0]
            assert not causes
        assert not await ledgers.train.dead_letters()


class Worker:
    """A reward worker as a process, to be killed."""

    def __init__(self, config, run_dir):
        save(LoadedConfig(config=config, origins={}), run_dir / "run.json")
        self.run_dir = run_dir

    def __enter__(self):
        environ = {name: value for name, value in os.environ.items() if not name.startswith("STREAMRL_")}
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "streamrl.runtime", "reward", "0", str(self.run_dir)],
            env=environ, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        return self

    def __exit__(self, *error):
        self.process.kill()
        self.process.wait()


async def test_a_worker_that_is_killed_offers_its_samples_again_elsewhere(redis_run, make_config):
    config = make_config(lease_seconds=1.0)
    async with open_ledgers(config, redis_run.run_dir) as ledgers:
        await put(ledgers.train, 0, ["4", "5"])
        with Worker(config, redis_run.run_dir) as killed:
            file = redis_run.run_dir / "rewards" / "gateway" / "reward.0.url"
            async with a_program(await url_of(redis_run.run_dir)) as program:
                taken = []
                while len(taken) < 2:
                    taken += await program.lease(2, wait=30, seconds=600)
                killed.process.send_signal(signal.SIGKILL)
                killed.process.wait()
                file.unlink()
                with pytest.raises(aiohttp.ClientConnectionError):
                    await program.post({"lease": taken[0]["lease"], "value": 1})
        with Worker(config, redis_run.run_dir) as second:
            async with a_program(await url_of(redis_run.run_dir)) as program:
                assert (await program.post({"lease": taken[0]["lease"], "value": 1}))["lost"] == [taken[0]["lease"]]
                done = 0
                while done < 2:
                    for given in await program.lease(2, wait=30):
                        await program.post({"lease": given["lease"], "value": 0.5})
                        done += 1
                await until_closed(ledgers.train, [0])
            second.process.terminate()
            assert second.process.wait(60) == 0
        found, causes = await scores(ledgers.train, 0)
        assert ({number: score.value for number, score in found.items()}, causes) == ({0: 1.0, 1: 1.0}, {})
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
        async with worker(config, redis_run.run_dir, ledgers) as url:
            with running([command, str(example(language, tmp_path)), url], stderr) as program:
                closed = asyncio.create_task(until_closed(ledgers.train, [0, 1, 2], 90))
                while not closed.done():
                    assert program.poll() is None, stderr.read_text()
                    await asyncio.wait([closed], timeout=0.2)
                closed.result()
        for cursor in range(3):
            found, causes = await scores(ledgers.train, cursor)
            assert {number: score.value for number, score in found.items()} == {0: 2.0, 1: 0.0, 2: 0.0, 3: 2.0}
            assert not causes

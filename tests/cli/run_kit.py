"""Run directories with a ledger in them, and ways to call the command line."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import orjson

from streamrl import wire
from streamrl.cli import run
from streamrl.config import RunConfig
from streamrl.queues import Ledger, embedded, open_ledgers
from streamrl.runfile import load, save
from tests.queues import ledger_kit

DOC = Path(__file__).parents[2] / "docs" / "reference" / "json.md"
NUMBER = (int, float)
UNHURRIED = "rewards=[{use: spread_reward:unhurried}]"
"""For runs of `tiny` that go on while a test waits for something else: else they take both cores for nothing."""


def make_run(run_dir: Path, *settings: str) -> RunConfig:
    """Write the run.json of a run named demo with its own Redis."""
    run_dir.mkdir(parents=True, exist_ok=True)
    loaded = load(None, ["name=demo", "learner.groups_per_step=4", "redis.fsync_period=0.001", *settings], {})
    save(loaded, run_dir / "run.json")
    return loaded.config


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    returncode: int
    stdout: str
    stderr: str


def _environment(env: dict[str, str] | None) -> dict[str, str]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("STREAMRL_", "NO_COLOR"))}
    return clean | {"COLUMNS": "100", "TERM": "xterm"} | (env or {})


def cli(*arguments: str, env: dict[str, str] | None = None, cwd: Path | None = None) -> Done:
    """One command in this process (not in a running event loop), with nothing of the tester's terminal."""
    out, err = io.StringIO(), io.StringIO()
    with (
        mock.patch.dict(os.environ, _environment(env), clear=True),
        contextlib.chdir(cwd or Path.cwd()),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        code = run(arguments)
    return Done(code, out.getvalue(), err.getvalue())


def process(*arguments: str, env: dict[str, str] | None = None, cwd: Path | None = None, seconds: float = 60) -> Done:
    """One command in a process of its own."""
    command = [sys.executable, "-m", "streamrl", *arguments]
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, env=_environment(env), cwd=cwd, timeout=seconds
    )
    return Done(done.returncode, done.stdout, done.stderr)


def data_of(output: str, schema: str) -> Any:
    """The data of one envelope; checks the envelope, and the data against the documentation."""
    answer = orjson.loads(output)
    assert set(answer) == {"schema", "at", "data"}
    assert answer["schema"] == schema
    assert answer["at"] > 1.6e9
    fits(answer["data"], documented(schema), schema)
    return answer["data"]


async def command(*arguments: str, env: dict[str, str] | None = None) -> Done:
    """As `cli`, beside what the test's event loop does."""
    return await asyncio.to_thread(cli, *arguments, env=env)


async def answered(schema: str, run_dir: Path, *arguments: str, code: int | None = None) -> Any:
    """The data of a command's envelope about a run; checks its exit code unless None."""
    done = await command(*arguments, "--run", str(run_dir), "--json")
    assert code in (done.returncode, None), done
    return data_of(done.stdout, schema)


def documented(schema: str) -> Any:
    """The shape that docs/reference/json.md gives for a schema."""
    match = re.search(rf"^### {re.escape(schema)}\n\n```json\n(.*?)```", DOC.read_text(), re.MULTILINE | re.DOTALL)
    assert match, f"{schema} is not documented"
    return orjson.loads(match.group(1))


def fits(value: Any, shape: Any, where: str) -> None:
    """Assert that a value has a documented shape; extra keys of objects are allowed only beside `*`."""
    if isinstance(shape, list):
        assert isinstance(value, list), where
        for index, item in enumerate(value):
            fits(item, shape[0], f"{where}[{index}]")
    elif isinstance(shape, dict):
        assert isinstance(value, dict), where
        missing = set(shape) - {"*"} - set(value)
        assert not missing, f"{where}: {missing}"
        for key, item in value.items():
            if key in shape or "*" in shape:
                fits(item, shape.get(key, shape.get("*")), f"{where}.{key}")
            else:
                assert schema_may_grow(where), f"{where}.{key} is not documented"
    else:
        kinds = {"string": str, "number": NUMBER, "boolean": bool, "object": dict, "null": type(None), "any": object}
        assert isinstance(value, tuple(kinds[kind] for kind in shape.split("|"))), f"{where} is {value!r}"


def schema_may_grow(where: str) -> bool:
    """Only live groups of `trace` have more fields than are in its shape (listed in words there)."""
    return where == "streamrl.trace/1"


async def admit(ledger: Ledger, group_id: int) -> None:
    prompt = wire.encode(
        wire.Prompt(tokens=wire.pack_int32([1, 2]), text=f"prompt {group_id}", answer="42", line=group_id)
    )
    await ledger_kit.admit(ledger, group_id, prompt=prompt, version=3)


def sample() -> bytes:
    return wire.encode(
        wire.Sample(
            tokens=wire.pack_int32([5, 6, 7]),
            logprobs=wire.pack_float32([-0.1, -0.2, -0.3]),
            runs=[(0, 3), (2, 4)],
            finish="stop",
            text="fourty\x1b[31m two",
        )
    )


async def fill(config: RunConfig, run_dir: Path) -> None:
    """Group 0 closed, 1 dead as a whole, 2 with one response of two leased by a reward worker, 3 and 4 waiting."""
    async with open_ledgers(config, run_dir) as ledgers:
        train = ledgers.train
        for group_id in range(5):
            await admit(train, group_id)
        closed, dead, half = await ledger_kit.lease(train, "prompts", count=3)
        for number in range(2):
            await train.emit(closed, number, sample())
        for leased in await ledger_kit.lease(train, "rollouts", count=2):
            await train.score(leased, wire.encode(wire.SampleScore(value=1.0, parts={"exact": 1.0})))
        await train.fail_prompt(dead, "too long for the engine", "Traceback: \x1b[2Jline one\nline two")
        await train.emit(half, 0, sample())
        await ledger_kit.lease(train, "rollouts")
        await ledgers.roles.beat("rollout.0", {"version": 4, "pid": 77, "state": "ready", "tokens": 900}, 60)
        await ledgers.roles.beat("reward.0", {"per_second": 12.5, "pid": 78, "state": "ready"}, 60)


async def filled_and_stopped(run_dir: Path, *settings: str) -> RunConfig:
    """A run as it is after its supervisor left: files and an append-only file, no server."""
    config = make_run(run_dir, *settings)
    async with embedded.running(config.redis, run_dir):
        await fill(config, run_dir)
    return config

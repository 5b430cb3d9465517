"""Real roles as real processes: what they tell, how they end; alone and under a supervisor with the run's own Redis."""

import asyncio
import contextlib
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import orjson
import psutil
import pytest

from streamrl.config import ModelConfig, RedisConfig, RunConfig
from streamrl.errors import ExitCode
from streamrl.producers.tokenizer import Tokenizer, vocabulary_of
from streamrl.queues import open_ledgers
from streamrl.runfile import LoadedConfig, save
from streamrl.runtime.instance import RoleState
from streamrl.runtime.plan import plan
from tests.consumers.worker_kit import put, until_closed
from tests.producers.producer_kit import save_tokenizer
from tests.queues.ledger_kit import faults
from tests.runtime.test_supervisor import Run

REWARDS = Path(__file__).parent.parent / "consumers"


def make_config(redis=None, use="exact_match", **sections):
    return RunConfig.model_validate(
        {
            "name": "t",
            "redis": (redis or RedisConfig(patience=20, maxmemory=256 << 20)).model_dump(),
            "rewards": [{"use": use}],
            "reward_worker": {"deadline": 60.0, "attempts": 1},
            "plugin_paths": [str(REWARDS)],
            **sections,
        }
    )


def save_run(config, run_dir):
    run_dir.mkdir(parents=True, exist_ok=True)
    save(LoadedConfig(config=config, origins={}), run_dir / "run.json")
    return config


@contextlib.contextmanager
def role(kind, run_dir):
    """A role with pipes, as the supervisor starts it: (process, file of its status, writing end of its lifeline)."""
    told, telling = os.pipe()
    lifeline, held = os.pipe()
    environ = {name: value for name, value in os.environ.items() if not name.startswith("STREAMRL_")}
    environ |= {"STREAMRL_STATUS_FD": str(telling), "STREAMRL_LIFELINE_FD": str(lifeline)}
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "streamrl.runtime", kind, "0", str(run_dir)],
        env=environ, pass_fds=(telling, lifeline), stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    os.close(telling)
    os.close(lifeline)
    try:
        with os.fdopen(told) as status, os.fdopen(held, "w") as line:
            yield process, status, line
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def until_it_handles_sigterm(pid):
    end = time.monotonic() + 30
    caught = 0
    while not caught >> (signal.SIGTERM - 1) & 1:
        assert time.monotonic() < end
        time.sleep(0.005)
        fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        caught = int(fields["SigCgt"], 16)


def test_a_role_says_ready_beats_and_drains_on_sigterm(redis_run):
    save_run(make_config(redis_run.config), redis_run.run_dir)
    with role("reward", redis_run.run_dir) as (process, status, _):
        assert [status.readline() for _ in range(3)] == ["READY=1\n", "BEAT=1\n", "BEAT=1\n"]
        process.terminate()
        output = process.stderr.read()
        assert process.wait(30) == 0
    lines = [orjson.loads(line) for line in output.splitlines()]
    assert lines[-1]["event"] == "role ended"
    assert {line["role"] for line in lines} == {"reward.0"}
    assert all({"at", "level", "logger"} <= set(line) for line in lines)


def test_what_a_restart_cannot_mend_is_said_and_has_its_exit_code(redis_run, tmp_path):
    cases = [
        (
            make_config(redis_run.config, "exact_mach"),
            78,
            "ERROR=reward exact_mach is unknown (did you mean exact_match?)",
        ),
        (make_config(RedisConfig(url=f"unix://{tmp_path}/none.sock", patience=0.2)), 69, "ERROR="),
    ]
    for config, code, told in cases:
        save_run(config, redis_run.run_dir)
        with role("reward", redis_run.run_dir) as (process, status, _):
            assert told in status.read()
            assert process.wait(30) == code
    with role("reward", tmp_path / "nowhere") as (process, status, _):
        assert "is not a run directory" in status.read()
        assert process.wait(30) == 78


def test_code_that_raises_keyboard_interrupt_in_a_task_of_its_own_is_named(redis_run, tmp_path):
    """Its task hands that to the event loop, which ends."""
    (tmp_path / "interrupting.py").write_text(
        "import asyncio\n"
        "async def interrupt():\n"
        "    raise KeyboardInterrupt\n"
        "async def score(text):\n"
        "    return 0.0\n"
        "asyncio.get_running_loop().create_task(interrupt())\n"
    )
    save_run(make_config(redis_run.config, "interrupting:score", plugin_paths=[str(tmp_path)]), tmp_path)
    with role("reward", tmp_path) as (process, status, _):
        assert f"ERROR=code raised KeyboardInterrupt at {tmp_path / 'interrupting.py'}:3 in interrupt\n" in status
        assert process.wait(30) == ExitCode.FAILURE


def test_a_role_waits_for_the_runs_redis_and_leaves_when_it_is_to_stop_before(tmp_path):
    save_run(make_config(), tmp_path)
    with role("reward", tmp_path) as (first, _, _), role("reward", tmp_path) as (second, status, _):
        until_it_handles_sigterm(second.pid)
        second.terminate()
        assert second.wait(30) == 0
        assert status.read() == ""
        with role("redis", tmp_path):
            assert b"role ready" in first.stderr.readline()
            first.terminate()
            assert first.wait(30) == 0


def test_the_feeder_reads_its_prompts_without_torch(tmp_path):
    """transformers imports torch with every tokenizer: 200 MB and a second of a processor for nothing."""
    import torch  # noqa: F401  (with which the tokenizer gives the same)

    save_tokenizer(tmp_path)
    code = """
import sys
from streamrl.config import ModelConfig, RunConfig
from streamrl.producers.tokenizer import Tokenizer, vocabulary_of
from streamrl.runtime import roles
roles._runner("feeder", 0, RunConfig())
model = ModelConfig(path=sys.argv[1])
ids = Tokenizer.load(model).encode(["0123", "31"], special=True)
print(sys.modules.get("torch") is None, ids, vocabulary_of(model))
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    model = ModelConfig(path=str(tmp_path))
    assert done.stdout == f"True {Tokenizer.load(model).encode(['0123', '31'], special=True)} {vocabulary_of(model)}\n"
    assert "PyTorch" not in done.stderr


def test_the_second_sigterm_cancels_and_sigusr1_shows_the_stacks(redis_run, tmp_path):
    config = save_run(make_config(redis_run.config, "rewards_for_tests:waits_in_the_middle"), redis_run.run_dir)
    asyncio.run(put_one(config, redis_run.run_dir, tmp_path))
    with role("reward", redis_run.run_dir) as (process, status, _):
        assert status.readline() == "READY=1\n"
        end = time.monotonic() + 30
        while not list(tmp_path.glob("in-*")):
            assert time.monotonic() < end
            time.sleep(0.01)
        process.send_signal(signal.SIGUSR1)
        process.terminate()
        while b'"count":1' not in (line := process.stderr.readline()):
            assert line, "the role ended before it noted the signal"
        process.terminate()
        rest = process.stderr.read()
        assert process.wait(30) == ExitCode.TERMINATED
    assert b"handed back" in rest


def test_a_role_ends_when_its_lifeline_is_cut(redis_run):
    save_run(make_config(redis_run.config, supervisor={"term_grace": 20.0}), redis_run.run_dir)
    with role("reward", redis_run.run_dir) as (process, status, line):
        assert status.readline() == "READY=1\n"
        line.close()
        assert process.wait(30) == 0  # it took it as the first SIGTERM


def test_a_role_that_hangs_without_its_supervisor_is_killed_after_the_grace(redis_run, tmp_path):
    config = make_config(redis_run.config, "rewards_for_tests:waits_in_the_middle", supervisor={"term_grace": 0.3})
    save_run(config, redis_run.run_dir)
    asyncio.run(put_one(config, redis_run.run_dir, tmp_path))
    with role("reward", redis_run.run_dir) as (process, _, line):
        end = time.monotonic() + 30
        while not list(tmp_path.glob("in-*")):
            assert time.monotonic() < end
            time.sleep(0.01)
        line.close()
        assert process.wait(30) == -signal.SIGKILL


def test_a_wrong_command_line_is_usage():
    done = subprocess.run(
        [sys.executable, "-m", "streamrl.runtime", "cook", "0", "."], capture_output=True, check=False
    )
    assert done.returncode == ExitCode.USAGE


async def put_one(config, run_dir, folder):
    """A group of one sample, which waits in the middle."""
    async with open_ledgers(config, run_dir) as ledgers:
        await put(ledgers.train, 0, ["a"], metadata={"folder": str(folder)})


def supervised(config, run_dir, *kinds, **supervisor):
    save_run(config, run_dir)
    units = [unit for unit in plan(config, run_dir) if unit.kind in kinds]
    run = Run(run_dir, *units, **(config.supervisor.model_dump(exclude_unset=True) | supervisor))
    run.config = config.model_copy(update={"supervisor": run.config.supervisor})
    return run


def _there(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def test_redis_that_is_killed_comes_back_with_its_data_and_the_worker_rides_it_out(tmp_path):
    config, run_dir = make_config(), tmp_path / "run"
    async with supervised(config, run_dir, "redis", "reward") as run:
        await run.until(lambda: run.now("reward.0") is RoleState.READY)
        async with open_ledgers(config, run_dir) as ledgers:
            for cursor in range(2):
                await put(ledgers.train, cursor, ["4", "5"])
                await until_closed(ledgers.train, [cursor])
                redis = run.pid("redis")
                os.kill(redis, signal.SIGKILL)
                await run.until(lambda redis=redis: run.now("redis") is RoleState.READY and run.pid("redis") != redis)
            assert await ledgers.train.closed() == [0, 1]
            assert not await faults(ledgers.train)
        os.kill(os.getpid(), signal.SIGINT)
        outcome = await run.outcome()
    assert outcome.exit_code == ExitCode.OK
    assert outcome.restarts == {"redis": 2, "reward.0": 0}
    assert not psutil.pid_exists(run.pid("redis"))


async def test_redis_that_hangs_is_killed_with_what_is_known_of_it_and_the_worker_rides_it_out(tmp_path):
    config, run_dir = make_config(supervisor={"liveness_deadline": 3.0}), tmp_path / "run"
    async with supervised(config, run_dir, "redis", "reward") as run:
        await run.until(run.all_ready)
        async with open_ledgers(config, run_dir) as ledgers:
            await put(ledgers.train, 0, ["4", "5"])
            await until_closed(ledgers.train, [0])
            redis = run.pid("redis")
            os.kill(redis, signal.SIGSTOP)
            await run.until(lambda: run.now("redis") is RoleState.READY and run.pid("redis") != redis, 60)
            await put(ledgers.train, 1, ["4", "5"])
            await until_closed(ledgers.train, [1], seconds=60)
            assert await ledgers.train.closed() == [0, 1]
        os.kill(os.getpid(), signal.SIGINT)
        outcome = await run.outcome()
    assert outcome.restarts == {"redis": 1, "reward.0": 0}
    reasons = [event.reason for event in run.events if getattr(event, "state", None) is RoleState.BACKOFF]
    assert [reason.partition(" for ")[0] for reason in reasons] == ["redis: no answer"]
    log = (run_dir / "logs" / "redis.jsonl").read_text()
    assert "T (stopped)" in log
    assert "ready to accept connections" in log


@pytest.mark.slow
async def test_a_reward_that_blocks_the_loop_is_killed_until_its_sample_is_dead(tmp_path):
    config = make_config(use="rewards_for_tests:never_yields", lease={"seconds": 0.6, "max_deliveries": 3})
    run_dir = tmp_path / "run"
    async with supervised(config, run_dir, "redis", "reward", liveness_deadline=2.5) as run:
        await run.until(lambda: run.now("reward.0") is RoleState.READY)
        async with open_ledgers(config, run_dir) as ledgers:
            await put(ledgers.train, 0, ["fine", "block", "fine"])
            await until_closed(ledgers.train, [0], seconds=100)  # three times silence, death and start
            group = await ledgers.train.read_group(0)
            assert (set(group.samples), set(group.causes)) == ({0, 2}, {1})
    log = (run_dir / "logs" / "reward.0.jsonl").read_text()
    assert "never_yields" in log  # the stacks it was asked for before it was killed


async def test_a_reward_that_cannot_be_loaded_ends_the_run_with_its_reason(tmp_path):
    async with supervised(make_config(use="rewards_for_tests:by_txt"), tmp_path / "run", "redis", "reward") as run:
        outcome = await run.outcome()
    assert outcome.exit_code == ExitCode.CONFIG
    assert "did you mean by_text?" in outcome.reason


SUPERVISOR = """
import asyncio, sys
from pathlib import Path
from streamrl.runfile import read_saved
from streamrl.runtime.plan import plan
from streamrl.runtime.supervisor import supervise
run_dir = Path(sys.argv[1])
config = read_saved(run_dir / "run.json").config
units = [unit for unit in plan(config, run_dir) if unit.kind in {"redis", "reward"}]
def show(event):
    print(getattr(event, "role", ""), getattr(event, "state", ""), getattr(event, "pid", ""), flush=True)
asyncio.run(supervise(config, run_dir, show, units=units))
"""


@contextlib.contextmanager
def supervisor_process(run_dir, terminal=None):
    """A supervisor in a process of its own with Redis and a reward worker, both ready, and the pids of both."""
    process = subprocess.Popen(
        [sys.executable, "-c", SUPERVISOR if terminal is None else f"{TERMINAL}{SUPERVISOR}", str(run_dir)],
        stdin=terminal, stdout=subprocess.PIPE, stderr=terminal, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        pids, ready = {}, set()
        while ready != {"redis", "reward.0"}:
            name, state, pid = process.stdout.readline().split(" ")
            pids |= {name: int(pid)} if pid.strip().isdecimal() else {}
            ready |= {name} if state == "ready" else set()
        yield process, pids
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


TERMINAL = """
import fcntl, termios
fcntl.ioctl(0, termios.TIOCSCTTY)
"""


def test_a_supervisor_that_is_killed_leaves_nothing_behind_and_the_next_one_starts(tmp_path):
    save_run(make_config(supervisor={"term_grace": 3.0}), tmp_path)
    for _ in range(2):
        with supervisor_process(tmp_path) as (process, pids):
            roles = [psutil.Process(pid) for pid in pids.values()]
            process.kill()
            _, alive = psutil.wait_procs(roles, 30)
            assert not alive, f"{pids} outlived the supervisor"


async def test_a_redis_that_outlived_its_supervisor_is_ended_and_its_data_served_again(tmp_path):
    """It hangs, so it cannot do what the kernel asks of it when the supervisor dies."""
    config, run_dir = make_config(), tmp_path / "run"
    save_run(config, run_dir)
    with supervisor_process(run_dir) as (process, pids):
        async with open_ledgers(config, run_dir) as ledgers:
            await put(ledgers.train, 0, ["4", "5"])
            await until_closed(ledgers.train, [0])
        os.kill(pids["redis"], signal.SIGSTOP)
        for pid in (process.pid, pids["reward.0"]):
            os.kill(pid, signal.SIGKILL)
        process.wait()
        try:
            assert _there(pids["redis"])
            async with supervised(config, run_dir, "redis", "reward") as run:
                await run.until(run.all_ready, 60)
                assert not _there(pids["redis"])
                async with open_ledgers(config, run_dir) as ledgers:
                    assert await ledgers.train.closed() == [0]
                    assert not await faults(ledgers.train)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pids["redis"], signal.SIGKILL)


def test_a_terminal_that_is_closed_drains_the_run(tmp_path):
    save_run(make_config(), tmp_path)
    ours, theirs = pty.openpty()
    with supervisor_process(tmp_path, terminal=theirs) as (process, pids):
        os.close(theirs)
        os.close(ours)
        assert process.wait(60) == 0
        assert not any(_there(pid) for pid in pids.values())
    said = [orjson.loads(line) for line in (tmp_path / "logs" / "supervisor.jsonl").read_bytes().splitlines()]
    assert [line["why"] for line in said if line.get("state") == "draining"] == ["run ends"] * 2


FOSTER = """
import os, subprocess, sys
environ = os.environ | {"STREAMRL_SUPERVISOR": str(os.getpid())}
child = subprocess.Popen([sys.executable, "-m", "streamrl.runtime", "redis", "0", sys.argv[1]], env=environ)
os.kill(child.pid, 19)
print(child.pid, flush=True)
"""


def test_a_redis_whose_supervisor_dies_before_it_has_begun_does_not_begin(tmp_path):
    save_run(make_config(), tmp_path)
    with subprocess.Popen([sys.executable, "-c", FOSTER, str(tmp_path)], stdout=subprocess.PIPE, text=True) as foster:
        pid = int(foster.stdout.readline())
    child = psutil.Process(pid)
    child.send_signal(signal.SIGCONT)
    _, left = psutil.wait_procs([child], 30)
    for process in left:
        process.kill()
    assert not left
    assert not (tmp_path / "redis.sock").exists()


@pytest.mark.parametrize(("finished", "code"), [(False, 143), (True, 0)])
def test_a_role_that_is_wanted_until_the_end_says_whether_it_was_stopped_before(redis_run, finished, code):
    save_run(make_config(redis_run.config), redis_run.run_dir)
    if finished:
        (redis_run.run_dir / "finished.json").touch()
    words = ["run", "reward", "--run", str(redis_run.run_dir), "--until-finished"]
    process = subprocess.Popen([sys.executable, "-P", "-m", "streamrl", *words], stderr=subprocess.DEVNULL)
    try:
        until_it_handles_sigterm(process.pid)
        process.terminate()
        assert process.wait(30) == code
    finally:
        process.kill()
        process.wait()

"""Hostile programs: what they may do, what comes of them, and that nothing of them stays."""

import asyncio
import itertools
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import uuid
from pathlib import Path
from textwrap import dedent

import pytest

from streamrl.consumers.sandbox import Program, Sandbox, SandboxError, SandboxLimits
from streamrl.errors import ConfigError
from tests.consumers import hostile_programs as hostile
from tests.consumers.hostile_programs import MIB
from tests.consumers.sandboxes import keepers, python, run, running, sandbox, together
from tests.queues.ledger_kit import until

WRAPPED = pytest.param("bubblewrap", marks=pytest.mark.slow)
STRONG = ["namespaces", WRAPPED]
ISOLATIONS = [*STRONG, "none"]


@pytest.fixture
def mark():
    mark = f"sandboxed-{uuid.uuid4().hex}"
    yield mark
    left = running(mark)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left


@pytest.mark.parametrize("isolation", ISOLATIONS)
async def test_a_harmless_program_reads_prints_and_ends(isolation):
    text = "import sys; print(sys.stdin.read()[::-1]); print('why', file=sys.stderr); sys.exit(3)"
    execution = await run(sandbox(isolation), text, stdin="gnirts")
    assert (execution.outcome, execution.code) == ("ended", 3)
    assert (execution.stdout, execution.stderr) == ("string\n", "why\n")


@pytest.mark.parametrize("isolation", ISOLATIONS)
async def test_limits_end_a_program_and_the_outcome_says_which(isolation):
    programs = hostile.ENDED_BY_A_LIMIT.items()
    runs = {name: run(sandbox(isolation, **limits), dedent(text)) for name, (text, limits, _) in programs}
    found = await together(runs)
    assert {name: execution.outcome for name, execution in found.items()} == {
        name: outcome for name, (_, _, outcome) in programs
    }
    for execution in found.values():
        assert (execution.code or 0) <= 0
        assert len(execution.stdout) + len(execution.stderr) < 3 * MIB


@pytest.mark.parametrize("isolation", ISOLATIONS)
async def test_what_the_kernel_refuses_makes_a_program_fail(isolation):
    await all_fail(sandbox(isolation, memory=256 * MIB, address_space=512 * MIB), hostile.REFUSED_BY_THE_KERNEL)


async def test_what_namespaces_and_the_filter_refuse():
    await all_fail(sandbox(), hostile.REFUSED_BY_NAMESPACES)


async def all_fail(box, programs):
    """They fail, and by what they are to fail by: not for a module that is missing, say."""
    runs = {name: run(box, hostile.CALLING + dedent(text)) for name, (text, _) in programs.items()}
    for name, execution in (await together(runs)).items():
        assert (execution.outcome, execution.code) != ("ended", 0), name
        assert re.search(programs[name][1], f"{execution.outcome} {execution.stderr}", re.DOTALL), (name, execution)


@pytest.mark.parametrize("isolation", STRONG)
async def test_a_program_sees_nothing_of_the_worker(isolation, tmp_path, monkeypatch):
    secret = tmp_path / "secret"
    secret.write_text("password")
    monkeypatch.setenv("STREAMRL_SECRET", "password")
    held = secret.open()
    os.set_inheritable(held.fileno(), True)
    text = hostile.SEES_NOTHING.format(secret=str(secret), test=__file__)
    execution = await run(sandbox(isolation), dedent(text))
    held.close()
    assert (execution.stdout, execution.stderr) == ("nothing\n", "")


@pytest.mark.parametrize("isolation", STRONG)
async def test_no_network_not_even_loopback_unless_it_is_allowed(isolation):
    with socket.create_server(("127.0.0.1", 0)) as server:
        accepted = threading.Thread(target=server.accept, daemon=True)
        accepted.start()
        port = server.getsockname()[1]
        text = f"import socket; socket.create_connection(('127.0.0.1', {port}), timeout=5); print('in')"
        denied = await run(sandbox(isolation), text)
        assert denied.stdout == ""
        assert "Error" in denied.stderr
        assert accepted.is_alive()
        assert (await run(sandbox(isolation, network=True), text)).stdout == "in\n"


@pytest.mark.parametrize("isolation", ISOLATIONS)
async def test_children_end_with_their_program(isolation, mark):
    box = sandbox(isolation, wall=3)
    runs = {name: left_by(box, text, f"{mark}-{name}") for name, text in hostile.LEAVES_PROCESSES.items()}
    assert await together(runs) == {name: [] for name in runs}


async def left_by(box, text, mark):
    """Processes that a program has left behind."""
    await run(box, hostile.spawning(text, mark))
    return running(mark)


async def test_killing_everything_kills_the_program_alone(mark):
    box = sandbox()
    async with box.start(python(hostile.spawning("os.kill(-1, 9)\nos.kill(1, 9)\nprint('alive')", mark))) as session:
        for _ in range(2):
            execution = await session.run("")
            assert execution.outcome in {"ended", "signal"}


@pytest.mark.parametrize("isolation", ISOLATIONS)
async def test_every_run_has_a_fresh_directory(isolation):
    text = "import os; print(sorted(os.listdir('.'))); open('left', 'w').close(); os.makedirs('a/b'); os.chmod('a', 0)"
    async with sandbox(isolation).start(python(text)) as session:
        assert [(await session.run("")).stdout for _ in range(2)] == ["['solution.py']\n"] * 2


@pytest.mark.parametrize("isolation", ISOLATIONS)
async def test_directories_of_any_depth_and_mode_are_removed(isolation, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    await run(sandbox(isolation), dedent(hostile.DEEP))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("isolation", ISOLATIONS)
async def test_a_run_that_is_cancelled_leaves_nothing(isolation, mark, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    task = asyncio.create_task(run(sandbox(isolation), hostile.spawning("spawn(); time.sleep(600)", mark)))
    await until(lambda: running(mark))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not running(mark)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("isolation", ISOLATIONS)
async def test_a_keeper_that_is_killed_is_an_error_and_no_score(isolation, mark, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    text = "os.execv(sys.executable, [sys.executable, '-S', '-c', 'import time; time.sleep(600)', MARK])"
    box = sandbox(isolation)
    task = asyncio.create_task(run(box, hostile.spawning(text.replace("MARK", repr(mark)), mark)))
    await until(lambda: running(mark))
    [keeper] = keepers()
    os.kill(keeper, signal.SIGKILL)
    with pytest.raises(SandboxError, match="keeper"):
        await task
    await until(lambda: not running(mark))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("isolation", ISOLATIONS)
async def test_a_worker_that_is_killed_leaves_nothing(isolation, mark, tmp_path):
    sandbox(isolation)
    program = hostile.spawning("spawn(); time.sleep(600)", mark)
    script = f"""
        import asyncio, tempfile
        from tests.consumers import sandboxes
        tempfile.tempdir = {str(tmp_path)!r}
        asyncio.run(sandboxes.run(sandboxes.sandbox({isolation!r}), {program!r}))
    """
    worker = subprocess.Popen(  # noqa: ASYNC220
        [sys.executable, "-c", dedent(script)], cwd=Path(__file__).parents[2]
    )
    try:
        await until(lambda: any(_is_spawned(pid) for pid in running(mark)))
    finally:
        worker.kill()
        worker.wait()
    await until(lambda: not running(mark))
    await until(lambda: list(tmp_path.iterdir()) == [])


async def test_a_host_without_memory_is_an_error_and_no_score(monkeypatch):
    box = sandbox()
    await box.open()
    start = (
        "import itertools, sys; sys.path.insert(0, sys.argv[1]); from inside import keeper, processes;"
        "killed = itertools.count(); processes.starved = lambda: next(killed); keeper.main()"
    )
    monkeypatch.setattr("streamrl.consumers.sandbox.sandbox._START", start)
    assert (await run(box, "print(1)")).stdout == "1\n"
    with pytest.raises(SandboxError, match="the host ran out of memory"):
        await run(box, "import os; os.kill(os.getpid(), 9)")


async def test_bubblewrap_is_told_what_the_program_may(tmp_path, monkeypatch):
    """A played bubblewrap that writes its options down and isolates from nothing."""
    options = tmp_path / "options"
    played = tmp_path / "bwrap"
    played.write_text(f'#!/bin/sh\nwhile [ "$1" != -- ]; do echo "$1" >> {options}; shift; done; shift; exec "$@"\n')
    played.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    box = Sandbox(SandboxLimits(wall=60), isolation="bubblewrap")
    text = "import os, sys; os.write(3, b'result'); print(input()); sys.exit(3)"
    execution = await run(box, text, stdin="said")
    assert (execution.outcome, execution.code, execution.stdout) == ("ended", 3, "said\n")
    assert execution.result == "result"
    words = options.read_text().splitlines()
    assert words.count("--unshare-net") == 2, "that of the look whether it works, and that of the program"
    shown = {Path(folder) for option, folder in itertools.pairwise(words) if option == "--bind"}
    assert len(shown) == 2
    assert not any(folder.exists() for folder in shown)
    assert "/home" not in words


async def test_a_program_that_cannot_be_executed_is_an_error_and_no_score():
    async with sandbox().start(Program(argv=("/no/such/program",))) as session:
        with pytest.raises(SandboxError, match="No such file"):
            await session.run("")


async def test_an_isolation_that_does_not_work_is_refused_with_all_reasons(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr("streamrl.consumers.sandbox.sandbox._START", 'print(\'{"error": "not permitted"}\')')
    with pytest.raises(ConfigError) as caught:
        await Sandbox(SandboxLimits()).open()
    for reason in ("namespaces:", "bubblewrap: bwrap is not installed"):
        assert reason in caught.value.message
    assert "isolation: none and network: allow" in caught.value.hint


def test_no_isolation_needs_the_network_to_be_allowed():
    with pytest.raises(ConfigError, match="cannot keep programs from the network"):
        Sandbox(SandboxLimits(), isolation="none")


@pytest.mark.parametrize(
    "wrong", [{"cpu": 0}, {"processes": -1}, {"memory": 1}, {"wall": float("nan")}, {"cpu": float("inf")}]
)
def test_limits_that_are_none_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        SandboxLimits(**wrong)


def _is_spawned(pid):
    try:
        return b"import time; time.sleep(600)" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False

"""Hostile programs: what they may do, what comes of them, and that nothing of them stays."""

import asyncio
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import uuid
import venv
from dataclasses import asdict
from pathlib import Path
from textwrap import dedent

import pytest

from streamrl.errors import ConfigError
from streamrl.sandbox import Program, Sandbox, SandboxError, SandboxLimits, inside
from streamrl.sandbox.inside import keeper, processes
from streamrl.sandbox.sandbox import _START, SLOWEST, interpreter, own_folder, sweep
from tests.needs import missing, need_programs
from tests.queues.ledger_kit import until
from tests.sandbox import hostile_programs as hostile
from tests.sandbox.hostile_programs import MIB
from tests.sandbox.sandboxes import SPACIOUS, keepers, need, python, run, running, sandbox, together

ISOLATIONS = ["auto", "none"]


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


async def test_a_program_sees_nothing_of_the_worker(tmp_path, monkeypatch):
    secret = tmp_path / "secret"
    secret.write_text("password")
    monkeypatch.setenv("STREAMRL_SECRET", "password")
    held = secret.open()
    os.set_inheritable(held.fileno(), True)
    text = hostile.SEES_NOTHING.format(secret=str(secret), test=__file__)
    execution = await run(sandbox(), dedent(text))
    held.close()
    assert (execution.stdout, execution.stderr) == ("nothing\n", "")


async def test_no_network_not_even_loopback_unless_it_is_allowed():
    with socket.create_server(("127.0.0.1", 0)) as server:
        accepted = threading.Thread(target=server.accept, daemon=True)
        accepted.start()
        port = server.getsockname()[1]
        text = f"import socket; socket.create_connection(('127.0.0.1', {port}), timeout=5); print('in')"
        denied = await run(sandbox(), text)
        assert denied.stdout == ""
        assert "Error" in denied.stderr
        assert accepted.is_alive()
        assert (await run(sandbox(network=True), text)).stdout == "in\n"


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
        from tests.sandbox import sandboxes
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
    monkeypatch.setattr("streamrl.sandbox.sandbox._START", start)
    assert (await run(box, "print(1)")).stdout == "1\n"
    with pytest.raises(SandboxError, match="the host ran out of memory"):
        await run(box, "import os; os.kill(os.getpid(), 9)")


async def test_a_program_that_cannot_be_executed_is_an_error_and_no_score():
    async with sandbox().start(Program(argv=("/no/such/program",))) as session:
        with pytest.raises(SandboxError, match="No such file"):
            await session.run("")


async def test_an_isolation_that_does_not_work_is_refused_with_the_reason(monkeypatch):
    monkeypatch.setattr("streamrl.sandbox.sandbox._START", 'print(\'{"error": "not permitted"}\')')
    with pytest.raises(ConfigError, match="cannot be isolated here: a sandbox failed: not permitted") as caught:
        await Sandbox(SandboxLimits()).open()
    assert "isolation: none and network: allow" in caught.value.hint


NO_SECCOMP = """
import asyncio, ctypes, os, sys
from streamrl.errors import ConfigError
from streamrl.sandbox import Sandbox, SandboxLimits
from streamrl.sandbox.inside import kernel

column, audit = kernel._ARCHITECTURES[os.uname().machine]
program = b"".join([
    kernel._do(kernel._LOAD, kernel._NUMBER),
    kernel._do(kernel._EQUAL, (157, 167)[column], 0, 3),
    kernel._do(kernel._LOAD, kernel._FIRST_ARGUMENT),
    kernel._do(kernel._EQUAL, kernel._PR_SET_SECCOMP, 0, 1),
    kernel._do(kernel._RETURN, 0x00050000 | 22),  # as a kernel without seccomp
    kernel._do(kernel._RETURN, kernel._ALLOW),
])
kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
filter = ctypes.byref(kernel._Program(len(program) // 8, program))
kernel._check(kernel._libc.prctl(22, ctypes.c_ulong(2), filter, *kernel._ZEROS), "seccomp")
try:
    asyncio.run(Sandbox(SandboxLimits(wall=60), isolation=sys.argv[1]).open())
    print("opened:", Sandbox.weakness)
except ConfigError as error:
    print("refused:", error.message)
"""


@pytest.mark.parametrize(
    ("isolation", "said", "logged"),
    [
        ("auto", "opened: no filter of system calls", "the sandbox is weak"),
        ("strict", "refused: isolation: strict: no filter of system calls", ""),
    ],
)
def test_a_kernel_without_seccomp_is_never_silent(isolation, said, logged):
    need("auto")
    done = subprocess.run(
        [sys.executable, "-c", NO_SECCOMP, isolation], capture_output=True, text=True, timeout=100, check=True
    )
    assert done.stdout.startswith(said)
    assert logged in done.stderr


async def test_strict_isolation_works_where_there_is_a_filter():
    await sandbox("strict").open()
    assert Sandbox.weakness == ""


@pytest.mark.parametrize("place", ["an environment", "a link", "an environment in the home"])
async def test_an_interpreter_in_a_home_directory_shows_nothing_else_of_it(place, tmp_path):
    """It works, with the packages of its environment; what lies beside it stays hidden."""
    home = tmp_path / "home" / "me"
    (home / ".ssh").mkdir(parents=True)
    (home / ".ssh" / "id").write_text("secret")
    (tmp_path / "home" / "other").write_text("secret")
    if place == "a link":
        path = home / "python"
        path.symlink_to(sys.executable)
    else:
        folder = home / "env" if place == "an environment" else home
        venv.create(folder, symlinks=True)
        path = folder / "bin" / "python"
        packages = next(folder.glob("lib/python*/site-packages"))
        (packages / "mine.py").write_text("print('mine')")
    found = interpreter(str(path))
    text = f"""
        import json, os, sys
        {"" if place == "a link" else "import mine"}
        print(os.path.exists({str(home / ".ssh")!r}), os.path.exists({str(tmp_path / "home" / "other")!r}))
    """
    async with sandbox().start(found.program("solution.py", {"solution.py": dedent(text)})) as session:
        execution = await session.run("")
    assert (execution.stderr, execution.code) == ("", 0)
    assert execution.stdout.split() == [*([] if place == "a link" else ["mine"]), "False", "False"]


def test_a_python_that_does_not_run_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"python: .*nowhere does not run"):
        interpreter(str(tmp_path / "nowhere"))


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


# --- directories ------------------------------------------------------------------------------------------------------


HOLDS = """
import sys, time
from streamrl.sandbox.sandbox import own_folder
with own_folder("streamrl-test-") as folder:
    print(folder, flush=True)
    time.sleep(600)
"""


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def grown_old(folder):
    os.utime(folder, (0, 0))


def test_what_a_killed_process_left_is_swept_and_nothing_else(temporary):
    options = {"env": {**os.environ, "TMPDIR": str(temporary)}, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", HOLDS], **options) as process:
        folder = Path(process.stdout.readline().strip())
        assert folder.parent == temporary
        grown_old(folder)
        sweep("streamrl-test-")
        assert folder.exists(), "its process lives"
        process.send_signal(signal.SIGKILL)
    young, other = temporary / "streamrl-test-young", temporary / "mine"
    young.mkdir()
    other.mkdir()
    (temporary / "streamrl-test-link").symlink_to(other)
    (folder / "deep").mkdir()
    grown_old(folder)
    sweep("streamrl-test-")
    assert sorted(path.name for path in temporary.iterdir()) == ["mine", "streamrl-test-link", "streamrl-test-young"]


def test_a_directory_is_gone_at_the_end(temporary):
    with own_folder("streamrl-test-") as folder:
        (Path(folder) / "file").touch()
    assert list(temporary.iterdir()) == []


async def test_the_sandbox_sweeps_when_it_opens(temporary):
    left = temporary / "streamrl-code-left"
    left.mkdir()
    grown_old(left)
    await Sandbox(SPACIOUS, network=True, isolation="none").open()
    assert list(temporary.iterdir()) == []


# --- the keeper by itself, and for an ordinary user, who may map no other user ----------------------------------------


ORDINARY = 41234
LIMITS = {**asdict(SandboxLimits(cpu=20, wall=60, disk=16 << 20)), "slowest": SLOWEST}


@pytest.fixture
def package():
    """A folder with the keeper's code that everybody can read."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(Path(inside.__file__).parent, Path(folder) / "inside")
        for path in (Path(folder), *Path(folder).rglob("*")):
            path.chmod(0o755)
        yield folder


def order(text, **changes):
    return {
        "jailed": True,
        "network": False,
        "argv": ["/bin/sh", "-c", text],
        "environ": {"PATH": "/usr/bin:/bin"},
        "files": {},
        "visible": [],
        "folder": "",
        "limits": LIMITS,
    } | changes


def started(package, *before, **options):
    """A keeper; as another user, with the system's Python, which he may execute."""
    python = "/usr/bin/python3" if options else sys.executable
    argv = [*before, python, "-I", "-S", "-c", _START, package]
    return subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={"PATH": os.defpath}, text=True, **options
    )


def ask(keeper, *lines):
    """Send lines, and return the answer to the last."""
    keeper.stdin.writelines(json.dumps(line) + "\n" for line in lines)
    keeper.stdin.flush()
    return json.loads(keeper.stdout.readline())


def ended(keeper):
    """Let go of the lifeline and return the exit code."""
    keeper.stdin.close()
    with keeper.stdout:
        return keeper.wait(60)


def once(package, text, **options):
    """What comes of one run as another user."""
    keeper = started(package, **options)
    answer = ask(keeper, order(text), {"stdin": ""})
    assert ended(keeper) == 0
    return answer


@pytest.fixture
def user():
    """Options of a process of an ordinary user; ends the test where there is no way to be one."""
    need("auto")
    if os.geteuid() != 0:
        return {"user": os.geteuid()}
    if not Path("/usr/bin/python3").exists():
        missing("the system has no Python that other users may execute")
    return {"user": ORDINARY, "group": ORDINARY, "extra_groups": []}


READ_ONLY, DENIED, FORBIDDEN = "Read-only file system", "[Pp]ermission denied", "Operation not permitted"
REFUSED = {
    "touch /usr/x": READ_ONLY,
    "cat /proc/1/environ": DENIED,
    "echo 9 > /proc/sys/user/max_user_namespaces": f"{DENIED}|{READ_ONLY}|Directory nonexistent",
    "unshare --user true": FORBIDDEN,
    "chmod 777 /": f"{READ_ONLY}|{FORBIDDEN}",
    "mkdir /x": f"{READ_ONLY}|{DENIED}",
    "mount -t tmpfs tmpfs /tmp": f"{DENIED}|{FORBIDDEN}|must be superuser",
}


def test_an_ordinary_user_can_isolate(package, user):
    answer = once(package, "id -u; pwd; grep CapEff /proc/self/status", **user)
    assert answer["stdout"] == "65534\n/tmp\nCapEff:\t0000000000000000\n"


def test_the_program_of_an_ordinary_user_has_none_of_his_rights(package, user):
    answer = once(package, "".join(f"({text}); echo code $? >&2\n" for text in REFUSED), **user)
    assert answer["outcome"] == "ended"
    said = re.findall(r"(.*?)code (\d+)\n", answer["stderr"], re.DOTALL)
    for (text, why), (errors, code) in zip(REFUSED.items(), said, strict=True):
        assert int(code) not in {0, 126, 127}, f"{text}: the command is there, and it failed"
        assert re.search(why, errors), text


def test_the_program_of_an_ordinary_user_cannot_end_the_sandbox(package, user):
    answer = once(package, "for number in 2 9 15; do kill -$number 1; done; sleep 0.2; echo alive", **user)
    assert (answer["outcome"], answer["stdout"]) == ("ended", "alive\n")


def test_processes_are_limited_for_an_ordinary_user_too(package, user):
    answer = once(package, "for i in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20; do sleep 9 & done", **user)
    assert answer["outcome"] == "ended"
    assert re.search("fork", answer["stderr"])


@pytest.mark.parametrize("right", ["setuid", "setgid"])
def test_root_that_cannot_become_another_user_runs_no_program(package, right):
    """The program would be root outside, and could write what only root may."""
    need_programs("setpriv")
    if os.geteuid() != 0:
        missing("only root is refused")
    keeper = started(package, shutil.which("setpriv"), f"--bounding-set=-{right}")
    answer = ask(keeper, order("echo > /proc/sys/kernel/core_pattern"), {"stdin": ""})
    assert "would run programs as root: run as another user" in answer["error"]
    assert ended(keeper) == 0


def test_it_answers_every_request_in_turn_and_ends_with_its_lifeline(package):
    folder = tempfile.mkdtemp()
    keeper = started(package)
    first = ask(keeper, order("cat; exit 4", jailed=False, folder=folder), {"stdin": "a"})
    second = ask(keeper, {"stdin": "b"})
    assert [(answer["stdout"], answer["code"]) for answer in (first, second)] == [("a", 4), ("b", 4)]
    assert ended(keeper) == 0
    assert not Path(folder).exists()
    assert ended(started(package)) == 0


@pytest.mark.parametrize("wrong", [{"folder": "/no/such/folder"}, {"files": {"a/b": ""}}, {"argv": ["/no/such"]}])
def test_what_it_cannot_do_is_an_error_in_one_line(package, wrong, tmp_path):
    keeper = started(package)
    answer = ask(keeper, order("true", jailed=False, folder=str(tmp_path)) | wrong, {"stdin": ""})
    assert "Error" in answer["error"]
    assert ended(keeper) == 0


def test_signals_do_not_end_it(package, tmp_path):
    keeper = started(package)
    ask(keeper, order("true", jailed=False, folder=str(tmp_path)), {"stdin": ""})
    for number in (signal.SIGINT, signal.SIGTERM):
        keeper.send_signal(number)
    assert ask(keeper, {"stdin": ""})["code"] == 0
    assert ended(keeper) == 0


# --- whose fault it is that a program waits for a processor -----------------------------------------------------------


SPINS = """
import os, threading
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
for _ in range(3): os.fork()
while True: pass
"""
SPINS_IN_CHILDREN_THAT_END = """
import os, time
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
for _ in range(6):
    if os.fork() == 0:
        while True:
            if os.fork() == 0:
                end = time.process_time() + 0.02
                while time.process_time() < end: pass
                os._exit(0)
            os.wait()
while True: pass
"""


@pytest.mark.parametrize(
    ("threads", "run", "waited"),
    [
        ([], 0.0, 0.0),
        ([(5.0, 5.0)], 5.0, 5.0),
        ([(0.0, 0.1), (1.0, 9.0)], 1.0, 9.0),
        ([(1.0, 15.0)] * 16, 16.0, 0.0),
        ([(1.0, 45.0)] * 16, 16.0, 30.0),
        ([(1.0, 9.0)], 10.0, 0.0),
    ],
    ids=["none", "alone", "beside one that sleeps", "for its own", "for both", "for those that ended"],
)
def test_waiting_for_its_own_is_not_waiting_for_others(threads, run, waited):
    assert processes.kept_waiting(threads, run) == waited


@pytest.mark.parametrize("text", [SPINS, SPINS_IN_CHILDREN_THAT_END], ids=["processes", "children that end"])
async def test_a_program_that_spins_on_one_processor_waits_for_itself(text):
    execution = await run(sandbox(wall=3, cpu=60), text)
    # On one processor nobody else can have had it while the program ran, however busy the host is.
    assert execution.outcome == "time"
    assert execution.delay + execution.cpu <= 1.05 * execution.wall
    assert execution.cpu > 0


async def test_a_program_cannot_let_everybody_go_first():
    text = """
import os
for call in (lambda: os.nice(1), lambda: os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))):
    try: print(call())
    except PermissionError: print("refused")
"""
    assert (await run(sandbox(), text)).stdout == "refused\nrefused\n"


def look(monkeypatch, passed, ran, waited):
    monkeypatch.setattr(processes, "processor_time", lambda pids: (ran, waited))
    order = {"jailed": False, "argv": [], "limits": {"memory": 1 << 40, "wall": 1, "cpu": 5, "slowest": 10}}
    return keeper.Run(order, "", "", keeper.ParentPipe())._look(passed)


@pytest.mark.parametrize(
    ("passed", "ran", "waited", "over"),
    [
        (0.9, 0.9, 0.0, None),
        (1.1, 0.1, 0.0, "time"),
        (1.1, 0.1, 0.5, None),
        (1.6, 0.1, 0.5, "time"),
        (9.9, 0.5, 9.4, None),
        (9.9, 5.1, 9.4, "time"),
    ],
)
def test_time_in_which_others_have_the_processor_does_not_count(monkeypatch, passed, ran, waited, over):
    assert look(monkeypatch, passed, ran, waited) == over


def test_a_host_that_keeps_a_program_waiting_for_ever_is_an_error_and_no_verdict(monkeypatch):
    with pytest.raises(OSError, match=r"the host is too busy: a program waited 9\.4 s"):
        look(monkeypatch, 10.1, 0.5, 9.4)

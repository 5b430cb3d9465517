import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from streamrl.consumers.processes import CallFailed, CallLimits, ProcessDied, ProcessPool
from streamrl.errors import ConfigError, RewardUnavailable
from streamrl.restarts import Deaths, RestartPolicy
from tests.queues.ledger_kit import until

SCRIPT = """
import os, resource, subprocess, sys, time

KEPT = []

def prepare(settings):
    if settings == "broken":
        raise RuntimeError("broken on purpose")

    def answer(request, tell):
        tell("begun")
        if request[0] == "phases":
            return phases(tell, request[1])
        return globals()[request[0]](*request[1:])

    return answer

def echo(value):
    return value

def burn():
    while True:
        pass

def phases(tell, seconds):
    for phase in ("first", "second"):
        tell(phase)
        end = time.process_time() + seconds
        while time.process_time() < end:
            pass
    return "both"

def power():
    return 9 ** (9 ** 9) > 1

def grow():
    return len("x" * (1 << 40))

def hoard(mib):
    KEPT.append(b"x" * (mib << 20))
    return os.getpid()

def take(mib):
    try:
        return len(b"x" * (mib << 20)) >> 20
    except MemoryError:
        return "a library goes on without it"

def sleep():
    time.sleep(3600)

def abort():
    os.abort()

def leave(code):
    os._exit(code)

def fail():
    raise ValueError("no such thing")

def noise():
    print("noise", flush=True)
    os.write(1, b"noise")
    return "quiet"

def pid():
    return os.getpid()

def start():
    return subprocess.Popen(["sleep", "3600"]).pid

def look():
    return {
        "environment": sorted(os.environ),
        "modules": sorted(sys.modules),
        "session": os.getsid(0) == os.getpid(),
        "memory": resource.getrlimit(resource.RLIMIT_AS),
        "core": resource.getrlimit(resource.RLIMIT_CORE),
    }
"""
MEMORY = 256 << 20


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "played.py"
    path.write_text(SCRIPT)
    return path


@pytest.fixture
async def make_pool(script):
    """Makes pools, of one process where nothing else is said, and closes them."""
    async with contextlib.AsyncExitStack() as stack:

        def make(settings=None, size=1, path=script, **limits):
            pool = ProcessPool(
                "test", path, settings, size, CallLimits(**{"cpu": 5, "wall": 600, "memory": MEMORY} | limits)
            )
            stack.push_async_callback(pool.close)
            return pool

        yield make


@pytest.fixture
def pool(make_pool):
    return make_pool(size=2, cpu=0.5)


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


async def test_calls_are_answered_by_processes_that_stay(pool):
    texts = [f"text {number} é" for number in range(20)]
    assert await asyncio.gather(*(pool.call(["echo", text]) for text in texts)) == texts
    assert pool.counts.started <= 2
    assert await pool.call(["pid"]) in {process.pid for process in pool._idle}


@pytest.mark.parametrize(
    ("how", "cause", "message"),
    [
        ("burn", "cpu", r"more than 0.5 s of CPU time in phase begun"),
        ("power", "cpu", r"more than 0.5 s of CPU time in phase begun"),
        ("grow", "memory", "more than 256 MiB of memory"),
    ],
)
async def test_what_takes_too_much_dies_and_the_next_call_is_answered(pool, how, cause, message):
    with pytest.raises(ProcessDied, match=message) as died:
        await pool.call([how])
    assert (died.value.cause, died.value.phase, died.value.too_expensive) == (cause, "begun", True)
    assert await pool.call(["echo", 1]) == 1
    counts = pool.counts
    assert (counts.started, counts.too_long, counts.too_large, counts.lost) == (2, cause == "cpu", cause == "memory", 0)


async def test_every_phase_has_the_cpu_time_to_itself(pool):
    assert await pool.call(["phases", 0.35]) == "both"
    with pytest.raises(ProcessDied) as died:
        await pool.call(["phases", 0.7])
    assert (died.value.cause, died.value.phase) == ("cpu", "first")


async def test_a_process_whose_memory_is_half_used_makes_way_for_another(pool):
    pids = [await pool.call(["hoard", 50]) for _ in range(12)]
    assert len(set(pids)) > 2
    assert pool.counts.too_large == pool.counts.lost == 0


async def test_what_earlier_calls_have_left_takes_no_memory_from_a_call(make_pool):
    pool = make_pool(cpu=60)
    alone = [await pool.call(["take", 150]), await pool.call(["take", 260])]
    used = await pool.call(["hoard", 90])
    assert [await pool.call(["take", 150]), await pool.call(["take", 260])] == alone
    assert alone == [150, "a library goes on without it"]
    assert await pool.call(["pid"]) == used


async def test_a_time_limit_with_cpu_time_left_is_nobodys_fault(make_pool):
    pool = make_pool(cpu=60, wall=0.2)
    pid = await started_pid(pool)
    with pytest.raises(ProcessDied, match=r"no answer within 0\.2 s") as died:
        await pool.call(["sleep"])
    assert (died.value.cause, died.value.too_expensive) == ("wall", False)
    assert pool.counts.lost == 1
    await pool.close()
    assert gone(pid)


async def started_pid(pool) -> int:
    await pool.open()
    return pool._idle[0].pid


@pytest.mark.parametrize(
    ("request_", "cause", "message"),
    [(["abort"], "signal", "ended by SIGABRT"), (["leave", 3], "exit", "ended with exit code 3")],
)
async def test_a_process_that_ends_by_itself_is_nobodys_fault(pool, request_, cause, message):
    with pytest.raises(ProcessDied, match=message) as died:
        await pool.call(request_)
    assert (died.value.cause, died.value.too_expensive) == (cause, False)
    assert await pool.call(["echo", 1]) == 1
    assert pool.counts.lost == 1


async def test_an_exception_is_told_and_what_is_printed_does_not_get_between_the_answers(pool):
    before = await pool.call(["pid"])
    with pytest.raises(CallFailed, match="ValueError: no such thing"):
        await pool.call(["fail"])
    assert await pool.call(["noise"]) == "quiet"
    assert await pool.call(["pid"]) == before


async def test_a_cancelled_call_kills_its_process(pool):
    pid = await started_pid(pool)
    call = asyncio.create_task(pool.call(["sleep"]))
    await until(lambda: pool._busy)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert await pool.call(["pid"]) != pid
    assert pool.counts.lost == 1
    await until(lambda: gone(pid))


async def test_a_process_that_others_kill(pool):
    pid = await started_pid(pool)
    call = asyncio.create_task(pool.call(["sleep"]))
    await until(lambda: pool._busy)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(ProcessDied, match="SIGKILL"):
        await call
    idle = await pool.call(["pid"])
    os.kill(idle, signal.SIGKILL)
    await until(lambda: not pool._idle[0].alive)
    assert await pool.call(["echo", 1]) == 1
    assert pool.counts.lost == 2


async def test_what_a_process_has_started_dies_with_it(pool):
    grandchild = await pool.call(["start"])
    with pytest.raises(ProcessDied):
        await pool.call(["abort"])
    await until(lambda: gone(grandchild))


async def test_a_process_sees_nothing_of_ours(pool, monkeypatch):
    monkeypatch.setenv("STREAMRL_SECRET", "secret")
    seen = await pool.call(["look"])
    assert "STREAMRL_SECRET" not in seen["environment"]
    assert not {"torch", "transformers", "numpy", "streamrl"} & set(seen["modules"])
    assert seen["session"]
    assert (seen["memory"][0], seen["core"]) == (MEMORY, [0, 0])


async def test_a_process_makes_way_after_many_calls(make_pool):
    pool = make_pool(calls=3)
    pids = [await pool.call(["pid"]) for _ in range(7)]
    assert [pids.count(pid) for pid in dict.fromkeys(pids)] == [3, 3, 1]
    assert pool.counts.lost == 0


async def test_deaths_are_bounded(make_pool):
    pool = make_pool()
    pool._deaths = Deaths(RestartPolicy(max_restarts=2, window=60, backoff=0, max_backoff=0))
    for _ in range(3):
        with pytest.raises(ProcessDied):
            await pool.call(["abort"])
    with pytest.raises(RewardUnavailable, match="3 of its processes died within 60 s"):
        await pool.call(["echo", 1])
    assert pool.counts.started == 3


async def test_a_start_that_is_cancelled_is_no_death(pool, monkeypatch):
    """Cancelled calls must not close the pool for those that come after them."""
    pool._deaths = Deaths(RestartPolicy(max_restarts=0, window=60, backoff=0, max_backoff=0))
    begun = asyncio.Event()
    start = asyncio.create_subprocess_exec

    async def told(*argv, **options):
        process = await start(*argv, **options)
        begun.set()
        return process

    monkeypatch.setattr(asyncio, "create_subprocess_exec", told)
    call = asyncio.create_task(pool.call(["echo", 1]))
    await begun.wait()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert await pool.call(["echo", 1]) == 1


async def test_what_cannot_start_is_said_at_once(make_pool, tmp_path):
    broken = make_pool("broken")
    with pytest.raises(ConfigError, match="cannot be prepared: RuntimeError: broken on purpose"):
        await broken.open()
    missing = make_pool(path=tmp_path / "missing.py")
    with pytest.raises(RewardUnavailable, match="FileNotFoundError"):
        await missing.call(["echo", 1])


async def test_a_host_that_starts_no_process_for_now_is_waited_for(pool, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", "/nowhere/python")
        await pool.open()
        with pytest.raises(RewardUnavailable, match=r"no process can be started: .*No such file"):
            await pool.call(["echo", 1])
    assert await pool.call(["echo", 1]) == 1


async def test_too_little_memory_for_the_function_itself_is_said(make_pool, script):
    script.write_text("X = b'x' * (1 << 28)")
    pool = make_pool()
    with pytest.raises(ConfigError, match="MemoryError") as caught:
        await pool.open()
    assert caught.value.hint == "it may need more than 256 MiB of memory"


async def test_the_end_is_clean_and_may_be_repeated(make_pool):
    pool = make_pool(size=2)
    idle = await started_pid(pool)
    calls = [asyncio.create_task(pool.call(["sleep"])) for _ in range(2)]
    await until(lambda: len(pool._busy) == 2)
    pids = [idle, *(process.pid for process in pool._busy)]
    await pool.close()
    await pool.close()
    assert [type(error) for error in await asyncio.gather(*calls, return_exceptions=True)] == [ProcessDied] * 2
    assert all(map(gone, pids))
    with pytest.raises(RewardUnavailable, match="closed"):
        await pool.call(["echo", 1])


PARENT = """
import asyncio, os, signal, sys
from pathlib import Path
from streamrl.consumers.processes import CallLimits, ProcessPool

async def main():
    pool = ProcessPool("test", Path(sys.argv[1]), None, 2, CallLimits(cpu=1000, wall=1000, memory=1 << 28))
    busy = asyncio.create_task(pool.call(["burn"]))
    idle = await pool.call(["pid"])
    while not pool._busy:
        await asyncio.sleep(0.01)
    print(idle, *(process.pid for process in pool._busy), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


def test_no_process_outlives_the_one_that_started_it(script):
    argv = [sys.executable, "-c", PARENT, str(script)]
    done = subprocess.run(argv, check=False, capture_output=True, text=True, timeout=100)
    pids = [int(word) for word in done.stdout.split()]
    assert (done.returncode, len(pids)) == (-signal.SIGKILL, 2), done.stderr
    asyncio.run(until(lambda: all(map(gone, pids))))

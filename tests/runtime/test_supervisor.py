"""The supervisor with real child processes: tiny scripts stand for the roles, everything else is the real thing."""

import asyncio
import os
import signal
import threading
import time
from pathlib import Path

import psutil
import pytest

from streamrl.config import RunConfig
from streamrl.errors import ExitCode, Refused
from streamrl.monitor.roles import read_states
from streamrl.queues import embedded
from streamrl.runtime.events import DrainStage, LinesDropped, LogLine, Notice, StateChanged
from streamrl.runtime.instance import RoleState
from streamrl.runtime.plan import ROLE_KINDS, RoleCommand, UnitSpec, starts_after
from streamrl.runtime.supervisor import supervise
from streamrl.weight_sync.files import shm_store

STANDIN = Path(__file__).parent / "standin.py"


def unit(folder, name, *behaviours, kind=None, finishes=False, names=None, start_seconds=0.0):
    def command(position):
        which = (names or [name])[position]
        argv = ("-S", "-E", str(STANDIN), which, *behaviours)
        return RoleCommand(argv, {"RANK": str(position)}, folder)

    kind = kind or name.split(".")[0]
    return UnitSpec(
        kind, tuple(names or [name]), command, finishes=finishes, start_seconds=start_seconds,
        starts_after=starts_after(kind), waits_for=ROLE_KINDS[kind].waits_for,
    )  # fmt: skip


class Run:
    """A supervised run in a task, with what it told and what its children wrote down."""

    def __init__(self, folder, *units, on_event=None, on="local", **supervisor):
        self.on = on
        options = {"backoff": 0.01, "max_backoff": 0.05, "term_grace": 0.5, "drain_deadline": 20.0} | supervisor
        self.config = RunConfig.model_validate({"name": "t", "supervisor": options})
        self.folder = folder
        self.units = units
        self.events = []
        self._changed = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._on_event = on_event

    def _saw(self, event):
        if self._on_event is not None:
            self._on_event(event)
        self.events.append(event)
        self._loop.call_soon_threadsafe(self._changed.set)

    async def __aenter__(self):
        self.task = asyncio.create_task(supervise(self.config, self.folder, self._saw, units=self.units, on=self.on))
        return self

    async def __aexit__(self, *error):
        if not self.task.done():
            self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)

    async def until(self, condition, seconds=30):
        async with asyncio.timeout(seconds):
            while not condition():
                if self.task.done():
                    self.task.result()
                    assert condition(), f"the run ended: {self.events}"
                    return
                self._changed.clear()
                try:
                    await asyncio.wait_for(self._changed.wait(), 0.05)
                except TimeoutError:
                    continue

    async def outcome(self, seconds=30):
        return await asyncio.wait_for(asyncio.shield(self.task), seconds)

    def journal(self, *events):
        path = self.folder / "journal"
        rows = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
        return [(row[0], row[1]) for row in rows if not events or row[1] in events]

    def states(self, role):
        return [event.state for event in self.events if isinstance(event, StateChanged) and event.role == role]

    def now(self, role):
        return (self.states(role) or [None])[-1]

    def all_ready(self):
        return all(self.now(name) is RoleState.READY for unit in self.units for name in unit.processes)

    def pid(self, role):
        return next(
            event.pid for event in reversed(self.events)
            if isinstance(event, StateChanged) and event.role == role and event.pid
        )  # fmt: skip


def whole_run(folder, learner=("ready", "serve")):
    return [
        unit(folder, "redis", "ready", "serve"),
        unit(folder, "learner.0", *learner, kind="learner", finishes=True),
        unit(folder, "rollout.0", "ready", "serve"),
        unit(folder, "rollout.1", "ready", "serve"),
        unit(folder, "reward.0", "ready", "serve"),
        unit(folder, "feeder.0", "ready", "serve", finishes=True),
    ]


async def test_the_directory_of_the_socket_goes_with_the_run(tmp_path):
    """A run directory with a long path has its socket elsewhere; a killed server leaves it there."""
    folder = tmp_path / ("x" * 100)
    folder.mkdir()
    socket = embedded.socket_path(folder)
    socket.parent.mkdir(mode=0o700)
    socket.touch()
    async with Run(folder, unit(folder, "learner.0", "ready", kind="learner", finishes=True)) as run:
        assert (await run.outcome()).finished
    assert not socket.parent.exists()


async def test_all_roles_start_at_once(tmp_path):
    units = whole_run(tmp_path)
    names = {unit.name for unit in units}
    units[0] = unit(tmp_path, "redis", "wait-for:go", "ready", "serve")
    units[1] = unit(tmp_path, "learner.0", "wait-for:go", "ready", "serve", kind="learner", finishes=True)
    async with Run(tmp_path, *units) as run:
        await run.until(lambda: {name for name, _ in run.journal("start")} == names)
        assert (run.now("redis"), run.now("learner.0")) == (RoleState.STARTING, RoleState.STARTING)
        (tmp_path / "go").touch()
        await run.until(lambda: all(run.now(name) is RoleState.READY for name in names))
        assert len(run.journal("start")) == len(names)


async def test_a_role_is_not_late_while_one_that_it_waits_for_still_loads(tmp_path):
    units = [
        unit(tmp_path, "learner.0", "wait-for:go", "ready", "serve", kind="learner", start_seconds=1000.0),
        unit(tmp_path, "rollout.0", "wait-for:go", "ready", "serve"),  # as one that waits for the first version
        unit(tmp_path, "feeder.0", "hang"),  # the clock of this test: it has nobody to wait for
    ]
    async with Run(tmp_path, *units, start_deadline=0.5, max_restarts=1000) as run:
        await run.until(lambda: run.states("feeder.0").count(RoleState.BACKOFF) == 3)
        assert run.states("rollout.0")[-1] is RoleState.STARTING
        assert RoleState.BACKOFF not in run.states("rollout.0")
        (tmp_path / "go").touch()
        await run.until(lambda: run.now("rollout.0") is RoleState.READY)
        assert RoleState.BACKOFF not in run.states("rollout.0")


async def test_a_role_is_killed_and_counted_when_all_that_it_waits_for_are_ready_and_it_is_not(tmp_path):
    units = [
        unit(tmp_path, "learner.0", "wait-for:go", "ready", "serve", kind="learner", start_seconds=1000.0),
        unit(tmp_path, "rollout.0", "deaf", "hang"),
    ]
    async with Run(tmp_path, *units, start_deadline=0.5, max_restarts=1) as run:
        await run.until(lambda: ("rollout.0", "start") in run.journal())
        (tmp_path / "go").touch()
        outcome = await run.outcome()
    assert "rollout.0 not ready within 0.5 s" in outcome.reason
    assert outcome.restarts["rollout.0"] == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
async def test_the_first_signal_drains_in_the_order_of_the_data_with_redis_last(tmp_path, number):
    async with Run(tmp_path, *whole_run(tmp_path)) as run:
        await run.until(run.all_ready)
        os.kill(os.getpid(), number)
        outcome = await run.outcome()
        assert outcome.exit_code == ExitCode.OK
        assert not outcome.finished
        order = [name for name, _ in run.journal("term", "exit")]
        assert order[:2] == ["feeder.0"] * 2
        assert set(order[2:6]) == {"rollout.0", "rollout.1"}
        assert order[6:] == ["reward.0", "reward.0", "learner.0", "learner.0", "redis", "redis"]
    stages = [event for event in run.events if isinstance(event, DrainStage)]
    assert [stage.roles[0].split(".")[0] for stage in stages] == ["feeder", "rollout", "reward", "learner", "redis"]
    assert all(stage.seconds > 0 for stage in stages)
    assert {run.now(role) for role in ("redis", "learner.0", "rollout.1")} == {RoleState.STOPPED}


async def test_nohup_is_heeded(tmp_path):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        async with Run(tmp_path, unit(tmp_path, "reward.0", "ready", "serve")) as run:
            await run.until(run.all_ready)
            os.kill(os.getpid(), signal.SIGHUP)
            os.kill(os.getpid(), signal.SIGTERM)
            assert (await run.outcome()).reason == "stopped by SIGTERM"
    finally:
        signal.signal(signal.SIGHUP, before)


async def test_the_learners_end_is_the_end_of_the_run(tmp_path):
    async with Run(tmp_path, *whole_run(tmp_path, ("ready", "wait-for:feeder.0.up", "exit:0"))) as run:
        await run.until(run.all_ready)
        (tmp_path / "feeder.0.up").touch()
        outcome = await run.outcome()
    assert (outcome.exit_code, outcome.finished) == (ExitCode.OK, True)
    assert run.journal("term")[0] == ("feeder.0", "term")
    assert run.journal("term")[-1] == ("redis", "term")


async def test_one_roles_death_is_one_roles_restart(tmp_path):
    async with Run(tmp_path, *whole_run(tmp_path)) as run:
        await run.until(run.all_ready)
        for _ in range(3):
            pid = run.pid("rollout.0")
            os.kill(pid, signal.SIGKILL)
            await run.until(lambda pid=pid: run.now("rollout.0") is RoleState.READY and run.pid("rollout.0") != pid)
        starts = [name for name, _ in run.journal("start")]
        assert starts.count("rollout.0") == 4
        assert len(starts) == 6 + 3
        deaths = [event for event in run.events if isinstance(event, StateChanged) and event.state is RoleState.BACKOFF]
        assert {event.reason for event in deaths} == {"killed by SIGKILL"}
        os.kill(os.getpid(), signal.SIGTERM)
        assert (await run.outcome()).restarts["rollout.0"] == 3


async def test_a_role_that_exits_78_is_not_restarted_and_its_reason_is_the_runs(tmp_path):
    units = whole_run(tmp_path)
    units[4] = unit(tmp_path, "reward.0", "say:loading", "error:reward exact_mach is unknown", "exit:78")
    async with Run(tmp_path, *units) as run:
        outcome = await run.outcome()
    assert outcome.exit_code == ExitCode.CONFIG
    assert "reward.0 exit 78: reward exact_mach is unknown" in outcome.reason
    assert run.journal("start").count(("reward.0", "start")) == 1
    assert any(isinstance(event, LogLine) and event.tail and b"loading" in event.line for event in run.events)
    assert any(isinstance(event, Notice) and event.error and "exact_mach" in event.text for event in run.events)


async def test_a_screen_that_fails_hides_no_state_from_other_shells(tmp_path):
    def closed(event):
        raise BrokenPipeError

    units = [unit(tmp_path, "redis", "ready", "serve"), unit(tmp_path, "reward.0", "ready", "finish:0.1", "exit:78")]
    async with Run(tmp_path, *units, on_event=closed) as run:
        outcome = await run.outcome()
    found = read_states(tmp_path)
    assert (outcome.exit_code, found.roles["reward.0"].state) == (ExitCode.CONFIG, "failed")
    assert found.roles["redis"].state == "stopped"
    assert not found.alive


async def test_a_role_that_dies_again_and_again_ends_the_run(tmp_path):
    units = [unit(tmp_path, "redis", "ready", "serve"), unit(tmp_path, "reward.0", "exit:1")]
    async with Run(tmp_path, *units, max_restarts=3) as run:
        outcome = await run.outcome()
    assert outcome.exit_code == ExitCode.FAILURE
    assert "4 deaths within" in outcome.reason
    assert outcome.restarts == {"redis": 0, "reward.0": 3}
    assert ("redis", "term") in run.journal()


async def test_a_ready_role_whose_loop_is_silent_is_killed_and_restarted(tmp_path):
    units = [unit(tmp_path, "reward.0", "ready", "beat", "hang")]
    async with Run(tmp_path, *units, liveness_deadline=0.3) as run:
        await run.until(lambda: RoleState.BACKOFF in run.states("reward.0"))
        await run.until(lambda: run.states("reward.0").count(RoleState.READY) >= 2)
        reasons = [event.reason for event in run.events if isinstance(event, StateChanged)]
        assert any("event loop silent" in reason for reason in reasons)


async def test_a_supervisor_that_stood_still_blames_nobody(tmp_path):
    async with Run(tmp_path, unit(tmp_path, "reward.0", "ready", "beats"), liveness_deadline=0.6) as run:
        await run.until(lambda: run.now("reward.0") is RoleState.READY)
        time.sleep(2.0)  # noqa: ASYNC251  the fault: the event loop of the supervisor stands still, as after Ctrl-Z
        beats = len(run.journal("beat"))
        await run.until(lambda: len(run.journal("beat")) > beats + 5)
        assert run.journal("start") == [("reward.0", "start")]
        assert RoleState.BACKOFF not in run.states("reward.0")


async def test_a_role_that_ignores_sigterm_is_killed_when_its_budget_is_over(tmp_path):
    units = [unit(tmp_path, "redis", "ready", "serve"), unit(tmp_path, "rollout.0", "deaf", "ready", "hang")]
    async with Run(tmp_path, *units, drain_deadline=1.0, term_grace=0.2) as run:
        await run.until(lambda: run.now("rollout.0") is RoleState.READY)
        pid = run.pid("rollout.0")
        os.kill(os.getpid(), signal.SIGTERM)
        outcome = await run.outcome()
    assert outcome.exit_code == ExitCode.OK
    assert not psutil.pid_exists(pid)
    assert any(isinstance(event, Notice) and "did not end in time" in event.text for event in run.events)


async def test_the_second_signal_stops_now_and_the_third_kills(tmp_path):
    units = [
        unit(tmp_path, "redis", "ready", "serve"),
        unit(tmp_path, "rollout.0", "deaf", "ready", "hang"),
        unit(tmp_path, "reward.0", "ready", "serve"),
        unit(tmp_path, "feeder.0", "deaf", "ready", "hang"),
    ]
    async with Run(tmp_path, *units, drain_deadline=1000.0, term_grace=1000.0) as run:
        await run.until(run.all_ready)
        os.kill(os.getpid(), signal.SIGINT)
        await run.until(lambda: run.now("feeder.0") is RoleState.DRAINING)
        assert ("reward.0", "term") not in run.journal()
        os.kill(os.getpid(), signal.SIGINT)
        await run.until(lambda: ("reward.0", "exit") in run.journal())
        assert ("redis", "term") not in run.journal()
        os.kill(os.getpid(), signal.SIGINT)
        outcome = await run.outcome()
    assert outcome.exit_code == ExitCode.INTERRUPTED
    assert not any(psutil.pid_exists(run.pid(role)) for role in ("redis", "rollout.0", "feeder.0"))


async def test_a_process_that_not_even_sigkill_ends_does_not_hold_up_the_supervisor(tmp_path, monkeypatch):
    """As a process that is stuck in the kernel; it ends by itself when its lifeline is closed."""
    monkeypatch.setattr("streamrl.runtime.placement.local.LocalProcess.signal", lambda process, number: None)
    monkeypatch.setattr("streamrl.runtime.unit.KILL_SECONDS", 0.2)
    stuck = unit(tmp_path, "rollout.0", "deaf", "ready", "beats")
    silent = unit(tmp_path, "reward.0", "deaf", "ready", "beat", "hang")
    options = {"drain_deadline": 1.0, "liveness_deadline": 0.5, "max_restarts": 1, "window": 1000.0}
    async with Run(tmp_path, stuck, silent, **options) as run:
        outcome = await run.outcome()
    assert (outcome.exit_code, outcome.restarts) == (ExitCode.FAILURE, {"rollout.0": 0, "reward.0": 1})
    assert "reward.0: event loop silent" in outcome.reason
    for role in ("rollout.0", "reward.0"):
        await _gone(run.pid(role))


async def test_a_gang_dies_together_and_starts_together_with_a_new_rendezvous(tmp_path):
    names = ["learner.0", "learner.1"]
    gang = unit(
        tmp_path, "learner", "environment:STREAMRL_RENDEZVOUS", "environment:RANK", "ready", "serve",
        names=names, kind="learner", finishes=True,
    )  # fmt: skip
    async with Run(tmp_path, gang) as run:
        await run.until(lambda: run.now("learner.0") is RoleState.READY)
        first = {name: run.pid(name) for name in names}
        os.kill(first["learner.1"], signal.SIGKILL)
        await run.until(lambda: run.now("learner.0") is RoleState.READY and run.pid("learner.0") != first["learner.0"])
        assert not any(psutil.pid_exists(pid) for pid in first.values())
        tokens = [event for _, event in run.journal() if event.startswith("STREAMRL_RENDEZVOUS=file:")]
        assert len(tokens) == 4
        assert len(set(tokens)) == 2
        assert {event for _, event in run.journal() if event.startswith("RANK=")} == {"RANK=0", "RANK=1"}


async def test_the_better_reason_of_two_ranks_counts(tmp_path):
    (tmp_path / "rank.py").write_text(
        "import os, time\n"
        "rank = os.environ['RANK']\n"
        "time.sleep(0.3 if rank == '0' else 0)\n"
        "os._exit(78 if rank == '0' else 75)\n"
    )

    def command(position):
        return RoleCommand(("-S", str(tmp_path / "rank.py")), {"RANK": str(position)}, tmp_path)

    spec = UnitSpec("learner", ("learner.0", "learner.1"), command, finishes=True)
    async with Run(tmp_path, spec) as run:
        outcome = await run.outcome()
    assert (outcome.exit_code, outcome.restarts) == (ExitCode.CONFIG, {"learner": 0})
    assert "learner.0: exit 78" in outcome.reason


async def test_a_learner_replaced_by_a_newer_one_is_no_finished_run_and_comes_back(tmp_path):
    units = whole_run(tmp_path, ("ready", "wait-for:go", "fenced:epoch 3 took over", "exit:0"))
    async with Run(tmp_path, *units, max_restarts=2) as run:
        await run.until(run.all_ready)
        (tmp_path / "go").touch()
        outcome = await run.outcome()
    assert (outcome.exit_code, outcome.finished) == (ExitCode.FAILURE, False)
    assert outcome.restarts["learner.0"] == 2
    assert "epoch 3 took over; 3 deaths" in outcome.reason


async def test_a_gang_is_fenced_when_its_leader_says_so_after_the_others_have_left(tmp_path):
    def command(position):
        behaviours = ("ready", "wait-for:go", "fenced:epoch 3 took over", "wait-for:rank-1-left", "exit:0")
        if position == 1:
            behaviours = ("ready", "wait-for:go", "exit:0")
        argv = ("-S", "-E", str(STANDIN), f"learner.{position}", *behaviours)
        return RoleCommand(argv, {"RANK": str(position)}, tmp_path)

    gang = UnitSpec("learner", ("learner.0", "learner.1"), command, finishes=True)
    async with Run(tmp_path, gang, max_restarts=1) as run:
        await run.until(lambda: run.now("learner.0") is RoleState.READY)
        (tmp_path / "go").touch()
        await run.until(lambda: ("learner.1", "exit-0") in run.journal())
        (tmp_path / "rank-1-left").touch()
        outcome = await run.outcome()
    assert (outcome.exit_code, outcome.finished) == (ExitCode.FAILURE, False)
    assert "learner.0: exit 0: epoch 3 took over" in outcome.reason


async def test_a_learner_that_cannot_save_at_its_end_makes_the_drain_a_failure(tmp_path):
    units = whole_run(tmp_path, ("ready", "serve", "error:no space left", "exit:73"))
    async with Run(tmp_path, *units) as run:
        await run.until(run.all_ready)
        os.kill(os.getpid(), signal.SIGINT)
        outcome = await run.outcome()
    assert outcome.exit_code == ExitCode.CANNOT_CREATE
    assert "no space left" in outcome.reason


async def test_what_dies_during_the_drain_stays_dead_except_redis(tmp_path):
    units = whole_run(tmp_path)
    units[5] = unit(tmp_path, "feeder.0", "deaf", "ready", "wait-for:go", finishes=True)
    async with Run(tmp_path, *units) as run:
        await run.until(run.all_ready)
        os.kill(os.getpid(), signal.SIGINT)
        await run.until(lambda: run.now("feeder.0") is RoleState.DRAINING)
        redis = run.pid("redis")
        os.kill(run.pid("reward.0"), signal.SIGKILL)
        os.kill(redis, signal.SIGKILL)
        await run.until(lambda: run.now("reward.0") is RoleState.STOPPED)
        await run.until(lambda: run.now("redis") is RoleState.READY and run.pid("redis") != redis)
        (tmp_path / "go").touch()
        assert (await run.outcome()).exit_code == ExitCode.OK
    assert run.journal("start").count(("reward.0", "start")) == 1


async def test_a_program_that_cannot_be_executed_is_a_death_with_its_reason(tmp_path):
    def command(position):
        return RoleCommand((), {}, tmp_path / "missing")

    async with Run(tmp_path, UnitSpec("feeder", ("feeder.0",), command), max_restarts=1) as run:
        outcome = await run.outcome()
    assert "cannot be started" in outcome.reason


async def test_what_a_role_started_is_killed_with_it(tmp_path):
    units = [unit(tmp_path, "rollout.0", "grandchild", "ready", "wait-for:go", "exit:1")]
    async with Run(tmp_path, *units, max_restarts=0) as run:
        await run.until(lambda: ("rollout.0", "grandchild") in run.journal())
        grandchild = int(
            next(line.split()[2] for line in (tmp_path / "journal").read_text().splitlines() if "grandchild" in line)
        )
        (tmp_path / "go").touch()
        await run.outcome()
    await _gone(grandchild)


async def test_a_second_supervisor_is_refused_and_the_first_is_named(tmp_path):
    async with Run(tmp_path, unit(tmp_path, "feeder.0", "ready", "serve")) as run:
        await run.until(run.all_ready)
        with pytest.raises(Refused, match=f"process {os.getpid()}") as caught:
            await supervise(run.config, tmp_path, lambda event: None, units=[])
        assert caught.value.exit_code == 78
        assert run.now("feeder.0") is RoleState.READY


async def test_a_terminal_that_does_not_read_blocks_no_role(tmp_path):
    free = threading.Event()

    def slow(event):
        if isinstance(event, LogLine):
            free.wait(60)

    chatter = ("ready", "chatter:30000", "environment:RANK", "wait-for:go", "exit:0")
    async with Run(tmp_path, unit(tmp_path, "learner.0", *chatter, finishes=True), on_event=slow) as run:
        async with asyncio.timeout(30):
            while not any("RANK" in event for _, event in run.journal()):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        free.set()  # it has written everything, although nobody has read a line
        (tmp_path / "go").touch()
        assert (await run.outcome()).finished
    assert sum(1 for _ in (tmp_path / "logs" / "learner.0.jsonl").open()) == 30000
    shown = sum(isinstance(event, LogLine) for event in run.events)
    dropped = sum(event.count for event in run.events if isinstance(event, LinesDropped))
    assert shown + dropped == 30000
    assert dropped > 0


async def test_cancelling_the_supervisor_leaves_no_process_and_no_shared_memory(tmp_path):
    memory = shm_store(tmp_path).root
    (memory / "v-1-1").mkdir(parents=True)
    async with Run(tmp_path, *whole_run(tmp_path)) as run:
        await run.until(run.all_ready)
        pids = [run.pid(role) for role in ("redis", "learner.0", "rollout.0", "reward.0", "feeder.0")]
        run.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run.task
        for pid in pids:
            await _gone(pid)
    assert not memory.exists()


async def _gone(pid):
    def there():
        try:
            return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    async with asyncio.timeout(20):
        while there():  # noqa: ASYNC110
            await asyncio.sleep(0.02)

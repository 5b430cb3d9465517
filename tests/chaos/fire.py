"""A real `streamrl up` under fire: find its processes, kill them at chosen moments, cut Redis back, and audit."""

from __future__ import annotations

import contextlib
import functools
import glob
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import psutil
import redis

DEADLINE = 150.0
"""Longest wait for a condition; a run that makes no progress for so long has failed."""

SHORT = 0.002
"""Seconds between looks for what lasts some milliseconds; others leave the processor to the run."""

HARD_CAP = 2 * 8 + 2 * 2 * 8
"""(max_staleness + 1) x groups_per_step + 2 x checkpoint.every x groups_per_step of the chaos run: a checkpoint is
written in the background while groups of the next are trained."""


def until(condition: Callable[[], object], what: str, deadline: float = DEADLINE, every: float = 0.05) -> object:
    """Poll until the condition holds; AssertionError with `what` after the deadline."""
    end = time.monotonic() + deadline
    while time.monotonic() < end:
        if value := condition():
            return value
        time.sleep(every)
    raise AssertionError(f"waited {deadline:g} s for: {what}")


def over(process: psutil.Process) -> bool:
    """Whether a process has ended, reaped by its parent or not (a stopped supervisor reaps nobody)."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


class Fire:
    """One run and everything that is done to it. `log` holds (seconds, what) of each blow."""

    def __init__(self, run_file: Path, run_dir: Path, seed: int) -> None:
        self.run_file, self.run_dir = run_file, run_dir
        self.random = random.Random(seed)
        self.log: list[tuple[float, str]] = []
        self.kills: Counter[str] = Counter()
        self.began = time.monotonic()
        self.supervisor: subprocess.Popen[bytes] | None = None
        self.output = (run_dir.parent / "up.log").open("ab")
        paths = [str(Path(__file__).parent / "poison"), *filter(None, [os.environ.get("PYTHONPATH")])]
        self.environ = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "NO_COLOR": "1"}

    # ---- the run

    def up(self) -> None:
        command = [sys.executable, "-m", "streamrl", "up", str(self.run_file), "--run", str(self.run_dir)]
        self.supervisor = subprocess.Popen(
            [*command, "--screen", "plain"],
            env=self.environ,
            stdout=self.output,
            stderr=self.output,
            start_new_session=True,
        )

    def streamrl(self, *arguments: str) -> tuple[int, dict]:
        command = [sys.executable, "-m", "streamrl", *arguments, "--run", str(self.run_dir), "--json"]
        done = subprocess.run(command, env=self.environ, capture_output=True, timeout=60, check=False)
        assert done.stdout, done.stderr.decode()
        return done.returncode, json.loads(done.stdout)["data"]

    def process(self, role: str) -> psutil.Process | None:
        """The newest living process of a role, such as `learner.1` or `redis`."""
        found = [process for process in self.family() if self._is(process, role)]
        return max(found, key=lambda process: process.create_time(), default=None)

    def family(self) -> list[psutil.Process]:
        """Every living process that has the run directory in its command line, or is its Redis server."""
        family = []
        for process in psutil.process_iter(["cmdline", "status"]):
            words = process.info["cmdline"] or []
            ours = any(str(self.run_dir) in word for word in words)
            if ours and process.info["status"] != psutil.STATUS_ZOMBIE and process.pid != os.getpid():
                family.append(process)
        return family

    @staticmethod
    def _is(process: psutil.Process, role: str) -> bool:
        kind, _, index = role.partition(".")
        words = process.info["cmdline"]
        if kind == "redis":
            return any("redis-server" in word for word in words)
        return "streamrl.runtime" in words and words[words.index("streamrl.runtime") + 1 :][:2] == [kind, index]

    @functools.cached_property
    def _store(self) -> redis.Redis:
        return redis.Redis(unix_socket_path=str(self.run_dir / "redis.sock"), socket_timeout=5)

    def store(self) -> redis.Redis:
        """A client of the run's Redis, for looking only."""
        return self._store

    def steps(self) -> int:
        """Steps written to the metrics in all lives of the learner; steps that were lost and made again count twice."""
        path = self.run_dir / "metrics" / "learner.0.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def moves_on(self, steps: int = 1) -> None:
        """Wait until the learner has made more steps."""
        goal = self.steps() + steps
        until(lambda: self.within_bounds() and self.steps() >= goal, f"step {goal} of the learner")

    def within_bounds(self) -> bool:
        """Promise 2 at every look: never more live groups than the hard cap."""
        try:
            live = self.store().zcard("{sr:chaos}:live")
        except redis.RedisError:
            return True
        assert live <= HARD_CAP, f"{live} live groups, hard cap {HARD_CAP}"
        return True

    # ---- the blows

    def note(self, what: str) -> None:
        self.log.append((round(time.monotonic() - self.began, 1), what))

    def kill(self, role: str, why: str = "") -> None:
        process = until(lambda: self.process(role), f"a process of {role}")
        process.send_signal(signal.SIGKILL)
        until(lambda: over(process), f"the end of {role}", 10)
        self.kills[role] += 1
        self.note(f"kill -9 {role} {why}".strip())

    def kill_in_step(self) -> None:
        """Kill rank 0 while groups of a step have gradients that are not applied: they carry a crash counter."""
        store = self.store()

        def in_step() -> list[bytes]:
            live = store.zrange("{sr:chaos}:live", 0, -1)
            return [
                group_id for group_id in live if int(store.hget(f"{{sr:chaos}}:group:{int(group_id)}", "t") or 0) > 0
            ]

        for _ in range(20):
            until(in_step, "a step of the learner", every=SHORT)
            self.kill("learner.0", "inside a step")
            if in_step():
                self.kills["inside a step"] += 1
                return
            self.moves_on()
        raise AssertionError("never hit the learner inside a step")

    def kill_in_episode(self) -> None:
        """Kill the replica while a sample that has not ended has answers of tools in its journal."""
        store, answers = self.store(), 2  # after the beginning and the first reply

        def in_episode() -> bool:
            groups = [f"{{sr:chaos}}:group:{int(gid)}" for gid in store.zrange("{sr:chaos}:live", 0, -1)]
            return any(re.fullmatch(rb"j:\d+:%d" % answers, name) for key in groups for name in store.hkeys(key))

        for _ in range(20):
            until(in_episode, "a turn of tools in a journal", every=SHORT)
            self.kill("rollout.0", "inside an episode")
            if in_episode():
                self.kills["inside an episode"] += 1
                return
            self.moves_on()
        raise AssertionError("never hit the replica inside an episode")

    def kill_in_checkpoint(self) -> None:
        """Kill rank 0 while shards of a checkpoint are on disk and its meta data is not."""
        folder = self.run_dir / "checkpoints"

        def draft() -> bool:
            found: dict[tuple[int, ...], set[str]] = {}
            for name in glob.glob("ckpt-*/*", root_dir=folder):  # noqa: PTH207  (that of a Path fails at what is removed)
                place, file = name.split("/")
                found.setdefault(tuple(map(int, place.split("-")[1:])), set()).add(file)
            return bool(found) and "meta.json" not in found[max(found)]

        for _ in range(20):
            until(draft, "a draft of a checkpoint", every=SHORT)
            self.kill("learner.0", "inside a checkpoint")
            if draft():
                self.kills["inside a checkpoint"] += 1
                return
            self.moves_on()
        raise AssertionError("never hit the learner inside a checkpoint")

    def roll_back_redis(self, seconds: float) -> None:
        """Kill Redis and cut its append-only file somewhere within what it wrote in its last seconds."""
        part = until(self._appended, "the append-only file")
        size_before = part.stat().st_size
        end = time.monotonic() + seconds
        until(lambda: time.monotonic() > end, "the window of the roll-back", seconds + 5)
        os.kill(self.supervisor.pid, signal.SIGSTOP)  # or it starts the server again before the cut
        try:
            self.kill("redis", "and cut its file")
            size = part.stat().st_size
            cut = self.random.randint(min(size_before, size - 1), size - 1)
            os.truncate(part, cut)
            self.kills["roll-back"] += 1
            self.note(f"cut {size - cut} of {size} bytes")
        finally:
            os.kill(self.supervisor.pid, signal.SIGCONT)

    def _appended(self) -> Path | None:
        """The file Redis appends to: one file before version 7, the last increment since."""
        parts = [*self.run_dir.glob("redis/**/*.incr.aof"), *self.run_dir.glob("redis/appendonly.aof")]
        parts = [part for part in parts if part.exists() and part.stat().st_size > 10_000]
        return max(parts, key=lambda part: part.stat().st_mtime, default=None)

    def replace_paused_learner(self) -> None:
        """Stop the learner's ranks, let a second learner take over and train, then wake the first: it must yield."""
        old = [until(lambda name=name: self.process(name), name) for name in ("learner.0", "learner.1")]
        for process in old:
            process.send_signal(signal.SIGSTOP)
        self.note("SIGSTOP the ranks of the learner")
        second = self._second_learner()
        try:
            goal = self.steps() + 3
            until(lambda: self.steps() >= goal or self._died(second), "three steps of the second learner")
            assert not self._died(second), "the second learner ended"
            for process in old:
                process.send_signal(signal.SIGCONT)
            self.note("SIGCONT the old learner, next to its successor")
            until(lambda: over(old[0]), "the old learner's end")
            self.kills["woken zombie"] += 1
        finally:
            for process in second:
                process.kill()
                process.wait()

    def _second_learner(self) -> list[subprocess.Popen[bytes]]:
        rendezvous = f"file://{self.run_dir.parent / f'second-{time.monotonic_ns()}'}"
        processes = []
        for rank in range(2):
            environ = self.environ | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
            environ |= {"STREAMRL_RENDEZVOUS": rendezvous, "OMP_NUM_THREADS": "1"}
            command = [sys.executable, "-P", "-m", "streamrl.runtime", "learner", str(rank), str(self.run_dir)]
            processes.append(subprocess.Popen(command, env=environ, stdout=self.output, stderr=self.output))
        return processes

    @staticmethod
    def _died(processes: list[subprocess.Popen[bytes]]) -> bool:
        return any(process.poll() is not None for process in processes)

    def kill_supervisor(self) -> None:
        """Kill the supervisor: no process of the run may outlive it."""
        self.supervisor.kill()
        self.supervisor.wait()
        self.kills["supervisor"] += 1
        self.note("kill -9 supervisor")
        until(lambda: not self.family(), "the end of all children of a killed supervisor", 60)
        self.note("all children are gone")

    def kill_everything(self) -> None:
        """Kill the supervisor, Redis and all roles at once, in an order of the seed."""
        family = self.family()
        self.random.shuffle(family)
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.supervisor.wait()
        self.kills["everything"] += 1
        self.note(f"kill -9 of all {len(family)} processes")
        until(lambda: not self.family(), "the end of everything", 60)

    def kill_all_but_a_hanging_redis(self) -> None:
        """Stop Redis, then kill the supervisor and all roles: the server is left behind, and cannot end by itself."""
        until(self._answers, "a Redis that answers")  # what still starts ends with the supervisor
        redis = until(lambda: self.process("redis"), "a process of redis")
        redis.send_signal(signal.SIGSTOP)
        for process in self.family():
            if process.pid != redis.pid:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        self.supervisor.wait()
        until(lambda: [process.pid for process in self.family()] == [redis.pid], "the end of all but Redis", 60)
        self.kills["all but a hanging redis"] += 1
        self.note("SIGSTOP redis, kill -9 of all others")

    def _answers(self) -> bool:
        try:
            return bool(self.store().ping())
        except redis.RedisError:
            return False

    def kill_supervisor_while_redis_starts(self) -> None:
        """Kill Redis, and the supervisor as soon as it has started the process that becomes the next one."""
        self.kill("redis")
        until(lambda: any(self._becomes_redis(process) for process in self.family()), "the next Redis", every=SHORT)
        self.supervisor.kill()
        self.supervisor.wait()
        self.kills["supervisor while redis starts"] += 1
        self.note("kill -9 supervisor while Redis starts")
        until(lambda: not self.family(), "the end of all children of a killed supervisor", 60)

    @staticmethod
    def _becomes_redis(process: psutil.Process) -> bool:
        words = process.info["cmdline"]
        return "streamrl.runtime" in words and words[words.index("streamrl.runtime") + 1] == "redis"

    def hang_redis(self) -> None:
        """Stop Redis: the supervisor has to notice, and to start another one."""
        redis = until(lambda: self.process("redis"), "a process of redis")
        redis.send_signal(signal.SIGSTOP)
        self.note("SIGSTOP redis")
        until(lambda: over(redis), "the end of a Redis that hangs", 60)
        self.kills["hanging redis"] += 1
        self.note("it was killed")

    def drain(self) -> int:
        """First Ctrl-C: the run drains; returns the exit code of `up`."""
        self.supervisor.send_signal(signal.SIGINT)
        self.note("SIGINT supervisor")
        return self.supervisor.wait(120)

    def last_words(self) -> str:
        """The end of what `streamrl up` said: what the roles were at when the run stood still."""
        return "\n".join((self.run_dir.parent / "up.log").read_text(errors="replace").splitlines()[-40:])

    def close(self) -> None:
        """Leave nothing behind, whatever happened."""
        if self.supervisor is not None and self.supervisor.poll() is None:
            self.supervisor.kill()
        for process in self.family():
            process.kill()
        self.output.close()

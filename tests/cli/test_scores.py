"""`trace`, `archive` and `rescore`: what they say, their JSON against docs/reference/json.md, their exit codes."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import pytest

from streamrl.archive.reader import ARCHIVE, read_archive
from streamrl.commands.archive import since_of
from streamrl.errors import UsageError
from tests.archive_kit import archived, closed, configured

from .run_kit import cli, data_of, filled_and_stopped, make_run

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory) -> Path:
    """A stopped run with five groups in Redis (ids 0 to 4) and ten groups in its archive (ids 0 to 9)."""
    folder = tmp_path_factory.mktemp("scores") / "demo"
    config = asyncio.run(filled_and_stopped(folder, f"plugin_paths=[{HERE}]"))
    groups = [closed(group_id, dead=(2,) if group_id == 3 else ()) for group_id in range(10)]
    asyncio.run(archived(folder, config, *groups))
    asyncio.run(archived(folder, config, closed(0, samples=2, evaluation=True), evaluation=True))
    return folder


def show(run_dir, *arguments):
    return cli("trace", *arguments, "--run", str(run_dir))


def rescore(run_dir, *arguments):
    return cli("rescore", *arguments, "--run", str(run_dir))


# ---- trace


def test_scores_of_a_live_group(run_dir):
    done = show(run_dir, "0", "--json")
    data = data_of(done.stdout, "streamrl.trace/1")
    assert (done.returncode, data["source"], data["state"]) == (0, "ledger", "closed")
    assert [response["score"] for response in data["responses"]] == [1.0, 1.0]
    assert data["responses"][0]["parts"] == {"exact": 1.0}
    text = show(run_dir, "0").stdout
    assert "group 0: closed, attempt 1, from the ledger" in text
    assert "sample 1  score 1" in text
    assert "parts  exact 1" in text
    assert "\x1b" not in text
    assert "3 tokens (stop)" in text


def test_scores_of_a_group_that_lost_a_sample_and_of_one_that_is_not_whole(run_dir):
    half = show(run_dir, "2").stdout
    assert "group 2: open" in half
    assert "not generated yet" in half
    done = show(run_dir, "7", "--json")
    data = data_of(done.stdout, "streamrl.trace/1")
    assert (data["source"], data["earlier_attempts"]) == ("archive", 0)
    assert data["prompt"]["answer"] == "8"
    # Group 1 died in Redis, and the archive still has an attempt at it.
    one = data_of(show(run_dir, "1", "--json").stdout, "streamrl.trace/1")
    assert (one["state"], one["source"]) == ("dead", "archive")
    assert one["letters"][0]["why"] == "too long for the engine"


def test_an_archived_group_shows_text_score_parts_seconds_and_causes(run_dir, tmp_path):
    config = make_run(tmp_path / "other")
    asyncio.run(archived(tmp_path / "other", config, closed(3, dead=(2,)), closed(3, dead=(1,), attempt=2)))
    done = show(tmp_path / "other", "3")
    assert done.returncode == 0, done.stderr
    assert "attempt 2, from the archive" in done.stdout
    assert "sample 0  score 0  in 0.2s  1 tokens (stop)" in done.stdout
    assert "sample 1  dead: 'deadline: sample 1'" in done.stdout
    assert "answer  '4'" in done.stdout
    data = data_of(show(tmp_path / "other", "3", "--json").stdout, "streamrl.trace/1")
    assert data["earlier_attempts"] == 1
    assert [response.get("cause") for response in data["responses"]] == [None, "deadline: sample 1", None, None]


def test_scores_made_again_are_shown_beside_their_own_attempt_alone(tmp_path):
    folder = tmp_path / "attempts"
    config = make_run(folder)
    asyncio.run(archived(folder, config, closed(3)))
    assert rescore(folder, "--reward", "exact_match", "--into", "first").returncode == 0
    assert list(data_of(show(folder, "3", "--json").stdout, "streamrl.trace/1")["rescored"]) == ["first"]
    asyncio.run(archived(folder, config, closed(3, attempt=2)))
    data = data_of(show(folder, "3", "--json").stdout, "streamrl.trace/1")
    assert (data["attempt"], data["rescored"]) == (2, {})


def test_a_group_of_which_nothing_is_kept(run_dir):
    done = show(run_dir, "99")
    assert done.returncode == 1
    assert "nothing is kept" in done.stdout
    held_out = show(run_dir, "0", "--eval", "--json")
    assert data_of(held_out.stdout, "streamrl.trace/1")["prompt"]["line"] == 0
    assert held_out.returncode == 0


# ---- archive


def test_ls_tells_what_there_is_and_what_is_damaged(run_dir, tmp_path):
    data = data_of(cli("archive", "ls", "--run", str(run_dir), "--json").stdout, "streamrl.archive/1")
    (train, held_out) = data["files"]
    assert (train["groups"], train["samples"], train["dead"], train["evaluation"]) == (10, 39, 1, False)
    assert (held_out["groups"], held_out["evaluation"], held_out["problem"]) == (1, True, None)
    assert train["from"] <= train["to"] <= time.time()
    text = cli("archive", "ls", "--run", str(run_dir)).stdout
    assert "10 groups  39 samples" in text
    (file,) = (run_dir / ARCHIVE).glob("groups-*")
    broken = tmp_path / file.name
    whole = bytearray(file.read_bytes())
    whole[-3] ^= 1
    broken.write_bytes(whole)
    listed = cli("archive", "ls", "--from", str(broken))
    assert (listed.returncode, "DAMAGED" in listed.stdout) == (1, True)
    nothing = cli("archive", "ls", "--from", str(tmp_path / "nothing"))
    assert nothing.returncode == 78
    assert "archive.enabled" in nothing.stderr


def test_export_as_json_lines(run_dir, tmp_path):
    out = tmp_path / "all.jsonl"
    done = cli("archive", "export", "--run", str(run_dir), "--out", str(out), "--json")
    data = data_of(done.stdout, "streamrl.archive.export/1")
    rows = [json.loads(line) for line in out.read_bytes().splitlines()]
    assert (data["rows"], len(rows)) == (40, 40)
    dead = [row for row in rows if row["cause"] is not None]
    assert [(row["group"], row["sample"], row["score"], row["text"]) for row in dead] == [(3, 2, None, None)]
    first = rows[0]
    assert (first["run"], first["prompt"], first["answer"], first["metadata"]) == ("demo", "0 + 1 =", "1", {"level": 0})
    assert (first["text"], first["score"], first["parts"], first["seconds"]) == ("1", 1.0, {"exact_match": 1.0}, 0.25)
    assert (first["tokens"], first["logprobs"], first["versions"]) == ([5], [-0.25], [[0, 3]])
    again = cli("archive", "export", "--run", str(run_dir), "--out", str(out))
    assert again.returncode == 73
    assert "--force" in again.stderr
    assert cli("archive", "export", "--run", str(run_dir), "--out", str(out), "--force", "--eval").returncode == 0
    assert len(out.read_bytes().splitlines()) == 2
    assert [file.name for file in tmp_path.iterdir()] == ["all.jsonl"]


def test_damage_is_told_to_programs_too(run_dir, tmp_path):
    """One file of two is damaged: what is in the other one is exported and scored, and nobody takes it for all."""
    folder = tmp_path / "damaged"
    make_run(folder)
    for group_id in (1, 2):
        asyncio.run(archived(folder, configured(), closed(group_id)))
    first = min((folder / ARCHIVE).glob("groups-*"))
    first.write_bytes(b"what is this")
    out = tmp_path / "all.jsonl"
    done = cli("archive", "export", "--run", str(folder), "--out", str(out), "--json")
    data = data_of(done.stdout, "streamrl.archive.export/1")
    assert (done.returncode, data["rows"], len(data["problems"])) == (1, 4, 1)
    assert str(first) in data["problems"][0]
    assert cli("archive", "export", "--run", str(folder), "--out", "-").returncode == 1
    again = rescore(folder, "--reward", "exact_match", "--into", "new", "--json")
    data = data_of(again.stdout, "streamrl.rescore/2")
    assert (again.returncode, data["scored"], len(data["problems"])) == (1, 4, 1)
    tried = cli("reward", "test", "exact_match", "--sample", str(folder), "--json")
    assert (tried.returncode, data_of(tried.stdout, "streamrl.reward.test/1")["scored"]) == (1, 4)
    assert str(first) in tried.stderr


def test_export_to_stdout_since_a_moment(run_dir):
    done = cli("archive", "export", "--run", str(run_dir), "--out", "-", "--no-tokens", "--since", "1h")
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == 40
    assert "tokens" not in rows[0]
    later = cli("archive", "export", "--run", str(run_dir), "--out", "-", "--since", "2999-01-01")
    assert (later.returncode, later.stdout) == (0, "")
    assert cli("archive", "export", "--run", str(run_dir), "--out", "-", "--since", "soon").returncode == 2


def test_there_is_no_parquet(run_dir, tmp_path):
    done = cli("archive", "export", "--run", str(run_dir), "--out", str(tmp_path / "x.parquet"))
    assert (done.returncode, list(tmp_path.iterdir())) == (2, [])
    assert "name a .jsonl file" in done.stderr


def test_an_export_that_fails_leaves_nothing(run_dir, tmp_path):
    done = cli("archive", "export", "--run", str(run_dir), "--out", str(tmp_path / "no" / "x.jsonl"))
    assert done.returncode == 73
    assert list(tmp_path.iterdir()) == []


def test_when_since_is():
    assert since_of(None) == 0.0
    assert since_of("90s", now=1000.0) == 910.0
    assert since_of("2h", now=10_000.0) == 2800.0
    assert since_of("1970-01-02T00:00:00+00:00") == 86400.0
    for bad in ("", "2", "h", "nand", "infd", "-2h", "tomorrow", "2026-13-01"):
        with pytest.raises(UsageError):
            since_of(bad)


# ---- rescore


def test_another_reward_is_compared(run_dir):
    done = rescore(run_dir, "--reward", "rescore_rewards:opposite", "--arg", "by=2", "--into", "far", "--json")
    data = data_of(done.stdout, "streamrl.rescore/2")
    assert (data["groups"], data["scored"], data["failed"], data["unwritten"]) == (10, 37, 2, 1)
    assert done.returncode == 1  # group 5 has two responses that the reward does not take
    assert {(each["group"], each["sample"]) for each in data["failures"]} == {(5, 0), (5, 2)}
    comparison = data["comparison"]
    assert comparison["agreement"] == 0.0
    assert comparison["pearson"] == pytest.approx(-1.0)
    assert comparison["order"] == 0.0
    assert (comparison["new"]["max"], comparison["old"]["max"]) == (2.0, 1.0)
    assert "zero_variance_old" in comparison
    assert len(data["differ"]) == 10
    assert data["differ"][0]["prompt"].endswith("+ 1 =")
    new = read_archive(run_dir / "rescored" / "far")
    assert sorted(group.group_id for group in new) == [0, 1, 2, 3, 4, 6, 7, 8, 9]
    shown = show(run_dir, "7").stdout
    assert "far  score 2" in shown
    assert data_of(show(run_dir, "7", "--json").stdout, "streamrl.trace/1")["rescored"]["far"]["0"]["score"] == 2.0
    text = rescore(run_dir, "--reward", "rescore_rewards:opposite", "--arg", "by=2", "--into", "far")
    assert "2 responses scored" in text.stdout  # of group 5, which is tried again; the others are kept
    assert "same side of 0.5  0.0 %" in text.stdout
    assert "group 5 sample 0" in text.stdout
    assert "five is\\x1b[2J not for me" in text.stdout
    assert "\x1b" not in text.stdout


def test_a_name_is_taken_once(run_dir):
    assert rescore(run_dir, "--reward", "exact_match", "--into", "again").returncode == 0
    other = rescore(run_dir, "--reward", "number_match", "--into", "again")
    assert other.returncode == 78
    assert "--force" in other.stderr
    forced = rescore(run_dir, "--reward", "number_match", "--into", "again", "--force", "--json")
    data = data_of(forced.stdout, "streamrl.rescore/2")
    assert (forced.returncode, data["scored"], data["comparison"]["same"]) == (0, 39, 1.0)
    assert data["differ"] == []
    wrong = rescore(run_dir, "--reward", "rescore_rewards:opposite", "--arg", "x=1", "--into", "again", "--force")
    assert wrong.returncode == 78  # and what was there is there
    assert rescore(run_dir, "--reward", "number_match", "--into", "again", "--json").returncode == 0
    assert len(list(read_archive(run_dir / "rescored" / "again"))) == 10


def test_a_reward_that_compares_and_a_limit(run_dir):
    done = rescore(run_dir, "--reward", "rescore_rewards:Longest", "--into", "longest", "--limit", "4", "--json")
    data = data_of(done.stdout, "streamrl.rescore/2")
    assert (done.returncode, data["groups"], data["scored"]) == (0, 4, 15)
    three = read_archive(run_dir / "rescored" / "longest").find(3)[0]
    assert {sample.score.parts["rescore_rewards:Longest/of"] for sample in three.samples} == {3.0}


def test_a_function_of_another_system(run_dir):
    done = rescore(run_dir, "--reward", "rescore_rewards:verl_like", "--adapter", "verl", "--into", "verl", "--json")
    assert done.returncode == 0, done.stderr
    assert data_of(done.stdout, "streamrl.rescore/2")["comparison"]["same"] == 1.0


def test_new_scores_are_exported_and_scored_themselves(run_dir, tmp_path):
    assert rescore(run_dir, "--reward", "exact_match", "--into", "one").returncode == 0
    folder = str(run_dir / "rescored" / "one")
    assert cli("archive", "export", "--from", folder, "--out", str(tmp_path / "one.jsonl")).returncode == 0
    assert len((tmp_path / "one.jsonl").read_bytes().splitlines()) == 40
    done = rescore(run_dir, "--reward", "exact_match", "--into", "two", "--from", folder, "--json")
    assert data_of(done.stdout, "streamrl.rescore/2")["scored"] == 39


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("--reward", "exakt_match", "--into", "x"), 78, "did you mean exact_match"),
        (("--reward", "exact_match", "--into", "../x"), 2, "is not a valid name"),
        (("--reward", "exact_match", "--into", "x", "--since", "soon"), 2, "is not a time"),
        (("--reward", "exact_match", "--into", "x", "--set", "seed=1"), 2, "--file"),
        (("--reward", "exact_match", "--into", "x", "--arg", "oops"), 2, "oops"),
        (("--reward", "exact_match", "--into", "x", "--threshold", "nan"), 2, "is not a finite number"),
        (("--reward", "rescore_rewards:opposite", "--into", "x", "--arg", "wrong=1"), 78, "wrong"),
        (("--reward", "exact_match", "--into", "x", "--from", "/nowhere"), 78, "no archived groups"),
    ],
)
def test_mistakes_are_told_before_anything_is_written(run_dir, arguments, code, said):
    done = rescore(run_dir, *arguments)
    assert done.returncode == code, done.stderr
    assert said in done.stderr
    assert not (run_dir / "rescored" / "x").exists()


def test_nothing_since_then_is_said(run_dir):
    done = rescore(run_dir, "--reward", "exact_match", "--into", "late", "--since", "2999-01-01")
    assert done.returncode == 0
    assert "nothing to compare" in done.stdout


def test_the_servers_of_a_run_that_does_not_run_are_not_waited_for(run_dir, tmp_path):
    file = tmp_path / "asks.yaml"
    file.write_text(
        "rewards: [{use: reward_model, args: {model: critic}}]\nreward_models: {critic: {model: any/one}}\n"
    )
    done = rescore(run_dir, "--file", str(file), "--into", "asked")
    assert (done.returncode, done.stdout) == (69, "")
    assert "run demo is not running, and with it the servers of reward_models.critic" in done.stderr
    own = ("--file", str(file), "--set", f"plugin_paths=[{HERE}]", "--reward", "rescore_rewards:Longest")
    assert rescore(run_dir, *own, "--into", "own").returncode == 0

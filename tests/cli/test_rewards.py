"""`streamrl reward new` and `streamrl reward test`."""

from __future__ import annotations

import subprocess
import sys
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import orjson
import pytest
import yaml

from tests.http_kit import answering

from .run_kit import cli, data_of

SCHEMA = "streamrl.reward.test/1"
REWARDS = """
import asyncio
from streamrl.consumers import GroupReward, Reward, Score
from streamrl.errors import RewardUnavailable

class Length(Reward):
    def __init__(self, unit: float = 1.0):
        self.unit = unit
    async def score(self, sample):
        if sample.text == "raise":
            raise ValueError("not\\x1b[31m amused")
        if sample.text == "hang":
            await asyncio.Event().wait()
        return Score(len(sample.text) * self.unit, {"characters": len(sample.text)})

class Rank(GroupReward):
    async def score_group(self, samples):
        return [float(len(samples)) for _ in samples]

class Asleep(Reward):
    def __init__(self, looks: int):
        self.looks = looks
    async def score(self, sample):
        self.looks -= 1
        if self.looks >= 0:
            raise RewardUnavailable("the model is asleep")
        return 1.0

def explains(sample):
    return Score(0.5, detail="line one\\n\\x1b[31mline two")

class Ending(Reward):
    async def open(self, context):
        self.model = context.config.model.path
    async def close(self):
        open("closed", "w").write(self.model)
    def score(self, sample):
        return 1.0

def verl(data_source, solution_str, ground_truth, extra_info):
    return float(solution_str == ground_truth)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, str]:
    """A directory with a module of rewards (its name is this test's own) and samples."""
    module = f"rewards_{abs(hash(str(tmp_path)))}"
    (tmp_path / f"{module}.py").write_text(REWARDS)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path, module


def samples(folder: Path, *texts: str, **fields: object) -> str:
    path = folder / "samples.jsonl"
    lines = [orjson.dumps({"prompt": "2+2=", "answer": "4", "response": text, **fields}) for text in texts]
    path.write_bytes(b"\n".join(lines))
    return str(path)


def test_new_writes_rewards_whose_tests_pass_and_lines_that_work(tmp_path: Path):
    where = tmp_path / "rewards"
    written = {}
    for form, name in (("sample", "my_last_line"), ("group", "my_shortest")):
        done = cli("reward", "new", name, "--in", str(where), "--form", form)
        assert done.returncode == 0, done.stderr
        written[name] = done.stdout
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    tested = subprocess.run(command, check=False, cwd=where, capture_output=True, text=True, timeout=100)
    assert tested.returncode == 0, tested.stdout + tested.stderr
    assert " passed" in tested.stdout
    assert [path.name for path in sorted(where.glob("test_*.py"))] == [f"test_{name}.py" for name in written]
    for name, lines in written.items():
        (where / f"{name}.yaml").write_text(lines)
        (spec,) = yaml.safe_load(lines)["rewards"]
        samples = str(where / f"{name}_samples.jsonl")
        tried = cli("reward", "test", "--file", str(where / f"{name}.yaml"), "--sample", samples, "--json")
        data = data_of(tried.stdout, SCHEMA)
        assert (tried.returncode, data["failed"], data["rewards"]) == (0, 0, [spec["use"]])
        assert (data["min"], data["max"]) == (0.0, 1.0)
        sys.path[:] = [path for path in sys.path if path != str(where)]


def test_new_overwrites_nothing(tmp_path: Path):
    (tmp_path / "test_mine.py").write_text("mine")
    done = cli("reward", "new", "mine", "--in", str(tmp_path))
    assert (done.returncode, "has test_mine.py already" in done.stderr) == (73, True)
    assert [path.name for path in tmp_path.iterdir()] == ["test_mine.py"]
    assert (tmp_path / "test_mine.py").read_text() == "mine"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("my-reward", "cannot be the name"),
        ("class", "cannot be the name"),
        ("test_it", "cannot be the name"),
        ("a.b", "cannot be the name"),
        ("../x", "cannot be the name"),
        ("json", "there is a module json already"),
        ("sys", "there is a module sys already"),
        ("streamrl", "there is a module streamrl already"),
        ("score", "would be 'Score'"),
        ("group_reward", "would be 'GroupReward'"),
        ("reward_sample", "would be 'RewardSample'"),
        ("sequence", "would be 'Sequence'"),
        ("none", "would be 'None'"),
        ("true", "would be 'True'"),
        ("__", "would be ''"),
        ("_2nd", "would be '2nd'"),
    ],
)
def test_new_refuses_names_that_cannot_be_imported(tmp_path: Path, name: str, said: str):
    done = cli("reward", "new", name, "--in", str(tmp_path))
    assert (done.returncode, said in done.stderr) == (2, True)
    assert not list(tmp_path.iterdir())


def test_new_where_nothing_can_be_written(tmp_path: Path):
    (tmp_path / "file").write_text("")
    done = cli("reward", "new", "mine_too", "--in", str(tmp_path / "file" / "folder"))
    assert done.returncode == 73


def test_scores_times_and_errors_are_shown_and_an_error_is_the_exit_code(folder: tuple[Path, str]):
    where, module = folder
    done = cli("reward", "test", f"{module}:Length", "--sample", samples(where, "four", "raise", "ab"), cwd=where)
    assert done.returncode == 1
    assert "2 scored, 1 failed, mean 3, 2 to 4" in done.stdout
    assert "characters 4" in done.stdout
    assert "Traceback" in done.stdout
    assert 'raise ValueError("not' in done.stdout
    assert "\x1b[31m" not in done.stdout, "what a reward wrote does not steer the terminal"
    done = cli("reward", "test", f"{module}:Length", "--sample", samples(where, "four"), cwd=where)
    assert (done.returncode, "1 scored, 0 failed" in done.stdout) == (0, True)


def test_what_a_reward_says_of_a_score_in_words_is_shown(folder: tuple[Path, str]):
    where, module = folder
    done = cli("reward", "test", f"{module}:explains", "--sample", samples(where, "four"), cwd=where)
    assert (done.returncode, "line one\n" in done.stdout, "\x1b[31m" in done.stdout) == (0, True, False)
    done = cli("reward", "test", f"{module}:explains", "--sample", samples(where, "four"), "--json", cwd=where)
    (sample,) = data_of(done.stdout, SCHEMA)["samples"]
    assert (sample["value"], sample["detail"]) == (0.5, f"{module}:explains: line one\n\x1b[31mline two")


def test_json_has_every_sample(folder: tuple[Path, str]):
    where, module = folder
    file = samples(where, "four", "raise", "hang", line=3)
    done = cli(
        "reward", "test", f"{module}:Length", "--arg", "unit=0.5", "--set", "reward_worker.deadline=0.2",
        "--sample", file, "--json", cwd=where,
    )  # fmt: skip
    data = data_of(done.stdout, SCHEMA)
    assert (done.returncode, data["scored"], data["failed"], data["mean"]) == (1, 1, 2, 2.0)
    four, raised, hung = data["samples"]
    assert (four["value"], four["error"], four["line"]) == (2.0, None, 3)
    assert four["parts"] == {f"{module}:Length": 2.0, f"{module}:Length/characters": 4.0}
    assert raised["value"] is None
    assert "amused" in raised["error"]
    assert "Traceback" in raised["detail"]
    assert "no score within 0.2 s" in hung["error"]
    assert hung["seconds"] >= 0.2


def test_a_reward_of_the_run_file_by_its_name_and_all_of_them(folder: tuple[Path, str], tmp_path: Path):
    where, module = folder
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    run = where / "run.yaml"
    run.write_text(
        f"rewards:\n- {{use: '{module}:Length', name: long, weight: 3, args: {{unit: 2}}, attempts: 9}}\n"
        "- {use: exact_match, weight: 10}\nscoring: {clip: [0, 15]}\nreward_worker: {backoff: 1000}\n"
    )
    file = samples(where, "4", "raise")
    all_of_them = cli("reward", "test", "--file", str(run), "--sample", file, "--json", cwd=elsewhere)
    data = data_of(all_of_them.stdout, SCHEMA)
    assert data["rewards"] == ["long", "exact_match"]
    assert data["samples"][0]["value"] == 15.0
    assert data["samples"][1]["value"] is None, "once, whatever the run file says"
    of_file = ["--file", str(run), "--json", "--sample"]
    one = cli("reward", "test", "long", "--arg", "unit=5", *of_file, file, cwd=elsewhere)
    assert data_of(one.stdout, SCHEMA)["samples"][0]["value"] == 5.0
    built_in = cli("reward", "test", "number_match", *of_file, samples(where, "4.0"))
    assert data_of(built_in.stdout, SCHEMA)["mean"] == 1.0


def test_a_reward_that_compares_gets_whole_groups(folder: tuple[Path, str]):
    where, module = folder
    path = where / "groups.jsonl"
    path.write_text(
        "\n".join(
            f'{{"prompt": "x", "response": "{text}", "group": {group}}}'
            for group, text in ((0, "a"), (1, "b"), (0, "c"))
        )
    )
    done = cli("reward", "test", f"{module}:Rank", "--sample", str(path), "--json", cwd=where)
    found = {each["response"]: each["value"] for each in data_of(done.stdout, SCHEMA)["samples"]}
    assert found == {"a": 2.0, "c": 2.0, "b": 1.0}
    assert list(found) == ["a", "b", "c"], "as in the file"


def test_the_reward_is_opened_and_closed(folder: tuple[Path, str]):
    where, module = folder
    done = cli(
        "reward", "test", f"{module}:Ending", "--set", "model.path=tiny", "--sample", samples(where, "x"), cwd=where
    )
    assert done.returncode == 0
    assert (where / "closed").read_text() == "tiny"


def test_who_cannot_be_had_now_is_waited_for_to_a_limit(folder: tuple[Path, str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("streamrl.consumers.scoring.TELL_SECONDS", 0.1)
    reward = ("reward", "test", f"{folder[1]}:Asleep", "--sample", samples(folder[0], "4"))
    done = cli(*reward, "--arg", "looks=2", "--json", cwd=folder[0])
    assert (done.returncode, data_of(done.stdout, SCHEMA)["mean"]) == (0, 1.0), done.stderr
    limits = (
        "--set",
        "lease.max_hold=1s",
        "--set",
        "reward_worker.deadline=0.1s",
        "--set",
        "reward_worker.backoff=0.1s",
    )
    ended = cli(*reward, "--arg", "looks=1000000", *limits, cwd=folder[0])
    assert (ended.returncode, ended.stdout) == (69, "")
    assert "waiting for" in ended.stderr
    assert "1 s at most while nothing is scored: RewardUnavailable: the model is asleep" in ended.stderr
    assert "nothing could be scored for" in ended.stderr


def test_a_service_that_is_away_is_waited_for_as_long_as_the_option_says(folder: tuple[Path, str]):
    reward = ("reward", "test", f"{folder[1]}:Asleep", "--arg", "looks=1000000", "--sample", samples(folder[0], "4"))
    done = cli(*reward, "--wait", "0.5", cwd=folder[0])
    assert (done.returncode, done.stdout) == (69, "")
    assert "Asleep is away: RewardUnavailable: the model is asleep" in done.stderr
    assert "hint: --wait" in done.stderr


def test_only_so_many_samples(folder: tuple[Path, str]):
    where, _ = folder
    done = cli("reward", "test", "exact_match", "-n", "2", "--sample", samples(where, *"44444"), "--json")
    assert len(data_of(done.stdout, SCHEMA)["samples"]) == 2


def test_a_run_without_an_archive_is_explained(stopped_run: Path):
    done = cli("reward", "test", "exact_match", "--sample", str(stopped_run), "--json")
    assert (done.returncode, "no recorded groups" in done.stderr) == (78, True)


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["exact_mach"], 78, "did you mean exact_match?"),
        (["nothing_like_it:Name"], 78, "there is no module"),
        ([], 2, "no reward to test"),
        (["exact_match", "--arg", "tolerance"], 2, "no '='"),
        (["exact_match", "--arg", "tolerance=0.1"], 78, "args do not fit"),
        (["exact_match", "--adapter", "ray"], 2, "'ray' is not one of 'verl', 'trl'"),
        (["exact_match", "--file", "nothing.yaml"], 78, "does not exist"),
    ],
)
def test_bad_options_are_explained(tmp_path: Path, arguments: list[str], code: int, said: str):
    done = cli("reward", "test", *arguments, "--sample", samples(tmp_path, "4"), cwd=tmp_path)
    assert (done.returncode, said in done.stderr) == (code, True), done.stderr


def test_samples_that_are_none_are_explained(tmp_path: Path):
    (tmp_path / "samples.jsonl").write_text('{"prompt": "x", "response": "y"}\n{"prompt": "x"}')
    done = cli("reward", "test", "exact_match", "--sample", str(tmp_path / "samples.jsonl"))
    assert (done.returncode, "line 2 has no `response`" in done.stderr) == (78, True)


def test_a_server_of_yours_scores_what_is_tested(tmp_path: Path):
    def answer(request: BaseHTTPRequestHandler) -> tuple[int, bytes]:
        return (200, b'{"score": 0.25, "detail": "so so"}') if request.command == "POST" else (405, b"{}")

    with answering(answer) as url:
        done = cli("reward", "test", "http", "--arg", f"url={url}/score", "--json", "--sample", samples(tmp_path, "4"))
    (row,) = data_of(done.stdout, SCHEMA)["samples"]
    assert (row["value"], row["detail"]) == (0.25, "http: so so")


def test_a_server_of_yours_that_is_away_is_waited_for_and_named(tmp_path: Path):
    arguments = ["--arg", "url=http://127.0.0.1:9/score", "--wait", "0.2", "--sample", samples(tmp_path, "4")]
    done = cli("reward", "test", "http", *arguments)
    assert (done.returncode, "Connection refused" in done.stderr) == (78, True), done

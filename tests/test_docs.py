"""The documentation says what the code says: its snippets run, its links lead somewhere, its tests exist."""

from __future__ import annotations

import functools
import inspect
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import orjson
import pytest

from streamrl.cli import load_command
from streamrl.config import RunConfig
from streamrl.consumers.plugins import BUILT_IN
from streamrl.demo import prepare
from streamrl.runfile import load
from tests.docs_kit import DOCS, PAGES, ROOT, Block, blocks, hooks

LUA = ROOT / "streamrl" / "queues" / "lua"
SMALL = {"STEPS": 2, "WARM_UP": 1, "DECAY_FROM": 1, "TRAINING_PROMPTS": 20, "HELD_OUT_PROMPTS": 10}


def name(block: Block) -> str:
    return f"{block.page}-{block.number}"


@functools.cache
def defined() -> set[str]:
    """Names of all tests, and of their files."""
    files = list((ROOT / "tests").rglob("*.py"))
    return {path.name for path in files} | {
        test for path in files for test in re.findall(r"def (test_\w+)\(", path.read_text())
    }


@pytest.mark.parametrize(("page", "least"), [("reference/faults.md", 185), ("internals/holes.md", 60)])
def test_every_test_that_a_page_names_exists(page, least):
    named = re.findall(r"`(test_\w+(?:\.py)?)`", (DOCS / page).read_text())
    assert len(named) >= least
    assert set(named) <= defined(), set(named) - defined()


def test_every_hole_names_its_tests():
    page = (DOCS / "internals" / "holes.md").read_text()
    rows = re.findall(r"^\| (\d+b?) \| .* \| (.*) \|$", page, re.MULTILINE)
    first = ["1", "2", "3", "4", "4b", *map(str, range(5, 38))]
    assert [number for number, _ in rows][: len(first)] == first, "later ones are welcome"
    for number, tests in rows:
        assert re.search(r"`test_\w+`", tests) or (number, tests) == ("37", "stated"), f"hole {number} names no test"


def test_every_fault_names_a_test():
    text = (DOCS / "reference" / "faults.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("| ") and not line.endswith("| tests |")]
    assert len(rows) > 100
    assert not [row for row in rows if "`test_" not in row]


def test_the_site_shows_names_of_tests_as_hints_and_no_escaped_pipes():
    page = SimpleNamespace(file=SimpleNamespace(src_uri="reference/faults.md"))
    shown = hooks().on_page_markdown((DOCS / "reference" / "faults.md").read_text(), page=page)
    assert "`test_" not in shown
    assert '<abbr title="test_a_redis_that_is_gone_ends_the_patience">1 test</abbr>' in shown
    assert "`--screen <auto|live|plain|logs>`" in hooks().commands()


def test_no_table_is_broken_and_none_swallows_a_heading():
    for page in PAGES:
        text = page.read_text()
        assert not re.search(r"^\|.*\n#", text, re.MULTILINE), page
        assert not re.search(r"^\|.*\n\n+\|.*\n(?!\|--)", text, re.MULTILINE), page


def test_every_script_says_what_it_does():
    generated = hooks().scripts()
    for path in LUA.glob("[!_]*.lua"):
        parts = hooks().script_header(path.read_text())
        assert {"does", "KEYS", "returns"} <= set(parts), path.name
        assert "repeat" in " ".join([*parts, parts["does"]]), path.name
        assert f"| `{path.stem}` | " in generated


def test_every_command_and_option_is_listed():
    text = hooks().commands()
    commands = dict(hooks().every_command())
    assert len(commands) >= 16
    for words, command in commands.items():
        section = text.partition(f"### {words}\n")[2].partition("\n### ")[0]
        assert section, words
        for option in (option for parameter in command.params for option in parameter.opts if option.startswith("--")):
            assert option in section or option == "--help", (words, option)


def test_the_exit_codes_are_those_of_commands_that_exist():
    table = (DOCS / "reference" / "cli.md").read_text().partition("More precisely")[2].partition("\n## ")[0]
    commands = {words for words, _ in hooks().every_command()}
    for cell in re.findall(r"^\| (`.*?) \| ", table, re.MULTILINE):
        for words in re.findall(r"`([a-z ]+)`", cell):
            assert any(f" {command}".endswith(f" {words}") for command in commands), words


def test_every_key_is_listed():
    text = hooks().keys()
    for key, origin in load(None, [], {}).origins.items():
        section, _, leaf = key.rpartition(".")
        heading = f"## {section}\n" if section else "## Top level\n"
        assert origin == "default"
        assert key.startswith(("rewards", "plugin_paths")) or f"| `{leaf}` |" in text.partition(heading)[2], key
    assert "| `rewards` | list of [rewards](#rewards) |" in text
    assert text.count("\n## ") > len(RunConfig.model_fields) // 2


@pytest.mark.parametrize("reward", BUILT_IN)
def test_the_arguments_of_every_built_in_reward_are_listed(reward):
    listed = hooks().arguments(reward)
    module, _, attribute = BUILT_IN[reward].partition(":")
    signature = inspect.signature(getattr(__import__(module, fromlist=[attribute]), attribute).__init__)
    for argument in list(signature.parameters)[1:]:
        assert f"| `{argument}` |" in listed, argument


def test_every_mark_is_filled():
    marks = [mark for page in PAGES for mark in hooks().MARK.findall(page.read_text())]
    assert len(marks) > 12
    for mark in marks:
        assert len(hooks().GENERATED[mark]()) > 80, mark


def test_every_place_to_change_something_exists():
    rows = re.findall(r"^\| .+ \| (.+) \|$", (DOCS / "internals" / "where-things-are.md").read_text(), re.MULTILINE)
    paths = [path for row in rows[1:] for path in re.findall(r"`([\w/]+(?:\.py|\.yaml|\.lua)?)`", row)]
    assert len(paths) > 40
    for path in paths:
        assert any((folder / path).exists() for folder in (ROOT, ROOT / "streamrl")), path


def test_links_out_of_the_readme_lead_somewhere():
    for page in (ROOT / "README.md", ROOT / "benchmarks" / "README.md"):
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name}: {link}"


def test_every_page_of_the_documentation_that_code_names_exists():
    folders = ("streamrl", "tests", "examples", "benchmarks", "deploy")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*")]
    texts = {path: path.read_text() for path in files if path.suffix in {".py", ".md", ".yaml", ".txt", ".lua"}}
    for path, text in texts.items():
        for page in re.findall(r"\bdocs/[\w/-]+\.md", text):
            assert (ROOT / page).exists(), f"{path}: {page}"


@pytest.mark.parametrize("block", list(blocks("yaml")), ids=name)
def test_every_run_file_is_one(block, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(block.text)
    load(path, ["redis.maxmemory=64GiB"], {})


@pytest.mark.parametrize("block", list(blocks("json")), ids=name)
def test_every_line_of_json_is_json(block):
    try:
        orjson.loads(block.text)
    except orjson.JSONDecodeError:
        for line in block.text.splitlines():
            orjson.loads(line)


def with_tests(block: Block) -> bool:
    return "def test_" in block.text


@pytest.mark.parametrize("block", [block for block in blocks("python") if not with_tests(block)], ids=name)
def test_every_piece_of_python_runs(block):
    """A module of definitions."""
    exec(compile(block.text, name(block), "exec"), {"__name__": "snippet"})


def commands_of(block: Block) -> list[list[str]]:
    lines = [re.split(r"(?:^|\s)#", line)[0] for line in re.sub(r"\\\n", " ", block.text).splitlines()]
    parts = [part for line in lines for part in re.split(r"&&|;|\|\|", line)]
    return [words[1:] for part in parts if (words := shlex.split(part)) and words[0] == "streamrl"]


@pytest.mark.parametrize("block", [block for block in blocks("bash") if "streamrl " in block.text], ids=name)
def test_every_command_line_is_understood(block):
    """Read as the command line reads it, without running the command."""
    lines = commands_of(block)
    assert lines
    for line in lines:
        command, words = load_command(line[0]), list(line[1:])
        context = command.context_class(command, info_name="streamrl")
        while hasattr(command, "list_commands"):
            command = command.get_command(context, words.pop(0))
            assert command is not None, line
        command.make_context("streamrl", words)


def test_the_page_about_the_first_reward_works_as_it_stands(tmp_path):
    """Its commands, in their order; its tests run with those that `reward new` wrote."""
    [tests] = [block for block in blocks("python") if with_tests(block)]
    page = [block for block in blocks("bash") if block.page == tests.page == "docs/start/first-reward.md"]
    lines = [line for block in page for line in block.text.splitlines()]
    assert any(line.startswith("pytest ") for line in lines)
    (tmp_path / "test_snippet.py").write_text(tests.text)
    for line in lines:
        words = shlex.split(line)
        of_pytest = ["-p", "no:cacheprovider", "test_snippet.py"] if words[0] == "pytest" else []
        command = [sys.executable, "-m", *words, *of_pytest]
        environ = os.environ | {"PYTEST_ADDOPTS": ""}
        done = subprocess.run(
            command, check=False, cwd=tmp_path, capture_output=True, text=True, timeout=60, env=environ
        )
        assert done.returncode == 0, (line, done.stdout, done.stderr)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_quickstart_works_as_it_stands(tmp_path, monkeypatch):
    """Its commands but the installation: a run of one step, with a model that knows nothing."""
    for size, value in SMALL.items():
        monkeypatch.setattr(prepare, size, value)
    assert prepare.main([str(tmp_path / "my-sort")]) == 0
    page = [block for block in blocks("bash") if block.page == "docs/start/quickstart.md"]
    lines = [line for block in page for line in block.text.splitlines() if not line.startswith("pip ")]
    bin_folder = Path(sys.executable).parent
    short = {
        "STREAMRL_LEARNER__STEPS": "1",
        "STREAMRL_LEARNER__STOP_AT_ACCURACY": "null",
        "STREAMRL_EVALUATION__EVERY": "0",
        "STREAMRL_EVALUATION__FINAL_PROMPTS": "0",
    }
    environ = os.environ | short | {"PATH": f"{bin_folder}:{os.environ['PATH']}"}
    program = "\n".join(["set -e", *lines]).replace("streamrl status", "streamrl status || true")
    command = ["bash", "-c", program]
    done = subprocess.run(command, check=False, cwd=tmp_path, capture_output=True, text=True, env=environ, timeout=380)
    assert done.returncode == 0, (done.stdout[-2000:], done.stderr[-2000:])
    assert "nothing lost, nothing trained twice" in done.stdout

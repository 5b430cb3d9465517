"""Episodes for people and for other programs: `trace --turns`, and the turns in an exported archive."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from pathlib import Path

import pytest

from streamrl import wire
from streamrl.archive.reader import read_archive
from streamrl.queues import embedded, open_ledgers
from tests.archive_kit import archived, closed
from tests.queues import ledger_kit

from .run_kit import admit, cli, data_of, make_run, sample

TREE = wire.Sample(
    v=2,
    tokens=wire.pack_int32([72, 105, 1, 66, 121, 101]),
    logprobs=wire.pack_float32([-1, -2, -3, -3, -4, -5]),
    runs=[(0, 3), (4, 4)],
    finish="stop",
    text="ye",
    stop="max_turns",
    replayed=1,
    dropped=2,
    auxiliary=3,
    turns=[
        wire.Turn(sampled=3, finish="stop", model_seconds=0.5, reward=0.25),
        wire.Turn(
            parent=0,
            role="tool",
            observed=wire.pack_int32([43, 45]),
            tools=[wire.ToolUse(name="add\x1b[31m", outcome="timeout", seconds=2.0)],
        ),
        wire.Turn(parent=1, sampled=1, finish="stop"),
        wire.Turn(parent=0, role="user", observed=wire.pack_int32([63])),
        wire.Turn(parent=3, sampled=2, finish="length"),
    ],
)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory, tiny: Path) -> Path:
    """A stopped run: group 0 is open with one episode and one that goes on; group 7 is in the archive."""
    folder = tmp_path_factory.mktemp("turns") / "demo"
    config = make_run(folder, f"model.path={tiny / 'model'}")

    async def fill():
        async with embedded.running(config.redis, folder), open_ledgers(config, folder) as ledgers:
            await admit(ledgers.train, 0)
            (prompt,) = await ledger_kit.lease(ledgers.train, "prompts")
            await ledgers.train.emit(prompt, 0, wire.encode(TREE))
            await ledgers.train.journal(prompt, 1, 0, b"turn")

    asyncio.run(fill())
    group = closed(7, samples=2)
    group = dataclasses.replace(
        group, samples={0: (wire.encode(TREE), group.samples[0][1]), 1: (sample(), group.samples[1][1])}
    )
    asyncio.run(archived(folder, config, group))
    return folder


def test_the_turns_of_a_live_group(run_dir):
    done = cli("trace", "0", "--turns", "--run", str(run_dir), "--json")
    data = data_of(done.stdout, "streamrl.trace/1")
    assert data["journaled"] == {"1": 1}
    response = data["responses"][0]
    assert (response["stop"], response["replayed"], response["restarts"]) == ("max_turns", 1, 0)
    assert (response["dropped"], response["auxiliary"]) == (2, 3)
    turns = response["turns"]
    assert [turn["parent"] for turn in turns] == [-1, 0, 1, 0, 3]
    assert [turn["text"] for turn in turns] == ["Hi</s>", "+-", "B", "?", "ye"]
    assert [turn["versions"] for turn in turns] == [[3], [], [3], [], [4]]
    assert turns[1]["tools"] == [{"name": "add\x1b[31m", "outcome": "timeout", "seconds": 2.0}]
    text = cli("trace", "0", "--turns", "--run", str(run_dir)).stdout
    assert "\x1b" not in text
    lines = text.splitlines()
    assert any("turns so far  sample 1: 1" in line for line in lines)
    assert any("ended: max_turns  replayed 1  dropped 2  auxiliary 3" in line for line in lines)
    assert any(line.startswith("    0 assistant  3 tokens (stop) by v3  in 0.5s  reward 0.25") for line in lines)
    assert any("tool add" in line and "timeout in 2.0s" in line for line in lines)
    assert "      3 user  after 0  1 tokens" in lines, "a branch is indented"
    assert "journal" not in cli("trace", "0", "--run", str(run_dir)).stdout


def test_an_archived_group_and_single_answers_have_turns_too(run_dir):
    data = data_of(cli("trace", "7", "--turns", "--run", str(run_dir), "--json").stdout, "streamrl.trace/1")
    tree, single = data["responses"]
    assert [turn["text"] for turn in tree["turns"]] == ["Hi</s>", "+-", "B", "?", "ye"]
    assert [(turn["parent"], turn["role"], turn["tokens"], turn["versions"]) for turn in single["turns"]] == [
        (-1, "assistant", 3, [3, 4])
    ]


def test_without_a_tokenizer_tokens_are_counted(run_dir, tmp_path):
    make_run(tmp_path / "other", f"model.path={tmp_path / 'none'}")
    (tmp_path / "other" / "archive").symlink_to(run_dir / "archive")
    done = cli("trace", "7", "--turns", "--run", str(tmp_path / "other"))
    assert "without their text" in done.stderr
    assert "4 assistant  2 tokens (length) by v4" in done.stdout


def test_turns_are_exported_and_read_back(run_dir, tmp_path):
    assert next(iter(read_archive(run_dir))).samples[0].response == TREE
    rows = []
    for more in ((), ("--no-tokens",)):
        done = cli("archive", "export", "--run", str(run_dir), "--out", "-", *more)
        rows += [json.loads(line) for line in done.stdout.splitlines()]
    tree, single, bare, _ = rows
    assert (tree["stop"], tree["replayed"], single["stop"], single["turns"]) == ("max_turns", 1, None, [])
    assert tree["turns"][1]["tools"] == [{"name": "add\x1b[31m", "outcome": "timeout", "seconds": 2.0}]
    assert [turn["sampled"] for turn in tree["turns"]] == [3, 0, 1, 0, 2]
    assert [turn["observed_tokens"] for turn in tree["turns"]] == [[], [43, 45], [], [63], []]
    assert [turn["observed"] for turn in bare["turns"]] == [0, 2, 0, 1, 0]
    assert "observed_tokens" not in bare["turns"][0]

"""How long a JSONL file of many lines takes from the start to its first prompt, and what reading it costs.

    python benchmarks/data.py [--lines N] [--json FILE]

Goal: 10 million lines start within 10 s. Each line has about 200 bytes, a question and an answer of grade-school
mathematics in size. `start` is what the feeder does before it admits the first group: it finds and hashes the lines and
tokenizes the first 1,024. `check` reads all records while the run goes on, `walk` is `data.long_prompts: drop` on a
restart, per million groups that were admitted before. The tokenizer is of single characters, 120 to a prompt.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from facts import write_json
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from streamrl.config import RunConfig
from streamrl.producers.dataset import Faults, PromptLimits
from streamrl.producers.order import TrainingPrompts
from streamrl.producers.tokenizer import Tokenizer

LINES, WALKED, ADMITTED = 10_000_000, 100_000, 1000
WORDS = "A farmer sells 18 eggs a day and keeps 3 for breakfast, how much does he make in 7 days at 2 dollars an egg? "


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lines", type=int, default=LINES)
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "train.jsonl"
        write(path, arguments.lines)
        results = measure(path, arguments.lines)
    for name, value in results.items():
        print(f"{name:28} {value}")
    if arguments.json:
        write_json(arguments.json, results)


def write(path: Path, lines: int) -> None:
    with path.open("w") as file:
        for begin in range(0, lines, 100_000):
            rows = range(begin, min(lines, begin + 100_000))
            file.writelines(f'{{"prompt": "{row}: {WORDS}", "answer": "{row}", "level": {row % 9}}}\n' for row in rows)


def measure(path: Path, lines: int) -> dict[str, Any]:
    before = resident_mib()
    began = time.perf_counter()
    data = opened(path, drop=False)
    data.prompt(0)
    started = time.perf_counter()
    memory = resident_mib() - before
    for group_id in range(1, ADMITTED + 1):
        data.prompt(group_id)
    admitted = time.perf_counter()
    faults = Faults()
    for reader, rows in data.pieces():
        reader.check(rows, faults)
    faults.check()
    checked = time.perf_counter()
    dropping = opened(path, drop=True)
    opened_again = time.perf_counter()
    walked = min(WALKED, lines)
    dropping.prompt(walked - 1)
    return {
        "lines": lines,
        "bytes": path.stat().st_size,
        "start_seconds": started - began,
        "memory_mib": memory,
        "prompts_per_second": ADMITTED / (admitted - started),
        "check_seconds": checked - admitted,
        "walk_seconds_per_million": 1e6 * (time.perf_counter() - opened_again) / walked,
    }


def resident_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def opened(path: Path, *, drop: bool) -> TrainingPrompts:
    vocabulary = {"<unk>": 0, **{chr(code): code for code in range(32, 127)}}
    backend = Backend(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>"), "characters")
    config = RunConfig.model_validate({"data": {"train": path}})
    return TrainingPrompts(config, tokenizer, PromptLimits(1024, 2048, drop=drop))


if __name__ == "__main__":
    main()

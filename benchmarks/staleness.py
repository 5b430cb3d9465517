"""How learning depends on staleness: the sort task, learnt by several algorithms from samples that are S steps old.

    python benchmarks/staleness.py                                   the grid of docs/internals/staleness.md, or goes on
    python benchmarks/staleness.py --report                          the same, then the table and picture in docs/
    python benchmarks/staleness.py --report --dry                    only of the cells that are there
    python benchmarks/staleness.py --staleness 64 --seeds 0,1,2 --algorithms high_staleness --jobs 1
    python benchmarks/staleness.py --algorithms m2po --set learner.lr=5e-5      one more setting for all of them

Each cell is one line of results/staleness.jsonl; what is there already is not run again.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from facts import machine_facts, write_json
from staleness_grid import ALGORITHMS, Cell, grid
from staleness_report import summary, write_report

HERE = Path(__file__).parent
EXAMPLE = HERE.parent / "examples" / "sort"


class Results:
    """Lines of finished cells in a file, which several commands may share.

    Args:
        path: of the file; it need not exist.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)

    def lines(self) -> list[dict[str, Any]]:
        """All lines."""
        return [json.loads(line) for line in self.path.read_text().splitlines()] if self.path.exists() else []

    def add(self, line: dict[str, Any]) -> None:
        """Add a line; a command that is killed meanwhile leaves the file as it was."""
        with (Path(tempfile.gettempdir()) / f"staleness-{os.getuid()}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            before = self.path.read_bytes() if self.path.exists() else b""
            draft = self.path.with_suffix(".draft")
            draft.write_bytes(before + json.dumps(line).encode() + b"\n")
            draft.replace(self.path)


class Progress:
    """A line on standard error: cells and steps so far, and when the rest may be done."""

    def __init__(self, cells: int, steps: int) -> None:
        self._cells, self._steps = cells, steps
        self._done = self._finished = 0
        self._began = time.monotonic()
        self._lock = threading.Lock()

    def step(self, cell: Cell, line: dict[str, Any]) -> None:
        """A step of a cell is done."""
        with self._lock:
            self._done += 1
            seconds = (time.monotonic() - self._began) / self._done * (self._steps - self._done)
            share = self._done / self._steps
            text = (
                f"{self._finished}/{self._cells} cells  {share:.1%}  {seconds / 60:.0f} min left"
                f"  {cell.label}, step {line['step']}: {line['accuracy']:.3f}"
            )
            end = "\r" if sys.stderr.isatty() else "\n"
            if end == "\r" or self._done % 50 == 0:
                print(f"{text:<100}", end=end, file=sys.stderr, flush=True)

    def finished(self, cell: Cell, line: dict[str, Any]) -> None:
        """A cell is done."""
        with self._lock:
            self._finished += 1
            text = f"{cell.label}: final {line['final']:.3f} in {line['seconds']:.0f} s"
            print(f"{text:<100}", file=sys.stderr, flush=True)


def run_cells(cells: Sequence[Cell], jobs: int, results: Results) -> list[str]:
    """Run cells, so many at a time, each on one thread; return the labels of those that failed."""
    waiting: queue.SimpleQueue[Cell] = queue.SimpleQueue()
    for cell in cells:
        waiting.put(cell)
    progress, failed = Progress(len(cells), sum(cell.steps for cell in cells)), list[str]()

    def work() -> None:
        for cell in _drain(waiting):
            try:
                line = run_cell(cell, progress)
            except RuntimeError as error:
                failed.append(cell.label)
                print(f"{cell.label}: {error}", file=sys.stderr, flush=True)
                continue
            results.add(line | {"facts": machine_facts()})
            progress.finished(cell, line)

    threads = [threading.Thread(target=work) for _ in range(min(jobs, len(cells)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return failed


def _drain(waiting: queue.SimpleQueue[Cell]) -> Iterator[Cell]:
    while True:
        try:
            yield waiting.get_nowait()
        except queue.Empty:
            return


def run_cell(cell: Cell, progress: Progress) -> dict[str, Any]:
    """Run one cell in a process of its own.

    Raises:
        RuntimeError: the process failed; with the end of what it said.
    """
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    with (
        tempfile.TemporaryFile("w+") as said,
        subprocess.Popen(
            [sys.executable, HERE / "staleness_cell.py", json.dumps(asdict(cell))],
            stdout=subprocess.PIPE,
            stderr=said,
            env=environ,
            text=True,
        ) as process,
    ):
        result: dict[str, Any] | None = None
        assert process.stdout is not None
        for text in process.stdout:
            line = json.loads(text)
            if "result" in line:
                result = line["result"]
            else:
                progress.step(cell, line)
        if process.wait() or result is None:
            said.seek(0)
            raise RuntimeError(f"exit status {process.returncode}\n{said.read()[-2000:]}")
    return result


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers, names = (lambda text: [int(part) for part in text.split(",")]), (lambda text: text.split(","))
    parser.add_argument("--algorithms", type=names, default=list(ALGORITHMS), help=f"of {', '.join(ALGORITHMS)}")
    parser.add_argument("--staleness", type=numbers, default=[0, 1, 4, 16], help="steps, separated by commas")
    parser.add_argument("--seeds", type=numbers, default=[0, 1])
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--lr", type=float, default=Cell.lr, help="before any rule")
    parser.add_argument("--rules", type=names, default=["own"], help="own, none, ess, staleness: the learning rate")
    parser.add_argument("--set", action="append", default=[], metavar="A.B=C", help="further settings of all cells")
    parser.add_argument("--groups", type=int, default=Cell.groups, help="prompts of a step")
    parser.add_argument("--size", type=int, default=Cell.size, help="samples of a prompt")
    parser.add_argument("--every", type=int, default=Cell.every, help="steps between measurements")
    parser.add_argument("--prompts", type=int, default=Cell.prompts, help="held-out prompts of a measurement")
    parser.add_argument(
        "--final-prompts", type=int, default=Cell.final_prompts, help="held-out prompts of the last one"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="cells at a time")
    parser.add_argument("--results", type=Path, default=HERE / "results" / "staleness.jsonl")
    parser.add_argument("--dry", action="store_true", help="run nothing: take what is there")
    parser.add_argument("--report", action="store_true", help="then draw the picture in --docs")
    parser.add_argument("--docs", type=Path, default=HERE.parent / "docs" / "internals", help="where its picture is")
    parser.add_argument("--json", type=Path, help="file for the summary of the cells asked for")
    args = parser.parse_args()
    if unknown := set(args.algorithms) - set(ALGORITHMS):
        parser.error(f"no such algorithms: {', '.join(sorted(unknown))}")
    if unknown := set(args.rules) - {"own", "none", "ess", "staleness"}:
        parser.error(f"no such rules: {', '.join(sorted(unknown))}")
    return args


def main() -> int:
    args = _arguments()
    results = Results(args.results)
    asked = grid(args)
    done = {Cell.of(line).key for line in results.lines()}
    todo = [] if args.dry else [cell for cell in asked if cell.key not in done]
    print(
        f"{len(asked)} cells, {len(done & {cell.key for cell in asked})} of them done before",
        file=sys.stderr,
        flush=True,
    )
    if todo and not (EXAMPLE / "cache").exists():
        subprocess.run([sys.executable, EXAMPLE / "prepare.py"], check=True)
    failed = run_cells(todo, args.jobs, results)
    keys = {cell.key for cell in asked}
    found = [line for line in results.lines() if Cell.of(line).key in keys]
    table = summary(found)
    for row in table["rows"]:
        print(row["text"])
    if args.json:
        write_json(args.json, {"ran": len(todo) - len(failed), "failed": failed, **table})
    if args.report and found:
        write_report(args.docs, found)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

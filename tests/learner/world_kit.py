"""The same play by one rank in this process and by two ranks in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import orjson
import plays

from streamrl.learner.ranks import RENDEZVOUS


def start(arguments, **variables):
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | variables
    command = [sys.executable, *map(str, arguments)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, stderr=sys.stderr, text=True)


class TwoRanks:
    """Two ranks of one learner over gloo, started once for all plays."""

    def __init__(self, folder: Path) -> None:
        variables = {"WORLD_SIZE": "2", RENDEZVOUS: f"file://{folder / 'rendezvous'}"}
        script = [Path(__file__).parent / "ranks_process.py"]
        self.processes = [start(script, RANK=str(rank), **variables) for rank in (0, 1)]

    def begin(self, play: str, model: Path, out: Path) -> None:
        for process in self.processes:
            process.stdin.write(json.dumps({"play": play, "model": str(model), "out": str(out)}) + "\n")
            process.stdin.flush()

    def end(self) -> None:
        said = [process.stdout.readline().strip() for process in self.processes]
        assert said == ["played"] * 2, said

    def close(self) -> None:
        for process in self.processes:
            process.stdin.close()
        for process in self.processes:
            process.wait(60)
            process.stdout.close()

    def beside(self, play: str, model: Path, one_rank, folder: Path) -> SimpleNamespace:
        """What a play left behind: the folders of one and two ranks, and what each rank found."""
        folders = {name: folder / name for name in ("one", "two")}
        for path in folders.values():
            path.mkdir()
        self.begin(play, model, folders["two"])
        getattr(plays, play)(model, folders["one"], one_rank)
        self.end()
        one, *two = (
            orjson.loads((folders[name] / f"found-{rank}.json").read_bytes())
            for name, rank in (("one", 0), ("two", 0), ("two", 1))
        )
        return SimpleNamespace(folders=folders, one=one, two=two)

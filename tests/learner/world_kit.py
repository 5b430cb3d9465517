"""The same script played by one rank in this process and by two ranks in processes of their own."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import orjson

from streamrl.learner.ranks import RENDEZVOUS


def start(arguments, **variables):
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | variables
    command = [sys.executable, *map(str, arguments)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def one_and_two(player, model, one_rank, tmp_path_factory, seconds):
    """What `player.play(model, folder, ranks)` left behind: its folders, and what each rank found.

    Args:
        player: the module of the script.
        seconds: longest wait for the two ranks.
    """
    one, two = (tmp_path_factory.mktemp(name) for name in ("one", "two"))
    rendezvous = {"WORLD_SIZE": "2", RENDEZVOUS: f"file://{two / 'rendezvous'}"}
    processes = [start([Path(player.__file__), model, two], RANK=str(rank), **rendezvous) for rank in (0, 1)]
    player.play(model, one, one_rank)
    outputs = [process.communicate(timeout=seconds)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    found = [
        orjson.loads((folder / f"found-{rank}.json").read_bytes()) for folder, rank in ((one, 0), (two, 0), (two, 1))
    ]
    return SimpleNamespace(folders={"one": one, "two": two}, one=found[0], two=found[1:])

"""One of two ranks, as a process: plays whatever it is told, a line of JSON each (`TwoRanks` in world_kit.py)."""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import plays
from tiny_policy import run_config

from streamrl.learner.ranks import Ranks


def main() -> None:
    """Join as the environment says, and play until the other end of the pipe is closed."""
    ranks = Ranks.from_environment(run_config(Path(), ranks=2, device="cpu"))
    for line in sys.stdin:
        order = json.loads(line)
        try:
            getattr(plays, order["play"])(Path(order["model"]), Path(order["out"]), ranks)
        except BaseException:  # noqa: BLE001
            print("failed:", json.dumps(traceback.format_exc()), flush=True)
            os._exit(1)
        print("played", flush=True)
    os._exit(0)  # as a role ends


if __name__ == "__main__":
    main()

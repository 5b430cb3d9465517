"""Samples per second through the ledger; the benchmark itself is in `queue_speed.py`, with the same options.

A benchmark that is run as a script has this folder first on `sys.path`, so `import queue` anywhere in it (redis, torch,
asyncio) finds this file. It therefore puts the module of the standard library in its own place first.
"""

import importlib.util
import sys
from importlib.machinery import PathFinder
from pathlib import Path

_elsewhere = [folder for folder in sys.path if Path(folder or ".").resolve() != Path(__file__).resolve().parent]
_spec = PathFinder.find_spec("queue", _elsewhere)
assert _spec is not None
assert _spec.loader is not None
sys.modules["queue"] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(sys.modules["queue"])

if __name__ == "__main__":
    from queue_speed import main

    main()

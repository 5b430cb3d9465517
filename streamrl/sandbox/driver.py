"""Runs in the sandbox: loads a solution and calls one of its functions.

Standard input has one JSON object, `{"call": name, "args": [...], "kwargs": {...}}`. The result goes to descriptor 3 as
JSON. The expected result never enters the sandbox, so it cannot be stolen.
"""

from __future__ import annotations

import json
import os
import sys
import types
from typing import Any

RESULT = 3


def load(path: str) -> dict[str, Any]:
    """Run the solution as an importable module, and return its names."""
    module = types.ModuleType("solution")
    sys.modules["solution"] = module
    with open(path, encoding="utf-8") as file:  # noqa: PTH123 - one import less, for each test
        text = file.read()
    exec(compile(text, path, "exec"), module.__dict__)  # noqa: S102 - this is what the sandbox is for
    return module.__dict__


def _find(space: dict[str, Any], name: str) -> Any:
    """A function, or a method of a class that is built without arguments; `Solution.` may be omitted."""
    owner, _, method = name.rpartition(".")
    if not owner and name not in space and hasattr(space.get("Solution"), name):
        owner = "Solution"
    return getattr(space[owner](), method) if owner else space[name]


def main() -> None:
    task = json.loads(sys.stdin.buffer.read())
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    space = load("solution.py")
    answer = json.dumps(_find(space, task["call"])(*task["args"], **task["kwargs"]))
    sys.stdout.flush()
    with open(RESULT, "w", encoding="utf-8") as file:
        file.write(answer)


if __name__ == "__main__":
    main()

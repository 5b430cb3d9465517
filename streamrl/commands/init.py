"""`streamrl init`: the files a new run begins with."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import resources
from pathlib import Path
from typing import Annotated, Final, Literal

import typer

from streamrl.commands import output
from streamrl.errors import CannotCreate, need_packages, writing

FILES: Final = {
    "own": {
        "run.yaml": "run.yaml.txt",
        "my_rewards.py": "my_rewards.py.txt",
        "train.jsonl": "train.jsonl.txt",
        ".env.example": "env.example.txt",
    },
    "sort": {"run.yaml": "sort.yaml.txt"},
    "tools": {"run.yaml": "tools.yaml.txt", "my_tools.py": "my_tools.py.txt"},
    "agent": {"run.yaml": "agent.yaml.txt", "agent.py": "agent.py.txt"},
}
_TASKS: Final = {"sort": "sort", "tools": "tools", "agent": "tools"}
"""Templates that come with a model and prompts, and the task of these (`streamrl.demo`)."""


_PREPARE: Final = """import signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
from streamrl.demo.prepare import main
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.exit(main(sys.argv[1:]))"""
"""Ctrl-C also ends it without a traceback while torch is loaded."""


def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Directory to write to; created if missing.")] = Path(),
    template: Annotated[
        Literal["own", "sort", "tools", "agent"],
        typer.Option(
            help="own: for your own model, prompts and rewards. Tasks that run without network: sort; tools: turns with"
            " a tool; agent: the same, played by a program on the `openai` package."
        ),
    ] = "own",
    force: Annotated[bool, typer.Option("--force", help="Overwrite existing files.")] = False,
) -> int:
    """Write a commented run.yaml, a reward plug-in, sample prompts and .env.example.

    Nothing is written if one of the files exists, unless --force is given. The templates sort, tools and agent
    also write a small model and its prompts to DIR/cache; these runs need neither network nor GPU.
    """
    files = FILES[template]
    there = [name for name in files if (folder / name).exists()]
    if there and not force:
        raise CannotCreate(f"{folder.resolve()} has {', '.join(there)} already", "another directory, or --force")
    templates = resources.files("streamrl.commands") / "templates"
    with writing(inside=folder):
        folder.mkdir(parents=True, exist_ok=True)
        if template in _TASKS:
            _make_task(folder, _TASKS[template])
        for name, source in files.items():
            text = (templates / source).read_text(encoding="utf-8").replace("{run_name}", _run_name(folder))
            (folder / name).write_text(text, encoding="utf-8")
    for name in files:
        output.write(f"wrote {folder / name}")
    if template == "agent":
        output.note("agent.py needs the package openai: `pip install openai`")
    here = "" if folder.resolve() == Path.cwd() else f"cd {folder} && "
    first = "" if template in _TASKS else "look through run.yaml, then "
    output.note(f"next: {first}`{here}streamrl up run.yaml`")
    return 0


def _run_name(folder: Path) -> str:
    """The name of a directory in the characters of a run's name."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", folder.resolve().name).lstrip("._-")[:64] or "my-run"


def _make_task(folder: Path, task: str) -> None:
    """Train the model of a task in a process of its own, because the command line never imports torch."""
    if (folder / "cache").exists():
        output.note(f"the model and the prompts are in {folder / 'cache'} already")
        return
    need_packages("training", "torch", "transformers")
    command = [sys.executable, "-c", _PREPARE, str(folder), "--task", task]
    code = subprocess.run(command, check=False).returncode  # noqa: S603
    if code:
        raise CannotCreate(
            f"the model of the {task} task was not made (exit {code})", "the reason is above; fix it and try again"
        )

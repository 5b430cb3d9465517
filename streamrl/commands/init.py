"""`streamrl init`: the files a new run begins with."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Final

from streamrl.commands import output
from streamrl.errors import CannotCreate

FILES: Final = {
    "run.yaml": "run.yaml.txt",
    "my_rewards.py": "my_rewards.py.txt",
    "train.jsonl": "train.jsonl.txt",
    ".env.example": "env.example.txt",
}


def init(folder: Path, force: bool) -> int:
    """Write the files of a new run into `folder`; nothing is written when one of them is there and not `force`.

    Raises:
        CannotCreate: a file is there already, or the directory cannot be written.
    """
    there = [name for name in FILES if (folder / name).exists()]
    if there and not force:
        raise CannotCreate(f"{folder.resolve()} has {', '.join(there)} already", "another directory, or --force")
    templates = resources.files("streamrl.commands") / "templates"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, template in FILES.items():
            (folder / name).write_text((templates / template).read_text(encoding="utf-8"), encoding="utf-8")
    except OSError as error:
        raise CannotCreate(f"{error.filename}: {error.strerror}", "check space and permissions") from error
    for name in FILES:
        output.write(f"wrote {folder / name}")
    here = "" if folder.resolve() == Path.cwd() else f"cd {folder} && "
    output.note(f"next: look through run.yaml, then `{here}streamrl up run.yaml`")
    return 0

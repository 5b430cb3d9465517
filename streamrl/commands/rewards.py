"""`streamrl reward`: writes a reward with its test; `test` and `servers` are in modules of their own."""

from __future__ import annotations

import importlib.util
import keyword
import os
import sys
from enum import StrEnum
from importlib import resources
from pathlib import Path
from typing import Annotated, Final

import typer

from streamrl.commands import output, reward_servers
from streamrl.commands.reward_trial import trial
from streamrl.errors import CannotCreate, UsageError

_TEMPLATES: Final = {
    "sample": {
        "{module}.py": "reward.py.txt",
        "test_{module}.py": "reward_test.py.txt",
        "{module}_samples.jsonl": "reward_samples.jsonl.txt",
    },
    "group": {
        "{module}.py": "reward_group.py.txt",
        "test_{module}.py": "reward_group_test.py.txt",
        "{module}_samples.jsonl": "reward_group_samples.jsonl.txt",
    },
}
_LINES: Final = """rewards:
  - use: {module}:{name}
    weight: 1.0
    args: {{{args}}}"""
_TAKEN: Final = {"GroupReward", "Reward", "RewardSample", "Score", "Sequence"}
"""Names that the templates import."""
_ARGS: Final = {"sample": "ignore_case: true", "group": "spread: 1.0"}


app = typer.Typer(no_args_is_help=True, add_completion=False)
app.add_typer(reward_servers.app, name="servers")
app.command("test")(trial)


class Form(StrEnum):
    """Values of `--form`."""

    sample = "sample"
    group = "group"


@app.command("new")
def new(
    module: Annotated[str, typer.Argument(metavar="NAME", help="Name of the module, e.g. my_reward; makes NAME.py.")],
    folder: Annotated[
        Path, typer.Option("--in", metavar="DIR", help="Where; a run looks for it beside its run file.")
    ] = Path(),
    form: Annotated[
        Form, typer.Option("--form", help="sample: scores one response; group: compares those to one prompt.")
    ] = Form.sample,
) -> int:
    """Write a reward that works, its test that passes, and samples to try it on. Nothing is overwritten.

    NAME.py is the reward, test_NAME.py its test (`pytest test_NAME.py`), NAME_samples.jsonl holds samples for
    `streamrl reward test`. The lines for the run file go to stdout. Exit code 73 if one of the files is there already.
    """
    name = "".join(part[:1].upper() + part[1:] for part in module.split("_"))
    _check(module, name)
    templates = resources.files("streamrl.commands") / "templates"
    files = {
        folder / target.format(module=module): (templates / template)
        .read_text(encoding="utf-8")
        .replace("MODULE", module)
        .replace("CLASS", name)
        for target, template in _TEMPLATES[form].items()
    }
    if there := [path.name for path in files if path.exists()]:
        raise CannotCreate(f"{folder.resolve()} has {', '.join(there)} already", "another name, or --in DIR")
    written: list[Path] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, text in files.items():
            with path.open("x", encoding="utf-8") as file:  # "x": never overwrite a file that appeared meanwhile
                written.append(path)
                file.write(text)
    except OSError as error:
        for path in written:
            path.unlink(missing_ok=True)
        raise CannotCreate(f"{error.filename}: {error.strerror}", "check space and permissions") from error
    for path in files:
        output.note(f"wrote {path}")
    output.note("lines for the run file; a run looks for modules beside it and in plugin_paths:")
    output.write(_LINES.format(module=module, name=name, args=_ARGS[form]))
    source, _, samples = files
    here = "" if folder.resolve() == Path.cwd() else f"cd {source.parent} && "
    output.note(f"next: {here}pytest test_{module}.py")
    output.note(f"      {here}streamrl reward test {module}:{name} --sample {samples.name}")
    return 0


def _check(module: str, name: str) -> None:
    if not (module.isidentifier() and module.isascii()) or keyword.iskeyword(module) or module.startswith("test_"):
        raise UsageError(f"{module!r} cannot be the name of a module of rewards", "letters, digits and _: my_reward")
    if not name.isidentifier() or keyword.iskeyword(name) or name in _TAKEN:
        raise UsageError(f"the class of {module} would be {name!r}, which it cannot", "another name, e.g. my_reward")
    here = {"", os.getcwd()}  # noqa: PTH109 (as sys.path has it)
    before = sys.path[:]
    sys.path[:] = [path for path in before if path not in here]
    try:
        taken = module in sys.builtin_module_names or importlib.util.find_spec(module) is not None
    finally:
        sys.path[:] = before
    if taken:
        raise UsageError(f"there is a module {module} already, which would be found instead", "another name")

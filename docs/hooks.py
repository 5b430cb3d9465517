"""What mkdocs adds to the pages in docs/ while it builds the site: all that can be read from the program itself.

A line `<!-- generated: NAME -->` of a page is replaced by what `GENERATED[NAME]` returns.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from math import inf
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import yaml

from streamrl.cli import COMMANDS, load_command
from streamrl.config import RunConfig, base
from streamrl.config.presets import PRESETS
from streamrl.consumers.plugins import BUILT_IN
from streamrl.learner.algorithms.advantages import ESTIMATORS
from streamrl.learner.algorithms.corrections import GATES
from streamrl.learner.algorithms.losses import LOSSES
from streamrl.learner.algorithms.registry import Registry

ROOT = Path(__file__).parents[1]
LUA = ROOT / "streamrl" / "queues" / "lua"
MARK = re.compile(r"^<!-- generated: (.+) -->$", re.MULTILINE)
PROOFS = re.compile(r"`test_\w+(?:\.py)?`(?: `test_\w+(?:\.py)?`)*")
CODE = re.compile(r"(`[^`]*`)")
PARTS = ("KEYS", "ARGV", "returns", "repeat", "full")


def on_config(config: Any) -> None:
    """Put every page of docs/decisions into the navigation."""
    pages = [f"decisions/{path.name}" for path in sorted((ROOT / "docs" / "decisions").glob("*.md"))]
    for entry in config.nav[-1]["Internals"]:
        if "Decisions" in entry:
            entry["Decisions"] = pages


def on_page_markdown(markdown: str, *, page: Any, **_: object) -> str:
    """Fill the marks of a page; names of tests become their number, with the names on hovering."""
    text = MARK.sub(lambda mark: GENERATED[mark[1]](), markdown)
    if page.file.src_uri in {"reference/faults.md", "internals/holes.md"}:
        text = PROOFS.sub(lambda found: _number_of(found[0].replace("`", "").split()), text)
    return text


def _number_of(tests: list[str]) -> str:
    return f'<abbr title="{", ".join(tests)}">{len(tests)} test{"s" * (len(tests) > 1)}</abbr>'


def every_command() -> Iterator[tuple[str, Any]]:
    """Every command of the command line, with its words."""
    for name in COMMANDS:
        yield from below(load_command(name), name)


def below(command: Any, *names: str) -> Iterator[tuple[str, Any]]:
    """The command, or every command below a group, with its words; none that is hidden."""
    if not hasattr(command, "list_commands"):
        if not command.hidden:
            yield " ".join(names), command
        return
    context = command.context_class(command, info_name="streamrl")
    for name in command.list_commands(context):
        yield from below(command.get_command(context, name), *names, name)


def commands() -> str:
    """Every command with its help, arguments and options."""
    parts = []
    for name, command in every_command():
        context = command.context_class(command, info_name=f"streamrl {name}")
        usage = " ".join([f"streamrl {name}", *command.collect_usage_pieces(context)])
        parts += [f"### {name}\n", f"`{usage}`\n", marked(inspect.cleandoc(command.help or "")) + "\n"]
        records = [found.get_help_record(context) for found in command.params if found.name != "help"]
        if rows := [f"| `{option}` | {cell(marked(meaning))} |" for option, meaning in filter(None, records)]:
            parts += ["| option | meaning |", "|---|---|", *rows, ""]
    return "\n".join(parts)


def outside_code(text: str, pattern: str, replacement: str) -> str:
    """Replace a pattern everywhere but in `code`."""
    parts = CODE.split(text)
    parts[::2] = [re.sub(pattern, replacement, part) for part in parts[::2]]
    return "".join(parts)


def marked(text: str) -> str:
    """Text of a help message as Markdown: options become code, pages become links."""
    text = outside_code(text, r"(?<![\w-])--[a-z][a-z-]*", r"`\g<0>`")
    return outside_code(text, r"docs/([\w/-]+\.md)", r"[\g<0>](../\1)")


def cell(text: str) -> str:
    """Text as one cell of a table; a pipe in code needs no backslash there, and would show it."""
    return outside_code(" ".join(text.split()), r"\|", r"\\|")


KINDS = {
    base.Duration: "duration",
    base.Size: "size",
    base.Positive: "integer above 0",
    base.Natural: "integer from 0",
    base.Fraction: "0 to 1",
}


def keys() -> str:
    """Every key of a run file, section by section."""
    return "\n".join(_section("", RunConfig))


def _section(path: str, section: type[base.Section]) -> Iterator[str]:
    yield f"## {path}\n\n{marked(_said(section))}\n" if path else "## Top level\n"
    yield "| key | type | default | meaning |\n|---|---|---|---|"
    below: list[tuple[str, type[base.Section]]] = []
    hints = get_type_hints(section, include_extras=True)
    for name, field in section.model_fields.items():
        kind, inner = _kind(hints[name]), _inner(hints[name])
        if inner is not None and inner not in [known for _, known in below]:
            below.append((f"{path}.{name}".lstrip("."), inner))
        default = "required" if field.is_required() else _default(field.get_default(call_default_factory=True), kind)
        meaning = field.description or ""
        if inner is not None:
            place = next(place for place, known in below if known is inner)
            link = f"[{place}](#{place.replace('.', '')})"
            kind = f"map of {link}" if kind == "map" else kind.replace("section", link)
            meaning = meaning or _said(inner)
            default = "" if kind == link else default
        yield f"| `{name}` | {cell(kind)} | {default} | {cell(marked(meaning))} |"
    yield ""
    for inner_path, inner in below:
        yield from _section(inner_path, inner)


def _said(section: type[base.Section]) -> str:
    return inspect.cleandoc(section.__doc__ or "").partition("\n\n")[0]


def _inner(hint: Any) -> type[base.Section] | None:
    """The section that a key holds: itself, in a list, in a map, or not at all."""
    if inspect.isclass(hint) and issubclass(hint, base.Section):
        return hint
    return next((found for part in get_args(hint) if (found := _inner(part)) is not None), None)


def _kind(hint: Any) -> str:
    """The type of a key in words."""
    if hint in KINDS:
        return KINDS[hint]
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _kind(parts[0])
    if origin is Literal:
        return ", ".join(f"`{part}`" for part in parts)
    if origin is tuple:
        return f"list of {_kind(parts[0])}" if parts[-1] is Ellipsis else f"list of {len(parts)}"
    if (parts and not isinstance(origin, type)) or origin is UnionType:
        return " or ".join("empty" if part is type(None) else _kind(part) for part in parts)
    if inspect.isclass(hint) and issubclass(hint, base.Section):
        return "section"
    names = {"str": "text", "int": "integer", "float": "number", "bool": "true, false", "Path": "path", "dict": "map"}
    return names[(origin or hint).__name__]


def _default(value: Any, kind: str) -> str:
    if value is None or value in ((), {}, "") or isinstance(value, base.Section):
        return ""
    if kind == "duration":
        return f"`{value:g}s`"
    if kind == "size":
        power = next((power for power in (3, 2, 1) if value and value % 1024**power == 0), 0)
        return f"`{value // 1024**power}{('', 'KiB', 'MiB', 'GiB')[power]}`"
    if isinstance(value, tuple):
        short = {"mode": "json", "exclude_defaults": True}
        items = [item.model_dump(**short) if isinstance(item, base.Section) else item for item in value]
        return f"`{items}`"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def arguments(name: str) -> str:
    """What a built-in reward does, and its arguments, from its docstring."""
    module, _, kind = BUILT_IN[name].partition(":")
    reward = getattr(import_module(module), kind)
    return "\n\n".join(documented(reward.__doc__, reward.__init__))


def documented(docstring: str, function: Callable[..., Any]) -> tuple[str, str]:
    """The text of a docstring, and a table of its arguments that can be chosen; empty without any."""
    said, _, rest = inspect.cleandoc(docstring).partition("Args:\n")
    parameters = inspect.signature(function).parameters
    rows = []
    for argument, meaning in re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", rest.partition("Raises:")[0], re.MULTILINE):
        parameter = parameters[argument]
        if function.__name__ == "__init__" or parameter.kind is inspect.Parameter.KEYWORD_ONLY:
            required = parameter.default is inspect.Parameter.empty
            default = "required" if required else _default(parameter.default, "")
            rows.append(f"| `{argument}` | {default} | {cell(meaning.replace('None:', 'empty:'))} |")
    head = ["| argument | default | meaning |", "|---|---|---|"]
    return marked(said.strip()), "\n".join([*head, *rows, ""]) if rows else ""


def rules() -> str:
    """Every rule that comes along."""
    names = [name for name, place in BUILT_IN.items() if ".rules." in place and name != "code"]
    return "\n".join(f"### {name}\n\n{arguments(name)}" for name in names)


def registered(registry: Registry[Any]) -> Iterator[tuple[str, Any, str, str]]:
    """Name, function, text and table of arguments of everything that a registry has."""
    for name in registry.names:
        function = registry.resolve(name, {}).func
        yield name, function, *documented(function.__doc__, function)


def losses() -> str:
    """Every policy loss."""
    found = list(registered(LOSSES))
    free = [f"`{name}`" for name, function, _, _ in found if not function.uses_ratio]
    parts = [f"### {name}\n\n{said}\n\n{table}" for name, _, said, table in found]
    return "\n".join([f"`uses_ratio` is false for {' and '.join(free)}, true for all others.\n", *parts])


def estimators() -> str:
    """Every advantage estimator."""
    rows, tables = [], []
    for name, function, said, table in registered(ESTIMATORS):
        step = getattr(function, "normalise", "none")
        step, needs = "" if step == "none" else f"`{step}`", ", ".join(sorted(getattr(function, "needs", ())))
        rows.append(f"| `{name}` | {cell(said)} | {step} | {needs} |")
        if table:
            tables.append(f"Arguments of `{name}`:\n\n{table}")
    return "\n".join(["| `use` | A of response i | over the step | needs |", "|---|---|---|---|", *rows, "", *tables])


def gates() -> str:
    """Every gate."""
    rows, tables = [], []
    for name, function, said, table in registered(GATES):
        known = function.traits.ranges.items() if function.traits.bounds else ()
        bounds = (
            (level, f"{low:.3g} to {high:.3g}" if high < inf else f"from {low:.3g}") for level, (low, high) in known
        )
        levels = "; ".join(map(" ".join, bounds)) or "token"
        rows.append(f"| `{name}` | {cell(said)} | {levels} |")
        if table:
            tables.append(f"Arguments of `{name}`:\n\n{table}")
    head = ["| gate | does | levels (first: default), with low to high |", "|---|---|---|"]
    return "\n".join([*head, *rows, "", *tables])


def script_header(text: str) -> dict[str, str]:
    """Parts of the comment at the top of a Lua script; a part goes on in the lines below it."""
    parts = {"does": ""}
    part = "does"
    for line in text.splitlines():
        if not line.startswith("-- "):
            break
        words = line.removeprefix("-- ")
        name = words.split()[0]
        if name == "include":
            continue
        if name in PARTS:
            part, words = name, words.removeprefix(name)
            parts[part] = ""
        glue = "; " if part in {"KEYS", "ARGV"} and parts[part] else " "
        parts[part] = f"{parts[part]}{glue}{re.sub(' {2,}', '; ', words.strip())}".strip()
    return parts


def scripts() -> str:
    """The table of all Lua scripts, from their headers."""
    lines = ["| script | does | called with, returns |", "|---|---|---|"]
    for path in sorted(LUA.glob("[!_]*.lua")):
        parts = script_header(path.read_text())
        does = parts["does"].removeprefix(f"{path.stem}: ")
        details = "<br>".join(f"**{name}** {cell(parts[name])}" for name in PARTS if name in parts)
        lines.append(f"| `{path.stem}` | {cell(does)} | {details} |")
    return "\n".join(lines) + "\n"


def preset(name: str) -> str:
    """The keys of a preset, as a part of a run file."""
    text = yaml.safe_dump(PRESETS[name], sort_keys=False, default_flow_style=None, width=110)
    return f"```yaml\n{text}```"


def staleness() -> str:
    """The figures of the staleness experiment, from what `benchmarks/staleness.py` measured."""
    spec = spec_from_file_location("staleness_report", ROOT / "benchmarks" / "staleness_report.py")
    report = module_from_spec(spec)
    spec.loader.exec_module(report)
    measured = (ROOT / "benchmarks" / "results" / "staleness.jsonl").read_text().splitlines()
    return report.tables([json.loads(line) for line in measured])


GENERATED: dict[str, Callable[[], str]] = {
    "commands": commands,
    "estimators": estimators,
    "gates": gates,
    "keys": keys,
    "losses": losses,
    "rules": rules,
    "scripts": scripts,
    "staleness": staleness,
    **{f"arguments {name}": (lambda name=name: arguments(name)) for name in BUILT_IN},
    **{f"preset {name}": (lambda name=name: preset(name)) for name in PRESETS},
}

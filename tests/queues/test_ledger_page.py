"""`docs/ledger.md` says what the code says: every script as its header has it, every hole with tests that exist.

`python tests/queues/test_ledger_page.py` writes the table of the scripts anew.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "ledger.md"
LUA = ROOT / "streamrl" / "queues" / "lua"
BEGIN, END = "<!-- scripts: begin -->\n", "<!-- scripts: end -->"
PARTS = ("KEYS", "ARGV", "returns", "repeat", "full")


def header(text: str) -> dict[str, str]:
    """Parts of the comment at the top of a script; a part goes on in the lines below it."""
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


def table() -> str:
    """The table of all scripts, from their headers."""
    lines = ["| script | does | " + " | ".join(PARTS) + " |", "|---" * (len(PARTS) + 2) + "|"]
    for path in sorted(LUA.glob("[!_]*.lua")):
        parts = header(path.read_text())
        does = parts["does"].removeprefix(f"{path.stem}: ")
        cells = [f"`{path.stem}`", does, *(parts.get(name, "") for name in PARTS)]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def test_the_page_has_every_script_as_its_header_says():
    page = PAGE.read_text()
    assert page.partition(BEGIN)[2].partition(END)[0] == table(), f"run python {Path(__file__).relative_to(ROOT)}"
    for path in LUA.glob("[!_]*.lua"):
        parts = header(path.read_text())
        assert {"does", "KEYS", "returns"} <= set(parts), path.name
        assert "repeat" in " ".join([*parts, parts["does"]]), path.name


def test_every_hole_is_there_with_tests_that_exist():
    rows = re.findall(r"^\| (\d+b?) \| (.*)$", PAGE.read_text(), re.MULTILINE)
    first = ["1", "2", "3", "4", "4b", *map(str, range(5, 38))]
    assert [number for number, _ in rows][: len(first)] == first, "later ones are welcome"
    for number, row in rows:
        state, tests = row.split(" | ")[1], re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", row)
        assert tests or state in {"closed by argument, no test", "stated"}, f"hole {number} names no test"
        for file, name in tests:
            assert f"def {name}(" in (ROOT / file).read_text(), f"hole {number}: {file} has no {name}"


if __name__ == "__main__":
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + BEGIN + table() + END + rest.partition(END)[2])

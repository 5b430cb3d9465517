"""The rule `code`: runs the tests of the prompt against the program in the response."""

from __future__ import annotations

import re
import shutil
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from typing_extensions import override

from streamrl import sandbox as sandbox_package
from streamrl.consumers.reward import Reward, RewardContext, RewardSample, Score
from streamrl.consumers.rules.code_tests import VERDICTS, CodeTest, NoModule, Unchecked, judge, read_tests
from streamrl.errors import DataError
from streamrl.plugin_import import one_of
from streamrl.sandbox import Execution, Isolation, Program, SandboxError, SandboxSettings
from streamrl.sandbox.sandbox import SLOWEST, last_lines, most_at_once

_FENCES: Final = "`~"
_SHORTEST: Final = 3
_LIST_MARK: Final = re.compile(r"^([-*+]|[0-9]{1,9}[.)])[ \t]+(?=```|~~~)")


@dataclass(frozen=True, slots=True)
class CodeBlock:
    """A fenced block: its language in lower case (empty: none given) and its text."""

    language: str
    text: str


def code_blocks(text: str) -> list[CodeBlock]:
    """The closed fenced blocks of `text`. A block that is still open at the end was cut off and does not count.

    A fence is a line of at least three backticks or tildes, possibly after the mark of a list item; it is closed by a
    line of the same character, at least as long. Lines lose the indentation of the fence. Takes linear time.
    """
    blocks: list[CodeBlock] = []
    fence, language, indent = "", "", 0
    lines: list[str] = []
    for line in text.splitlines(keepends=True):
        words = line.strip()
        if not fence:
            words = _LIST_MARK.sub("", words)
        marks = _marks(words)
        if not fence:
            info = words[len(marks) :].strip()
            if marks and not (marks[0] == "`" and "`" in info):
                fence, lines, indent = marks, [], len(line.rstrip()) - len(words)
                language = info.split(maxsplit=1)[0].lower() if info else ""
        elif marks == words and marks.startswith(fence):
            blocks.append(CodeBlock(language, "".join(_outdented(lines, indent))))
            fence = ""
        else:
            lines.append(line)
    return blocks


def _outdented(lines: list[str], indent: int) -> list[str]:
    """Lines without up to `indent` leading characters; unchanged if the first line has less (only the fence had it)."""
    blanks = [len(line) - len(line.lstrip(" \t")) for line in lines]
    first = next((blank for line, blank in zip(lines, blanks, strict=True) if line.strip()), 0)
    if first < indent:
        return lines
    return [line[min(indent, blank) :] for line, blank in zip(lines, blanks, strict=True)]


def program_in(text: str, languages: Collection[str], *, fenced: bool) -> str | None:
    """The last block in one of the languages. If not `fenced`, a text without any block counts as a whole."""
    blocks = code_blocks(text)
    found = [block.text for block in blocks if block.language in languages]
    if found:
        return found[-1]
    return None if fenced or blocks else text


def _marks(words: str) -> str:
    if not words or words[0] not in _FENCES:
        return ""
    length = len(words) - len(words.lstrip(words[0]))
    return words[:length] if length >= _SHORTEST else ""


_PYTHON: Final = ("python", "py", "python3", "")
_OURS: Final = {
    name: (Path(sandbox_package.__file__).parent / name).read_text(encoding="utf-8")
    for name in ("driver.py", "checks.py", "plain.py")
}
_SCRIPTS: Final = {"call": "driver.py", "code": "checks.py"}
_SETUP_SECONDS: Final = 60.0
_OUR_PROCESSES: Final = 2
"""Code of tests runs in a process of its own, and another one waits for tests that need the program's process."""


@dataclass(slots=True)
class _Tally:
    total: float
    spent: float = 0.0
    cpu: float = 0.0
    wall: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    detail: str = ""

    def add(self, verdict: str, execution: Execution) -> None:
        self.counts[verdict] += 1
        if verdict == "crashed" and not self.detail:
            said, code = last_lines(execution.stderr), execution.code or 0
            how = f"with code {code}" if execution.outcome == "ended" else f"by signal {-code}"
            self.detail = f"test {self.counts.total()} ended {how}{said and ':'}\n{said}".rstrip()
        self.spent += execution.wall - execution.delay
        self.cpu += execution.cpu
        self.wall += execution.wall
        if self.wall < SLOWEST * self.total or self.spent >= self.total:
            return
        if self.cpu < self.total:
            raise SandboxError(f"the host is too busy: its tests took {self.wall:.0f} s for {self.spent:.0f} s of work")
        self.spent = self.total

    def ends(self, *, at_failure: bool) -> bool:
        return self.spent >= self.total or (at_failure and self.counts.total() > self.counts["passed"])


class Code(Reward):
    """The share of the prompt's tests that the program in the response passes, each in a sandbox of its own.

    A response without a program scores 0. Missing tests, or a sandbox that does not work, are errors, not scores.
    Parts: `tests`, and how many `passed`, were `wrong`, `crashed`, exceeded `time`, `memory` or `output`, or were
    `unrun` because the time for all tests was up, or after a failure with `credit: all`.

    Args:
        tests: key of the metadata with the tests of the prompt.
        entry_point: key of the metadata with the name of the tested function, for HumanEval's `check(...)`.
        credit: `share`: the share of passed tests; `all`: 1 if all pass, else 0.
        max_tests: run the first tests only, at most so many; None: all.
        languages: languages of fenced blocks that are programs; empty text for blocks that name none.
        fenced: true: only a fenced block is a program; false: without one the whole response is.
        command: words of the command that runs a program other than Python. `{file}` is the program's path; the first
            word is looked up in PATH.
        file: name of the program's file.
        python: interpreter of the programs; empty: streamrl's, without the packages of its environment.
        visible: directories that programs may read, besides those of the system and of the interpreter.
        tolerance: largest relative difference of numbers, in results and in words of the output; 0: none.
        seconds: of processor time for each process of a test.
        wall: seconds for a test including its waiting; None: twice `seconds` plus one.
        total: seconds for all tests of one response; the rest count as not passed. As with `wall`, time in which other
            programs had the processor does not count, but the clock may not run longer than ten times the limit. After
            that, a program that used that much processor time has failed the rest; otherwise the attempt fails.
        memory_mib: MiB of all processes of a test together.
        address_space_mib: MiB of each process; None: no limit (Java, Node and Go reserve much more than they use).
        disk_mib: MiB of all files of a test.
        processes: processes and threads of a test.
        output_kib: KiB of output of a test.
        network: `deny`, or `allow`.
        isolation: `auto`, `strict`, or `none` (with `network: allow` only).
    """

    def __init__(
        self,
        *,
        tests: str = "tests",
        entry_point: str = "entry_point",
        credit: Literal["share", "all"] = "share",
        max_tests: int | None = None,
        languages: Sequence[str] = _PYTHON,
        fenced: bool = True,
        command: Sequence[str] | None = None,
        file: str = "solution.py",
        python: str = SandboxSettings.python,
        visible: Sequence[str] = SandboxSettings.visible,
        tolerance: float = 1e-6,
        seconds: float = SandboxSettings.seconds,
        wall: float | None = SandboxSettings.wall,
        total: float = 30.0,
        memory_mib: int = SandboxSettings.memory_mib,
        address_space_mib: int | None = SandboxSettings.address_space_mib,
        disk_mib: int = SandboxSettings.disk_mib,
        processes: int = SandboxSettings.processes,
        output_kib: int = SandboxSettings.output_kib,
        network: Literal["deny", "allow"] = SandboxSettings.network,
        isolation: Isolation = SandboxSettings.isolation,
    ) -> None:
        one_of("credit", credit, ("share", "all"))
        if max_tests is not None and max_tests < 1:
            raise ValueError(f"max_tests is {max_tests}; at least one test is needed")
        if not 0 <= tolerance < 1 or not total > 0:
            raise ValueError("tolerance must be at least 0 and below 1, total above 0")
        settings = SandboxSettings(
            python=python,
            visible=visible,
            seconds=seconds,
            wall=wall,
            memory_mib=memory_mib,
            address_space_mib=address_space_mib,
            disk_mib=disk_mib,
            processes=processes,
            output_kib=output_kib,
            network=network,
            isolation=isolation,
        )
        self._tests, self._entry = tests, entry_point
        self._max_tests, self._all = max_tests, credit == "all"
        self._languages, self._fenced = frozenset(map(str.lower, languages)), fenced
        self._tolerance, self._total = tolerance, total
        self._file = file
        self._interpreter = settings.interpreter()
        self._command = None if command is None else _looked_up(command)
        self._sandbox = settings.sandbox(ours=_OUR_PROCESSES)
        self.deadline = SLOWEST * (total + self._sandbox.limits.wall) + _SETUP_SECONDS
        self.concurrency = most_at_once()

    @override
    async def open(self, context: RewardContext) -> None:
        del context
        executable = self._interpreter.path if self._command is None else self._command[0]
        await self._sandbox.need(executable, self._interpreter.visible)

    @override
    async def score(self, sample: RewardSample) -> Score:
        where = f"metadata {self._tests} of line {sample.prompt.line}"
        if self._tests not in sample.prompt.metadata:
            raise DataError(f"{where} is missing", "the rule code needs tests: name their key with args.tests")
        entry = sample.prompt.metadata.get(self._entry)
        tests = read_tests(sample.prompt.metadata[self._tests], where, entry)[: self._max_tests]
        if self._command is not None and any(test.kind != "stdin" for test in tests):
            raise DataError(f"{where} calls functions", "a program that a command runs can read and print only")
        tally = _Tally(self._total)
        text = program_in(sample.text, self._languages, fenced=self._fenced)
        if text is not None:
            try:
                for kind in ("stdin", "call", "code"):
                    await self._run(text, [test for test in tests if test.kind == kind], tally)
            except Unchecked:
                raise DataError(
                    f"{where} has code that has executed no check",
                    "a loop over nothing, perhaps; code of tests needs an assert that is executed",
                ) from None
            except NoModule as error:
                raise DataError(
                    f"{where} has code that imports {error}, which {self._interpreter.path} does not have",
                    "name an interpreter that has it in args.python; the program itself is the module `solution`",
                ) from None
        counts = tally.counts
        counts["unrun"] = len(tests) - counts.total()
        passed = counts["passed"]
        value = float(passed == len(tests)) if self._all else passed / len(tests)
        parts: dict[str, float] = {"tests": len(tests), "no_code": int(text is None)}
        parts |= {verdict: counts[verdict] for verdict in VERDICTS}
        return Score(value, parts, detail=tally.detail)

    async def _run(self, text: str, tests: Sequence[CodeTest], tally: _Tally) -> None:
        if not tests or tally.ends(at_failure=self._all):
            return
        async with self._sandbox.start(self._program(text, tests[0])) as session:
            for test in tests:
                execution = await session.run(test.stdin)
                tally.add(judge(test, execution, self._tolerance), execution)
                if tally.ends(at_failure=self._all):
                    return

    def _program(self, text: str, test: CodeTest) -> Program:
        files = {self._file: text}
        if self._command is not None:
            argv = tuple(word.replace("{file}", self._file) for word in self._command)
            return Program(argv=argv, files=files, visible=self._interpreter.visible)
        if test.kind == "stdin":
            script = self._file
        else:
            script, files = _SCRIPTS[test.kind], {"solution.py": text, **_OURS}
        return self._interpreter.program(script, files)


def _looked_up(command: Sequence[str]) -> tuple[str, ...]:
    if not command or not all(isinstance(word, str) for word in command):
        raise ValueError("command is a list of words, for example [node, '{file}']")
    path = shutil.which(command[0])
    if path is None:
        raise ValueError(f"command {command[0]} is not installed here")
    return (str(Path(path).absolute()), *command[1:])

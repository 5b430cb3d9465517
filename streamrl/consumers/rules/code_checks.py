"""Analyses code of tests before it runs: which parts run, whether they check anything, and in which process.

The text comes from the data set and is trusted. The tested program is not, and is not read here.
"""

from __future__ import annotations

import ast
import builtins
import functools
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

_CHECKED: Final = "__streamrl_checked__"
_ENTRY: Final = re.compile(r"[A-Za-z_]\w*(\(\))?(\.[A-Za-z_]\w*)*")
_BUILT_IN: Final = frozenset(dir(builtins))
_CHECKING: Final = ("raises", "fail")
_STANDARD: Final = (
    "__future__ abc bisect cmath collections copy dataclasses datetime decimal enum fractions functools hashlib heapq"
    " itertools json math numbers operator pathlib pprint pytest random re solution statistics string tempfile textwrap"
    " time typing unittest"
)
_APART: Final = frozenset(_STANDARD.split())
"""Modules that work the same in another process than the program's."""
_OF_THE_PROCESS: Final = frozenset({"eval", "exec", "globals", "locals", "vars", "input", "id", "super", "__import__"})
_METHODS: Final = "append extend insert remove pop popleft appendleft clear sort reverse add discard update setdefault"
_CHANGING: Final = frozenset(_METHODS.split())
_SETUPS: Final = ("setup", "setup_method", "setup_class", "teardown", "teardown_method", "teardown_class")
_Function = (ast.FunctionDef, ast.AsyncFunctionDef)
_Definition = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


class NotTests(ValueError):
    """A value of the metadata that cannot be the tests of a program."""


@functools.lru_cache(maxsize=1024)
def read_checks(text: str, entry: str | None) -> Mapping[str, Any]:
    """The task for sandbox/checks.py that runs code of tests; `NotTests` if it cannot run, or checks nothing.

    It runs the code, then its functions named `test...`, its classes of unittest, and its classes named `Test...`. A
    function `check` with one argument is called with `entry`, as in HumanEval, unless the code calls it itself. Code
    below `if __name__ == "__main__"` runs only if nothing else checks.

    `entry` is the name of the tested function, `Solution().name` or `Solution.name`; None: unknown. The task has
    `shown`, for tracebacks; `code`, the same lines with a count of the executed checks; test `functions` and `classes`
    to run after it; `names` that it takes from the program, names that are `kept` from it, `modules` that it uses
    without importing them, packages that it `imports`, and those of them that it `needs`; whether it uses `unittest`,
    `skips` tests by itself, and must run `inside` the program's process.
    """
    try:
        return _task(text, _tree(text, main=False), entry)
    except NotTests:
        return _task(text, _tree(text, main=True), entry)


def _tree(text: str, *, main: bool) -> ast.Module:
    """Parse the code. With `main`, `if __name__ == "__main__"` is replaced by its body; otherwise it is removed."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        where = f", line {error.lineno}: {error.msg}" if isinstance(error, SyntaxError) else f": {error}"
        raise NotTests(f"has code that is not Python{where}") from None
    body: list[ast.stmt] = []
    for one in tree.body:
        if isinstance(one, ast.If) and "__name__" in _loaded([one.test]):
            body.extend(one.body if main else ())
        else:
            body.append(one)
    tree.body = body
    return tree


def _task(text: str, tree: ast.Module, entry: str | None) -> Mapping[str, Any]:
    _call_check(tree, entry)
    functions, classes = _test_functions(tree), _test_classes(tree)
    reachable = _reachable(tree, {*functions, *classes})
    defined = _defined(tree)
    if not any(_is_check(one, defined) for node in reachable for one in ast.walk(node)):
        raise NotTests(
            "has code that executes no check: there is no assert in what is run (a comparison alone, or one that is"
            " returned, checks nothing)"
        )
    names, kept, modules = _names(tree, entry)
    inside = _inside(tree, names)
    shown = ast.unparse(tree)
    return {
        "shown": shown,
        "code": ast.unparse(ast.fix_missing_locations(_Instrument(defined).visit(tree))),
        "functions": functions,
        "classes": classes,
        "names": sorted(names - kept - modules),
        "kept": sorted(kept | modules),
        "modules": sorted(modules),
        "imports": sorted(_imports([tree])),
        "needs": sorted(_imports(reachable, without=(ast.If, ast.Try))),
        "unittest": "unittest" in text or "TestCase" in text,
        "skips": "skip" in text.lower(),
        "inside": inside,
    }


def _defined(tree: ast.Module) -> dict[str, ast.stmt]:
    return {node.name: node for node in tree.body if isinstance(node, _Definition)}


def _loaded(nodes: Iterable[ast.AST]) -> Iterator[str]:
    for node in nodes:
        for one in ast.walk(node):
            if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Load):
                yield one.id


def _call_check(tree: ast.Module, entry: str | None) -> None:
    check = _defined(tree).get("check")
    if not isinstance(check, ast.FunctionDef) or len(check.args.args) != 1:
        return
    if "check" in _loaded(node for node in tree.body if node is not check):
        return
    if entry is None:
        raise NotTests(
            "has code that defines check(...) and does not call it: give the name of the function that is tested as"
            " `entry_point`, in the line or in the test"
        )
    if not _ENTRY.fullmatch(entry):
        raise NotTests(f"has the entry point {entry!r}, which is not a function name")
    owner, _, name = entry.rpartition(".")
    function = f"{owner if owner.endswith(')') else owner + '()'}.{name}" if owner else name
    tree.body.extend(ast.parse(f"check({function})").body)


def _test_functions(tree: ast.Module) -> list[str]:
    found = []
    for node in tree.body:
        if not isinstance(node, _Function) or not node.name.startswith("test"):
            continue
        if _needs(node, 0):
            if node.name in _loaded(one for one in tree.body if one is not node):
                continue  # the code calls it with arguments
            raise NotTests(f"has a test {node.name} with arguments: fixtures and parameters are not known here")
        _refuse_generator(node)
        found.append(node.name)
    return found


def _test_classes(tree: ast.Module) -> list[str]:
    found: list[str] = []
    for node in tree.body:
        if not isinstance(node, ast.ClassDef):
            continue
        bases = [ast.unparse(base) for base in node.bases]
        of_unittest = any(base.endswith("TestCase") or base in found for base in bases)
        if not of_unittest and not node.name.startswith("Test"):
            continue
        methods = [one for one in node.body if isinstance(one, _Function)]
        tests = [one for one in methods if one.name.startswith("test")]
        for test in tests:
            _refuse_generator(test)
            if _needs(test, 1) and not test.decorator_list:
                raise NotTests(f"has a test {node.name}.{test.name} with arguments: fixtures are not known here")
            if of_unittest and isinstance(test, ast.AsyncFunctionDef) and "IsolatedAsyncioTestCase" not in str(bases):
                raise NotTests(
                    f"has an async test {node.name}.{test.name} in a class that is not a"
                    " unittest.IsolatedAsyncioTestCase: unittest does not run it"
                )
        if not of_unittest and (odd := [one.name for one in methods if one.name in _SETUPS]):
            raise NotTests(f"has a class {node.name} with {odd[0]}, which is pytest's: write a unittest.TestCase")
        if tests or of_unittest:
            found.append(node.name)
    return found


def _needs(node: ast.FunctionDef | ast.AsyncFunctionDef, given: int) -> bool:
    args = node.args
    needed = len(args.posonlyargs) + len(args.args) - len(args.defaults)
    return needed > given or any(default is None for default in args.kw_defaults)


def _refuse_generator(node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
    if any(isinstance(one, ast.Yield | ast.YieldFrom) for one in _own(node)):
        raise NotTests(f"has a test {node.name} with yield: what it yields would not be run")


def _own(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes below, except inside nested functions and classes."""
    waiting = list(ast.iter_child_nodes(node))
    while waiting:
        one = waiting.pop()
        yield one
        if not isinstance(one, (*_Definition, ast.Lambda)):
            waiting.extend(ast.iter_child_nodes(one))


def _reachable(tree: ast.Module, roots: set[str]) -> list[ast.stmt]:
    """The statements that run: those outside of functions, the tests, and functions that these name."""
    defined = _defined(tree)
    found = [node for node in tree.body if not isinstance(node, _Definition) or node.name in roots]
    waiting = list(found)
    while waiting:
        for name in set(_loaded([waiting.pop()])):
            node = defined.get(name)
            if node is not None and node not in found:
                found.append(node)
                waiting.append(node)
    return found


def _is_check(node: ast.AST, defined: Mapping[str, Any]) -> bool:
    """Whether it can fail a test: an assert, a call of an assert function, a conditional raise or exit."""
    if isinstance(node, ast.Call):
        return _asserts(node, defined)
    if isinstance(node, ast.If):
        inner = (one for part in (*node.body, *node.orelse) for one in (part, *_own(part)))
        return any(isinstance(one, ast.Raise) or _exits(one) for one in inner)
    return isinstance(node, ast.Assert)


def _exits(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Call)
        and ast.unparse(node.func) in {"sys.exit", "exit", "quit", "os._exit"}
        and any(not isinstance(arg, ast.Constant) or arg.value not in {0, None} for arg in node.args)
    )


def _asserts(node: ast.Call, defined: Mapping[str, Any]) -> bool:
    """Whether it calls an assert function that the tests do not define themselves."""
    name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
    if isinstance(node.func, ast.Name) and node.func.id not in defined:
        name = node.func.id
    return name.startswith("assert") or name in _CHECKING


class _Instrument(ast.NodeTransformer):
    """Inserts calls of functions of sandbox/checks.py that count executed checks and compare values. Keeps lines."""

    def __init__(self, defined: Mapping[str, Any]) -> None:
        self._defined = defined

    def visit_Assert(self, node: ast.Assert) -> Any:
        self.generic_visit(node)
        node.test = _call(_CHECKED, node.test)
        return node

    def visit_ImportFrom(self, node: ast.ImportFrom) -> Any:
        """Drop `from solution import *`: the tests get the names that they use, and no others."""
        star = node.module == "solution" and node.names[0].name == "*"
        return ast.copy_location(ast.Pass(), node) if star else node

    def visit_If(self, node: ast.If) -> Any:
        counted = _is_check(node, self._defined)
        self.generic_visit(node)
        if counted:
            node.test = _call(_CHECKED, node.test)
        return node

    def visit_Try(self, node: ast.Try) -> Any:
        """Count an expected exception as a check, and note a caught assertion that no other check follows.

        An exception is expected if the code after the call fails otherwise. Another check follows if the handler has
        one, or a loop tries again.
        """
        again = any(isinstance(one, ast.Break) for part in node.body for one in ast.walk(part))
        last = [one for one in node.handlers if not again and not self._fails(one.body, ast.Continue)]
        must = self._fails([*node.body, *node.orelse])
        self.generic_visit(node)
        for handler in node.handlers if must else ():
            handler.type = _call(_CHECKED, handler.type or ast.Name("BaseException", ast.Load()))
        for handler in last:
            handler.type = _call("__streamrl_catching__", handler.type or ast.Name("BaseException", ast.Load()))
        return node

    def _fails(self, body: list[ast.stmt], *others: type[ast.AST]) -> bool:
        nodes = (one for part in body for one in ast.walk(part))
        return any(isinstance(one, (ast.Raise, *others)) or _is_check(one, self._defined) for one in nodes)

    def visit_Call(self, node: ast.Call) -> Any:
        counted = _asserts(node, self._defined)
        self.generic_visit(node)
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        if name in {"type", "isinstance"} and len(node.args) == 1 + (name == "isinstance") and not node.keywords:
            node.func = ast.Name(f"__streamrl_{name}__", ast.Load())
        if not counted:
            return node
        compares = isinstance(node.func, ast.Attribute) and node.func.attr.endswith("Equal") and len(node.args) > 1
        if compares and not any(isinstance(arg, ast.Starred) for arg in node.args):
            pair = ast.Starred(_call("__streamrl_pair__", *node.args[:2]), ast.Load())
            node.args = [pair, *node.args[2:]]
        return _call(_CHECKED, node)

    def visit_Attribute(self, node: ast.Attribute) -> Any:
        self.generic_visit(node)
        if node.attr == "__class__" and isinstance(node.ctx, ast.Load):
            return _call("__streamrl_type__", node.value)
        return node

    def visit_Compare(self, node: ast.Compare) -> Any:
        self.generic_visit(node)
        if all(isinstance(op, ast.Eq) for op in node.ops):
            return _call("__streamrl_equal__", node.left, *node.comparators)
        return node


def _call(name: str, *args: ast.expr) -> ast.Call:
    return ast.Call(ast.Name(name, ast.Load()), list(args), [])


def _bound(tree: ast.Module) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            found.add(node.id)
        elif isinstance(node, _Definition):
            found.add(node.name)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, ast.alias):
            found.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.ExceptHandler) and node.name:
            found.add(node.name)
    return found


def _names(tree: ast.Module, entry: str | None) -> tuple[set[str], set[str], set[str]]:
    """The names that the tests use, names that the program must not replace, and modules.

    A program that defines `abs` must not change what the tests compute with it, unless they test nothing else.
    """
    loaded, bound = set(_loaded([tree])), _bound(tree)
    free = loaded - bound - _BUILT_IN
    modules = {name for name in free & sys.stdlib_module_names if _only_owns(tree, name)}
    imports = any(isinstance(node, ast.ImportFrom) and node.module == "solution" for node in ast.walk(tree))
    tested = {(entry or "").partition(".")[0].removesuffix("()")} & loaded
    kept = (loaded & _BUILT_IN) - bound - tested if tested or imports or free - modules else set()
    return loaded, kept, modules


def _only_owns(tree: ast.Module, name: str) -> bool:
    """Whether a name occurs only before a dot, as a module does."""
    owners = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    return all(id(node) in owners for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id == name)


def _inside(tree: ast.Module, names: set[str]) -> bool:
    of_the_program = names - _bound(tree) - _BUILT_IN
    held = _held(tree)
    return any(_is_inside(node, of_the_program) or _changes(node, held) for node in ast.walk(tree))


def _held(tree: ast.Module) -> set[str]:
    """Names of values that an object may hold: attributes, and results of methods of objects of a named class.

    An object of `Solution` is assumed to hold nothing.
    """
    assigns = [node for node in ast.walk(tree) if isinstance(node, ast.Assign)]
    values = [(one.id, node.value) for node in assigns for one in node.targets if isinstance(one, ast.Name)]
    objects = set()
    for name, value in values:
        kind = value.func.id if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) else ""
        if kind[:1].isupper() and kind != "Solution":
            objects.add(name)
    return {name for name, value in values if _is_held(value, objects)}


def _is_held(node: ast.expr, objects: set[str]) -> bool:
    if isinstance(node, ast.Attribute):
        return not (isinstance(node.value, ast.Name) and node.value.id in {"self", "solution"})
    method = node.func if isinstance(node, ast.Call) else None
    return isinstance(method, ast.Attribute) and isinstance(method.value, ast.Name) and method.value.id in objects


def _changes(node: ast.AST, names: set[str]) -> bool:
    changed: ast.expr | None = None
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _CHANGING:
        changed = node.func.value
    elif isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
        changed = node.value
    return isinstance(changed, ast.Name) and changed.id in names


def _is_inside(node: ast.AST, of_the_program: set[str]) -> bool:  # noqa: PLR0911 - one for each kind of node
    if isinstance(node, ast.Import):
        return any(not _works_apart(alias.name) for alias in node.names)
    if isinstance(node, ast.ImportFrom):
        wanted = {alias.name for alias in node.names}
        return not _works_apart(node.module or "") or (node.module == "unittest" and "mock" in wanted)
    if isinstance(node, ast.Name):
        return node.id in _OF_THE_PROCESS
    if isinstance(node, ast.ClassDef):
        return any(name in of_the_program for name in _loaded([*node.bases, *node.keywords]))
    if isinstance(node, ast.Compare):
        return any(isinstance(op, ast.Is | ast.IsNot) for op in node.ops) and not any(
            isinstance(one, ast.Constant) or (isinstance(one, ast.Name) and one.id in _BUILT_IN)
            for one in (node.left, *node.comparators)
        )
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        if node.func.attr in {"assertIs", "assertIsNot"}:
            return not any(isinstance(arg, ast.Constant) for arg in node.args)
        return node.func.attr == "seed" or (node.func.attr in _CHANGING and _within(node.func.value))
    if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
        return isinstance(node.value, ast.Name) and node.value.id == "solution"
    if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
        return _within(node.value)
    return isinstance(node, ast.AsyncFunctionDef | ast.Await | ast.Yield | ast.YieldFrom)


def _imports(nodes: Iterable[ast.AST], without: tuple[type, ...] = ()) -> set[str]:
    """Packages that the tests import, except the program and imports inside nodes of the kinds `without`."""
    found: set[str] = set()
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            found.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])
        elif not isinstance(node, without):
            waiting.extend(ast.iter_child_nodes(node))
    return found - {"solution"}


def _works_apart(module: str) -> bool:
    return module.partition(".")[0] in _APART and module != "unittest.mock"


def _within(node: ast.expr) -> bool:
    """Whether an object holds it, so that a change of a copy would be lost."""
    while isinstance(node, ast.Subscript):
        node = node.value
    return isinstance(node, ast.Attribute | ast.Call)

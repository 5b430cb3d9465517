"""Runs in the sandbox: runs code of tests against a program.

Standard input has one JSON object: the result of `read_checks` in rules/code_checks.py, and a `token`. The answer goes
to descriptor 3: the token, if the tests ran without an exception and executed a check; the token and ` unchecked`, if
they executed none and asked the program for nothing; the token, ` misses ` and a name, if they import a missing module.

The tests and the program are two processes. The program's is forked before the tests are read, so it never holds them,
their expected values, or the token. The tests' process asks it to call functions. Plain data travels as text and is
compared in the tests' process; any other object stays where it is and is a `RemoteObject` there. Other tests (`inside`,
or with an argument of their own that is not plain data) run in the program's process, where a hostile program can forge
their result.
"""

from __future__ import annotations

import builtins

globals()["__builtins__"] = dict(
    vars(builtins)
)  # the functions below keep these, whatever a program does to `builtins`

import contextlib  # noqa: E402
import copy  # noqa: E402
import itertools  # noqa: E402
import json  # noqa: E402
import operator  # noqa: E402
import os  # noqa: E402
import signal  # noqa: E402
import sys  # noqa: E402
import types  # noqa: E402
from collections.abc import Callable, Iterator  # noqa: E402
from typing import Any, NoReturn  # noqa: E402

from driver import RESULT, load  # type: ignore[import-not-found]  # noqa: E402 - it lies beside this file there
from plain import CONTAINERS, KINDS, SCALARS, Message, NotPlain  # type: ignore[import-not-found]  # noqa: E402

_PR_SET_DUMPABLE = 4


# --- the program's process --------------------------------------------------------------------------------------------


_PLAIN: dict[Any, Callable[[Any], Any]] = {int: int.__index__, float: float.__float__, str: str.__str__}
"""These constructors would call methods of the object; the others read its contents."""


def _base(value: Any) -> Any:
    """The plain data in an object of a derived class, in a tuple; empty if there is none."""
    for kind in (*SCALARS, *CONTAINERS):
        if isinstance(value, kind):
            return (_PLAIN.get(kind, kind)(value),)
    return ()


class _Host:
    def __init__(self, space: dict[str, Any]) -> None:
        self._space = space
        self._objects: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._message = Message()
        self._verbs: dict[str, Callable[..., Any]] = {
            "call": lambda function, *args, **named: function(*args, **named),
            "names": lambda names: {name: self._space[name] for name in names if name in self._space},
            "global": self._global,
            "base": _base,
            "copy": copy.copy,
            "deepcopy": copy.deepcopy,
            **{name: getattr(builtins, name) for name in _BUILT_IN},
        }

    def answer(self, line: bytes) -> list[Any]:
        """The answer: `done` with the result, and the arguments if they changed, or `raised`."""
        try:
            verb, args, named = json.loads(line)
            request = Message()
            values = [request.read(arg, self._object) for arg in args]
            keys = {name: request.read(arg, self._object) for name, arg in named.items()}
            function = self._verbs.get(verb) or getattr(operator, verb)
            result = function(*values, **keys)
            after = self._after([*values, *keys.values()], [*args, *named.values()], request)
            return ["done", after, self._tree(result)]
        except BaseException as error:  # noqa: BLE001 - told to the tests
            self._message = Message()
            return ["raised", self._class(type(error)), self._list(error.args), str(error)]

    def _after(self, values: list[Any], trees: list[Any], request: Message) -> list[Any] | None:
        """Write the arguments after the call; None if they are unchanged."""
        self._message = Message()
        same = [self._tree(value) for value in values] == trees
        self._message = Message(request.objects)
        if same:
            self._message.unchanged()
            return None
        return [self._tree(value) for value in values]

    def _global(self, name: str) -> Any:
        if name not in self._space:
            raise AttributeError(f"module 'solution' has no attribute {name!r}")
        return self._space[name]

    def _list(self, values: Any) -> list[Any]:
        return [self._tree(value) for value in values]

    def _tree(self, value: Any) -> Any:
        return self._message.write(value, self._other)

    def _other(self, value: Any) -> Any:
        if isinstance(value, types.ModuleType):
            return ["module", [value.__name__, self._number(value)]]
        if isinstance(value, type) and issubclass(value, BaseException):
            return ["exception", self._class(value)]
        if hasattr(value, "dtype") and getattr(value, "shape", None) == () and hasattr(value, "item"):
            return self._tree(value.item())  # a number of numpy
        return ["object", self._number(value)]

    def _class(self, kind: Any) -> list[Any]:
        bases = [] if kind in (BaseException, object) else [self._class(base) for base in kind.__bases__]
        return [kind.__module__, kind.__name__, self._number(kind), bases]

    def _number(self, value: Any) -> int:
        number = self._numbers.setdefault(id(value), len(self._objects))
        if number == len(self._objects):
            self._objects.append(value)
        return number

    def _object(self, kind: str, inner: Any) -> Any:
        if kind == "class":
            return getattr(__import__(inner[0], fromlist=["_"]), inner[1])
        if kind == "shared":
            return __import__(inner)
        return self._objects[inner]


_BUILT_IN = (
    *("abs", "bool", "complex", "delattr", "dir", "divmod", "float", "format", "getattr", "hash", "int", "isinstance"),
    *("issubclass", "iter", "len", "next", "repr", "reversed", "round", "setattr", "str", "type"),
)


def _serve(requests: int, replies: int) -> NoReturn:
    code = 1
    try:
        with os.fdopen(requests, "rb") as reader, os.fdopen(replies, "wb") as writer:
            order = json.loads(reader.readline())
            _dumpable(True)  # as for any program
            kept = [(kind, dict(vars(kind))) for kind in _of_unittest(order["unittest"])]
            own = dict(vars(builtins))
            sys.modules["__main__"] = types.ModuleType("__main__")  # or a program could change this file's functions
            del sys.modules["driver"], sys.modules["plain"]
            program = load("solution.py")
            for kind, before in kept:
                _restore(kind, before)
            writer.write(b"loaded\n")
            writer.flush()
            host = _Host(program)
            for line in reader:
                answer = _inside(json.loads(line), program, own) if order["inside"] else host.answer(line)
                writer.write(json.dumps(answer).encode() + b"\n")
                writer.flush()
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException as error:  # noqa: BLE001 - printed
        _print(error)
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)


def _inside(order: list[Any], program: dict[str, Any], own: dict[str, Any]) -> list[Any]:
    """Run tests in this process, in a module of their own; return the word and the number of executed checks."""
    word, task = order
    module = types.ModuleType("tests")
    space = module.__dict__
    space.update({name: value for name, value in program.items() if name not in task["kept"]})
    space.update(__name__="tests", __builtins__=own)
    sys.modules["tests"] = module
    return [word, _run(task, space)]


def _of_unittest(wanted: bool) -> list[type]:
    if not wanted:
        return []
    import unittest
    import unittest.case
    import unittest.result
    import unittest.suite

    kinds: list[type] = [unittest.TestCase, unittest.TestSuite, unittest.suite.BaseTestSuite, unittest.TestResult]
    return [*kinds, unittest.TestLoader]


def _restore(kind: type, before: dict[str, Any]) -> None:
    for name in [name for name in vars(kind) if name not in before]:
        delattr(kind, name)
    for name, value in before.items():
        if vars(kind).get(name) is not value:
            setattr(kind, name, value)


# --- tests, in either process -----------------------------------------------------------------------------------------


def _run(task: dict[str, Any], space: dict[str, Any]) -> int:
    checks = 0
    failed: list[BaseException] = []

    def catching(kinds: Any) -> Any:
        error = sys.exc_info()[1]
        if isinstance(error, AssertionError) and isinstance(error, kinds) and not _is_of_the_program(error):
            failed.append(error)
        return kinds

    def checked(value: Any) -> Any:
        nonlocal checks
        checks += 1
        return value

    for name in task["modules"]:
        space[name] = __import__(name)
    global _imported  # noqa: PLW0603 - tests run once in a process
    _imported = frozenset(task["imports"])
    own = f"__streamrl_{os.urandom(8).hex()}_"  # so that no program can replace them by name
    found = {"checked": checked, "equal": _equal, "pair": _pair, "type": _type_of, "isinstance": _is_instance}
    found["catching"] = catching
    space.update({f"{own}{name}__": function for name, function in found.items()})
    _show_lines(task["shown"])
    if task["unittest"]:
        import unittest

        unittest.main = _ignore  # type: ignore[assignment]  # its classes are run below
    exec(compile(task["code"].replace("__streamrl_", own), "tests.py", "exec"), space)  # noqa: S102
    for name in task["functions"]:
        _finish(space[name]())
    for name in task["classes"]:
        if task["unittest"] and issubclass(space[name], unittest.TestCase):
            _run_case(space[name], task["skips"])
        else:
            for method in [method for method in dir(space[name]) if method.startswith("test")]:
                _finish(getattr(space[name](), method)())
    if failed:
        raise AssertionError("an assertion failed, and the tests caught it") from failed[0]
    return checks


def _is_of_the_program(error: BaseException) -> bool:
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename not in {__file__, "solution.py"}:
        trace = trace.tb_next
    return trace is not None


def _ignore(*args: Any, **named: Any) -> None:
    del args, named


def _finish(result: Any) -> None:
    """Run the coroutine of an async test."""
    if isinstance(result, types.CoroutineType):
        import asyncio

        asyncio.run(result)


def _run_case(case: Any, skips: bool) -> None:
    import unittest

    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromTestCase(case)(result)
    for _, why in (*result.errors, *result.failures):
        print(why, file=sys.stderr)  # noqa: T201
    if not result.wasSuccessful() or (result.skipped and not skips):
        raise AssertionError(f"tests of {case.__name__} failed")


def _print(error: BaseException) -> None:
    """Print a traceback without the leading frames of this file."""
    import traceback

    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    traceback.print_exception(type(error), error, trace)
    sys.stderr.flush()


def _show_lines(text: str) -> None:
    """Let tracebacks show the lines of the tests, which exist in no file."""
    import linecache

    linecache.cache["tests.py"] = (len(text), None, text.splitlines(keepends=True), "tests.py")


def _equal(*values: Any) -> Any:
    if len(values) == 2:
        return _same(*values)
    return all(_same(one, other) for one, other in itertools.pairwise(values))


def _pair(one: Any, other: Any) -> tuple[Any, Any]:
    """Return both as they are; but if only an overridden `__eq__` makes them equal, two values that differ.

    unittest compares them itself, so its assertion then fails.
    """
    if one == other and not _same(one, other):
        return ("plain data", repr(one)), ("an object that equals everything", repr(other))
    return one, other


def _same(one: Any, other: Any) -> Any:
    if type(one) is not type(other):
        one, other = (_plainer(value) for value in (one, other))
    if type(one) in (list, tuple) and type(one) is type(other):
        return len(one) == len(other) and all(map(_same, one, other))
    if type(one) is dict and type(other) is dict:
        return len(one) == len(other) and all(key in other and _same(one[key], other[key]) for key in one)
    if type(one) in (*SCALARS, *CONTAINERS, bool, type(None)):
        return not _equals_as_it_likes(other) and one == other
    if type(other) in (*SCALARS, *CONTAINERS, bool, type(None)):
        return not _equals_as_it_likes(one) and one == other
    return one == other


def _plainer(value: Any) -> Any:
    """The plain data of an object whose class is derived from plain data and overrides the comparison."""
    return _base(value)[0] if _equals_as_it_likes(value) and _base(value) else value


_imported: frozenset[str] = frozenset()
"""Packages that the tests import; `_run` sets it."""


def _equals_as_it_likes(value: Any) -> bool:
    """Whether its class could claim to equal anything, since its `__eq__` is not C code.

    Exempt are classes of the tests, classes of the standard library that travel, and classes of packages that the tests
    import; the tests' process has no others.
    """
    kind = type(value)
    compare = getattr(kind, "__eq__", None)
    if type(compare) is types.WrapperDescriptorType and compare.__name__ == "__eq__":
        return False
    module = sys.modules.get(kind.__module__)
    genuine = getattr(module, kind.__name__, None) is kind
    if kind is RemoteObject or (genuine and ((kind.__module__, kind.__name__) in KINDS or _of_the_tests(kind))):
        return False
    return getattr(getattr(compare, "__code__", None), "co_filename", "") != "tests.py"


def _of_the_tests(kind: type) -> bool:
    package = kind.__module__.partition(".")[0]
    return package in _imported and package not in sys.stdlib_module_names


# --- the tests' process -----------------------------------------------------------------------------------------------


_SHARED_MODULES = ("math", "cmath", "random", "collections", "itertools", "functools", "string", "re", "copy", "heapq")
"""If a name of the program is one of these modules, the tests use their own process's module."""


class ProgramProcess:
    """The program's process, as the tests' process sees it.

    `asked`: the tests have asked for something. `unfit`: what could not travel to it; empty: nothing.
    """

    def __init__(self) -> None:
        self.asked, self.unfit = False, ""
        self._exceptions: dict[int, type] = {}
        (requests, orders), (answers, replies) = os.pipe(), os.pipe()
        self._pid = os.fork()
        if not self._pid:
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(requests, 10)
            os.dup2(replies, 11)
            os.closerange(3, 10)
            os.closerange(12, 1024)
            _serve(10, 11)
        os.close(requests)
        os.close(replies)
        self._writer, self._reader = os.fdopen(orders, "wb"), os.fdopen(answers, "rb")

    def start(self, *, inside: bool, with_unittest: bool) -> None:
        """Run the program. If it ends, this process ends likewise."""
        self._send({"inside": inside, "unittest": with_unittest})
        self._line()

    def run(self, task: dict[str, Any]) -> int:
        """Run tests in the program's process; return the number of executed checks, which a program could forge."""
        word = os.urandom(16).hex()  # so that a program cannot write an answer in advance
        self._send([word, task])
        said, checks = json.loads(self._line())
        return int(checks) if said == word else 0

    def ask(self, verb: str, *args: Any, loose: bool = False, **named: Any) -> Any:
        """Let the program's process do something; returns its result, or raises its exception."""
        self.asked = True
        try:
            request = Message()
            trees = [request.write(arg, _reference) for arg in args]
            keys = {name: request.write(arg, _reference) for name, arg in named.items()}
        except NotPlain as error:  # a recursion that is too deep is an error: the program can lead the tests into one
            self.unfit = str(error)
            raise
        self._send([verb, trees, keys])
        answer = json.loads(self._line())
        if answer[0] == "raised":
            raise self._raised(*answer[1:])
        _, after, result = answer
        message = Message(request.objects)
        for tree in after or ():
            message.read(tree, self._object)
        return message.read(result, lambda kind, inner: self._object(kind, inner, loose))

    def end(self) -> None:
        if self._pid:
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
            self._pid = 0

    def _object(self, kind: str, inner: Any, loose: bool = False) -> Any:
        if kind == "module":
            name, number = inner
            return __import__(name) if name in _SHARED_MODULES else RemoteObject(self, number, loose)
        if kind == "exception":
            return self._exception(*inner)
        return RemoteObject(self, int(inner), loose)

    def _exception(self, module: str, name: str, number: int, bases: list[Any]) -> type:
        """A class of exceptions: Python's own, or for one of the program, a class with the same name and bases."""
        if module.partition(".")[0] in sys.stdlib_module_names and module.partition(".")[0] != "unittest":
            known = getattr(sys.modules.get(module), name, None)
            if known is object or (isinstance(known, type) and issubclass(known, BaseException)):
                return known
        if number not in self._exceptions:
            found = type(name, tuple(self._exception(*base) for base in bases), {"__str__": _said})
            found.__streamrl__ = number  # type: ignore[attr-defined]
            self._exceptions[number] = found
        return self._exceptions[number]

    def _raised(self, kind: list[Any], args: list[Any], said: str) -> BaseException:
        message = Message()
        values = [message.read(arg, self._object) for arg in args]
        cls = self._exception(*kind)
        error: BaseException = cls.__new__(cls, *values)
        error.args = tuple(values)
        if hasattr(cls, "__streamrl__"):
            error.__dict__["streamrl_said"] = said
        return error

    def _send(self, order: Any) -> None:
        try:
            self._writer.write(json.dumps(order).encode() + b"\n")
            self._writer.flush()
        except BrokenPipeError:
            self._ended()

    def _line(self) -> bytes:
        line = self._reader.readline()
        return line if line.endswith(b"\n") else self._ended()

    def _ended(self) -> NoReturn:
        """The program has ended: end in the same way, but never with success."""
        _, status = os.waitpid(self._pid, 0)
        self._pid = 0
        if os.WIFSIGNALED(status):
            signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
            os.kill(os.getpid(), os.WTERMSIG(status))
        sys.stderr.write(f"the program ended with code {os.WEXITSTATUS(status)} before the tests were through\n")
        sys.stderr.flush()
        os._exit(1)


def _said(error: Any) -> str:
    said = error.__dict__.get("streamrl_said")
    return BaseException.__str__(error) if said is None else str(said)


def _reference(value: Any) -> Any:
    """Write an object of the program, or a class; `NotPlain` for anything else."""
    if type(value) is RemoteObject:
        return ["object", value._streamrl[1]]  # noqa: SLF001
    if isinstance(value, types.ModuleType) and value.__name__ in _SHARED_MODULES:
        return ["shared", value.__name__]  # the program may have returned it
    if isinstance(value, type):
        if "__streamrl__" in vars(value):
            return ["object", value.__streamrl__]  # type: ignore[attr-defined]
        module, name = value.__module__, value.__name__
        known = module.partition(".")[0] in sys.stdlib_module_names
        if known and getattr(sys.modules.get(module), name, None) is value:
            return ["class", [module, name]]
    raise NotPlain(f"a {type(value).__name__} of the tests cannot travel to the process of the program")


def _type_of(value: Any) -> Any:
    return value._streamrl[0].ask("type", value) if type(value) is RemoteObject else type(value)  # noqa: SLF001


def _is_instance(value: Any, kinds: Any) -> bool:
    if type(value) is RemoteObject:
        return bool(value._streamrl[0].ask("isinstance", value, kinds))  # noqa: SLF001
    return isinstance(value, kinds)


class RemoteObject:
    """An object of the program. All operations on it run in the program's process.

    The program must not learn what the tests expect, and must not decide whether it has it. So it is never asked to
    compare an object with plain data: an object derived from plain data is compared by its data, any other equals none.
    It is asked to calculate with both only if the object is `loose`: built by the tests from a class of the program, or
    calculated from such an object.
    """

    __slots__ = ("_streamrl",)

    def __init__(self, program: ProgramProcess, number: int, loose: bool) -> None:
        object.__setattr__(self, "_streamrl", (program, number, loose))

    def _do(self, verb: str, *args: Any) -> Any:
        return self._streamrl[0].ask(verb, self, *args)

    def __call__(self, *args: Any, **named: Any) -> Any:
        program, _, loose = self._streamrl
        return program.ask("call", self, *args, loose=loose, **named)

    def __getattr__(self, name: str) -> Any:
        return self._do("getattr", name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._do("setattr", name, value)

    def __delattr__(self, name: str) -> None:
        self._do("delattr", name)

    def __instancecheck__(self, value: Any) -> bool:
        return bool(self._streamrl[0].ask("isinstance", value, self))

    def __subclasscheck__(self, value: Any) -> bool:
        return bool(self._streamrl[0].ask("issubclass", value, self))

    def __contains__(self, value: Any) -> bool:
        if self._streamrl[2] or type(value) is RemoteObject:
            return bool(self._do("contains", value))
        return any(item is value or item == value for item in self)

    def __iter__(self) -> Iterator[Any]:
        found: Iterator[Any] = self._do("iter")
        return found

    def __copy__(self) -> Any:
        program, _, loose = self._streamrl
        return program.ask("copy", self, loose=loose)

    def __deepcopy__(self, _memo: Any) -> Any:
        program, _, loose = self._streamrl
        return program.ask("deepcopy", self, loose=loose)

    def __reduce_ex__(self, _protocol: Any) -> NoReturn:
        raise TypeError("an object of the program cannot be written as bytes here")

    def __exit__(self, *raised: object) -> Any:
        return self._do("getattr", "__exit__")(*raised)

    def __enter__(self) -> Any:
        return self._do("getattr", "__enter__")()


def _alone(verb: str) -> Callable[..., Any]:
    def method(self: RemoteObject, *args: Any) -> Any:
        program, _, loose = self._streamrl
        return program.ask(verb, self, *args, loose=loose)

    return method


def _both(verb: str, *, compares: bool, swapped: bool = False) -> Callable[[RemoteObject, Any], Any]:
    function = getattr(builtins, verb, None) or getattr(operator, verb)

    def method(self: RemoteObject, other: Any) -> Any:
        program, _, loose = self._streamrl
        if type(other) is RemoteObject or (loose and not compares):
            pair = (other, self) if swapped else (self, other)
            return program.ask(verb, *pair, loose=loose)
        base = program.ask("base", self)
        if not base:
            return NotImplemented
        return function(other, base[0]) if swapped else function(base[0], other)

    return method


def _complete() -> None:
    for name in ("eq", "ne", "lt", "le", "gt", "ge"):
        setattr(RemoteObject, f"__{name}__", _both(name, compares=True))
    binary = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "lshift", "rshift", "and_", "or_")
    for name in (*binary, "xor", "divmod"):
        short = name.rstrip("_")
        setattr(RemoteObject, f"__{short}__", _both(name, compares=False))
        setattr(RemoteObject, f"__r{short}__", _both(name, compares=False, swapped=True))
    for name in ("abs", "bool", "complex", "dir", "float", "format", "hash", "int", "len", "next", "repr", "reversed"):
        setattr(RemoteObject, f"__{name}__", _alone(name))
    for name in ("round", "str", "index", "neg", "pos", "invert", "getitem", "setitem", "delitem"):
        setattr(RemoteObject, f"__{name}__", _alone(name))


_complete()


def _dumpable(yes: bool) -> None:
    """Set whether other processes of this user may inspect this one."""
    import ctypes

    if ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, int(yes), 0, 0, 0):
        raise OSError("this process cannot be hidden from the program")


def _test(task: dict[str, Any], program: ProgramProcess, spare: ProgramProcess) -> int:
    """Run the tests, if necessary in the process of the spare program; return the number of executed checks."""
    if not task["inside"]:
        program.start(inside=False, with_unittest=False)
        module = types.ModuleType("tests")
        space = module.__dict__
        names = program.ask("names", task["names"])
        program.asked = False
        for name in task["names"] if type(names) is dict else ():  # the program may answer with more than that
            if name not in names:
                continue
            value = names[name]
            loose = name[:1].isupper() and name != "Solution"
            space[name] = RemoteObject(program, value._streamrl[1], loose) if type(value) is RemoteObject else value  # noqa: SLF001
        solution = types.ModuleType("solution")
        solution.__getattr__ = lambda name: program.ask("global", name, loose=name[:1].isupper() and name != "Solution")  # type: ignore[method-assign]
        sys.modules.update(tests=module, solution=solution)
        try:
            checks = _run(task, space)
        except BaseException:
            if not program.unfit:
                raise
        if not program.unfit:
            return checks
        program.end()
    program.asked = True  # a program that runs tests reports by itself that nothing was checked
    spare.start(inside=True, with_unittest=task["unittest"])
    return spare.run(task)


def _is_missing(name: str) -> bool:
    import importlib.util

    return name not in sys.stdlib_module_names and name not in sys.modules and importlib.util.find_spec(name) is None


def _judge() -> str:
    """Run tests and return the answer to the worker. An exception, or the end of this process, fails the tests."""
    _dumpable(False)
    program, spare = ProgramProcess(), ProgramProcess()
    task = json.loads(sys.stdin.buffer.read())
    token: str = task["token"]
    with contextlib.suppress(OSError):  # for a pipe, which is empty now
        os.ftruncate(0, 0)  # the first process of a sandbox may have it open, too
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.path.remove(os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH100, PTH120 - the program can write there
    try:
        if missing := [name for name in task["needs"] if _is_missing(name)]:
            return f"{token} misses {missing[0]}"
        checks = _test(task, program, spare)
    finally:
        program.end()
        spare.end()
    if not checks and program.asked:
        raise AssertionError("no check was executed")
    return token if checks else f"{token} unchecked"


def main() -> None:
    try:
        answer = _judge()
    except BaseException as error:  # noqa: BLE001 - printed
        _print(error)
        os._exit(1)
    sys.stdout.flush()
    os.write(RESULT, answer.encode())


if __name__ == "__main__":
    main()

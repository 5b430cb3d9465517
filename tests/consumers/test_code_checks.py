"""Code of tests: its forms, what checks nothing, and programs that want to pass without being right."""

import pytest

from streamrl.consumers.rules.code import Code
from streamrl.consumers.rules.code_checks import read_checks
from streamrl.consumers.rules.code_tests import read_tests
from streamrl.errors import DataError
from tests.consumers.samples import seen
from tests.sandbox.sandboxes import need, together

ADD = "def add(a, b): return a + b"
WRONG = "def add(a, b): return a - b"


async def score(program, test, **metadata):
    rule = Code(wall=60, seconds=20)
    sample = seen(f"```python\n{program}\n```\n", metadata={"tests": [test], **metadata})
    return (await rule.score(sample)).value


FORMS = {
    "assert": "assert add(1, 2) == 3",
    "functions": "import math\ndef test_add():\n  assert math.isclose(add(1, 2), 3)\ndef test_other(): pass",
    "imports the program": "from solution import *\nimport solution\nassert add(1, 2) == solution.add(2, 1) == 3",
    "check of HumanEval": "def check(candidate):\n  assert candidate(1, 2) == 3\n  assert abs(candidate(1, 1) - 2) < 1",
    "check that is called": "def check(candidate):\n  assert candidate(1, 2) == 3\ncheck(add)",
    "check that only a main calls": "def check(f):\n  assert f(1, 2) == 3\nif __name__ == '__main__':\n  check(add)",
    "unittest": """
import unittest
class TestAdd(unittest.TestCase):
    def setUp(self): self.one = 1
    def test_add(self): self.assertEqual(add(self.one, 2), 3)
if __name__ == "__main__":
    unittest.main()
""",
    "unittest that starts itself": """
from unittest import TestCase, main
class Adding(TestCase):
    def test_add(self): self.assertTrue(add(1, 2) == 3)
main()
""",
    "a class of pytest": "class TestAdd:\n  def test_add(self):\n    assert add(1, 2) == 3",
    "async": "async def test_add():\n  assert add(1, 2) == 3",
    "async unittest": """
import unittest
class TestAdd(unittest.IsolatedAsyncioTestCase):
    async def test_add(self): self.assertEqual(add(1, 2), 3)
""",
    "only a main checks": "def run():\n  assert add(1, 2) == 3\nif __name__ == '__main__':\n  run()",
    "exits by itself": "import sys\nif add(1, 2) != 3:\n  sys.exit(1)",
    "a module that may be missing": "try:\n  import nowhere\nexcept ImportError:\n  pass\nassert add(1, 2) == 3",
    "raises by itself": "if add(1, 2) != 3:\n  raise ValueError('no')",
    "a helper that compares": "def same(a, b):\n  assert a == b\nsame(add(1, 2), 3)",
    "a mock": "from unittest.mock import Mock\ndef test():\n  m = Mock(return_value=1)\n  assert add(m(), 2) == 3",
    "a function of the tests as argument": """
class Number:
    def __init__(self, n): self.n = n
    def __add__(self, other): return Number(self.n + other.n)
    def __sub__(self, other): return Number(self.n - other.n)
assert add(Number(1), Number(2)).n == 3
""",
}


async def test_every_form_of_tests_passes_what_is_right_and_nothing_else():
    need("auto")
    runs = {("right", name): score(ADD, test, entry_point="add") for name, test in FORMS.items()}
    runs |= {("wrong", name): score(WRONG, test, entry_point="add") for name, test in FORMS.items()}
    found = await together(runs)
    assert {key: value for key, value in found.items() if value != (key[0] == "right")} == {}


NOTHING = {
    "return": ("def test_add():\n  return add(1, 2) == 3", "executes no check"),
    "comparison": ("add(1, 2) == 3", "executes no check"),
    "comments": ("# assert add(1, 2) == 3", "executes no check"),
    "no call": ("def helper():\n  assert add(1, 2) == 3", "executes no check"),
    "no test": ("import unittest\nclass A(unittest.TestCase):\n  def add(self): pass", "executes no check"),
    "a main without a check": ("if __name__ == '__main__':\n  print(add(1, 2))", "executes no check"),
    "an exit with 0": ("import sys\nif add(1, 2) == 3:\n  sys.exit(0)", "executes no check"),
    "no entry point": ("def check(candidate):\n  assert candidate(1, 2) == 3", "entry_point"),
    "generator": ("def test_add():\n  assert add(1, 2) == 3\n  yield", "test_add with yield"),
    "fixture": ("def test_add(numbers):\n  assert add(*numbers) == 3", "test_add with arguments"),
    "async unittest": (
        "import unittest\nclass T(unittest.TestCase):\n  async def test_a(self):\n    self.assertEqual(add(1, 2), 3)",
        "IsolatedAsyncioTestCase",
    ),
    "setup of pytest": ("class TestA:\n  def setup_method(self): pass\n  def test(self): assert add(1, 2)", "unittest"),
    "no Python": ("assert add(1, 2 == 3", "not Python, line 1"),
}


@pytest.mark.parametrize(("code", "why"), NOTHING.values(), ids=NOTHING)
def test_code_that_checks_nothing_is_an_error_of_the_data(code, why):
    with pytest.raises(DataError, match="metadata tests of line 7") as caught:
        read_tests([code], "metadata tests of line 7")
    assert why in str(caught.value)


async def test_a_loop_over_nothing_checks_nothing_whatever_the_program_is():
    need("auto")
    with pytest.raises(DataError, match="metadata tests of line 7 has code that has executed no check"):
        await score(ADD, "for a in []:\n  assert add(a, a) == 0")
    assert await score("def add(a, b): return []", "for a in add(1, 2):\n  assert a == 0") == 0.0


@pytest.mark.parametrize(
    "test", ["from nowhere.deep import a\nassert add(1, 2)", "def test():\n  import nowhere\n  assert 1"]
)
async def test_a_module_that_the_tests_miss_is_an_error_of_the_data(test):
    need("auto")
    with pytest.raises(DataError, match=r"metadata tests of line 7 has code that imports nowhere, which .* not have"):
        await score("import sys, types\nsys.modules['nowhere'] = types.ModuleType('nowhere')\n" + ADD, test)


TREES = """
import datetime
from collections import Counter, namedtuple
from enum import IntEnum
class Node:
    def __init__(self, value, left=None): self.value, self.left = value, left
    def __eq__(self, other): return isinstance(other, Node) and self.value == other.value
    def __hash__(self): return hash(self.value)
    def __add__(self, other): return Node(self.value + getattr(other, "value", other))
    def __contains__(self, value): return value == self.value
    def __len__(self): return 1
    def __iter__(self): yield self.value
    def __repr__(self): return f"Node({self.value})"
    def __enter__(self): return self
    def __exit__(self, *raised): pass
class Stack(list):
    def push(self, value): self.append(value)
class Empty(Exception):
    def __init__(self, code): super().__init__(code); self.code = code
class Deep(Empty): pass
Point = namedtuple("Point", "x y")
class Color(IntEnum):
    RED = 1
LIMIT = 7
def build(values): return [Node(value) for value in values]
def sort(values): values.sort(); values[0].append(9)
def count(text): return Counter(text)
def squares(n): yield from (i * i for i in range(n))
def adder(n): return lambda other: n + other
def fail(kind): raise {"key": KeyError("k"), "own": Deep(3), "value": ValueError("bad")}[kind]
def at(): return datetime.datetime(2020, 1, 2, 3, tzinfo=datetime.timezone.utc)
def big(): return 7 ** 5000, float("inf"), b"x", {1, 2}, frozenset([(1, 2)]), 1j, None, "\\ud800"
"""
OBJECTS = {
    "attributes": "n = build([1, 2])[1]\nassert n.value == 2 and n.left is None\nn.left = build([5])[0]\n"
    "assert n.left.value == 5 and hasattr(n, 'value') and not hasattr(n, 'right')",
    "operators": "assert Node(1) == Node(1) and Node(1) != Node(2) and Node(1) != 1 and 1 in Node(1)\n"
    "assert (Node(1) + 2).value == 3 and list(Node(4)) == [4] and len(Node(1)) == 1 and repr(Node(1)) == 'Node(1)'\n"
    "assert len({Node(1), Node(1)}) == 1 and isinstance(Node(1), Node) and type(Node(1)) == Node",
    "with": "with Node(3) as n:\n  assert n.value == 3",
    "derived from plain data": "s = Stack()\ns.push(1)\nassert s == [1] and [1] == s and len(s) == 1 and s[0] == 1\n"
    "assert Point(1, 2) == (1, 2) and Point(1, 2).x == 1 and Color.RED == 1 and Color.RED.name == 'RED'",
    "arguments that change": "a = [[3], [1]]\ninner = a[0]\nsort(a)\nassert a == [[1, 9], [3]] and inner == [3]",
    "kept": "assert count('aab').most_common(1) == [('a', 2)] and LIMIT == 7 and adder(2)(3) == 5",
    "times": "import datetime as d\nassert at() == d.datetime(2020, 1, 2, 3, tzinfo=d.timezone.utc)\n"
    "assert Node(1).__class__ == Node and Node(1).__class__.__name__ == 'Node'",
    "must raise": "try:\n  fail('value')\nexcept:\n  pass\nelse:\n  raise AssertionError",
    "generators": "assert list(squares(3)) == [0, 1, 4]\ng = squares(2)\nassert next(g) == 0 and sum(g) == 1",
    "exceptions": """
def caught(kind, expected):
    try:
        fail(kind)
        assert False
    except expected as error:
        return error
assert str(caught("value", ValueError)) == "bad"
assert caught("key", KeyError).args == ("k",)
assert isinstance(caught("own", Empty), Deep) and caught("own", Exception).args == (3,)
""",
    "values": "a, b, c, d, e, f, g, h = big()\nassert (a, b, c, d) == (7 ** 5000, float('inf'), b'x', {1, 2})\n"
    "assert (e, f, g, h) == ({(1, 2)}, 1j, None, '\\ud800')",
    "in the program's process": "import sys\nassert Node(1).value == 1 and Node(1) == Node(1) and LIMIT == 7\n"
    "assert build([1]) == [Node(1)] and Stack() == [] and Color.RED == 1 and big()[1] == float('inf')",
    "with arrays of its own": "import array\nassert sort.__name__ == 'sort' and Point(1, 2) is not Point(1, 2)",
    "functions as arguments": "assert sorted([2, 1], key=adder(1)) == [1, 2]\nassert adder([1])([2]) == [1, 2]",
}


SAME = """
class Same(int):
    def _yes(self, *others): return True
    __eq__ = __ge__ = __le__ = __gt__ = __lt__ = __contains__ = _yes
    def __ne__(self, other): return False
    def __hash__(self): return 3
    def _zero(self, *others): return Same(0)
    __sub__ = __rsub__ = __abs__ = _zero
def add(a, b): return Same(0)
"""
ATTACKS = {
    "exec does nothing": "import builtins\nbuiltins.exec = lambda *args: None",
    "compile makes nothing": "import builtins\nreal = compile\nbuiltins.compile = lambda *args: real('', 'x', 'exec')",
    "an int that equals everything": SAME,
    "an object that equals everything": SAME.replace("(int)", "").replace("Same(0)", "Same()"),
    "a list that equals everything": SAME.replace("(int)", "(list)").replace("Same(0)", "Same()"),
    "patches unittest": """
import unittest, unittest.case
for name in dir(unittest.TestCase):
    if name.startswith("assert"): setattr(unittest.TestCase, name, lambda *args: None)
unittest.TestResult.addFailure = unittest.TestResult.addError = lambda *args: None
unittest.TestResult.wasSuccessful = lambda self: True
unittest.TestLoader.loadTestsFromTestCase = lambda self, case: unittest.TestSuite()
""",
    "replaces modules": """
import sys, types
for name in ("unittest", "json", "math", "tests", "asyncio"):
    module = types.ModuleType(name)
    module.__getattr__ = lambda name: lambda *args: True
    sys.modules[name] = module
""",
    "overrides built-in names": """
import builtins
class Never(Exception): pass
builtins.AssertionError = Never
builtins.isinstance = builtins.all = builtins.any = lambda *args: True
builtins.abs = builtins.sum = lambda *args: 0
""",
    "defines built-in names": "def abs(x): return 0\ndef all(x): return True\nisinstance = set = sorted = all",
    "changes the file that runs it": """
import sys
sys.modules["__main__"]._run = lambda *args: 99
""",
    "looks at frames": """
import sys
frame = sys._getframe()
while frame:
    for value in list(frame.f_locals.values()) + list(frame.f_globals.values()):
        if isinstance(value, dict) and "token" in value:
            import os
            os.write(3, value["token"].encode())
            os._exit(0)
    frame = frame.f_back
""",
    "looks for the tests in memory": """
import gc, os
def look():
    for value in gc.get_objects():
        if isinstance(value, dict) and type(value.get("token")) is str:
            os.write(3, value["token"].encode())
            os._exit(0)
look()
def add(a, b): look()
""",
    "traces": """
import sys
def tracer(frame, event, arg):
    frame.f_locals.update(a=1, b=2)
    return tracer
sys.settrace(tracer)
""",
    "leaves when it is called": "import os\ndef add(a, b): os._exit(0)",
    "exits when it is called": "def add(a, b): raise SystemExit(0)",
    "leaves at its end": "import atexit, os\natexit.register(os._exit, 0)\ndef add(a, b): exit(0)",
    "prints results": """
import os, sys
for target in (1, 3):
    try: os.write(target, b"loaded\\n[\\"done\\", null, true]\\n1\\n")
    except OSError: pass
print("OK", '["done", null, 3]')
os._exit(0)
""",
    "answers for itself": """
import os
os.write(11, b"loaded\\n" + b'["done", null, true]\\n' * 9)
""",
    "skips the test": "import unittest\ndef add(a, b): raise unittest.SkipTest('later')",
    "raises what is expected": "def add(a, b): raise AssertionError\nclass AssertionError(Exception): pass",
    "reads other processes": """
import os
found = []
for pid in (os.getppid(), 1, 2, 3, 4, 5, 6):
    for name in ("mem", "environ", "fd/0", "fd/3", "maps"):
        try:
            with open(f"/proc/{pid}/{name}", "rb") as file:
                if pid != os.getpid() and (name == "mem" or b"assert" in file.read(1 << 20)): found.append((pid, name))
        except OSError: pass
def add(a, b): return 3 if found else 0
""",
    "writes modules for the tests": """
import os
for name in ("asyncio", "unittest", "linecache", "math", "json", "plain"):
    with open(name + ".py", "w") as file: file.write("import os; os.write(3, b'1'); os._exit(0)")
with open("driver.py", "w") as file: file.write("")
""",
    "kills the tests' process": "import os, signal\nos.kill(os.getppid(), signal.SIGTERM)",
}
TARGETS = {
    "assert": "assert add(1, 2) == 3\nassert isinstance(add(1, 2), int)",
    "near": "import math\nassert abs(add(1, 2) - 3) < 1e-6 and all([math.isclose(add(1, 2), 3)]) and 3 in [add(1, 2)]",
    "unittest": "import unittest\nclass T(unittest.TestCase):\n  def test(self): self.assertEqual(add(1, 2), 3)",
    "order": "assert 2 < add(1, 2) < 4 and {add(1, 2)} == {3} and sorted([add(1, 2)]) == [3]",
}


BY_COMPARISON = ("near", "unittest", "order")


def tricks(before=""):
    """One run of each trick, of those that are about comparison or unittest with the other targets as well."""
    runs = {"right": score(ADD, before + TARGETS["unittest"])}
    for name, attack in ATTACKS.items():
        others = BY_COMPARISON if "equals everything" in name or "built-in" in name else ()
        for target in ("assert", *others, *(["unittest"] if "unittest" in attack and not others else [])):
            runs[f"{name}, {target}"] = score(f"{WRONG}\n{attack}", before + TARGETS[target])
    return together(runs)


async def test_no_trick_passes_tests_that_a_right_program_passes():
    need("auto")
    assert {name for name, value in (await tricks()).items() if value} == {"right"}


async def test_no_trick_of_these_passes_in_the_process_of_the_program_either():
    need("auto")
    assert {name for name, value in (await tricks("import sys\n")).items() if value} == {"right"}
    blind = 'import os\nos.write(11, b"loaded\\n1\\n" * 9)\ndef add(a, b): os._exit(0)'
    assert await score(blind, "import sys\n" + TARGETS["assert"]) == 0.0


ANSWERS = """
import json, os
os.write(11, b"loaded\\n")
for line in os.fdopen(10, "rb", closefd=False):
    answer = {names} if json.loads(line)[0] == "names" else 0.0
    os.write(11, (json.dumps(["done", None, answer]) + "\\n").encode())
"""
REPLACES = {
    "its names take the place of our functions": (
        "from solution import *\nassert add(1, 2) == 3",
        "__all__ = ['add', '__streamrl_equal__']\ndef add(a, b): pass\ndef __streamrl_equal__(*a): return True",
    ),
    "its names take the place of built-in ones": (
        "from solution import *\nassert abs(add(1, 2) - 3) < 1",
        "__all__ = ['add', 'abs']\ndef add(a, b): return 0\ndef abs(x): return 0",
    ),
    "it answers with more names": (
        "def check(candidate):\n  assert abs(candidate(1, 2) - 3) < 1",
        ANSWERS.format(names='["dict", [["add", ["object", 0]], ["abs", ["object", 1]]]]'),
    ),
}


EQUALS = {
    "mock.ANY": "from unittest.mock import ANY\ndef add(a, b): return ANY",
    "a class that exec makes": 'exec("class E:\\n def __eq__(s, o): return True")\ndef add(a, b): return E()',
    "a function of C": "import operator\nclass E: __eq__ = operator.truth\ndef add(a, b): return E()",
    "another operator": "class E(list): __eq__ = list.__ge__\ndef add(a, b): return E([9])",
    "a list of mock.ANY": "from unittest.mock import ANY\ndef add(a, b): return [ANY]",
}
EQUAL = {
    "fractions": ("from fractions import Fraction\ndef f(): return Fraction(3)", "assert f() == 3"),
    "mocks": (
        "def f(m): m(1); m(2)",
        """
from unittest.mock import Mock, call
m = Mock()
f(m)
assert m.call_args_list == [call(1), call(2)]
assert m.call_args == call(2) and m.call_args == ((2,), {})
""",
    ),
    "of the tests": (
        "def f(x): return x",
        "class A:\n  def __eq__(self, other): return other == 3\nassert f(A()) == 3",
    ),
    "enums": ("import enum\nclass C(enum.IntEnum):\n  A = 3\ndef f(): return C.A", "assert f() == 3"),
    "named tuples": ("import collections as c\nP = c.namedtuple('P', 'a')\ndef f(): return P(3)", "assert f() == (3,)"),
    "dataclasses": (
        "import dataclasses as d\n@d.dataclass\nclass P:\n  a: int\ndef f(): return [P(3)]",
        "assert f() == [P(3)] and f() != [P(4)] and not f() == [3]",
    ),
}


async def test_only_honest_classes_equal_plain_data_in_the_process_of_the_program():
    need("auto")
    either = "import sys\nassert add(1, 2) == 3 or add(1, 2) == [3]"
    runs = {name: score(program, either) for name, program in EQUALS.items()}
    runs |= {name: score(program, f"import sys\n{test}") for name, (program, test) in EQUAL.items()}
    found = await together(runs)
    assert {name for name, value in found.items() if value} == set(EQUAL)


FORGES = """
import sys
frame = sys._getframe()
while frame:
    if "_run" in frame.f_globals: frame.f_globals["_run"] = lambda task, space: 5
    frame = frame.f_back
"""
GOES_INSIDE = {
    "returns a module": ("import math\ndef enc(s): return math\ndef dec(s): return s", "assert dec(enc('a')) == 'a'"),
    "returns what has to be copied": (
        "class L(list): pass\ndef f(x): return L()",
        "import copy\nassert copy.deepcopy(f(3)) == [1, 2] and copy.copy(f(3)) == [1]",
    ),
    "returns a tree without an end": (
        "class N:\n  @property\n  def left(self): return N()\n  def __eq__(self, other): return True",
        "def walk(n): return n.left and walk(n.left)\nassert walk(N()) == 3",
    ),
}


async def test_a_program_neither_replaces_names_of_the_tests_nor_brings_them_into_its_process():
    need("auto")
    runs = {name: score(program, test, entry_point="add") for name, (test, program) in REPLACES.items()}
    runs |= {name: score(FORGES + program, test) for name, (program, test) in GOES_INSIDE.items()}
    runs["all names"] = score(f"__all__ = []\n{ADD}", "from solution import *\nassert add(1, 2) == 3")
    copies = "import copy\ns = Stack()\ns.push(1)\nt = copy.deepcopy(s)\nt.push(2)\nassert s == [1] and t == [1, 2]"
    runs["right"] = score(TREES, copies + "\nassert copy.copy([Node(1)])[0] == Node(1)")
    found = await together(runs)
    assert {name for name, value in found.items() if value} == {"right", "all names"}


CATCHES = {
    "prints": "try:\n  assert add(1, 2) == 3\nexcept AssertionError:\n  print('bad')",
    "prints in a loop": """
def a(): assert add(1, 2) == 3
def run():
  for test in [a]:
    try: test()
    except Exception as error: print(error)
run()
""",
    "unittest": """
import unittest
class T(unittest.TestCase):
  def test(self):
    try: self.assertEqual(add(1, 2), 3)
    except: pass
""",
    "counts": "import sys\nbad = 0\ntry:\n  assert add(1, 2) == 3\nexcept AssertionError:\n  bad += 1\nprint(bad)",
}
GOES_ON = {
    "either": "try:\n  assert add(1, 2) == 4\nexcept AssertionError:\n  assert add(1, 2) == 3",
    "again": "for n in 4, 3:\n  try:\n    assert add(1, 2) == n\n    break\n  except AssertionError:\n    pass",
    "must not be": "import unittest\nclass T(unittest.TestCase):\n  def test(self):\n"
    "    with self.assertRaises(AssertionError):\n      assert add(1, 2) == 4",
    "raised by the program": "try:\n  refuse()\n  assert False\nexcept AssertionError:\n  pass",
    "raised by the program, inside": "import sys\ntry:\n  refuse()\n  assert False\nexcept AssertionError:\n  pass",
}


async def test_a_failed_assertion_that_the_tests_catch_fails_them():
    need("auto")
    refuse = "\ndef refuse(): assert False"
    runs = {("right", name): score(ADD + refuse, test) for name, test in (CATCHES | GOES_ON).items()}
    runs |= {("wrong", name): score(WRONG + "\ndef refuse(): pass", test) for name, test in CATCHES.items()}
    silent = ("raised by the program", "raised by the program, inside")
    runs |= {("wrong", name): score(WRONG + "\ndef refuse(): pass", GOES_ON[name]) for name in silent}
    found = await together(runs)
    assert {key: value for key, value in found.items() if value != (key[0] == "right")} == {}


ONE_OBJECT = """
from collections import Counter, deque
def first(m): m[0][0] = 1
def second(a, b): b.append(9)
def same(a): return a
def inner(a): return a[0]
def swap(a): a[0], a[1] = a[1], a[0]
def apart(m): m[1] = [7]
def keep(a, *, to): to["a"] = a; return to
def tail(d): d.append(d.popleft()); return d
def twice(): a = [1]; return [a, a]
def ring(a): return a[0] is a
def add(c): c["x"] += 1; return [c, c]
"""
IDENTITY = {
    "rows": "m = [[0] * 2] * 2\nfirst(m)\nassert m == [[1, 0], [1, 0]]\nm[0].append(5)\nassert m[1] == [1, 0, 5]",
    "arguments": "a = [1]\nsecond(a, a)\nassert a == [1, 9]",
    "a result": "a = [1]\nb = same(a)\nb.append(2)\nassert a == [1, 2]",
    "a part": "a = [[1], 2]\ninner(a).append(3)\nassert a == [[1, 3], 2]",
    "moved": "a, b = [1], [2]\nboth = [a, b]\nswap(both)\na.append(5)\nassert both == [[2], [1, 5]]",
    "parted": "r = [0]\nm = [r, r]\napart(m)\nassert m == [[0], [7]] and r == [0]",
    "named": "a, d = [1], {}\nassert keep(a, to=d) == {'a': [1]}\na.append(2)\nassert d == {'a': [1, 2]}",
    "of collections": "from collections import deque, Counter\nd = deque([1, 2], 5)\ne = tail(d)\ne.append(3)\n"
    "assert d == deque([2, 1, 3]) and d.maxlen == 5\nc = Counter('x')\nadd(c)[1]['y'] = 4\n"
    "assert c == Counter(x=2, y=4)",
    "of a new object": "a = twice()\na[0].append(2)\nassert a == [[1, 2], [1, 2]]",
    "a list in itself": "a = []\na.append(a)\nassert ring(a)",
}


HELD = {
    "an attribute": "s = Shelf()\nl = s.items\nl.append(1)\nassert s.items == [1]",
    "of a method": "s = Shelf()\nl = s.all()\nl.append(1)\nl[0] = 2\nassert s.items == [2]",
    "a copy": "s = Shelf()\nl = s.copy()\nl.append(1)\nassert s.items == []",
}
SHELF = """
class Shelf:
    def __init__(self): self.items = []
    def all(self): return self.items
    def copy(self): return list(self.items)
"""


def test_results_of_functions_may_be_changed_anywhere():
    for test in ("r = add(1)\nr.sort()\nassert r == []", "s = Solution()\nr = s.add(1)\nr.sort()\nassert r == []"):
        assert not read_checks(test, None)["inside"]


async def test_objects_of_the_program_are_used_and_changed_as_if_they_were_here_and_stay_one_object():
    need("auto")
    tests = ((TREES, OBJECTS), (SHELF, HELD), (ONE_OBJECT, IDENTITY))
    found = await together({name: score(program, test) for program, some in tests for name, test in some.items()})
    assert {name for name, value in found.items() if value != 1.0} == set()
    assert len(found) == len(OBJECTS) + len(HELD) + len(IDENTITY)

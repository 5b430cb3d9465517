import subprocess
import sys

import pytest

from streamrl.config import RunConfig
from streamrl.consumers.plugins import BUILT_IN, load_rewards
from streamrl.errors import PluginError

NEEDED = {"regex": {"pattern": "a"}, "json_schema": {"key": "schema"}, "length": {"most": 9}}


def load(use, **args):
    return load_rewards(RunConfig.model_validate({"rewards": [{"use": use, "args": args}]}))[0]


@pytest.mark.parametrize(
    "use", ["exact_match", "number_match", "math", "regex", "json_schema", "format", "length", "repetition"]
)
def test_every_rule_is_found_by_its_name(use):
    reward = load(use, **NEEDED.get(use, {}))
    assert (reward.name, reward.blocking) == (use, False)
    assert reward.instant == (use not in {"math", "regex", "json_schema"})


@pytest.mark.parametrize(
    ("use", "hint"),
    [
        ("maths", "did you mean math?"),
        ("json-schema", "did you mean json_schema?"),
        ("lenght", "did you mean length?"),
        ("zzz", "built in: exact_match"),
    ],
)
def test_a_name_that_is_nearly_right(use, hint):
    with pytest.raises(PluginError) as caught:
        load(use)
    assert hint in caught.value.hint


def test_all_names_of_the_table_exist():
    for use, path in BUILT_IN.items():
        module, _, name = path.partition(":")
        assert hasattr(__import__(module, fromlist=[name]), name), use


def test_a_rule_brings_none_of_the_others():
    code = "import sys; from streamrl.consumers.rules import text; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True)
    ours = ("streamrl.consumers.rules.", "streamrl.sandbox")
    found = {name for name in done.stdout.split() if name.startswith(ours)}
    assert found == {"streamrl.consumers.rules.text"}


@pytest.mark.parametrize(
    ("use", "package", "extra"), [("math", "math_verify", "math"), ("json_schema", "jsonschema", "json")]
)
def test_a_package_that_is_missing_comes_with_the_command_that_installs_it(monkeypatch, use, package, extra):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(PluginError, match=f"rule {use} needs the package {package}") as caught:
        load(use, **NEEDED.get(use, {}))
    assert caught.value.hint == f"pip install 'streamrl[{extra}]'"
    assert caught.value.exit_code == 78


@pytest.mark.parametrize(
    ("use", "args", "message", "hint"),
    [
        ("math", {"tolerance": 1}, "unexpected keyword argument 'tolerance'", "it takes: boxed, tag, digits"),
        ("regex", {}, "missing a required argument: 'pattern'", "it takes: pattern, match"),
        ("regex", {"pattern": "("}, "unterminated", "see its args"),
        ("length", {}, "give least, most or both", "see its args"),
    ],
)
def test_args_that_do_not_fit(use, args, message, hint):
    with pytest.raises(PluginError) as caught:
        load(use, **args)
    assert message in caught.value.message
    assert hint in caught.value.hint

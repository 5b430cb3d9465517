import sys

import pytest

from streamrl.config import RunConfig
from streamrl.consumers.plugins import load_rewards
from streamrl.errors import ConfigError, PluginError
from tests.consumers.samples import seen

MODULE = """
import functools
from streamrl.consumers import Reward, Score

class Good(Reward):
    def __init__(self, bonus: float = 0.0):
        self.bonus = bonus
    async def score(self, sample):
        return Score(1.0 + self.bonus)

class Slow(Good):
    deadline = 10.0

class Abstract(Reward):
    pass

class NoScore:
    pass

class NoSample(Reward):
    async def score(self):
        return 1.0

class Broken(Reward):
    def __init__(self):
        raise RuntimeError("no such judge")
    async def score(self, sample):
        return 1.0

class Callable:
    async def __call__(self, sample):
        return 1.0

def plain(sample, scale=1.0):
    return scale * len(sample.text)

async def coroutine(sample):
    return 1.0

partial = functools.partial(coroutine)
callable_object = Callable()
constant = 3

def of_verl(data_source, solution_str, ground_truth, extra_info):
    return 1.0

def of_trl(prompts, completions, **kwargs):
    return [1.0] * len(prompts)


class OldRoom:
    async def score(self, sample):
        return 0.0

    def room(self):
        return 1
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    name = f"my_rewards_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    (tmp_path / "raises_at_import.py").write_text("raise ValueError('bad day')")
    (tmp_path / "imports_another.py").write_text("import no_such_package.inside")
    (tmp_path / "is_no_python.py").write_text("\ndef broken(:\n")
    for package, text in {"lacks_another": "import no_such_package", "raises_in_init": "1 / 0", "sound": ""}.items():
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text(text)
        (tmp_path / package / "inner.py").write_text("def Good(sample): return 1.0")
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path, name
    sys.modules.pop(name, None)


def load(folder, *rewards):
    config = RunConfig.model_validate({"rewards": list(rewards), "plugin_paths": [str(folder[0])]})
    return load_rewards(config)


async def test_every_form_of_a_reward_is_loaded_and_its_kind_is_known(folder):
    module = folder[1]
    names = ["Good", "plain", "coroutine", "partial", "callable_object"]
    rewards = load(folder, {"use": "exact_match"}, *({"use": f"{module}:{name}"} for name in names))
    assert [reward.blocking for reward in rewards] == [False, False, True, False, False, False]
    assert [reward.instant for reward in rewards] == [True] + [False] * 5
    assert rewards[0].name == "exact_match"
    assert rewards[2].call(seen("four")) == 4.0


async def test_args_weight_and_name_of_the_run_file(folder):
    good, plain = load(
        folder,
        {"use": f"{folder[1]}:Good", "args": {"bonus": 0.5}, "weight": 2, "name": "good"},
        {"use": f"{folder[1]}:plain", "args": {"scale": 3}},
    )
    assert (good.name, good.spec.weight) == ("good", 2.0)
    assert (await good.call(seen())).value == 1.5
    assert plain.call(seen("abcd")) == 12


@pytest.mark.parametrize(
    ("use", "message", "hint"),
    [
        ("exact_mach", "reward exact_mach is unknown", "did you mean exact_match?"),
        ("zzz", "reward zzz is unknown", "built in: exact_match"),
        ("MODULE:Goood", "has no Goood", "did you mean Good?"),
        ("MODULEs:Good", "there is no module", "did you mean MODULE?"),
        ("nothing_like_it:Good", "there is no module nothing_like_it", "looked in"),
        ("no.such.package:Good", "there is no module no.such.package", "looked in"),
        (
            "raises_at_import:Good",
            "importing raises_at_import fails: ValueError: bad day",
            "raises_at_import.py, line 1;",
        ),
        ("is_no_python:Good", "importing is_no_python fails: SyntaxError", "is_no_python.py, line 2;"),
        ("MODULE:Abstract", "is abstract", "implement score"),
        ("MODULE:NoScore", "no method score", "add `async def score"),
        ("MODULE:OldRoom", "the method room is now called slots", "rename it"),
        ("MODULE:NoSample", "does not take one sample", "score(sample)"),
        ("MODULE:Broken", "cannot be built: RuntimeError: no such judge", ""),
        ("MODULE:constant", "is of type int", "a class or a function"),
        ("MODULE.Good", "is unknown", "did you mean MODULE:Good?"),
        ("imports_another:Good", "No module named 'no_such_package'", "-m pip install no_such_package,"),
        ("lacks_another.inner:Good", "importing lacks_another.inner fails: ModuleNotFoundError", "no_such_package,"),
        ("raises_in_init.inner:Good", "fails: ZeroDivisionError", "__init__.py, line 1;"),
        ("sound.outer:Good", "there is no module sound.outer", "looked in"),
        ("is_no_python.inner:Good", "importing is_no_python.inner fails: SyntaxError", "is_no_python.py, line 2;"),
        ("imports_another.inner:Good", "No module named 'no_such_package'", "-m pip install no_such_package,"),
        ("MODULE:of_verl", "does not take one sample", "`adapter: verl`"),
        ("MODULE:of_trl", "does not take one sample", "`adapter: trl`"),
        ("MODULE:", "is not an import path", "module:Name"),
        ("../evil:Name", "is not an import path", "module:Name"),
    ],
)
def test_a_reward_that_cannot_work_is_refused_at_start(folder, use, message, hint):
    with pytest.raises(PluginError) as caught:
        load(folder, {"use": use.replace("MODULE", folder[1])})
    assert message in caught.value.message
    assert hint.replace("MODULE", folder[1]) in caught.value.hint
    assert caught.value.exit_code == 78


def test_args_that_do_not_fit_name_what_the_reward_takes(folder):
    with pytest.raises(PluginError, match="bonsu") as caught:
        load(folder, {"use": f"{folder[1]}:Good", "args": {"bonsu": 1}})
    assert caught.value.hint == "it takes: bonus"
    with pytest.raises(PluginError, match="does not take one sample"):
        load(folder, {"use": f"{folder[1]}:plain", "args": {"scael": 1}})


def test_an_installed_entry_point_is_found(folder, monkeypatch):
    info = folder[0] / "judges-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: judges\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[streamrl.rewards]\nreferee = {folder[1]}:Good\nbad = {folder[1]}:Nope\n")
    assert load(folder, {"use": "referee", "args": {"bonus": 1}})[0].name == "referee"
    with pytest.raises(PluginError, match="entry point"):
        load(folder, {"use": "bad"})
    with pytest.raises(PluginError) as caught:
        load(folder, {"use": "refere"})
    assert caught.value.hint == "did you mean referee?"


def test_plugin_directories_come_after_what_is_installed(folder):
    (folder[0] / "json.py").write_text("raise RuntimeError('shadowed')")
    load(folder, {"use": f"{folder[1]}:Good"})
    assert sys.path.index(str(folder[0])) > 0


@pytest.mark.parametrize("use", ["judge", "reward_model"])
def test_a_model_that_the_run_file_does_not_have_is_refused_before_anything_runs(use):
    model = {"kind": "openai", "model": "any", "url": ["http://127.0.0.1:9"]}
    asked = {"use": use, "args": {"model": "critc"}}
    config = RunConfig.model_validate({"rewards": [asked], "reward_models": {"critic": model}})
    with pytest.raises(ConfigError, match="no reward model 'critc'") as caught:
        load_rewards(config)
    assert caught.value.hint == "did you mean critic?"


def test_deadlines_that_no_lease_is_long_enough_for_are_refused_at_the_start(folder):
    def config_of(max_hold, *gates):
        slow = [{"use": f"{folder[1]}:Slow", "name": f"slow {gate}", "gate": gate} for gate in gates]
        rewards = [*slow, {"use": f"{folder[1]}:Slow"}]
        keys = {"rewards": rewards, "plugin_paths": [str(folder[0])], "lease": {"max_hold": max_hold, "seconds": 1}}
        return RunConfig.model_validate(keys)

    assert load_rewards(config_of(11))
    with pytest.raises(ConfigError, match="may take 10 s") as caught:
        load_rewards(config_of(10))
    assert "lease.max_hold to 11s" in caught.value.hint
    with pytest.raises(ConfigError, match="may take 20 s"):
        load_rewards(config_of(20, 0.5))

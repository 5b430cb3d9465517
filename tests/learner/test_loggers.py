"""Figures of steps in TensorBoard and in trackers; a broken one costs nothing but itself."""

import importlib.util
import sys
import threading
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest

from streamrl.config import RunConfig
from streamrl.errors import ConfigError
from streamrl.learner import metrics
from streamrl.learner.metrics import StepLoggers, figures

LINE = {"loss": 0.5, "groups": 4, "skipped": False, "staleness": {"0": 3, "1": 2}, "busy": [[1, 2]], "kind": "full"}
FLAT = {"loss": 0.5, "groups": 4.0, "skipped": 0.0, "staleness/0": 3.0, "staleness/1": 2.0}


def config(*names):
    return RunConfig.model_validate({"name": "mine", "model": {"path": "none"}, "learner": {"report_to": names}})


class Library(ModuleType):
    """Stands for wandb or trackio: the same four functions, which remember what they were given."""

    def __init__(self, name, failing=""):
        super().__init__(name)
        self.__spec__ = ModuleSpec(name, None)
        self.calls, self.failing = [], failing

    def _call(self, what, *args, **kwargs):
        if what == self.failing:
            raise RuntimeError("no network")
        self.calls.append((what, args, kwargs))

    def init(self, **kwargs):
        self._call("init", **kwargs)

    def log(self, values):
        self._call("log", values)

    def finish(self):
        self._call("finish")


def test_numbers_of_a_line_and_of_the_maps_in_it():
    assert figures(LINE) == FLAT


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_tracker_gets_the_run_its_settings_and_every_step(name, tmp_path, monkeypatch):
    library = Library(name)
    monkeypatch.setitem(sys.modules, name, library)
    loggers = StepLoggers(config(name), tmp_path)
    loggers.log(7, LINE)
    loggers.log(8, LINE)
    loggers.close()
    (_, _, init), *logs, (last, _, _) = library.calls
    assert (init["project"], init["name"]) == ("streamrl", "mine")
    assert init["config"]["loss"]["use"] == "ppo"
    assert "reference" not in init["config"], "addresses and paths are nobody's business"
    assert [args[0] for _, args, _ in logs] == [{**FLAT, "step": 7}, {**FLAT, "step": 8}]
    assert last == "finish"


@pytest.mark.parametrize("failing", ["init", "log", "finish"])
def test_a_logger_that_fails_is_left_out(failing, tmp_path, monkeypatch):
    broken, whole = Library("wandb", failing), Library("trackio")
    monkeypatch.setitem(sys.modules, "wandb", broken)
    monkeypatch.setitem(sys.modules, "trackio", whole)
    loggers = StepLoggers(config("wandb", "trackio"), tmp_path)
    for step in (1, 2):
        loggers.log(step, LINE)
    loggers.close()
    assert [what for what, _, _ in whole.calls] == ["init", "log", "log", "finish"]
    assert len(broken.calls) == {"init": 0, "log": 1, "finish": 3}[failing]


def test_lines_do_not_pile_up_before_a_slow_logger(tmp_path, monkeypatch, caplog):
    library, hold = Library("wandb"), threading.Event()
    monkeypatch.setattr(library, "init", lambda **_: hold.wait(60))
    monkeypatch.setitem(sys.modules, "wandb", library)
    monkeypatch.setattr(metrics, "_MOST_WAITING", 3)
    loggers = StepLoggers(config("wandb"), tmp_path)
    for step in range(10):
        loggers.log(step, LINE)
    hold.set()
    loggers.close()
    assert [args[0]["step"] for what, args, _ in library.calls if what == "log"] == [0, 1, 2]
    [record] = [record for record in caplog.records if "too slow" in record.message]
    assert (record.step, record.loggers) == (3, ["wandb"])


def test_a_library_that_is_not_there_is_an_error_at_the_start(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match="trackio is not installed"):
        StepLoggers(config("trackio"), tmp_path)
    StepLoggers(config(), tmp_path).log(1, LINE)


def test_event_files_of_tensorboard(tmp_path):
    from tensorboard.backend.event_processing import event_accumulator as accumulator

    loggers = StepLoggers(config("tensorboard"), tmp_path)
    loggers.log(7, LINE)
    loggers.close()
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert set(events.Tags()["scalars"]) == set(FLAT)
    assert [(event.step, event.value) for event in events.Scalars("staleness/0")] == [(7, 3.0)]

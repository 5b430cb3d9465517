"""Figures of steps in TensorBoard and in trackers; a broken one costs nothing but itself."""

import importlib.util
import re
import sys
import threading
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest

from streamrl import wire
from streamrl.config import RunConfig
from streamrl.errors import ConfigError
from streamrl.learner import metrics
from streamrl.learner.metrics import StepLoggers, figures
from streamrl.queues.records import ClosedGroup

LINE = {"loss": 0.5, "groups": 4, "skipped": False, "staleness": {"0": 3, "1": 2}, "busy": [[1, 2]], "kind": "full"}
FLAT = {"loss": 0.5, "groups": 4.0, "skipped": 0.0, "staleness/0": 3.0, "staleness/1": 2.0}


def config(*names, every=0):
    return RunConfig.model_validate(
        {
            "name": "mine",
            "model": {"path": "/mine/models/none", "tokenizer": "org/none"},
            "data": {"train": "/mine/train.jsonl"},
            "rewards": [{"use": "http", "args": {"url": "http://judge"}}],
            "learner": {
                "report_to": names,
                "log_samples_every": every,
                "kl": {"where": "loss"},
                "reference": {"kind": "remote", "url": ["http://reference"], "api_key_file": "/mine/key"},
            },
        }
    )


def closed():
    """A group of two samples, the second of which failed."""
    prompt = wire.Prompt(tokens=wire.pack_int32([1]), text="1+1=", source="sums")
    sample = wire.Sample(tokens=wire.pack_int32([2]), logprobs=b"\0" * 4, runs=[(0, 1)], finish="stop", text="two\n| 2")
    score = wire.encode(wire.SampleScore(value=0.5))
    samples = {0: (wire.encode(sample), score)}
    return ClosedGroup(
        group_id=7,
        size=2,
        attempt=1,
        version=1,
        crashes=0,
        prompt=wire.encode(prompt),
        samples=samples,
        causes={1: "no score"},
    )


class Library(ModuleType):
    """Stands for wandb or trackio: the same functions, which remember what they were given, and the same table."""

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

    def Table(self, *, columns, data):
        return [dict(zip(columns, row, strict=True)) for row in data]


def test_numbers_of_a_line_and_of_the_maps_in_it():
    assert figures(LINE) == FLAT
    assert figures({"sources": {"math": {"groups": 3, "length": 2.5}}}) == {
        "sources/math/groups": 3.0,
        "sources/math/length": 2.5,
    }


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
    said = init["config"]
    assert (said["seed"], said["learner"]["loss"]["use"], said["model"]["tokenizer"]) == (0, "ppo", "org/none")
    assert [reward["use"] for reward in said["rewards"]] == ["http"]
    assert not re.search("mine/|://", str(said)), "addresses and paths are nobody's business"
    assert [args[0] for _, args, _ in logs] == [{**FLAT, "step": 7}, {**FLAT, "step": 8}]
    assert last == "finish"


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_tracker_gets_a_table_of_samples_each_k_steps(name, tmp_path, monkeypatch):
    library = Library(name)
    monkeypatch.setitem(sys.modules, name, library)
    loggers = StepLoggers(config(name, every=2), tmp_path)
    for step in (1, 2, 3):
        loggers.log(step, LINE, closed())
    loggers.log(4, LINE)  # nothing was read yet
    loggers.close()
    row = {"group": 7, "source": "sums", "prompt": "1+1=", "response": "two\n| 2", "score": 0.5}
    assert [args[0].get("samples") for what, args, _ in library.calls if what == "log"] == [None, [row], None, None]


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

    loggers = StepLoggers(config("tensorboard", every=1), tmp_path)
    loggers.log(7, LINE, closed())
    loggers.close()
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert set(events.Tags()["scalars"]) == set(FLAT)
    assert [(event.step, event.value) for event in events.Scalars("staleness/0")] == [(7, 3.0)]
    [shown] = events.Tensors("samples/text_summary")
    assert shown.tensor_proto.string_val[0].decode().splitlines() == [
        "    group: 7", "    source: sums", "    prompt: 1+1=", "    response: two", "    | 2", "    score: 0.5",
    ]  # fmt: skip
    [shown] = events.Tensors("configuration/text_summary")
    assert b'"seed": 0' in shown.tensor_proto.string_val[0]

"""Which way matrices are multiplied: the trial's verdict, and when there is none."""

import logging

import pytest
import torch
from tiny_policy import run_config

from streamrl.learner import matmul
from streamrl.learner.matmul import choose_precision, verdict

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _as_before():
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


def choose(tmp_path, precision, *, device=CPU, attention="eager", dtype="float32"):
    config = run_config(tmp_path, dtype=dtype, matmul_precision=precision)
    config = config.model_copy(update={"model": config.model.model_copy(update={"attention": attention})})
    return choose_precision(config, device, hidden=32, heads=4)


@pytest.mark.parametrize(
    ("medium_seconds", "medium_error", "expected"),
    [
        (0.5, 1e-5, "medium"),
        (0.95, 1e-5, "highest"),  # no clear gain
        (2.0, 1e-5, "highest"),  # attention sdpa
        (0.1, 1e-2, "highest"),  # bfloat16 in disguise
    ],
)
def test_the_verdict(medium_seconds, medium_error, expected):
    assert verdict({"highest": 1.0, "medium": medium_seconds}, {"highest": 1e-5, "medium": medium_error}) == expected


@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
def test_what_is_asked_for_is_taken(tmp_path, precision, monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    assert choose(tmp_path, precision) == precision


def test_medium_with_sdpa_is_warned_of(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "streamrl"):
        assert choose(tmp_path, "medium", attention="sdpa") == "medium"
    assert "model.attention to eager" in caplog.text


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_the_trial_measures_logs_and_leaves_the_precision_as_it_was(tmp_path, caplog, monkeypatch, attention):
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    torch.set_float32_matmul_precision("high")
    with caplog.at_level(logging.INFO, "streamrl"):
        chosen = choose(tmp_path, "auto", attention=attention)
    (record,) = caplog.records
    assert record.precision == chosen
    assert chosen in {"highest", "medium"}
    assert record.milliseconds.keys() == record.errors.keys() == {"highest", "medium"}
    assert record.errors["highest"] < 1e-4
    assert torch.get_float32_matmul_precision() == "high"


@pytest.mark.parametrize(
    ("amx", "device", "dtype", "why"),
    [
        (True, CPU, "float32", "AMX"),
        (False, torch.device("cuda"), "float32", "nothing to gain"),
        (False, CPU, "bfloat16", "nothing to gain"),
    ],
)
def test_there_is_no_trial_where_it_would_cost_precision(tmp_path, caplog, monkeypatch, amx, device, dtype, why):
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    monkeypatch.setattr(matmul, "_trial", lambda *_, **__: pytest.fail("a trial"))
    with caplog.at_level(logging.INFO, "streamrl"):
        assert choose(tmp_path, "auto", device=device, dtype=dtype) == "highest"
    assert why in caplog.records[0].why


def test_the_fastest_round_counts(monkeypatch):
    clock = iter([0.0, 3.0, 3.0, 4.0, 4.0, 9.0, 9.0, 11.0, 11.0, 14.0])
    monkeypatch.setattr(matmul.time, "perf_counter", lambda: next(clock))
    rounds = []
    assert matmul.fastest(lambda: rounds.append(1)) == 1.0
    assert len(rounds) == 6

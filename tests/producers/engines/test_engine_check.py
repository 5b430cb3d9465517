"""`streamrl engines check` finds out an engine that does not say what is true."""

from __future__ import annotations

from pathlib import Path

from streamrl.producers.engine_check import check_engine
from streamrl.producers.engines import weights
from streamrl.producers.engines.slots import SlotBatch


async def check(folder: Path) -> list[str]:
    return [f"{each.verdict} {each.name}: {each.detail}" async for each in check_engine("hf", folder, None)]


async def test_an_engine_that_works(tmp_path):
    found = await check(tmp_path)
    assert all(line.startswith("yes") for line in found)
    assert len(found) == 4


async def test_one_that_drops_new_weights(tmp_path, monkeypatch):
    monkeypatch.setattr(weights, "copy_weights", lambda _: None)
    found = await check(tmp_path)
    assert len(found) == 4
    assert found[-1].startswith("failed their log-probabilities: log-probabilities are off by")


async def test_one_that_names_another_version(tmp_path, monkeypatch):
    monkeypatch.setattr(SlotBatch, "swapped", lambda *_: None)
    found = await check(tmp_path)
    assert found[-1] == "failed their log-probabilities: the versions of the tokens are [(0, 0)] instead of [(0, 1)]"


async def test_one_that_cannot_start_is_the_only_finding(tmp_path, monkeypatch):
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("no kernel for this machine")

    monkeypatch.setattr(SlotBatch, "__init__", broken)
    [found] = await check(tmp_path)
    assert found.startswith("failed start: ")
    assert "no kernel for this machine" in found

"""How the cores of a host are counted and divided."""

import os

import pytest

from streamrl.cores import VISIBLE, Path, share_cores, usable_cores, visible_cards


@pytest.mark.parametrize(
    ("said", "cards"),
    [(None, ["0", "1"]), ("1", ["1"]), ("GPU-5, 1", ["GPU-5", "1"]), ("", []), ("-1", []), ("1,-1,0", ["1"])],
)
def test_cards_that_are_hidden_do_not_count(monkeypatch, said, cards):
    monkeypatch.setattr(Path, "glob", lambda *_: iter(["nvidia0", "nvidia1"]))
    monkeypatch.delenv(VISIBLE, raising=False) if said is None else monkeypatch.setenv(VISIBLE, said)
    assert visible_cards() == cards
    monkeypatch.setattr(Path, "glob", lambda *_: iter([]))
    assert visible_cards() == []


@pytest.mark.parametrize(
    ("cores", "processes", "taken", "threads"),
    [
        (2, 2, 0, 1),
        (8, 2, 0, 4),
        (8, 3, 0, 2),
        (8, 3, 4, 1),
        (2, 5, 0, 1),  # never less than one
        (8, 1, 0, 7),  # alone, it leaves a core to everything else
        (2, 1, 0, 1),
        (1, 1, 0, 1),
        (4, 1, 16, 1),
        (4, 0, 0, 3),
    ],
)
def test_there_are_no_more_threads_than_cores(cores, processes, taken, threads):
    assert share_cores(cores, processes, taken=taken) == threads


@pytest.mark.parametrize(("content", "limit"), [("150000 100000\n", 2), ("50000 100000\n", 1), ("max 100000\n", None)])
def test_the_quota_of_a_container_counts(tmp_path, content, limit):
    quota = tmp_path / "cpu.max"
    quota.write_text(content)
    there = len(os.sched_getaffinity(0))
    assert usable_cores(quota) == (there if limit is None else min(limit, there))


def test_a_host_without_quotas_has_all_its_cores(tmp_path):
    assert usable_cores(tmp_path / "none") == len(os.sched_getaffinity(0))

"""What a card must be able to do and to hold, before anything is loaded; torch's answers are played."""

from __future__ import annotations

import pytest
import torch

from streamrl.cards import check_room, choose_device
from streamrl.errors import CannotCreate, ConfigError

CARD = torch.device("cuda", 0)


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Tesla V100")
    return monkeypatch


def test_each_rank_has_its_card_or_the_only_one_that_it_sees(cards: pytest.MonkeyPatch) -> None:
    def chosen(name: str, rank: int = 0) -> str:
        return str(choose_device(name, "bfloat16", section="learner", local_rank=rank))

    assert [chosen("auto", 1), chosen("cuda"), chosen("cuda:1"), chosen("cpu")] == ["cuda:1", "cuda:0", "cuda:1", "cpu"]
    with pytest.raises(ConfigError, match="cuda:2 here, and this process sees 2"):
        chosen("cuda", 2)
    cards.setattr(torch.cuda, "device_count", lambda: 1)
    assert [chosen("cuda"), chosen("cuda:1")] == ["cuda:0", "cuda:0"]
    with pytest.raises(ConfigError, match="cuda:3 here, and this process sees 1"):
        chosen("cuda", 3)


def test_bfloat16_on_a_card_without_it_is_refused(cards: pytest.MonkeyPatch) -> None:
    cards.setattr(torch.cuda, "get_device_capability", lambda _: (7, 0))
    assert choose_device("cuda", "float32", section="engine") == CARD
    with pytest.raises(ConfigError, match="Tesla V100 does not compute in bfloat16") as caught:
        choose_device("cuda", "bfloat16", section="engine")
    assert "float32" in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("free", "hint"), [(16 << 30, None), (10 << 30, "another process fills it"), (1 << 30, "take more ranks")]
)
def test_what_does_not_fit_on_a_card_is_refused(monkeypatch: pytest.MonkeyPatch, free: int, hint: str | None) -> None:
    total = 2 << 30 if free == 1 << 30 else 80 << 30
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free, total))
    for name in ("memory_reserved", "memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda _: 1 << 20)
    check_room(torch.device("cpu"), 12 << 30, "m")
    if hint is None:
        check_room(CARD, 12 << 30, "m")
        return
    with pytest.raises(CannotCreate, match=f"m needs 12288 MiB on cuda:0, which has {free >> 20} MiB free") as caught:
        check_room(CARD, 12 << 30, "m")
    assert (caught.value.hint or "").startswith(hint)

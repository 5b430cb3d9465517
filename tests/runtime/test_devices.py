"""One plan of the cards of a host for learner, engines and reward models, and what it refuses."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from streamrl.cores import VISIBLE
from streamrl.errors import ConfigError
from streamrl.runfile import load
from streamrl.runtime.devices import plan_devices, show_devices
from streamrl.runtime.placement import local
from streamrl.runtime.placement.local import LocalPlacement

CARDS = [str(number) for number in range(8)]
JUDGE = "reward_models={judge: {kind: vllm, model: m, servers: 2%s}}"
COLOCATED = "rollout.placement=colocated"
VLLM = "engine.kind=vllm"


def planned(*overrides: str, cards: list[str] = CARDS, name: str = "") -> str:
    config = load(None, ["learner.device=cuda", "engine.device=cuda", *overrides], {}).config
    return " ".join(f"{process}={'+'.join(taken)}" for process, taken in plan_devices(config, cards, name).items())


@pytest.mark.parametrize(
    ("overrides", "plan"),
    [
        ([], "learner.0=0 rollout.0=1"),
        (["rollout.replicas=2", "learner.ranks=2"], "learner.0=0 learner.1=1 rollout.0=2 rollout.1=3"),
        ([VLLM, "engine.servers=2", "engine.tensor_parallel=2"], "learner.0=0 engine.0=1+2 engine.1=3+4"),
        ([VLLM, "learner.ranks=4", COLOCATED], "learner.0=0 learner.1=1 learner.2=2 learner.3=3 engine.0=0"),
        ([VLLM, "engine.tensor_parallel=2", COLOCATED], "learner.0=0 engine.0=0+1"),
        ([VLLM, "engine.servers=3", "engine.devices=['6,7', '5']"], "learner.0=0 engine.0=6+7 engine.1=5 engine.2=6+7"),
        ([VLLM, JUDGE % ""], "learner.0=0 engine.0=1 reward_model.judge.0=2 reward_model.judge.1=3"),
        ([VLLM, JUDGE % ", devices: ['1']"], "learner.0=0 engine.0=1 reward_model.judge.0=1 reward_model.judge.1=1"),
        (
            [VLLM, COLOCATED, JUDGE % ", sleep: true"],
            "learner.0=0 engine.0=0 reward_model.judge.0=0 reward_model.judge.1=1",
        ),
        ([VLLM, "engine.url=[http://a:1]"], "learner.0=0"),
        (["engine.device=cpu"], "learner.0=0"),
        (["learner.device=cpu"], "rollout.0=0"),
        (["learner.device=cuda:2", "engine.device=cuda:5"], "learner.0=2 rollout.0=5"),
        (["recording.mode=write"], "rollout.0=0"),
    ],
)
def test_the_plan(overrides: list[str], plan: str) -> None:
    assert planned(*overrides) == plan


@pytest.mark.parametrize(
    ("overrides", "cards", "says"),
    [
        (["learner.ranks=3"], CARDS[:2], r"has the cards 0, 1, and learner\.2 needs 1 of its own"),
        ([], CARDS[:1], r"rollout\.0 needs 1 of its own"),
        ([VLLM, "engine.tensor_parallel=4"], CARDS[:4], r"engine\.0 needs 4 of its own"),
        ([VLLM, "engine.servers=2", COLOCATED], CARDS[:1], r"engine\.1 needs 1 of its own"),
        ([VLLM, "engine.devices=['0']"], CARDS, r"engine\.0 and the learner would both have card 0"),
        ([VLLM, "engine.devices=['9']"], CARDS, r"engine\.0 needs card 9"),
        ([VLLM, "engine.tensor_parallel=2", "engine.devices=['3']"], CARDS, r"engine\.0 needs card 3"),
        (["learner.device=cuda:1", "learner.ranks=2"], CARDS, "2 ranks of the learner would share a card"),
        (["learner.device=cuda:9"], CARDS, r"learner\.0 needs card cuda:9"),
    ],
)
def test_what_does_not_fit_is_refused(overrides: list[str], cards: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        planned(*overrides, cards=cards)
    assert re.search("colocated|learner.device", caught.value.hint or "")


def test_a_host_without_cards_has_no_plan() -> None:
    assert planned(cards=[]) == ""
    assert show_devices({}, []) == "CPU (this host has 0 cards)"


def test_a_member_that_is_added_has_the_next_card() -> None:
    assert planned(VLLM, name="engine.2").endswith("engine.0=1 engine.1=2 engine.2=3")
    with pytest.raises(ConfigError, match=r"engine\.2 needs"):
        planned(VLLM, name="engine.2", cards=CARDS[:3])


def test_processes_of_this_host_see_their_own_cards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "visible_cards", lambda: ["4", "GPU-5"])
    config = load(None, ["learner.device=cuda", VLLM, "engine.device=cuda"], {}).config
    seen = LocalPlacement(tmp_path, config)._devices
    assert [seen("learner.0"), seen("engine.0"), seen("feeder.0")] == [
        {VISIBLE: "4", "LOCAL_RANK": "0"},
        {VISIBLE: "GPU-5", "LOCAL_RANK": "0"},
        {},
    ]
    with pytest.raises(OSError, match=r"engine\.1 needs 1 of its own"):
        seen("engine.1")
    assert seen("redis") == {}, "it starts also where others have the cards"


def test_a_card_that_is_named_is_dealt_once() -> None:
    assert planned("learner.device=cuda:0", VLLM) == "learner.0=0 engine.0=1"

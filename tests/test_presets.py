"""Presets: each is a valid run, its page says exactly what it is, and whatever a run sets wins over it."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest
import yaml

from streamrl.config.learner import Preset
from streamrl.config.presets import PRESETS
from streamrl.errors import ConfigError
from streamrl.learner.algorithms.recipe import Recipe
from streamrl.runfile import leaves, load
from tests.docs_kit import hooks

PAGES = Path(__file__).parent.parent / "docs" / "reference" / "presets"
NAMES = sorted(get_args(Preset))


def page(name: str) -> str:
    return (PAGES / f"{name}.md").read_text()


def test_there_is_a_preset_for_each_name_and_a_page_for_each_preset():
    assert sorted(PRESETS) == NAMES
    assert sorted(path.stem for path in PAGES.glob("*.md")) == sorted(["index", *NAMES])
    index = page("index")
    assert all(f"({name}.md)" in index for name in NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_the_page_shows_exactly_the_preset(name):
    assert f"\n<!-- generated: preset {name} -->\n" in page(name)
    shown = hooks().GENERATED[f"preset {name}"]().removeprefix("```yaml\n").removesuffix("```")
    assert yaml.safe_load(shown) == PRESETS[name]
    assert all(f"**{part}.**" in page(name) for part in ("Source", "When", "Watch"))
    assert "arXiv" in page(name)


@pytest.mark.parametrize("name", NAMES)
def test_each_is_a_run_that_starts(name):
    config = load(None, [f"learner.preset={name}"], {}).config
    assert config.learner.preset == name
    recipe = Recipe.of(config)
    assert recipe.estimator.name == config.learner.advantage.use
    assert recipe.streams == (name in {"grpo", "egpo_zhao", "kpop", "ipo", "high_staleness", "on_policy"})


@pytest.mark.parametrize("name", NAMES)
def test_every_value_has_its_origin(name):
    loaded = load(None, [f"learner.preset={name}"], {})
    brought = {key for key, origin in loaded.origins.items() if origin == f"preset {name}"}
    assert brought == {key for key, _ in leaves(PRESETS[name])}
    assert loaded.origins["learner.preset"] == "--set"
    assert loaded.origins["learner.lr"] == "default"


def test_on_policy_trains_no_token_of_older_weights():
    assert load(None, ["learner.preset=on_policy"], {}).config.token_staleness_limit == 0


@pytest.mark.parametrize("name", ["sao", "flash_reinforce"])
def test_one_response_per_prompt_is_a_group_that_is_complete(name):
    config = load(None, [f"learner.preset={name}"], {}).config
    assert (config.sampling.group_size, config.sampling.min_group) == (1, 1)
    with pytest.raises(ConfigError, match="compares the responses of a group"):
        Recipe.of(
            load(None, [f"learner.preset={name}", "learner.advantage.use=grpo", "learner.critic.kind=none"], {}).config
        )


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("way", ["file", "environment", "set"])
def test_a_preset_may_be_named_anywhere_and_lies_beneath_all(tmp_path: Path, way):
    text = "learner: {loss: {args: {k_pos: 1.5}}, correction: {gates: [{use: mask}]}}\n"
    if way == "file":
        text += "max_staleness: 3\n"
        text = text.replace("learner: {", "learner: {preset: high_staleness, ")
    environ = {"STREAMRL_LEARNER__PRESET": "high_staleness"} if way == "environment" else {}
    overrides = ["learner.preset=high_staleness"] if way == "set" else []
    loaded = load(write(tmp_path, text), [*overrides, "learner.loss.aggregate=sequence_mean"], environ)
    learner, origins = loaded.config.learner, loaded.origins
    assert learner.loss.args == {"k_pos": 1.5, "lambda_pos": 3.0, "k_neg": 3.0, "lambda_neg": 2.0}
    assert learner.loss.aggregate == "sequence_mean"
    assert learner.correction.gates is not None
    assert [gate.use for gate in learner.correction.gates] == ["mask"]
    assert learner.correction.base == "bypass"
    assert origins["learner.loss.args.k_pos"].startswith("file")
    assert origins["learner.loss.args.lambda_pos"] == "preset high_staleness"
    assert origins["learner.loss.aggregate"] == "--set"
    assert origins["learner.correction.base"] == "preset high_staleness"


def test_the_newest_name_wins(tmp_path: Path):
    path = write(tmp_path, "learner: {preset: scalerl}\n")
    loaded = load(path, ["learner.preset=on_policy"], {"STREAMRL_LEARNER__PRESET": "egpo"})
    assert loaded.config.max_staleness == 0
    assert not [origin for origin in loaded.origins.values() if origin in {"preset scalerl", "preset egpo"}]
    plain = load(path, ["learner.preset=null"], {})
    assert not [origin for origin in plain.origins.values() if origin.startswith("preset")]


def test_what_belongs_to_another_choice_is_left_out():
    learner = load(None, ["learner.preset=scalerl", "learner.loss.use=gspo"], {}).config.learner
    assert (learner.loss.use, learner.loss.args, learner.loss.aggregate) == ("gspo", {}, "prompt_mean")
    learner = load(None, ["learner.preset=scalerl", "learner.correction.base=decoupled"], {}).config.learner
    assert learner.correction.gates is None  # the default ones of that base


def test_one_run_does_not_change_the_next():
    first = load(None, ["learner.preset=scalerl", "learner.loss.args.cap=3"], {}).config
    again = load(None, ["learner.preset=scalerl"], {}).config
    assert (first.learner.loss.args, again.learner.loss.args) == ({"cap": 3}, {"cap": 5.0})


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["learner.preset=grop"], "learner.preset: must be"),
        (["learner.preset=7"], "learner.preset"),
        (["learner=7"], "learner: must be a mapping"),
        (["learner.preset=grpo", "learner.loss=7"], "learner.loss: must be a mapping"),
        (["learner.preset=on_policy", "learner.correction.gates=[{use: tis}]"], "uncorrected has no gates"),
        (["learner.preset=ppo", "learner.advantage.use=grpo"], "only learner.advantage.use gae reads"),
        (["learner.preset=ppo", "learner.groups_per_step=1"], "mini_batches"),
    ],
)
def test_what_does_not_fit_says_so(overrides, message):
    with pytest.raises(ConfigError, match=message):
        load(None, overrides, {})


_BF16 = {"model.dtype", "engine.dtype", "weights.dtype"}


@pytest.mark.parametrize(
    ("gpu", "overrides", "bfloat16"),
    [
        (False, [], set()),
        (True, [], _BF16),
        (True, ["learner.device=cpu", "engine.device=cpu"], set()),
        (False, ["learner.device=cuda"], {"model.dtype"}),
        (False, ["engine.device=cuda"], {"engine.dtype", "weights.dtype"}),
        (True, ["engine.device=cpu"], {"model.dtype"}),
        (True, ["weights.dtype=float32"], {"model.dtype", "engine.dtype"}),
        (False, ["cluster.resources={learner: {gpus: 1}, rollout: {gpus: 1}, engine: {gpus: 1}}"], _BF16),
        # What computes at a URL is not known: as the learner.
        (False, ["learner.device=cuda", "engine.kind=vllm", "engine.url=[http://a:1]"], _BF16),
    ],
)
def test_what_computes_on_a_gpu_computes_in_bfloat16(monkeypatch, gpu, overrides, bfloat16):
    monkeypatch.setattr("streamrl.runfile.has_gpu", lambda: gpu)
    loaded = load(None, overrides, {})
    config = loaded.config
    chosen = {
        "model.dtype": config.model.dtype,
        "engine.dtype": config.engine.dtype,
        "weights.dtype": config.weights.dtype,
    }
    assert {key for key, dtype in chosen.items() if dtype == "bfloat16"} == bfloat16
    assert config.learner.matmul_precision == ("high" if "model.dtype" in bfloat16 else "highest")
    assert all(loaded.origins[key].startswith("of a GPU") for key in bfloat16)

"""Each preset trains: a real learner on groups that a player closes."""

from __future__ import annotations

from copy import deepcopy

import pytest

from streamrl.config import LearnerConfig
from streamrl.config.presets import PRESETS
from streamrl.runfile import LoadedConfig, save


@pytest.mark.parametrize("name", PRESETS)
async def test_each_preset_trains(run, name):
    config, preset = run.configure(steps=3), deepcopy(dict(PRESETS[name]))
    own = {"groups_per_step": config.learner.groups_per_step}
    learner = LearnerConfig.model_validate({**config.learner.model_dump(), **preset["learner"], **own})
    sampling = config.sampling.model_copy(update=preset.pop("sampling", {}))
    run.config = config.model_copy(update={**preset, "sampling": sampling, "learner": learner})
    save(LoadedConfig(config=run.config, origins={}), run.run_dir / "run.json")
    async with run.play():
        assert await run.learn() == 0, run.log()
        steps = run.steps()
        assert [line["step"] for line in steps if "grad_norm" in line] == [1, 2, 3]
        assert not any(line["skipped"] for line in steps if "grad_norm" in line)
        found = await run.audit()
    # Groups with equal rewards leave their step where the preset says so.
    assert found.trained == 12 or (name == "scalerl" and found.trained + found.dropped >= 12), found

"""The same batch through streamrl's objective and through `GRPOTrainer.compute_loss` of trl: same loss, same gradient.

Models, weights, tokens, advantages and old log-probabilities are the same; the layouts are each side's own. The answers
of trl are kept in `trl.safetensors`. What both do not share on purpose, and why, is listed in docs/reference/losses.md.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from cases import CASES, REWARDS

from streamrl.learner.algorithms.advantages import GroupData, dr_grpo, grpo
from streamrl.learner.algorithms.losses import LOSSES

TOLERANCE = 1e-5


def distance(ours, theirs):
    """Norm of the difference over the norm."""
    return ((ours - theirs).norm() / theirs.norm()).item()


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradient(name, both_sides):
    case = CASES[name]
    our_loss, our_slopes, _ = both_sides.ours(case)
    their_loss, their_slopes, _ = both_sides.theirs(name)
    torch.testing.assert_close(torch.cat(both_sides.our_values), both_sides.their_values, rtol=TOLERANCE, atol=1e-5)
    assert our_loss == pytest.approx(their_loss, rel=TOLERANCE, abs=TOLERANCE)
    assert distance(our_slopes, their_slopes) < TOLERANCE


@pytest.mark.benchmarks
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_trl_still_answers_what_is_kept_and_agrees_on_the_gradients_of_parameters(both_sides, with_trl):
    assert with_trl.advantages == both_sides.advantages
    for name, case in CASES.items():
        kept_loss, kept_slopes, _ = both_sides.theirs(name)
        loss, slopes, theirs = with_trl.theirs(name)
        assert loss == pytest.approx(kept_loss, rel=TOLERANCE, abs=TOLERANCE)
        assert distance(kept_slopes, slopes) < TOLERANCE
        torch.testing.assert_close(both_sides.their_values, with_trl.their_values, rtol=TOLERANCE, atol=1e-5)
        *_, ours = with_trl.ours(case)
        assert set(ours) == set(theirs)
        # Biases of keys have no gradient but rounding noise: softmax does not see them.
        names = [key for key in ours if not key.endswith("k_proj.bias")]
        assert distance(*(torch.cat([side[key].flatten() for key in names]) for side in (ours, theirs))) < TOLERANCE


def test_the_cases_say_something(both_sides):
    """Ratios lie on both sides of the bounds, so that each case would notice a missing one."""
    plain = both_sides.theirs("grpo")[1]
    for name in ("grpo, on-policy", "grpo, two-sided cap", "gspo", "cispo", "sapo", "vespo"):
        assert distance(both_sides.theirs(name)[1], plain) > 0.01, name
    tokens = both_sides.theirs("grpo, mean over tokens")[1]
    for name in ("kl in the loss", "truncated importance sampling", "off-policy sequence mask"):
        assert distance(both_sides.theirs(name)[1], tokens) > 0.01, name
    assert both_sides.losses["entropy bonus"] < both_sides.losses["grpo, mean over tokens"] - 0.01
    assert distance(both_sides.theirs("cispo")[1], both_sides.theirs("cispo, bound of ScaleRL")[1]) > 0.01
    covered = {case.loss[0] for case in CASES.values()}
    assert covered <= set(LOSSES.names)
    assert {"ppo", "gspo", "cispo", "sapo", "vespo"} <= covered
    pins = (Path(__file__).parents[2] / "constraints.txt").read_text().splitlines()
    assert f"trl=={both_sides.versions['trl']}" in pins, "the answers are of another trl: ask the one that is pinned"


def groups():
    """Usable rewards of the two groups, each with the places of its responses."""
    for start in (0, 4):
        places = [place for place in range(start, start + 4) if REWARDS[place] is not None]
        yield places, np.asarray([REWARDS[place] for place in places], dtype=np.float64)


def group_data(rewards):
    return GroupData(rewards=rewards, lengths=np.ones(len(rewards), dtype=np.int64), behaviour=[[0.0]] * len(rewards))


def test_advantages(both_sides):
    """An unscored response is no part of its group on either side. What is added to the deviation differs."""
    theirs = {scale: np.asarray(found) for scale, found in both_sides.advantages.items()}
    for places, rewards in groups():
        data, std = group_data(rewards), rewards.std(ddof=1)
        centred = np.concatenate(dr_grpo(data))
        assert theirs["none"][places] == pytest.approx(centred, rel=TOLERANCE, abs=1e-6)
        scaled = np.concatenate(grpo(data)) * (std + 1e-6) / (std + 1e-4)
        assert theirs["group"][places] == pytest.approx(scaled, rel=TOLERANCE, abs=1e-6)
    assert theirs["group"][REWARDS.index(None)] == theirs["none"][REWARDS.index(None)] == 0


def test_the_deviation_of_a_batch_is_another_one(both_sides):
    """`scale_rewards: batch` divides by that of the rewards; grpo_batch_std (ScaleRL) by that of the advantages."""
    known = np.asarray([reward for reward in REWARDS if reward is not None])
    for places, rewards in groups():
        centred = rewards - rewards.mean()
        theirs = np.asarray(both_sides.advantages["batch"])[places]
        assert theirs == pytest.approx(centred / (known.std(ddof=1) + 1e-4), rel=TOLERANCE, abs=1e-6)

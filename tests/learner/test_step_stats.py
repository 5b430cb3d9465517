"""What the updates of a step come to."""

import numpy as np
import pytest

from streamrl.learner.algorithms.losses import ValueSums
from streamrl.learner.algorithms.tokens import TokenSums
from streamrl.learner.optimizer import UpdateStats
from streamrl.learner.step import StepStats


def update(kind, *, skipped: bool) -> UpdateStats:
    norm = np.nan if skipped else 1.0
    return UpdateStats(update=1, loss=0.5, grad_norm=norm, lr=1e-3, skipped=skipped, trained=kind())


@pytest.mark.parametrize(
    ("actors", "critics", "skipped", "diverged"),
    [
        ([False], [], False, False),
        ([True, False], [], False, False),
        ([True, True], [], True, True),
        ([True, True], [False, False], False, True),  # the data is used up, and the policy does not move
        ([False], [True], False, True),
        ([], [False], False, False),  # only the critic learns
        ([], [True], True, True),
    ],
)
def test_a_step_is_skipped_when_nothing_learnt_and_has_diverged_when_a_model_could_not(
    actors, critics, skipped, diverged
):
    stats = StepStats.of(
        [update(TokenSums, skipped=each) for each in actors],
        kl_coefficient=0.0,
        critic=[update(ValueSums, skipped=each) for each in critics],
    )
    assert (stats.skipped, stats.diverged) == (skipped, diverged)
    assert stats.skipped_updates == sum(actors) + sum(critics)


def test_a_step_that_could_not_be_computed_is_both():
    stats = StepStats.of([], kl_coefficient=0.0, failed=True)
    assert (stats.skipped, stats.diverged) == (True, True)

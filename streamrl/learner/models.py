"""Every model that a run's algorithm needs, made and put into a trainer."""

from __future__ import annotations

from streamrl.config import RunConfig
from streamrl.learner.actor import Actor
from streamrl.learner.critic import make_critic
from streamrl.learner.ranks import Ranks
from streamrl.learner.reference import make_reference
from streamrl.learner.steps import Trainer


def make_trainer(config: RunConfig, ranks: Ranks) -> Trainer:
    """Load actor, critic and reference as configured, and return this rank's trainer. Collective.

    Raises:
        ConfigError: a model is missing, cannot be trained, or cannot read what the policy reads; or the algorithm is
            none.
        Unreachable: no reference server answers.
    """
    actor = Actor(config, ranks)
    critic = make_critic(config, ranks, actor) if config.learner.critic.kind == "model" else None
    return Trainer(config, ranks, actor, critic=critic, reference=make_reference(config, ranks, actor))

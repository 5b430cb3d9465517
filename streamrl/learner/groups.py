"""From a closed group in Redis to what the learner trains: decode, check, advantages, versions of its tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from streamrl import wire
from streamrl.errors import StreamrlError, WireError
from streamrl.learner.advantages import group_advantages
from streamrl.learner.batch import TrainSample
from streamrl.learner.chain import Branch
from streamrl.queues.records import ClosedGroup


class Unusable(StreamrlError):
    """A closed group that cannot be trained; it goes to the dead letters with this reason."""


@dataclass(frozen=True, slots=True, eq=False)
class TrainGroup:
    """One group, ready to be trained.

    Attributes:
        gid: its id.
        crashes: learners that died in a step with it.
        samples: its usable responses.
        rewards: their rewards, in the same order.
        versions: sampled tokens by the version that sampled them.
        spanning: responses whose tokens come from more than one version.
    """

    gid: int
    crashes: int
    samples: tuple[TrainSample, ...]
    rewards: tuple[float, ...]
    versions: dict[int, int]
    spanning: int

    @property
    def tokens(self) -> int:
        """Sampled tokens."""
        return sum(len(sample.tokens) for sample in self.samples)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt, counted once for each response."""
        return sum(len(sample.prompt) for sample in self.samples)

    @property
    def zero_advantage(self) -> bool:
        """Whether all rewards are equal: the gradient is exactly zero and no forward pass is needed."""
        return all(sample.advantage == 0 for sample in self.samples)

    @property
    def cost(self) -> int:
        """Tokens that go through the model, padding not counted."""
        return 0 if self.zero_advantage else sum(sample.width for sample in self.samples)

    def staleness(self, branch: Branch, step: int) -> Counter[int]:
        """Sampled tokens by their age in steps of the surviving branch, when they are trained at `step`."""
        ages: Counter[int] = Counter()
        for version, tokens in self.versions.items():
            ages[max(0, step - branch.step(version))] += tokens
        return ages


Misfit = Callable[[Sequence[TrainSample]], ValueError | None]


def open_group(closed: ClosedGroup, *, scale_by_std: bool, misfit: Misfit) -> TrainGroup:
    """Decode and check one closed group.

    Args:
        closed: as Redis holds it.
        scale_by_std: see `group_advantages`.
        misfit: says why samples do not fit the model (`Policy.misfit`), None when they do.

    Raises:
        Unusable: a message that is none of ours, an empty prompt, numbers that give no finite advantage, or tokens
            that the model does not know.
    """
    try:
        prompt = wire.decode(closed.prompt, wire.Prompt).token_ids
        parts = [closed.samples[number] for number in sorted(closed.samples)]
        samples = [wire.decode(payload, wire.Sample) for payload, _ in parts]
        rewards = tuple(wire.decode(score, wire.Score).value for _, score in parts)
        advantages = group_advantages(rewards, scale_by_std=scale_by_std)
        train = tuple(
            TrainSample(closed.gid, prompt, sample.token_ids, sample.token_logprobs, float(advantage))
            for sample, advantage in zip(samples, advantages, strict=True)
        )
        if (reason := misfit(train)) is not None:
            raise reason
    except (WireError, ValueError) as error:
        raise Unusable(f"group {closed.gid} cannot be trained: {error}") from error
    versions: Counter[int] = Counter()
    spanning = 0
    for sample in samples:
        own, counts = np.unique(sample.token_versions, return_counts=True)
        versions.update(dict(zip(own.tolist(), counts.tolist(), strict=True)))
        spanning += len(own) > 1
    return TrainGroup(closed.gid, closed.crashes, train, rewards, dict(versions), spanning)

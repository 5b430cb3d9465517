"""From a closed group in Redis to what the learner trains: decode, check, advantages, ages of its tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from streamrl import wire
from streamrl.errors import StreamrlError, WireError
from streamrl.learner.advantages import group_advantages
from streamrl.learner.batch import Int64Array, TrainSample
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
        samples: its usable responses; the greedy one is not among them.
        spanning: responses whose tokens come from more than one version.
        baseline_reward: reward of the greedy response; None without one.
    """

    gid: int
    crashes: int
    samples: tuple[TrainSample, ...]
    spanning: int
    baseline_reward: float | None = None

    @property
    def rewards(self) -> tuple[float, ...]:
        """Rewards of the responses."""
        return tuple(sample.reward for sample in self.samples)

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
        """Whether no token has an advantage: the gradient is exactly zero and no forward pass is needed."""
        return not any(sample.has_advantage for sample in self.samples)

    @property
    def cost(self) -> int:
        """Tokens that go through the model, padding not counted."""
        return 0 if self.zero_advantage else sum(sample.width for sample in self.samples)

    def staleness(self, step: int) -> Counter[int]:
        """Sampled tokens by their age in steps of the surviving branch, when they are trained at `step`."""
        steps = np.concatenate([sample.steps for sample in self.samples])
        ages, counts = np.unique(np.maximum(0, step - steps), return_counts=True)
        return Counter(dict(zip(ages.tolist(), counts.tolist(), strict=True)))


Misfit = Callable[[Sequence[TrainSample]], ValueError | None]


def open_group(closed: ClosedGroup, branch: Branch, *, scale_by_std: bool, misfit: Misfit) -> TrainGroup:
    """Decode and check one closed group.

    Args:
        closed: as Redis holds it.
        branch: knows the step of each version.
        scale_by_std: see `group_advantages`.
        misfit: says why samples do not fit the model (`Actor.misfit`), None when they do.

    Raises:
        Unusable: a message that is none of ours, an empty prompt, no response but the greedy one, numbers that give no
            finite advantage, or tokens that the model does not know.
    """
    try:
        prompt = wire.decode(closed.prompt, wire.Prompt).token_ids
        parts = [closed.samples[number] for number in sorted(closed.samples)]
        scored = [(wire.decode(sample, wire.Sample), wire.decode(score, wire.Score).value) for sample, score in parts]
        baseline = next((reward for sample, reward in scored if sample.greedy), None)
        samples = [sample for sample, _ in scored if not sample.greedy]
        rewards = [reward for sample, reward in scored if not sample.greedy]
        if not samples:
            raise ValueError("no response but the greedy one")
        advantages = group_advantages(rewards, scale_by_std=scale_by_std)
        train = tuple(
            TrainSample(
                gid=closed.gid,
                prompt=prompt,
                tokens=sample.token_ids,
                logprobs=sample.token_logprobs,
                steps=token_steps(sample, branch),
                reward=reward,
                advantages=np.full(len(sample.token_ids), advantage).astype(np.float32),
            )
            for sample, reward, advantage in zip(samples, rewards, advantages, strict=True)
        )
        if (reason := misfit(train)) is not None:
            raise reason
    except (WireError, ValueError) as error:
        raise Unusable(f"group {closed.gid} cannot be trained: {error}") from error
    spanning = sum(len({version for _, version in sample.runs}) > 1 for sample in samples)
    return TrainGroup(closed.gid, closed.crashes, train, spanning, baseline)


def token_steps(sample: wire.Sample, branch: Branch) -> Int64Array:
    """Step of the version that sampled each token, shape (tokens,)."""
    versions, places = np.unique(sample.token_versions, return_inverse=True)
    return np.asarray([branch.step(version) for version in versions.tolist()], dtype=np.int64)[places]

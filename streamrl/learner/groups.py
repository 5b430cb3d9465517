"""From a closed group in Redis to what the learner trains: decode, check, advantages, ages of its tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from streamrl import wire
from streamrl.errors import StreamrlError, WireError
from streamrl.learner.algorithms.advantages import KNOWN_EARLY, FloatArray, GroupData, TokenTexts, all_equal
from streamrl.learner.algorithms.recipe import Recipe
from streamrl.learner.batch import Int64Array, TrainSample
from streamrl.learner.lineage import Branch
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
        flat: the gradient is exactly zero: no forward pass is needed.
    """

    gid: int
    crashes: int
    samples: tuple[TrainSample, ...]
    spanning: int
    flat: bool

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
    def responses(self) -> int:
        """Responses with sampled tokens."""
        return sum(len(sample.tokens) > 0 for sample in self.samples)

    @property
    def zero_variance(self) -> bool:
        """Whether all rewards are equal, so that nothing is learnt from their contrast."""
        return all_equal(np.asarray(self.rewards))

    @property
    def cost(self) -> int:
        """Tokens that go through the model, padding not counted."""
        return 0 if self.flat else sum(sample.width for sample in self.samples)

    def staleness(self, step: int) -> Counter[int]:
        """Sampled tokens by their age in steps of the surviving branch, when they are trained at `step`."""
        steps = np.concatenate([sample.steps for sample in self.samples])
        ages, counts = np.unique(np.maximum(0, step - steps), return_counts=True)
        return Counter(dict(zip(ages.tolist(), counts.tolist(), strict=True)))


Misfit = Callable[[Sequence[TrainSample]], ValueError | None]
"""Says why samples do not fit the model (`Actor.misfit`), None when they do."""


class GroupOpener:
    """Decodes and checks closed groups.

    Args:
        branch: knows the step of each version.
        recipe: the algorithm.
        misfit: of the model.
    """

    def __init__(self, branch: Branch, recipe: Recipe, misfit: Misfit) -> None:
        self.branch = branch
        self._recipe, self._misfit = recipe, misfit

    def __call__(self, closed: ClosedGroup) -> TrainGroup:
        """Open one group. Advantages that need more than the group have to be computed later; they are 0 here.

        Raises:
            Unusable: a message that is none of ours, an empty prompt, no response but the greedy one, numbers that give
                no finite advantage, or tokens that the model does not know.
        """
        try:
            samples, spanning = self._decode(closed)
            if (reason := self._misfit(samples)) is not None:
                raise reason
            train = self._estimated(samples)
        except (WireError, ValueError) as error:
            raise Unusable(f"group {closed.gid} cannot be trained: {error}") from error
        flat = self._recipe.skips_zero and not any(sample.has_advantage for sample in train)
        return TrainGroup(closed.gid, closed.crashes, train, spanning, flat)

    def _decode(self, closed: ClosedGroup) -> tuple[list[TrainSample], int]:
        prompt = wire.decode(closed.prompt, wire.Prompt).token_ids
        parts = [closed.samples[number] for number in sorted(closed.samples)]
        samples = [wire.decode(payload, wire.Sample) for payload, _ in parts]
        rewards = [wire.decode(score, wire.Score).value for _, score in parts]
        both = list(zip(samples, rewards, strict=True))
        baseline = next((reward for sample, reward in both if sample.greedy), None)
        train = [
            TrainSample(
                gid=closed.gid,
                prompt=prompt,
                tokens=sample.token_ids,
                logprobs=sample.token_logprobs,
                steps=token_steps(sample, self.branch),
                reward=reward,
                advantages=np.zeros(len(sample.token_ids), dtype=np.float32),
                baseline=baseline,
            )
            for sample, reward in both
            if not sample.greedy
        ]
        if not train:
            raise ValueError("no response but the greedy one")
        spanning = sum(len({version for _, version in sample.runs}) > 1 for sample in samples if not sample.greedy)
        return train, spanning

    def _estimated(self, samples: list[TrainSample]) -> tuple[TrainSample, ...]:
        if not self._recipe.estimator.needs <= KNOWN_EARLY:
            return tuple(samples)
        data = group_data(samples, texts=self._recipe.texts)
        with np.errstate(over="ignore"):
            arrays = [array.astype(np.float32) for array in self._recipe.estimator(data)]
        return tuple(replace(sample, advantages=array) for sample, array in zip(samples, arrays, strict=True))


def group_data(
    samples: Sequence[TrainSample],
    penalties: Sequence[FloatArray] | None = None,
    *,
    texts: TokenTexts | None = None,
) -> GroupData:
    """What an estimator of advantages knows of a group.

    Args:
        samples: all usable responses of one group, at least one.
        penalties: KL in the reward per token, times its coefficient; None: none.
        texts: `Recipe.texts`.
    """
    values = [sample.values for sample in samples if sample.values is not None]
    entropy = [sample.entropy for sample in samples if sample.entropy is not None]
    return GroupData(
        rewards=np.asarray([sample.reward for sample in samples]),
        lengths=np.asarray([len(sample.tokens) for sample in samples]),
        behaviour=[sample.logprobs for sample in samples],
        penalties=penalties,
        values=values if len(values) == len(samples) else None,
        entropy=entropy if len(entropy) == len(samples) else None,
        baseline_reward=samples[0].baseline if samples else None,
        tokens=[sample.tokens for sample in samples],
        texts=None if texts is None else [texts(sample.tokens) for sample in samples],
        prompt_text="" if texts is None else "".join(texts(samples[0].prompt)),
    )


def token_steps(sample: wire.Sample, branch: Branch) -> Int64Array:
    """Step of the version that sampled each token, shape (tokens,)."""
    versions, places = np.unique(sample.token_versions, return_inverse=True)
    return np.asarray([branch.step(version) for version in versions.tolist()], dtype=np.int64)[places]

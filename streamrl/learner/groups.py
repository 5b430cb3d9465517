"""Turn a closed group in Redis into what the learner trains: decode, check, advantages, ages of its tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from streamrl import wire
from streamrl.errors import DataError, Refused, StreamrlError, WireError
from streamrl.images.store import ImageStore
from streamrl.learner.algorithms.advantages import KNOWN_EARLY, FloatArray, GroupData, TokenTexts, all_equal
from streamrl.learner.algorithms.recipe import Recipe
from streamrl.learner.batch import TrainSample
from streamrl.learner.tree import Int64Array, Tree, return_to_go
from streamrl.queues.records import ClosedGroup


class Unusable(StreamrlError):
    """A closed group that cannot be trained; it goes to the dead letters with this reason."""


@dataclass(kw_only=True, slots=True)
class EpisodeFigures:
    """Sums over samples with turns; they add up over groups and steps."""

    episodes: int = 0
    turns: int = 0  # sampled ones
    branches: int = 0
    sampled: int = 0
    observed: int = 0
    context: int = 0  # tokens before sampled turns, each time they were read
    cached: int = 0  # of these, the ones that the engine still had
    calls: int = 0
    unknown: int = 0
    failed: int = 0  # calls that did not end well, unknown tools apart
    model_seconds: float = 0.0
    tool_seconds: float = 0.0
    rewards: float = 0.0
    replayed: int = 0
    restarts: int = 0
    stops: Counter[str] = field(default_factory=Counter)

    @classmethod
    def of(cls, sample: wire.Sample, tree: Tree, prompt: int = 0) -> EpisodeFigures:
        uses = [use for turn in sample.turns for use in turn.tools]
        before, context = [0] * len(sample.turns), 0
        roots = {wire.PROMPT: prompt, wire.NOTHING: 0}
        for number, turn in enumerate(sample.turns):
            parent = turn.parent
            before[number] = roots[parent] if parent < 0 else before[parent] + tree.length(parent)
            context += before[number] if turn.sampled else 0
        return cls(
            episodes=1,
            turns=sum(turn.sampled > 0 for turn in sample.turns),
            branches=len(tree.branches),
            sampled=sum(tree.sampled),
            observed=sum(map(len, tree.observed)),
            context=context,
            cached=sum(turn.cached for turn in sample.turns),
            calls=len(uses),
            unknown=sum(use.outcome == "unknown" for use in uses),
            failed=sum(use.outcome not in {"ok", "unknown"} for use in uses),
            model_seconds=sum(turn.model_seconds for turn in sample.turns),
            tool_seconds=sum(turn.tool_seconds for turn in sample.turns),
            rewards=sum(tree.rewards),
            replayed=sample.replayed,
            restarts=sample.restarts,
            stops=Counter([sample.stop or "unknown"]),
        )

    def __add__(self, other: EpisodeFigures) -> EpisodeFigures:
        names = [each.name for each in fields(self)]
        return EpisodeFigures(**{name: getattr(self, name) + getattr(other, name) for name in names})

    def line(self) -> dict[str, Any]:
        if not self.episodes:
            return {}
        return {
            "episodes": self.episodes,
            "turns_per_sample": self.turns / self.episodes,
            "branches_per_sample": self.branches / self.episodes,
            "stops": dict(sorted(self.stops.items())),
            "observed_fraction": self.observed / max(1, self.observed + self.sampled),
            "cached_fraction": self.cached / max(1, self.context),
            "turn_reward_mean": self.rewards / self.episodes,
            "model_seconds_per_sample": self.model_seconds / self.episodes,
            "tool_seconds_per_sample": self.tool_seconds / self.episodes,
            "tool_calls": self.calls,
            "tool_failures": self.failed,
            "tool_unknown": self.unknown,
            "replayed_turns": self.replayed,
            "restarted_episodes": self.restarts,
        }


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TrainGroup:
    group_id: int
    crashes: int  # learners that died in a step with it
    samples: tuple[TrainSample, ...]  # its usable responses, without the greedy one
    mixed_version: int  # responses whose tokens come from more than one version
    zero_gradient: bool  # the gradient is exactly zero, so no forward pass is needed
    episodes: EpisodeFigures = field(default_factory=EpisodeFigures)

    @property
    def rewards(self) -> tuple[float, ...]:
        return tuple(sample.reward for sample in self.samples)

    @property
    def tokens(self) -> int:
        return sum(len(sample.tokens) for sample in self.samples)

    @property
    def prompt_tokens(self) -> int:
        return sum(len(sample.prompt) for sample in self.samples)

    @property
    def responses(self) -> int:
        return sum(len(sample.tokens) > 0 for sample in self.samples)

    @property
    def zero_variance(self) -> bool:
        """Whether all rewards are equal; with rewards of turns, all returns of tokens."""
        returns = [return_to_go(sample.tree) for sample in self.samples]
        if all(going is None for going in returns):
            return all_equal(np.asarray(self.rewards))
        pairs = zip(self.rewards, returns, strict=True)
        arrays = [np.atleast_1d(reward if going is None else reward + going) for reward, going in pairs]
        return all_equal(np.concatenate(arrays))

    @property
    def cost(self) -> int:
        """Tokens that go through the model, without padding."""
        return 0 if self.zero_gradient else sum(sample.cost for sample in self.samples)

    def staleness(self, step: int) -> Counter[int]:
        """Sampled tokens by their age in steps of the surviving branch, when they are trained at `step`."""
        steps = np.concatenate([sample.steps for sample in self.samples])
        ages, counts = np.unique(np.maximum(0, step - steps), return_counts=True)
        return Counter(dict(zip(ages.tolist(), counts.tolist(), strict=True)))


class GroupOpener:
    """Opens closed groups; `check` raises ValueError when samples do not fit the model.

    The images of its groups are in `images`, and were made tokens by the processor with the fingerprint `processor`.
    """

    def __init__(
        self,
        recipe: Recipe,
        check: Callable[[Sequence[TrainSample]], None],
        images: ImageStore | None = None,
        processor: str = "",
    ) -> None:
        self._recipe, self._check = recipe, check
        self.images, self._processor = images, processor

    def __call__(self, closed: ClosedGroup, step_of: Callable[[int], int]) -> TrainGroup:
        """Open one group. Advantages that need more than the group are 0 here and computed later."""
        try:
            responses = _decode(closed)
            samples = self._shown(closed, responses, _train_samples(closed, responses, step_of))
            self._check(samples)
            train = self._estimated(samples)
        except Refused:  # not the group is wrong, but this host
            raise
        except (WireError, DataError, ValueError) as error:
            raise Unusable(f"group {closed.group_id} cannot be trained: {error}") from error
        return TrainGroup(
            group_id=closed.group_id,
            crashes=closed.crashes,
            samples=train,
            mixed_version=sum(
                len({version for _, version in sample.runs}) > 1 for sample, _ in responses if not sample.greedy
            ),
            zero_gradient=self._recipe.skips_zero and not any(sample.has_advantage for sample in train),
            episodes=_episode_figures(responses, train),
        )

    def _shown(
        self, closed: ClosedGroup, responses: Sequence[tuple[wire.Sample, wire.SampleScore]], train: list[TrainSample]
    ) -> list[TrainSample]:
        """The samples with the bytes of their images."""
        prompt = wire.decode(closed.prompt, wire.Prompt)
        answers = [sample for sample, _ in responses if not sample.greedy]
        if not any((prompt.images, *(sample.images for sample in answers))):
            return train
        if self.images is None:
            raise DataError("it has images, and the model takes text alone")
        if prompt.processor != self._processor:
            what = f"images were counted by the image processor {prompt.processor}, the learner has {self._processor}"
            raise Refused(what, "install the same version of transformers on all hosts")
        travelled = [*prompt.blobs, *(data for sample in answers for data in sample.blobs)]
        own = [dict.fromkeys((*prompt.images, *sample.images)) for sample in answers]
        found = self.images.read({name: None for names in own for name in names}, travelled)
        return [
            replace(one, images=tuple(prompt.images), blobs={name: found[name] for name in names})
            for one, names in zip(train, own, strict=True)
        ]

    def _estimated(self, samples: list[TrainSample]) -> tuple[TrainSample, ...]:
        if not self._recipe.estimator.needs <= KNOWN_EARLY:
            return tuple(samples)
        data = group_data(samples, texts=self._recipe.texts)
        with np.errstate(over="ignore"):
            arrays = [array.astype(np.float32) for array in self._recipe.estimator(data)]
        # Over the step a masked response still counts in the baseline (`step.update_collected`).
        masks = self._recipe.mask_truncated and self._recipe.estimator.normalise == "none"
        return tuple(
            replace(sample, advantages=np.zeros_like(array) if masks and sample.truncated else array)
            for sample, array in zip(samples, arrays, strict=True)
        )


def _decode(closed: ClosedGroup) -> list[tuple[wire.Sample, wire.SampleScore]]:
    parts = [closed.samples[number] for number in sorted(closed.samples)]
    return [(wire.decode(payload, wire.Sample), wire.decode(score, wire.SampleScore)) for payload, score in parts]


def _train_samples(
    closed: ClosedGroup, responses: Sequence[tuple[wire.Sample, wire.SampleScore]], step_of: Callable[[int], int]
) -> list[TrainSample]:
    prompt = wire.decode(closed.prompt, wire.Prompt).token_ids
    baseline = next(
        (
            score.value + sum(turn.reward or 0.0 for turn in sample.turns)
            for sample, score in responses
            if sample.greedy
        ),
        None,
    )
    lengths = [count for sample, _ in responses if not sample.greedy and (count := len(sample.token_ids))]
    train = [
        TrainSample(
            group_id=closed.group_id,
            prompt=prompt,
            tokens=sample.token_ids,
            logprobs=sample.token_logprobs,
            steps=_token_steps(sample, step_of),
            reward=score.value,
            advantages=np.zeros(len(sample.token_ids), dtype=np.float32),
            tree=Tree.of(sample),
            baseline=baseline,
            parts=score.parts,
            truncated=sample.truncated,
            group_mean=float(np.mean(lengths)) if lengths else 1.0,
        )
        for sample, score in responses
        if not sample.greedy
    ]
    if not train:
        raise ValueError("no response but the greedy one")
    return train


def _episode_figures(
    responses: Sequence[tuple[wire.Sample, wire.SampleScore]], train: Sequence[TrainSample]
) -> EpisodeFigures:
    answers = (sample for sample, _ in responses if not sample.greedy)
    pairs = zip(answers, train, strict=True)
    found = (EpisodeFigures.of(sample, one.tree, len(one.prompt)) for sample, one in pairs if one.tree is not None)
    return sum(found, EpisodeFigures())


def _token_steps(sample: wire.Sample, step_of: Callable[[int], int]) -> Int64Array:
    found, places = np.unique(sample.token_versions, return_inverse=True)
    return np.asarray([step_of(version) for version in found.tolist()], dtype=np.int64)[places]


def group_data(
    samples: Sequence[TrainSample],
    penalties: Sequence[FloatArray] | None = None,
    *,
    texts: TokenTexts | None = None,
) -> GroupData:
    """`penalties` are the KL in the reward per token, times its coefficient; None without one."""
    values = [sample.values for sample in samples if sample.values is not None]
    entropy = [sample.entropy for sample in samples if sample.entropy is not None]
    going = [return_to_go(sample.tree) for sample in samples]
    turned = any(array is not None for array in going)
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
        parts=[sample.parts for sample in samples],
        prompt_text="" if texts is None else "".join(texts(samples[0].prompt)),
        going=[
            np.zeros(len(sample.tokens)) if array is None else array
            for sample, array in zip(samples, going, strict=True)
        ]
        if turned
        else None,
        threads=None if all(sample.tree is None for sample in samples) else [_threads(sample) for sample in samples],
    )


def _threads(sample: TrainSample) -> list[Int64Array]:
    if sample.tree is not None:
        return sample.tree.threads
    return [np.arange(len(sample.tokens))] if len(sample.tokens) else []

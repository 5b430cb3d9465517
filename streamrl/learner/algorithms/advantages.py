"""Advantages: what each token of one whole group of responses to the same prompt is worth.

An estimator is a function `(group: GroupData, *, options) -> one array per response`; `traits` says what else it needs,
for those of a user as for ours. In their formulas r_i is the reward of response i without its KL penalties. A group
with one usable response never is its own baseline.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Literal, TypeAlias, TypeVar, get_args

import numpy as np
import numpy.typing as npt
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from streamrl.config import ModelConfig
from streamrl.config.learner import LearnerConfig
from streamrl.errors import ConfigError
from streamrl.learner.algorithms.egpo import (
    Part,
    confidence_weights,
    entropy_bonus,
    failures_only,
    mean_uncertainty,
    part_of,
)
from streamrl.learner.algorithms.registry import Registry

FloatArray: TypeAlias = npt.NDArray[np.float64]
ROUNDING = 1e-9
"""Rewards that differ by less than this share of the largest one are equal: 0.1 + 0.2 is not 0.3 in floating point, and
a deviation of rounding errors must neither divide an advantage nor count as a contrast."""


def all_equal(values: FloatArray) -> bool:
    """Whether values are equal up to `ROUNDING`."""
    peak = np.max(np.abs(values), initial=0.0)
    # The peak is taken out first, so that the difference does not overflow on rewards like 1e308.
    return not peak or bool(np.ptp(values / peak) <= ROUNDING)


def difference(left: FloatArray, right: float) -> FloatArray:
    """`left - right`, exactly 0 where they are equal up to `ROUNDING`."""
    found = left - right
    found[np.abs(found) <= ROUNDING * np.maximum(np.abs(left), abs(right))] = 0
    return found


@dataclass(frozen=True, slots=True, eq=False)
class GroupData:
    """The k responses of one group that have a score.

    Fields per token have one numpy array per response (`texts`: a list), None when the run does not have them.

    `ValueError`: a reward is not finite.
    """

    rewards: FloatArray  # shape (k,), finite
    lengths: npt.NDArray[np.int64]  # sampled tokens of each response, shape (k,)
    behaviour: Sequence[npt.ArrayLike]  # log-probability that each token was sampled with
    penalties: Sequence[npt.ArrayLike] | None = None  # KL in the reward, times its coefficient; taken off the reward
    values: Sequence[npt.ArrayLike] | None = None  # of the critic, before each token
    entropy: Sequence[npt.ArrayLike] | None = None  # of the policy at the start of the step, in nats
    baseline_reward: float | None = None  # of the greedy response
    tokens: Sequence[npt.ArrayLike] | None = None  # sampled token ids
    texts: Sequence[Sequence[str]] | None = None  # text of each sampled token
    parts: Sequence[Mapping[str, float]] | None = None  # the score of each response by reward, None: not known
    prompt_text: str = ""  # of the prompt that all responses answer; empty when not asked for
    going: Sequence[npt.ArrayLike] | None = None  # rewards of turns that follow (docs/reference/advantages.md)
    # Of each response the places of the tokens that each branch trains, in order; None: it is one sequence.
    threads: Sequence[Sequence[npt.NDArray[np.int64]]] | None = None

    def __post_init__(self) -> None:
        known = [*self.rewards.tolist(), 0.0 if self.baseline_reward is None else self.baseline_reward]
        if not np.all(np.isfinite(known)):
            raise ValueError(f"a reward is not finite: {known}")

    @property
    def totals(self) -> FloatArray:
        """Return of each response without its penalties, shape (k,); with rewards of turns the mean of its tokens."""
        totals = self.rewards if self.going is None else self.rewards + self._means
        if self.penalties is None:
            return totals
        penalties = [float(np.sum(np.asarray(penalty, np.float64))) for penalty in self.penalties]
        return np.asarray(totals - np.array(penalties, dtype=np.float64))

    @property
    def deviations(self) -> list[FloatArray] | None:
        """Return of each token minus the mean of its response; None without rewards of turns, or one response."""
        if self.going is None or self.rewards.size < 2:
            return None
        arrays = [np.asarray(going, dtype=np.float64) for going in self.going]
        return [difference(array, mean) for array, mean in zip(arrays, self._means.tolist(), strict=True)]

    def constant(self, per_response: FloatArray, slope: float | FloatArray = 1.0) -> list[FloatArray]:
        """Give every token the number of its response: shape (k,) to one array per response.

        With rewards of turns a token's own return counts: `slope` (one number, or shape (k,)) is what the number of a
        response gains per unit of its return.
        """
        arrays = [np.full(length, value) for value, length in zip(per_response, self.lengths, strict=True)]
        if (deviations := self.deviations) is None:
            return arrays
        slopes = np.broadcast_to(np.asarray(slope, dtype=np.float64), self.rewards.shape)
        return [array + factor * own for array, factor, own in zip(arrays, slopes, deviations, strict=True)]

    def token_rewards(self) -> list[FloatArray]:
        """Reward of each token: minus its penalty, plus that of the turns that it led to.

        The last token of each thread, which is the end of a branch, also has the reward of the response. What later
        branches of a fork get counts where they leave, so that rewards from a token on add up to its return.
        """
        tokens = [np.zeros(length) for length in self.lengths]
        for index, reward in enumerate(self.rewards):
            if self.penalties is not None:
                tokens[index] -= np.asarray(self.penalties[index], dtype=np.float64)
            for thread in self.threads_of(index):
                if self.going is not None:
                    going = np.append(np.asarray(self.going[index], dtype=np.float64)[thread], 0.0)
                    tokens[index][thread] -= np.diff(going)
                tokens[index][thread[-1]] += reward
        return tokens

    def threads_of(self, index: int) -> Sequence[npt.NDArray[np.int64]]:
        """Places of the tokens of a response in the order of its actions, branch by branch."""
        if self.threads is not None:
            return self.threads[index]
        return [np.arange(self.lengths[index])] if self.lengths[index] else []

    @property
    def _means(self) -> FloatArray:
        assert self.going is not None
        arrays = [np.asarray(going, dtype=np.float64) for going in self.going]
        return np.asarray([float(array.mean()) if array.size else 0.0 for array in arrays])


class TokenTexts:
    """Token ids to text, one by one; a token that is a part of a character has a replacement character."""

    def __init__(self, model: ModelConfig) -> None:
        self._name = model.tokenizer or model.path
        self._known: dict[int, str] = {}

    def load(self) -> None:
        """Load the tokenizer, so that one that is missing shows when the run starts (`ConfigError`)."""
        _ = self._tokenizer

    def __call__(self, ids: npt.ArrayLike) -> list[str]:
        return [self._text(token) for token in np.asarray(ids).tolist()]

    def _text(self, token: int) -> str:
        text = self._known.get(token)
        if text is None:
            # Tags may be special tokens.
            text = self._known[token] = str(self._tokenizer.decode([token], skip_special_tokens=False))
        return text

    @cached_property
    def _tokenizer(self) -> PreTrainedTokenizerBase:
        try:
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(self._name)
        except (OSError, ValueError, KeyError, ImportError) as error:
            reason = str(error).partition("\n")[0]
            raise ConfigError(
                f"learner.advantage needs the text of tokens, and there is no tokenizer in {self._name}: {reason}",
                "set model.tokenizer, or learner.advantage.args part: joint",
            ) from error
        return tokenizer


AllSum: TypeAlias = Callable[[FloatArray], FloatArray]
"""Adds a float64 array up over all ranks; called by all of them, the same number of times."""
Normalisation = Literal["none", "whiten", "std", "centre", "nonzero"]
NORMALISATIONS: tuple[str, ...] = get_args(Normalisation)

_STD_FLOOR = 1e-6
_ROUNDING = 1e-12  # a deviation below this share of the values themselves is rounding, not contrast


def normalise(arrays: Sequence[FloatArray], kind: Normalisation, all_sum: AllSum) -> list[FloatArray]:
    """Normalise the advantages of this rank's responses over the step.

    * `whiten`: `(A - mean) / (std + 1e-6)` over the tokens of the step (REINFORCE++, arXiv 2501.03262; PPO).
    * `std`: `A / (std + 1e-6)` over the responses of the step, each with the mean of its tokens (ScaleRL, arXiv
      2510.13786; TRL `scale_rewards="batch"`). The mean stays, so 0 stays 0.
    * `centre`: `A - mean` over the responses of the step, each with the mean of its tokens (FlashREINFORCE, 2026).
    * `nonzero`: `A responses / responses with an advantage` (GPG, arXiv 2504.02546): what has no gradient does not
      thin out the rest.

    Standard deviations are unbiased. Where there is no contrast, `whiten` and `std` give 0: a single token (or
    response) is not its own baseline. `ValueError`, on all ranks alike: squares of advantages are not finite.
    """
    if kind == "none":
        return list(arrays)
    filled = [array for array in arrays if array.size]
    if kind == "nonzero":
        counted = all_sum(np.asarray([len(filled), sum(bool(array.any()) for array in filled)], dtype=np.float64))
        return [array * (counted[0] / max(1.0, counted[1])) for array in arrays]
    if kind == "whiten":
        mean, std = _moments(np.concatenate(filled) if filled else np.zeros(0), all_sum)
        return [np.zeros_like(array) if std == 0 else (array - mean) / (std + _STD_FLOOR) for array in arrays]
    mean, std = _moments(np.asarray([array.mean() for array in filled], dtype=np.float64), all_sum)
    if kind == "centre":
        return [difference(array, mean) for array in arrays]
    return [np.zeros_like(array) if std == 0 else array / (std + _STD_FLOOR) for array in arrays]


def _moments(values: FloatArray, all_sum: AllSum) -> tuple[float, float]:
    """Mean and unbiased standard deviation over all ranks; 0 for the latter where there is no contrast."""
    with np.errstate(over="ignore", invalid="ignore"):
        count, total = all_sum(np.asarray([values.size, values.sum()], dtype=np.float64))
        mean = total / max(1.0, count)
        squares, magnitude = all_sum(np.asarray([((values - mean) ** 2).sum(), np.abs(values).sum()]))
    if not np.isfinite(squares):
        raise ValueError("advantages of a step are too large to be normalised")
    std = float(np.sqrt(squares / max(1.0, count - 1)))
    return float(mean), 0.0 if std <= _ROUNDING * magnitude / max(1.0, count) else std


def generalized_advantages(
    rewards: npt.ArrayLike, values: npt.ArrayLike, *, gamma: float, lam: float | FloatArray, lengths: npt.ArrayLike
) -> FloatArray:
    """The advantage of every token, shape (n,), of sequences of these `lengths` that stand one behind the other.

    `delta_t = r_t + gamma V_{t+1} - V_t` and `A_t = delta_t + gamma lam A_{t+1}` (arXiv 1506.02438, equations 11 and
    16). What is behind the last token of a sequence is worth 0. With values of 0 and lam 1 they are discounted returns.
    `lam` is one number, or one of each sequence.
    """
    reward, value = np.asarray(rewards, dtype=np.float64), np.asarray(values, dtype=np.float64)
    counts = np.asarray(lengths, dtype=np.int64)
    rows = np.repeat(np.arange(counts.size), counts)
    columns = np.arange(reward.size) - np.repeat(np.cumsum(counts) - counts, counts)
    # One row per token of the longest sequence, so that the recursion is one loop whatever the number of sequences.
    grid = np.zeros((counts.max(initial=0) + 1, counts.size))
    grid[columns, rows] = value
    following = grid[columns + 1, rows]
    grid[columns, rows] = reward + gamma * following - value
    for step in range(len(grid) - 2, -1, -1):
        grid[step] += gamma * lam * grid[step + 1]
    return grid[columns, rows]


Need = Literal["values", "entropy", "baseline", "text", "parts"]
KNOWN_EARLY: frozenset[Need] = frozenset(
    {"baseline", "text", "parts"}
)  # what is known of a group as soon as it is read
Compute: TypeAlias = Callable[..., list[FloatArray]]
_C = TypeVar("_C", bound=Compute)

ESTIMATORS: Registry[Compute] = Registry("learner.advantage.use")


def traits(
    *,
    needs: Iterable[Need] = (),
    normalise: Normalisation = "none",
    needs_of: Callable[[Mapping[str, Any]], Iterable[Need]] = lambda _: (),
) -> Callable[[_C], _C]:
    """Decorator: say what an estimator needs, and how its advantages are normalised over the step.

    Args:
        needs: `values` of a critic, `entropy` of the policy, reward of the greedy `baseline` response, `text` of the
            prompt and of each token, `parts` of the scores.
        normalise: see `normalise`.
        needs_of: what it needs beyond that with certain options, from those options.
    """

    def mark(function: _C) -> _C:
        vars(function).update(needs=frozenset(needs), normalise=normalise, needs_of=needs_of)
        return function

    return mark


@dataclass(frozen=True, slots=True)
class Estimator:
    """An estimator of advantages with its options, as the configuration names it."""

    name: str
    compute: Compute  # with its options bound
    needs: frozenset[Need]
    normalise: Normalisation  # over the step

    @classmethod
    def of(cls, config: LearnerConfig) -> Estimator:
        """Resolve `learner.advantage`, and try it on a small group; `ConfigError`: it does not fit."""
        use, args = config.advantage.use, config.advantage.args
        if use == "gae":
            args = {"gamma": config.critic.gamma, "lam": config.critic.lam} | args
        compute = ESTIMATORS.resolve(use, args)
        function = compute.func if isinstance(compute, partial) else compute
        needs = frozenset(getattr(function, "needs", ())) | frozenset(getattr(function, "needs_of", lambda _: ())(args))
        estimator = cls(use, compute, needs, getattr(function, "normalise", "none"))
        if estimator.normalise not in NORMALISATIONS:
            raise ConfigError(
                f"learner.advantage.use {use} asks for the normalisation {estimator.normalise}",
                f"one of {', '.join(NORMALISATIONS)}",
            )
        if odd := sorted(estimator.needs - set(_FIELDS)):
            raise ConfigError(f"learner.advantage.use {use} needs {odd[0]}", f"it may need {', '.join(_FIELDS)}")
        try:
            estimator(_small_group(estimator.needs))
        except ValueError as error:
            raise ConfigError(
                f"learner.advantage.use {use}: {error}",
                "docs/reference/advantages.md lists the estimators and their arguments",
            ) from error
        return estimator

    def learns_from_equal_rewards(self) -> bool:
        """Whether a group with equal rewards gets an advantage that is not 0, before a normalisation; by a trial."""
        groups = [replace(_small_group(self.needs), rewards=np.full(2, reward)) for reward in (0.0, 1.0)]
        return any(array.any() for group in groups for array in self(group))

    def __call__(self, group: GroupData) -> list[FloatArray]:
        """The advantage of every token, one float64 array per response.

        `ValueError`: what it needs is not there, rewards too far apart for a finite advantage, or an estimator of a
        user that raises or does not give one number per token.
        """
        missing = [need for need in self.needs if getattr(group, _FIELDS[need]) is None]
        if missing:
            raise ValueError(f"the estimator {self.name} needs {missing[0]}, which this group does not have")
        try:
            with np.errstate(over="ignore", invalid="ignore"):
                advantages = [np.asarray(array, dtype=np.float64) for array in self.compute(group)]
        except ValueError:
            raise
        except Exception as error:  # an error in a user's code concerns this group and must not end the learner
            raise ValueError(f"the estimator {self.name} failed: {error!r}") from error
        shapes, lengths = [array.shape for array in advantages], group.lengths.tolist()
        if shapes != [(length,) for length in lengths]:
            raise ValueError(f"the estimator {self.name} gave shapes {shapes} for responses of {lengths} tokens")
        if not all(np.all(np.isfinite(array)) for array in advantages):
            raise ValueError(f"rewards are too far apart for a finite advantage: {group.rewards.tolist()}")
        return advantages


_FIELDS: dict[Need, str] = {
    "values": "values",
    "entropy": "entropy",
    "baseline": "baseline_reward",
    "text": "texts",
    "parts": "parts",
}


def _small_group(needs: frozenset[Need]) -> GroupData:
    tokens = [np.zeros(2), np.zeros(1)]
    numbers = [np.asarray([0.5, 1.0]), np.asarray([0.25])]
    return GroupData(
        rewards=np.asarray([0.0, 1.0]),
        lengths=np.asarray([2, 1]),
        behaviour=[np.full(2, -1.0), np.full(1, -2.0)],
        values=numbers if "values" in needs else None,
        entropy=numbers if "entropy" in needs else None,
        baseline_reward=0.0 if "baseline" in needs else None,
        tokens=tokens,
        texts=[["a", "b"], ["c"]] if "text" in needs else None,
        parts=[{}, {}],
    )


def _centred(rewards: FloatArray) -> FloatArray:
    """Distance from the mean; exactly 0 for equal rewards and for a single one."""
    if all_equal(rewards):
        return np.zeros_like(rewards)
    peak = np.max(np.abs(rewards))  # taken out first, so that the sum does not overflow on rewards like 1e308
    return np.asarray((rewards / peak - np.mean(rewards / peak)) * peak)


def _grpo(rewards: FloatArray, within: float = 0.0) -> FloatArray:
    if all_equal(rewards):
        return np.zeros_like(rewards)
    peak = np.max(np.abs(rewards))
    scaled = rewards / peak
    deviation = scaled.std(ddof=1) if not within else np.hypot(scaled.std(ddof=1), np.sqrt(within) / peak)
    return np.asarray((scaled - scaled.mean()) / (deviation + _STD_FLOOR / peak))


def _scaled(group: GroupData) -> tuple[FloatArray, float]:
    """GRPO's number of each response, and what it gains per unit of return.

    With rewards of turns the mean variance within responses is added to the variance between them, so that responses
    with nearly equal means do not blow up the differences between their turns.
    """
    deviations = group.deviations
    if deviations is None:
        return _grpo(group.totals), 0.0
    within = float(np.mean([np.mean(own**2) if own.size else 0.0 for own in deviations]))
    between = 0.0 if all_equal(group.totals) else float(np.var(group.totals, ddof=1))
    return _grpo(group.totals, within), 1 / (np.sqrt(between + within) + _STD_FLOOR)


@ESTIMATORS.register("grpo")
def grpo(group: GroupData) -> list[FloatArray]:
    """`A_i = (r_i - mean(r)) / (std(r) + 1e-6)`, unbiased std (Shao et al., arXiv 2402.03300, section 4.1.2)."""
    return group.constant(*_scaled(group))


@ESTIMATORS.register("dr_grpo")
def dr_grpo(group: GroupData) -> list[FloatArray]:
    """`A_i = r_i - mean(r)`: no group weighs more because it is nearly solved (Liu et al., arXiv 2503.20783)."""
    return group.constant(_centred(group.totals))


@ESTIMATORS.register("grpo_batch_std")
@traits(normalise="std")
def grpo_batch_std(group: GroupData) -> list[FloatArray]:
    """`A_i = (r_i - mean(r)) / std over the step` (ScaleRL, arXiv 2510.13786; Lite PPO, arXiv 2508.08221)."""
    return group.constant(_centred(group.totals))


@ESTIMATORS.register("rloo")
def rloo(group: GroupData) -> list[FloatArray]:
    """`A_i = r_i - mean of the others = (r_i - mean(r)) k / (k - 1)` (Ahmadian et al., arXiv 2402.14740)."""
    count = group.rewards.size
    return group.constant(_centred(group.totals) * (count / max(1, count - 1)))


@ESTIMATORS.register("reinforce_plus_plus")
@traits(normalise="whiten")
def reinforce_plus_plus(group: GroupData, *, gamma: float = 1.0) -> list[FloatArray]:
    """Discounted return of each token, whitened over the tokens of the step (Hu et al., arXiv 2501.03262).

    Args:
        gamma: discount per token.
    """
    return _token_returns(group, gamma)


@ESTIMATORS.register("reinforce_plus_plus_baseline")
@traits(normalise="whiten")
def reinforce_plus_plus_baseline(group: GroupData) -> list[FloatArray]:
    """`r_i - mean(r)`, whitened over the tokens of the step (arXiv 2501.03262, REINFORCE++ with baseline)."""
    return group.constant(_centred(group.totals))


@ESTIMATORS.register("remax")
@traits(needs=["baseline"])
def remax(group: GroupData) -> list[FloatArray]:
    """Return of each token minus the reward of the greedy response (Li et al., arXiv 2310.10505)."""
    assert group.baseline_reward is not None
    return [difference(returns, group.baseline_reward) for returns in _token_returns(group, 1.0)]


@ESTIMATORS.register("opo")
def opo(group: GroupData) -> list[FloatArray]:
    """`A_i = r_i - sum(l r) / sum(l)` with lengths l: the baseline of least variance (Hao et al., arXiv 2505.23585)."""
    totals, lengths = group.totals, group.lengths
    if all_equal(totals) or not lengths.any():
        return group.constant(np.zeros_like(totals))
    return group.constant(totals - np.sum(totals * (lengths / lengths.sum())))


@ESTIMATORS.register("gpg")
@traits(normalise="nonzero")
def gpg(group: GroupData) -> list[FloatArray]:
    """`A_i = alpha (r_i - mean(r))`, alpha = responses of the step / those with an advantage (arXiv 2504.02546)."""
    return group.constant(_centred(group.totals))


@ESTIMATORS.register("batch_mean")
@traits(normalise="centre")
def batch_mean(group: GroupData) -> list[FloatArray]:
    """`A_i = r_i - mean over the responses of the step`: a baseline for one response per prompt (FlashREINFORCE)."""
    return group.constant(group.totals)


@ESTIMATORS.register("gdpo")
@traits(needs=["parts"], normalise="std")
def gdpo(group: GroupData, *, weights: Mapping[str, float]) -> list[FloatArray]:
    """`A_i = (sum of w_k A_ik) / std over the step`, A_ik the `grpo` of reward k alone (Liu et al., arXiv 2601.05242).

    Section 3.1, equations 4 to 6. Rewards with a small spread are not drowned by others.

    Args:
        weights: w_k by the name of the reward, or `name/part`. A reward that was not asked, behind a closed gate, is 0.
    """
    assert group.parts is not None
    total = np.zeros_like(group.rewards)
    for name, weight in weights.items():
        total += weight * _grpo(np.asarray([parts.get(name, 0.0) for parts in group.parts]))
    return group.constant(total, 0.0)


@ESTIMATORS.register("pass_at_k")
def pass_at_k(group: GroupData) -> list[FloatArray]:
    """Only the best response: `(r_max - r_second) / (std(r) + 1e-6)`, 0 for all others (arXiv 2503.19595)."""
    totals = group.totals
    advantages = np.zeros_like(totals)
    if totals.size > 1:
        best, scaled = int(np.argmax(totals)), _grpo(totals)
        advantages[best] = difference(scaled[best : best + 1], np.max(np.delete(scaled, best)))[0]
    return group.constant(advantages, 0.0)


@ESTIMATORS.register("gae")
@traits(needs=["values"], normalise="whiten")
def gae(group: GroupData, *, gamma: float = 1.0, lam: float = 1.0, alpha: float | None = None) -> list[FloatArray]:
    """Generalized advantages, whitened over the tokens of the step (docs/reference/advantages.md).

    Args:
        gamma: discount per token; `learner.critic.gamma`.
        lam: `learner.critic.lam`, or of the policy alone.
        alpha: lambda of a branch of l tokens is 1 - 1 / (alpha l), at least 0, in the place of `lam` (VAPO, arXiv
            2504.05118, section 4.2, with 0.05); None: `lam` for any length.
    """
    assert group.values is not None
    return _generalized(group, [np.asarray(values, dtype=np.float64) for values in group.values], gamma, lam, alpha)


def value_targets(group: GroupData, *, gamma: float, lam: float) -> list[FloatArray]:
    """What a critic learns, one array per response: the generalized advantage of its own lambda plus the value."""
    assert group.values is not None
    values = [np.asarray(array, dtype=np.float64) for array in group.values]
    return [array + value for array, value in zip(_generalized(group, values, gamma, lam), values, strict=True)]


def _egpo_needs(args: Mapping[str, Any]) -> Iterable[Need]:
    mode = args.get("mode", "bonus")
    if mode == "bonus":
        yield "entropy"
    if _egpo_part(mode, args.get("part")) != "joint":
        yield "text"


def _egpo_part(mode: str, part: Part | None) -> Part:
    return part or ("thinking" if mode == "bonus" else "joint")


@ESTIMATORS.register("egpo")
@traits(needs_of=_egpo_needs)
def egpo(
    group: GroupData,
    *,
    mode: Literal["bonus", "ratio", "asymmetric"] = "bonus",
    part: Part | None = None,
    opening: str = "<think>",
    closing: str = "</think>",
    lambda_min: float = 0.5,
    lambda_max: float = 2.0,
    bonus: float = 0.4,
    bonus_share: float = 2.0,
    wrong: float = 0.0,
    degenerate: float = 0.1,
) -> list[FloatArray]:
    """GRPO guided by the entropy of each response (docs/reference/presets/egpo.md, egpo_zhao.md).

    Args:
        mode: bonus: `A_i + bonus clip(H_i, -|A_i| / bonus_share, |A_i| / bonus_share)`, H_i the mean entropy (Hao et
            al., arXiv 2508.05118); ratio: `A_i w_i` with `w_i = clip(mean(H) / H_i, lambda_min, lambda_max)`, H_i the
            mean negative log-probability of the sampled tokens (Zhao et al., arXiv 2602.22751); asymmetric: a negative
            A_i is multiplied by `max(w_i, 1)`, so that overconfident failures are pushed down harder, and the other
            advantages stay; a group of failures only has `degenerate (mean(w) - w_i)` instead.
        part: tokens that H_i is the mean of: thinking (between the tags), answer (behind them) or joint (all); empty:
            thinking with mode bonus, else joint. A response without such tokens has no bonus, and weight 1.
        opening: tag before the thinking.
        closing: tag behind it.
        lambda_min: smallest weight.
        lambda_max: largest weight.
        bonus: lambda of mode bonus.
        bonus_share: alpha of mode bonus; above `bonus`, so that no sign flips.
        wrong: mode asymmetric: a reward at or below this is a failure.
        degenerate: mode asymmetric: size of the advantages in a group of failures only.
    """
    (advantages, slope), masks = _scaled(group), None
    if (chosen := _egpo_part(mode, part)) != "joint":
        assert group.texts is not None
        masks = [part_of(texts, chosen, group.prompt_text, opening=opening, closing=closing) for texts in group.texts]
    if mode == "bonus":
        assert group.entropy is not None
        entropies = mean_uncertainty(group.entropy, masks)
        return group.constant(entropy_bonus(advantages, entropies, scale=bonus, share=bonus_share), slope)
    surprisals = [-np.asarray(logprobs, dtype=np.float64) for logprobs in group.behaviour]
    weights = confidence_weights(mean_uncertainty(surprisals, masks), lambda_min=lambda_min, lambda_max=lambda_max)
    if mode == "ratio":
        return group.constant(advantages * weights, slope * weights)
    if mode == "asymmetric":
        failed = failures_only(advantages, weights, group.rewards, wrong=wrong, degenerate=degenerate)
        return group.constant(failed, slope)
    raise ValueError(f"there is no mode {mode}: bonus, ratio or asymmetric")


def _token_returns(group: GroupData, gamma: float) -> list[FloatArray]:
    """Discounted sum of the rewards from each token on."""
    return _generalized(group, [np.zeros(length) for length in group.lengths], gamma, 1.0)


def _generalized(
    group: GroupData, values: list[FloatArray], gamma: float, lam: float, alpha: float | None = None
) -> list[FloatArray]:
    if not (0 <= gamma <= 1 and 0 <= lam <= 1 and (alpha is None or alpha > 0)):
        raise ValueError(f"gamma {gamma} and lam {lam} are between 0 and 1, alpha {alpha} is above 0")
    if not group.rewards.size:
        return []
    # Threads of all responses one behind the other: the token after the end of an action is the start of the next one.
    starts = (np.cumsum(group.lengths) - group.lengths).tolist()
    threads = [start + thread for index, start in enumerate(starts) for thread in group.threads_of(index)]
    order = np.concatenate([np.zeros(0, dtype=np.int64), *threads])
    lengths = np.asarray([len(thread) for thread in threads])
    flat = np.zeros(order.size)
    flat[order] = generalized_advantages(
        np.concatenate(group.token_rewards())[order],
        np.concatenate(values)[order],
        gamma=gamma,
        lam=lam if alpha is None else np.maximum(0.0, 1 - 1 / (alpha * lengths)),
        lengths=lengths,
    )
    return np.split(flat, np.cumsum(group.lengths)[:-1])

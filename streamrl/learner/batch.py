"""Samples, and their arrays in the rows of micro-batches.

A block is a prompt with one or more responses to it: they lie side by side, each attends to the prompt and to itself,
and their positions all begin after the prompt, so every token sees exactly what it would see alone. The last token of
a response is left out, because nothing is predicted from it. A response may be an episode: a chain of turns, or a tree
in depth-first order, in which a turn attends to the turns that it continues. Where rows cannot be shared, each branch
of a tree is a response of its own, and tokens that an earlier branch trains are context there (`tree.py`).

A row is one block (`learner.rows: buckets`), or is filled with blocks up to a length (`packed`), under the same mask: a
block sees nothing of its neighbours. Rows are sorted by length and cut into micro-batches of at most
`tokens_per_microbatch` tokens, padding included. The rows of one sample are never in two micro-batches, because losses
and gates may need whole responses. Widths are multiples of `WIDTH_STEP`, because kernels are prepared
anew for every new shape. Padding is on the right, where a causal model cannot see it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from streamrl.learner.tree import Cut, Limb, Tree, cut_up, limb
from streamrl.wire import Float32Array, Int32Array

WIDTH_STEP = 16
PASS_TOKENS = 96
"""What one more pass costs, in tokens: padding up to that is cheaper than another micro-batch (measured on one core
with the 1M-parameter model of `examples/sort`; larger models care less)."""
PADDING = 1 << 30
"""`Microbatch.until` of padding: only what is behind it, other padding, sees it."""

Block: TypeAlias = list[int]
"""Indices of responses (limbs of samples) to one prompt, which stands before them once."""
Row: TypeAlias = list[Block]


class Extent(NamedTuple):
    prompt: int
    behind: int  # tokens behind the prompt; the last one of them takes no place


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes that rows and micro-batches must keep, in tokens."""

    tokens: int  # of a micro-batch, padding included; a single longer row still gets one of its own
    longest: int = 1 << 30  # sequence that the model takes; padding does not go beyond it
    shared: int = 0  # longest row with several responses; 0: the model cannot have such rows
    packed: int = 0  # length up to which a row is filled with blocks, at most `shared`; 0: one block per row
    share_prompts: bool = True  # a block may have several responses
    hidden: int = 1  # hidden size of the model
    alone: bool = False  # each row is a micro-batch without padding; nothing is shared or packed

    def work(self, width: int) -> int:
        """In arbitrary units: 24 hidden^2 per token and layer for the weights, 4 width hidden for the attention."""
        width = padded_width(width)
        return width * (6 * self.hidden + width)


def padded_width(tokens: int) -> int:
    return -(-tokens // WIDTH_STEP) * WIDTH_STEP


def row_width(extents: Sequence[Extent], row: Row) -> int:
    return sum(_block_width(extents, block) for block in row)


def plan(
    extents: Sequence[Extent],
    prompts: Sequence[Sequence[int]],
    limits: Limits,
    together: Sequence[Sequence[int]] = (),
) -> list[list[Row]]:
    """Micro-batches of rows. Shared rows never join wide ones, which need the attention windows of the model itself.

    `prompts` are responses by prompt; those in one of `together` are of one sample and stay in one micro-batch.
    """
    units = [[block] for members in prompts for block in _blocks(extents, members, limits)]
    if limits.alone:
        return [[unit] for unit in units]
    units += [[[member] for member in members] for members in together]
    bundles = _bundles(extents, units, limits)
    widths = [max(row_width(extents, row) for row in bundle) for bundle in bundles]
    long = [place for place, width in enumerate(widths) if width > limits.shared]
    short = [place for place, width in enumerate(widths) if width <= limits.shared]
    return [
        [row for index in part for row in bundles[places[index]]]
        for places in (long, short)
        for part in split([widths[place] for place in places], limits.tokens, [len(bundles[place]) for place in places])
    ]


def _bundles(extents: Sequence[Extent], units: Sequence[list[Block]], limits: Limits) -> list[list[Row]]:
    """Rows that stay in one micro-batch: one row, or those of a sample that does not fit into one."""
    if not limits.packed:
        return [[[block] for block in unit] for unit in units]
    fits = [unit for unit in units if len(unit) == 1 or row_width(extents, unit) <= limits.packed]
    bundles = [[row] for row in _packed(extents, fits, limits.packed)]
    for unit in units:
        if len(unit) > 1 and row_width(extents, unit) > limits.packed:
            plain = max(_block_width(extents, block) for block in unit) > limits.shared
            bundles.append(
                [[block] for block in unit] if plain else _packed(extents, [[block] for block in unit], limits.packed)
            )
    return bundles


def work_of_prompt(extents: Sequence[Extent], limits: Limits) -> int:
    """Work of all responses to one prompt; ranks are balanced by it."""
    members = [index for index, extent in enumerate(extents) if extent.behind]
    return sum(limits.work(_block_width(extents, block)) for block in _blocks(extents, members, limits))


def split(widths: Sequence[int], cap: int, rows: Sequence[int] | None = None) -> list[list[int]]:
    """Indices into `widths` by micro-batch, widest first; `rows` of each, one when not given.

    A micro-batch has at most `cap` tokens, or one row (or the rows of one sample), and less padding than one more pass
    would cost.
    """
    counts = [1] * len(widths) if rows is None else rows
    parts: list[list[int]] = []
    width = spare = taken = 0
    for index in sorted(range(len(widths)), key=lambda row: -widths[row]):
        own, count = padded_width(widths[index]), counts[index]
        spare += (width - own) * count
        if not parts or (taken + count) * width > cap or spare > PASS_TOKENS:
            parts.append([])
            width, spare, taken = own, 0, 0
        parts[-1].append(index)
        taken += count
    return parts


def _blocks(extents: Sequence[Extent], members: Sequence[int], limits: Limits) -> list[Block]:
    alone = [[member] for member in members]
    if not limits.share_prompts or not limits.shared:
        return alone
    shared: list[Block] = []
    for member in sorted(members, key=lambda index: -extents[index].behind):
        if not shared or _block_width(extents, [*shared[-1], member]) > limits.shared:
            shared.append([])
        shared[-1].append(member)
    work = [sum(limits.work(_block_width(extents, block)) for block in blocks) for blocks in (shared, alone)]
    return shared if work[0] < work[1] else alone


def _packed(extents: Sequence[Extent], units: Sequence[list[Block]], length: int) -> list[Row]:
    """First fit decreasing (Johnson 1973): at most 11/9 of the fewest possible rows, and one more."""
    rows: list[Row] = []
    room: list[int] = []
    for unit in sorted(units, key=lambda each: -row_width(extents, each)):
        width = row_width(extents, unit)
        place = next((row for row, free in enumerate(room) if free >= width), None)
        if place is None:
            rows.append([*unit])
            room.append(length - width)
        else:
            rows[place] += unit
            room[place] -= width
    return rows


def _block_width(extents: Sequence[Extent], block: Block) -> int:
    return extents[block[0]].prompt + sum(extents[index].behind - 1 for index in block)


Int64Array: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class TrainSample:
    """One response with what the learner needs of it; n sampled tokens. Optional arrays are None until computed.

    Arrays are over the sampled tokens of all turns; `tree` says where they stand among the observed ones.
    """

    group_id: int
    prompt: Int32Array  # token ids, shape (prompt tokens,), at least one
    tokens: Int32Array  # sampled token ids, shape (n,); without any, the sample gives no gradient
    logprobs: Float32Array  # log-probability that each token was sampled with, shape (n,), finite
    steps: Int64Array  # step of the version that sampled each token, shape (n,), at least 0
    reward: float
    advantages: Float32Array  # shape (n,), finite
    baseline: float | None = None  # reward of the greedy response to the prompt
    proximal: Float32Array | None = None  # log-probability under the policy of the start of the step, shape (n,)
    reference: Float32Array | None = None  # log-probability under the reference policy, shape (n,)
    entropy: Float32Array | None = None  # of each token's distribution at the start of the step, in nats, shape (n,)
    values: Float32Array | None = None  # the critic's value of the state before each token, shape (n,)
    returns: Float32Array | None = None  # what the critic learns, shape (n,)
    tree: Tree | None = None  # turns of an episode; None: the tokens are one response to the prompt

    def __post_init__(self) -> None:
        count = len(self.tokens)
        if count != len(self.logprobs):
            raise ValueError(f"group {self.group_id}: {count} tokens with {len(self.logprobs)} log-probabilities")
        if count != len(self.steps) or count != len(self.advantages):
            raise ValueError(f"group {self.group_id}: {count} tokens need as many steps and advantages")
        if self.tree is not None and sum(self.tree.sampled) != count:
            raise ValueError(f"group {self.group_id}: {count} tokens, its turns have {sum(self.tree.sampled)}")
        if not len(self.prompt):
            raise ValueError(
                f"group {self.group_id}: a prompt without tokens, nothing predicts the first sampled token"
            )
        if not np.all(np.isfinite(self.logprobs)):
            raise ValueError(f"group {self.group_id}: a log-probability of the sampling policy is not finite")
        if not np.all(np.isfinite(self.advantages)):
            raise ValueError(f"group {self.group_id}: an advantage is not finite in float32")

    @property
    def width(self) -> int:
        """Longest sequence that the model has to take."""
        if self.tree is None:
            return len(self.prompt) + len(self.tokens) - 1
        return max((self.tree.width(branch, len(self.prompt)) for branch in self.tree.branches), default=0)

    @property
    def cost(self) -> int:
        """Tokens that go through the model when each turn is computed once."""
        if self.tree is None:
            return self.width
        cuts = cut_up(self.tree, len(self.prompt), 1 << 62, shares=True)
        return sum(cut.prompt + cut.added for cut in cuts)

    @property
    def has_advantage(self) -> bool:
        return bool(self.advantages.any())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Microbatch:
    """Rows of one forward pass, and the places in them where sampled tokens are predicted; n tokens in all."""

    samples: Int64Array  # index in the batch of each sample, shape (samples,), row by row
    counts: npt.NDArray[np.int64]  # sampled tokens of each sample, shape (samples,)
    input_ids: npt.NDArray[np.int64]  # shape (rows, width), the last token again to the right
    until: npt.NDArray[np.int64]  # first column that does not see each token, shape (rows, width); `PADDING` at the end
    position_ids: npt.NDArray[np.int64]  # shape (rows, width), place of each token in its own sequence, 0 for padding
    shared: bool  # some row holds more than one response or branch
    positions: npt.NDArray[np.int64]  # flat index (row * width + column) of the place that predicts each token, (n,)
    targets: npt.NDArray[np.int64]  # sampled token ids, shape (n,)
    # The fields below are those of `TrainSample`, shape (n,); None when some sample has none.
    behaviour: Float32Array
    steps: Int64Array
    advantages: Float32Array
    proximal: Float32Array | None = None
    reference: Float32Array | None = None
    values: Float32Array | None = None
    returns: Float32Array | None = None

    def deal_out(self, tokens: npt.NDArray[np.float32], batch: list[Float32Array]) -> None:
        if len(self.samples):
            for index, piece in zip(self.samples, np.split(tokens, np.cumsum(self.counts)[:-1]), strict=True):
                batch[index] = piece


def sizes(batch: Sequence[TrainSample]) -> tuple[int, int]:
    """Sampled tokens, and responses with sampled tokens: what updates are divided by."""
    return sum(len(sample.tokens) for sample in batch), sum(len(sample.tokens) > 0 for sample in batch)


@dataclass(frozen=True, slots=True, eq=False)
class _Limbs:
    """Limbs of a batch: each stands behind its prompt in some row. A sample without a tree is one limb."""

    owners: list[int]  # index in the batch of each limb's sample
    extents: list[Extent]
    trees: dict[int, Limb]  # of the limbs of samples with a tree
    forked: set[int]  # limbs with several branches
    prompts: list[list[int]]  # limbs that may share a row, by prompt
    together: list[list[int]]  # limbs of one sample, where it has several

    @classmethod
    def of(cls, batch: Sequence[TrainSample], limits: Limits, *, arrays: bool = True) -> _Limbs:
        """Without `arrays` `trees` is empty, which is enough to count work."""
        prompts: dict[tuple[int, bytes], list[int]] = {}
        limbs = cls([], [], {}, set(), [], [])
        for index, sample in enumerate(batch):
            first = len(limbs.owners)
            if sample.tree is not None:
                limbs._add(index, sample, sample.tree, limits, arrays=arrays)
            elif len(sample.tokens):
                limbs.owners.append(index)
                limbs.extents.append(Extent(len(sample.prompt), len(sample.tokens)))
            mine = list(range(first, len(limbs.owners)))
            if len(mine) > 1:
                limbs.together.append(mine)
            elif mine:
                prompts.setdefault((sample.group_id, _prompt(sample).tobytes()), []).append(first)
        limbs.prompts.extend(prompts.values())
        return limbs

    def _add(self, index: int, sample: TrainSample, tree: Tree, limits: Limits, *, arrays: bool) -> None:
        cuts = _cheapest(tree, len(sample.prompt), limits)
        for cut in cuts:
            if len(cut.branches) > 1:
                self.forked.add(len(self.owners))
            if arrays:
                self.trees[len(self.owners)] = limb(tree, sample.prompt, sample.tokens, cut)
            self.owners.append(index)
            self.extents.append(Extent(cut.prompt, cut.added + 1))


def _prompt(sample: TrainSample) -> Int32Array:
    """What the first limb stands behind: not the data's prompt where a template puts tools into it."""
    tree = sample.tree
    own = tree is not None and tree.branches[0].own_prompt
    return tree.observed[tree.branches[0].turns[0]] if tree is not None and own else sample.prompt


def _cheapest(tree: Tree, prompt: int, limits: Limits) -> list[Cut]:
    """The branches of a sample in shared rows, or each alone where that is less work."""
    alone = cut_up(tree, prompt, limits.shared, shares=False)
    if not (limits.share_prompts and limits.shared) or len(alone) < 2:
        return alone
    shared = cut_up(tree, prompt, limits.shared, shares=True)
    work = [sum(limits.work(cut.prompt + cut.added) for cut in cuts) for cuts in (shared, alone)]
    return shared if work[0] < work[1] else alone


def layout(batch: Sequence[TrainSample], limits: Limits) -> list[Microbatch]:
    limbs = _Limbs.of(batch, limits)
    parts = plan(limbs.extents, limbs.prompts, limits, limbs.together)
    return [_microbatch(batch, limbs, rows, limits) for rows in parts]


def work_of(batch: Sequence[TrainSample], limits: Limits) -> int:
    """Work of the samples of one group; ranks are balanced by it."""
    limbs = _Limbs.of(batch, limits, arrays=False)
    apart = sum(limits.work(_block_width(limbs.extents, [index])) for several in limbs.together for index in several)
    return apart + sum(work_of_prompt([limbs.extents[index] for index in members], limits) for members in limbs.prompts)


def dummy() -> Microbatch:
    """One row with nothing to learn: a rank without rows runs it so that all ranks make the same number of passes."""
    none = np.zeros(0, dtype=np.int64)
    one = np.zeros(1, dtype=np.int64)
    zero = np.zeros(1, dtype=np.float32)
    row = np.zeros((1, WIDTH_STEP), dtype=np.int64)
    return Microbatch(
        samples=none,
        counts=none,
        input_ids=row,
        until=np.full_like(row, WIDTH_STEP),
        position_ids=np.arange(WIDTH_STEP)[None],
        shared=False,
        positions=one,
        targets=one,
        behaviour=zero,
        steps=one,
        advantages=zero,
    )


def _microbatch(batch: Sequence[TrainSample], limbs: _Limbs, rows: Sequence[Row], limits: Limits) -> Microbatch:
    shared = any(len(row) > 1 or len(row[0]) > 1 or row[0][0] in limbs.forked for row in rows)
    widest = max(row_width(limbs.extents, row) for row in rows)
    width = widest if limits.alone else padded_width(widest)
    if not shared:
        width = min(width, limits.longest)
    ids = np.zeros((len(rows), width), dtype=np.int64)
    until = np.full((len(rows), width), PADDING, dtype=np.int64)
    places = np.zeros((len(rows), width), dtype=np.int64)
    positions: dict[int, Int64Array] = {}
    for number, row in enumerate(rows):
        end = 0
        for block in row:
            tree = limbs.trees.get(block[0])
            prompt = batch[limbs.owners[block[0]]].prompt if tree is None else tree.prompt
            start, end = end, end + len(prompt)
            ids[number, start:end], until[number, start:end] = prompt, start + _block_width(limbs.extents, block)
            places[number, start:end] = np.arange(len(prompt))
            last = number * width + end - 1
            for index in block:
                tree, sample = limbs.trees.get(index), limbs.owners[index]
                start, end = end, end + limbs.extents[index].behind - 1
                if tree is None:
                    ids[number, start:end], until[number, start:end] = batch[sample].tokens[:-1], end
                    places[number, start:end] = np.arange(end - start) + len(prompt)
                    positions[sample] = np.arange(number * width + start - 1, number * width + end)
                    positions[sample][0] = last
                else:
                    ids[number, start:end], until[number, start:end] = tree.ids, tree.until + start
                    places[number, start:end] = tree.depth + len(prompt)
                    found = positions.setdefault(sample, np.zeros(len(batch[sample].tokens), dtype=np.int64))
                    found[tree.targets] = np.where(tree.before < 0, last, tree.before + number * width + start)
        ids[number, end:] = ids[number, end - 1]  # transformers asks for a mask where it sees the padding token
    order = list(positions)
    samples = [batch[index] for index in order]
    counts = np.asarray([len(sample.tokens) for sample in samples])
    return Microbatch(
        samples=np.asarray(order),
        counts=counts,
        input_ids=ids,
        until=until,
        position_ids=places,
        shared=shared,
        positions=np.concatenate([positions[index] for index in order]),
        targets=np.concatenate([sample.tokens for sample in samples]).astype(np.int64),
        behaviour=np.concatenate([sample.logprobs for sample in samples]).astype(np.float32),
        steps=np.concatenate([sample.steps for sample in samples]),
        advantages=np.concatenate([sample.advantages for sample in samples]).astype(np.float32),
        proximal=_joined([sample.proximal for sample in samples]),
        reference=_joined([sample.reference for sample in samples]),
        values=_joined([sample.values for sample in samples]),
        returns=_joined([sample.returns for sample in samples]),
    )


def _joined(arrays: Sequence[Float32Array | None]) -> Float32Array | None:
    known = [array for array in arrays if array is not None]
    return np.concatenate(known).astype(np.float32) if len(known) == len(arrays) else None

"""Samples, and their arrays in the rows of micro-batches.

A row holds blocks; a block is a prompt with the segments that continue it (`tree.py`): responses of its group, chains
or trees of turns. Each token has one integer, `visible_until`: the key k is visible to the query q when
k <= q < visible_until[k]. So every token sees what it would see alone, at the position that it would have alone.

Where only visible pairs cost something (flex attention on CUDA), a row is filled with blocks up to the tokens of a
micro-batch. Where attention costs the square of the width (a dense mask), a row is one block, prompts are shared where
that is less work, and rows of like length make a micro-batch. A model that does not keep to our mask has each response
alone, in a pass of its own.

The rows of one sample are never in two micro-batches, because losses and gates may need whole responses. Padding is on
the right, where a causal model cannot see it, and widths are multiples, because kernels are prepared for every shape.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeAlias

import numpy as np

from streamrl.images.encoded import known
from streamrl.images.vision import Vision
from streamrl.learner.tree import Int64Array, Segment, Tree, in_turn, segments
from streamrl.wire import Float32Array, Int32Array

PASS_TOKENS = 96
"""What one more pass costs, in tokens: padding up to that is cheaper than another micro-batch (measured on one core
with the 1M-parameter model of `examples/sort`; larger models care less)."""
PADDING = 1 << 30  # `Microbatch.visible_until` of padding: only what is behind it, other padding, sees it

Block: TypeAlias = list[tuple[int, Segment]]
"""Segments that continue one prompt, which stands before them once, each with the index of its sample."""
Row: TypeAlias = list[Block]


@dataclass(frozen=True, slots=True)
class RowLimits:
    tokens: int  # of a micro-batch, padding included; a single longer row still gets one of its own
    longest: int = 1 << 30  # sequence that the model takes; padding does not go beyond it
    shared: int = 0  # widest row with several segments or branches; 0: each response is alone in its pass
    hidden: int = 1  # hidden size of the model
    packed: bool = False  # rows are filled with blocks up to `shared`: only visible pairs of tokens cost something
    vision: Vision | None = None  # the image side of the model

    def padded(self, width: int) -> int:
        step = 128 if self.packed else 16 if self.shared else 1
        return -(-width // step) * step

    def work(self, width: int) -> int:
        """In arbitrary units: 24 hidden^2 per token and layer for the weights, 4 width hidden for the attention."""
        width = self.padded(width)
        return width * (6 * self.hidden + width)

    def positions(self, blobs: Mapping[str, bytes], ids: Int32Array, images: tuple[str, ...]) -> tuple[Int64Array, int]:
        """`tree.Places` of a sample with these encoded images."""
        if self.vision is None or not images:
            return in_turn(ids)
        return self.vision.positions(ids, [self.vision.outline(known(name, blobs[name]).size) for name in images])


@dataclass(frozen=True, slots=True, eq=False)
class TrainSample:
    """One response with n sampled tokens; `tree` says where they stand among the observed ones of an episode."""

    group_id: int
    prompt: Int32Array  # token ids, shape (prompt tokens,), at least one
    tokens: Int32Array  # sampled token ids, shape (n,); without any, the sample gives no gradient
    logprobs: Float32Array  # log-probability that each token was sampled with, shape (n,), finite
    steps: Int64Array  # step of the version that sampled each token, shape (n,), at least 0
    reward: float
    advantages: Float32Array  # shape (n,), finite
    baseline: float | None = None  # reward of the greedy response to the prompt
    parts: dict[str, float] = field(default_factory=dict)  # of the score, by reward
    truncated: bool = False  # a limit ended it
    group_mean: float = 1.0  # mean length of the responses to its prompt
    # The arrays below are None until they are computed.
    proximal: Float32Array | None = None  # log-probability under the policy of the start of the step, shape (n,)
    reference: Float32Array | None = None  # log-probability under the reference policy, shape (n,)
    entropy: Float32Array | None = None  # of each token's distribution at the start of the step, in nats, shape (n,)
    values: Float32Array | None = None  # the critic's value of the state before each token, shape (n,)
    returns: Float32Array | None = None  # what the critic learns, shape (n,)
    tree: Tree | None = None  # turns of an episode; None: the tokens are one response to the prompt
    images: tuple[str, ...] = ()  # hashes of those of the prompt, in the order of their tokens
    blobs: dict[str, bytes] = field(default_factory=dict)  # all encoded images of the sample by hash

    def __post_init__(self) -> None:
        if not len(self.prompt):
            raise ValueError(
                f"group {self.group_id}: a prompt without tokens, nothing predicts the first sampled token"
            )
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
        return self.width if self.tree is None else self.tree.cost(len(self.prompt))

    @property
    def has_advantage(self) -> bool:
        return bool(self.advantages.any())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Microbatch:
    """Rows of one forward pass, and the places in them where sampled tokens are predicted; n tokens in all."""

    samples: Int64Array  # index in the batch of each sample, shape (samples,), row by row
    counts: Int64Array  # sampled tokens of each sample, shape (samples,)
    input_ids: Int64Array  # shape (rows, width), the last token again to the right
    visible_until: Int64Array  # first column that does not see each token, `PADDING` for padding
    position_ids: Int64Array  # shape (rows, width), place of each token in its own sequence, 0 for padding; models with
    # images may number rows and columns of an image: then (axes, rows, width)
    shared: bool  # some row holds more than one response or branch
    images: list[tuple[str, bytes]]  # hash and encoded image, in the order of their tokens
    positions: Int64Array  # flat index (row * width + column) of the place that predicts each token, (n,)
    targets: Int64Array  # sampled token ids, shape (n,)
    # The fields below are those of `TrainSample`, shape (n,); None when some sample has none.
    behaviour: Float32Array
    steps: Int64Array
    advantages: Float32Array
    group_means: Float32Array  # `group_mean` of each sample, shape (samples,)
    proximal: Float32Array | None = None
    reference: Float32Array | None = None
    values: Float32Array | None = None
    returns: Float32Array | None = None

    def deal_out(self, tokens: Float32Array, batch: list[Float32Array]) -> None:
        if len(self.samples):
            for index, piece in zip(self.samples, np.split(tokens, np.cumsum(self.counts)[:-1]), strict=True):
                batch[index] = piece


def sizes(batch: Sequence[TrainSample]) -> tuple[int, int]:
    """Sampled tokens, and responses with sampled tokens: what updates are divided by."""
    return sum(len(sample.tokens) for sample in batch), sum(len(sample.tokens) > 0 for sample in batch)


def work_of(batch: Sequence[TrainSample], limits: RowLimits) -> int:
    """Work of samples by their tokens, each prompt counted for each of them; ranks are balanced by it."""
    return sum(limits.work(sample.cost) for sample in batch if len(sample.tokens))


def pack(batch: Sequence[TrainSample], limits: RowLimits) -> list[Microbatch]:
    """All samples with tokens, in micro-batches. Shared rows never join wide ones, which need the model's own mask."""
    bundles = _bundles(_units(batch, limits), limits)
    if not limits.shared:
        return [microbatch(batch, rows, limits) for rows in bundles]
    widths = [max(row_width(row) for row in rows) for rows in bundles]
    long = [place for place, width in enumerate(widths) if width > limits.shared]
    short = [place for place, width in enumerate(widths) if width <= limits.shared]
    return [
        microbatch(batch, [row for index in part for row in bundles[places[index]]], limits)
        for places in (long, short)
        for part in split([widths[place] for place in places], [len(bundles[place]) for place in places], limits)
    ]


def split(widths: Sequence[int], rows: Sequence[int], limits: RowLimits) -> list[list[int]]:
    """Indices of bundles by micro-batch: at most so many tokens or one bundle, less padding than another pass costs."""
    parts: list[list[int]] = []
    width = spare = taken = 0
    for index in sorted(range(len(widths)), key=lambda bundle: -widths[bundle]):
        own, count = limits.padded(widths[index]), rows[index]
        spare += (width - own) * count
        if not parts or (taken + count) * width > limits.tokens or spare > PASS_TOKENS:
            parts.append([])
            width, spare, taken = own, 0, 0
        parts[-1].append(index)
        taken += count
    return parts


def row_width(row: Row) -> int:
    return sum(_width(block) for block in row)


def _width(block: Block) -> int:
    return len(block[0][1].prompt) + sum(len(segment.ids) for _, segment in block)


def _work(blocks: Sequence[Block], limits: RowLimits) -> int:
    return sum(limits.work(_width(block)) for block in blocks)


def _units(batch: Sequence[TrainSample], limits: RowLimits) -> list[Row]:
    """Blocks that stay in one micro-batch: one of responses to a prompt, or those of a sample with several prompts."""
    prompts: dict[tuple[int, bytes, tuple[str, ...]], Block] = {}
    units: list[Row] = []
    for index, sample in enumerate(batch):
        found = [(index, segment) for segment in _segments(sample, limits)]
        if len(found) == 1:
            segment = found[0][1]
            key = (sample.group_id, segment.prompt.tobytes(), segment.prompt_images)
            prompts.setdefault(key, []).append(found[0])
        elif found:
            units.append([[one] for one in found])
    shared = [[block] for members in prompts.values() for block in _blocks(members, limits)]
    return shared + units


def _segments(sample: TrainSample, limits: RowLimits) -> list[Segment]:
    tree, prompt = sample.tree, sample.prompt
    if tree is None:
        return [Segment.of_answer(prompt, sample.tokens, sample.images)] if len(sample.tokens) else []
    cut = partial(segments, tree, prompt, sample.tokens, images=sample.images)
    places = partial(limits.positions, sample.blobs)
    shared = cut(widest=limits.shared, places=places)
    alone = sum(limits.work(tree.width(branch, len(prompt))) for branch in tree.branches)
    if limits.packed or _work([[(0, segment)] for segment in shared], limits) < alone:
        return shared
    return cut(widest=0, places=places)


def _blocks(members: Block, limits: RowLimits) -> list[Block]:
    alone = [[member] for member in members]
    shared: list[Block] = []
    for member in sorted(members, key=lambda one: -len(one[1].ids)):
        if shared and _width(shared[-1]) + len(member[1].ids) <= limits.shared:
            shared[-1].append(member)
        else:
            shared.append([member])
    return shared if limits.packed or _work(shared, limits) < _work(alone, limits) else alone


def _bundles(units: Sequence[Row], limits: RowLimits) -> list[list[Row]]:
    """Rows that stay in one micro-batch; where they are filled, first fit decreasing (Johnson 1973)."""
    if not limits.packed:
        return [[[block] for block in unit] for unit in units]
    bundles: list[list[Row]] = []
    filled: list[Row] = []
    widths: list[int] = []
    for width, unit in sorted(((row_width(unit), unit) for unit in units), key=lambda each: each[0], reverse=True):
        if width > limits.shared:
            bundles.append([[block] for block in unit])
        elif (place := next((at for at, used in enumerate(widths) if used + width <= limits.shared), None)) is not None:
            filled[place] += unit
            widths[place] += width
        else:
            filled.append([*unit])
            widths.append(width)
    return bundles + [[row] for row in filled]


def dummy() -> Microbatch:
    """One row with nothing to learn: a rank without rows runs it so that all ranks make the same number of passes."""
    ids, zero, none = np.zeros(16, dtype=np.int32), np.zeros(1, dtype=np.float32), np.zeros(0, dtype=np.int64)
    sample = TrainSample(0, ids, ids[:1], zero, zero.astype(np.int64), 0.0, zero)
    row = [[(0, Segment.of_answer(sample.prompt, sample.tokens))]]
    return replace(microbatch([sample], [row], RowLimits(tokens=16)), samples=none, counts=none)


def microbatch(batch: Sequence[TrainSample], rows: Sequence[Row], limits: RowLimits) -> Microbatch:
    shared = any(len(row) > 1 or len(row[0]) > 1 or row[0][0][1].branches > 1 for row in rows)
    width = limits.padded(max(row_width(row) for row in rows))
    if not shared:
        width = min(width, limits.longest)
    ids = np.zeros((len(rows), width), dtype=np.int64)
    until = np.full((len(rows), width), PADDING, dtype=np.int64)
    places = np.zeros((limits.vision.axes if limits.vision else 1, len(rows), width), dtype=np.int64)
    images: list[tuple[str, bytes]] = []
    positions: dict[int, Int64Array] = {}
    for number, row in enumerate(rows):
        first, end = number * width, 0
        for block in row:
            index, segment = block[0]
            prompt, blobs = segment.prompt, batch[index].blobs
            images += [(name, blobs[name]) for name in segment.prompt_images]
            start, end = end, end + len(prompt)
            last = first + end - 1
            ids[number, start:end], until[number, start:end] = prompt, start + _width(block)
            places[:, number, start:end], behind = limits.positions(blobs, prompt, segment.prompt_images)
            for index, segment in block:
                start, end = end, end + len(segment.ids)
                ids[number, start:end], until[number, start:end] = segment.ids, segment.visible_until + start
                places[:, number, start:end] = segment.depth + behind
                images += [(name, batch[index].blobs[name]) for name in segment.images]
                found = positions.setdefault(index, np.zeros(len(batch[index].tokens), dtype=np.int64))
                found[segment.targets] = np.where(segment.before < 0, last, segment.before + first + start)
        # Transformers asks for a mask where it sees the padding token, and for pixels where it sees a placeholder.
        last_id = int(ids[number, end - 1])
        shown = limits.vision is not None and last_id == limits.vision.token_id
        ids[number, end:] = int(last_id == 0) if shown else last_id
    order = list(positions)
    samples = [batch[index] for index in order]
    counts = np.asarray([len(sample.tokens) for sample in samples])
    return Microbatch(
        samples=np.asarray(order),
        counts=counts,
        input_ids=ids,
        visible_until=until,
        position_ids=places if len(places) > 1 else places[0],
        shared=shared,
        images=images,
        positions=np.concatenate([positions[index] for index in order]),
        targets=np.concatenate([sample.tokens for sample in samples]).astype(np.int64),
        behaviour=np.concatenate([sample.logprobs for sample in samples]).astype(np.float32),
        steps=np.concatenate([sample.steps for sample in samples]),
        advantages=np.concatenate([sample.advantages for sample in samples]).astype(np.float32),
        group_means=np.asarray([sample.group_mean for sample in samples], dtype=np.float32),
        proximal=_joined([sample.proximal for sample in samples]),
        reference=_joined([sample.reference for sample in samples]),
        values=_joined([sample.values for sample in samples]),
        returns=_joined([sample.returns for sample in samples]),
    )


def _joined(arrays: Sequence[Float32Array | None]) -> Float32Array | None:
    known = [array for array in arrays if array is not None]
    return np.concatenate(known).astype(np.float32) if len(known) == len(arrays) else None

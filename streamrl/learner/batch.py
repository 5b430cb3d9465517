"""Samples, and their arrays in the rows of micro-batches.

A block is a prompt with one or more responses to it: they lie side by side, each attends to the prompt and to itself,
and their positions all begin after the prompt, so every token sees exactly what it would see alone. The last token of
a response is left out, because nothing is predicted from it.

A row is one block (`learner.rows: buckets`), or is filled with blocks up to a length (`packed`), under the same mask: a
block sees nothing of its neighbours. Rows are sorted by length and cut into micro-batches of at most
`tokens_per_microbatch` tokens, padding included. Widths are multiples of `WIDTH_STEP`, because kernels are prepared
anew for every new shape. Padding is on the right, where a causal model cannot see it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from streamrl.wire import Float32Array, Int32Array

WIDTH_STEP = 16
PASS_TOKENS = 96
"""What one more pass costs, in tokens: padding up to that is cheaper than another micro-batch (measured on one core
with the 1M-parameter model of `examples/sort`; larger models care less)."""
BLOCK = 1 << 20
"""A token's segment is the number of its block in the row times this, for the prompt, and 1, 2, ... more for the
tokens of each response; so a token sees what is before it in its own segment and in the prompt of its block."""
PADDING = -1
"""Segment of padding."""

Block: TypeAlias = list[int]
"""Indices of responses to one prompt, which stands before them once."""
Row: TypeAlias = list[Block]


class Extent(NamedTuple):
    prompt: int
    sampled: int


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


def plan(extents: Sequence[Extent], prompts: Sequence[Sequence[int]], limits: Limits) -> list[list[Row]]:
    """Micro-batches of rows. Shared rows never join wide ones, which need the attention windows of the model itself."""
    blocks = [block for members in prompts for block in _blocks(extents, members, limits)]
    if limits.alone:
        return [[[block]] for block in blocks]
    rows = _packed(extents, blocks, limits.packed) if limits.packed else [[block] for block in blocks]
    widths = [row_width(extents, row) for row in rows]
    long = [place for place, width in enumerate(widths) if width > limits.shared]
    short = [place for place, width in enumerate(widths) if width <= limits.shared]
    return [
        [rows[places[index]] for index in part]
        for places in (long, short)
        for part in split([widths[place] for place in places], limits.tokens)
    ]


def work_of_prompt(extents: Sequence[Extent], limits: Limits) -> int:
    """Work of all responses to one prompt; ranks are balanced by it."""
    members = [index for index, extent in enumerate(extents) if extent.sampled]
    return sum(limits.work(_block_width(extents, block)) for block in _blocks(extents, members, limits))


def split(widths: Sequence[int], cap: int) -> list[list[int]]:
    """Indices into `widths` by micro-batch, widest first.

    A micro-batch has at most `cap` tokens, or one row, and less padding than one more pass would cost.
    """
    parts: list[list[int]] = []
    width = spare = 0
    for index in sorted(range(len(widths)), key=lambda row: -widths[row]):
        own = padded_width(widths[index])
        spare += width - own
        if not parts or (len(parts[-1]) + 1) * width > cap or spare > PASS_TOKENS:
            parts.append([])
            width, spare = own, 0
        parts[-1].append(index)
    return parts


def _blocks(extents: Sequence[Extent], members: Sequence[int], limits: Limits) -> list[Block]:
    alone = [[member] for member in members]
    if not limits.share_prompts or not limits.shared:
        return alone
    shared: list[Block] = []
    for member in sorted(members, key=lambda index: -extents[index].sampled):
        if not shared or _block_width(extents, [*shared[-1], member]) > limits.shared:
            shared.append([])
        shared[-1].append(member)
    work = [sum(limits.work(_block_width(extents, block)) for block in blocks) for blocks in (shared, alone)]
    return shared if work[0] < work[1] else alone


def _packed(extents: Sequence[Extent], blocks: Sequence[Block], length: int) -> list[Row]:
    """First fit decreasing (Johnson 1973): at most 11/9 of the fewest possible rows, and one more."""
    rows: list[Row] = []
    room: list[int] = []
    for block in sorted(blocks, key=lambda each: -_block_width(extents, each)):
        width = _block_width(extents, block)
        place = next((row for row, free in enumerate(room) if free >= width), None)
        if place is None:
            rows.append([block])
            room.append(length - width)
        else:
            rows[place].append(block)
            room[place] -= width
    return rows


def _block_width(extents: Sequence[Extent], block: Block) -> int:
    return extents[block[0]].prompt + sum(extents[index].sampled - 1 for index in block)


Int64Array: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class TrainSample:
    """One response with what the learner needs of it; n sampled tokens. Optional arrays are None until computed."""

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

    def __post_init__(self) -> None:
        count = len(self.tokens)
        if count != len(self.logprobs):
            raise ValueError(f"group {self.group_id}: {count} tokens with {len(self.logprobs)} log-probabilities")
        if count != len(self.steps) or count != len(self.advantages):
            raise ValueError(f"group {self.group_id}: {count} tokens need as many steps and advantages")
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
        return len(self.prompt) + len(self.tokens) - 1

    @property
    def has_advantage(self) -> bool:
        return bool(self.advantages.any())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Microbatch:
    """Rows of one forward pass, and the places in them where sampled tokens are predicted; n tokens in all."""

    samples: Int64Array  # index in the batch of each sample, shape (samples,), row by row
    counts: npt.NDArray[np.int64]  # sampled tokens of each sample, shape (samples,)
    input_ids: npt.NDArray[np.int64]  # shape (rows, width), zeros to the right
    segments: npt.NDArray[np.int64]  # shape (rows, width), see `BLOCK`; `PADDING` to the right
    position_ids: npt.NDArray[np.int64]  # shape (rows, width), place of each token in its own sequence, 0 for padding
    shared: bool  # some row holds more than one response
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


def layout(batch: Sequence[TrainSample], limits: Limits) -> list[Microbatch]:
    prompts: dict[tuple[int, bytes], list[int]] = {}
    for index, sample in enumerate(batch):
        if len(sample.tokens):
            prompts.setdefault((sample.group_id, sample.prompt.tobytes()), []).append(index)
    extents = [Extent(len(sample.prompt), len(sample.tokens)) for sample in batch]
    return [_microbatch(batch, extents, rows, limits) for rows in plan(extents, [*prompts.values()], limits)]


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
        segments=row,
        position_ids=np.arange(WIDTH_STEP)[None],
        shared=False,
        positions=one,
        targets=one,
        behaviour=zero,
        steps=one,
        advantages=zero,
    )


def _microbatch(
    batch: Sequence[TrainSample], extents: Sequence[Extent], rows: Sequence[Row], limits: Limits
) -> Microbatch:
    shared = any(len(row) > 1 or len(row[0]) > 1 for row in rows)
    widest = max(row_width(extents, row) for row in rows)
    width = widest if limits.alone else padded_width(widest)
    if not shared:
        width = min(width, limits.longest)
    ids = np.zeros((len(rows), width), dtype=np.int64)
    segments = np.full((len(rows), width), PADDING, dtype=np.int64)
    places = np.zeros((len(rows), width), dtype=np.int64)
    positions: list[Int64Array] = []
    for number, row in enumerate(rows):
        end = 0
        for block, members in enumerate(row):
            prompt = batch[members[0]].prompt
            start, end = end, end + len(prompt)
            ids[number, start:end], segments[number, start:end] = prompt, block * BLOCK
            places[number, start:end] = np.arange(len(prompt))
            last = np.asarray([number * width + end - 1])
            for segment, index in enumerate(members, 1):
                tokens = batch[index].tokens
                start, end = end, end + len(tokens) - 1
                ids[number, start:end], segments[number, start:end] = tokens[:-1], block * BLOCK + segment
                places[number, start:end] = np.arange(end - start) + len(prompt)
                positions += [last, np.arange(number * width + start, number * width + end)]
    order = [index for row in rows for members in row for index in members]
    samples = [batch[index] for index in order]
    counts = np.asarray([len(sample.tokens) for sample in samples])
    return Microbatch(
        samples=np.asarray(order),
        counts=counts,
        input_ids=ids,
        segments=segments,
        position_ids=places,
        shared=shared,
        positions=np.concatenate(positions),
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

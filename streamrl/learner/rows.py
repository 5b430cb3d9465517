"""Which responses stand in which row, and which rows in which micro-batch.

A block is a prompt with one or more responses to it: they lie side by side, each attends to the prompt and to itself,
and their positions all begin behind the prompt, so every token sees exactly what it would see alone. The last token of
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
    """Tokens of a sample: of its prompt, at least one, and sampled ones."""

    prompt: int
    sampled: int


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes that rows and micro-batches must keep.

    Attributes:
        tokens: most tokens of a micro-batch, padding included; a single longer row still gets one of its own.
        longest: longest sequence the model takes; padding does not go beyond it.
        shared: longest row with several responses, in tokens; 0: the model cannot have such rows.
        packed: length up to which a row is filled with blocks, at most `shared`; 0: a block a row.
        share_prompts: a block may have several responses.
        hidden: hidden size of the model, for the choice between sharing and not.
        alone: each row is a micro-batch without padding; nothing is shared or packed.
    """

    tokens: int
    longest: int = 1 << 30
    shared: int = 0
    packed: int = 0
    share_prompts: bool = True
    hidden: int = 1
    alone: bool = False

    def work(self, width: int) -> int:
        """Work of a row, padding included, in arbitrary units.

        A token costs 24 hidden^2 in a layer's products with weights and 4 width hidden in its attention, in which a
        shared row also computes the pairs of different responses, for nothing.
        """
        width = padded_width(width)
        return width * (6 * self.hidden + width)


def padded_width(tokens: int) -> int:
    """Width of a row of so many tokens: the next multiple of `WIDTH_STEP`."""
    return -(-tokens // WIDTH_STEP) * WIDTH_STEP


def row_width(extents: Sequence[Extent], row: Row) -> int:
    """Tokens of a row, padding not counted."""
    return sum(_block_width(extents, block) for block in row)


def plan(extents: Sequence[Extent], prompts: Sequence[Sequence[int]], limits: Limits) -> list[list[Row]]:
    """Give each response its place.

    Args:
        extents: of all samples.
        prompts: indices of the samples of each prompt; every sample to be trained is in one of them, and has sampled
            tokens.
        limits: sizes to keep.

    Returns:
        Micro-batches of rows. Rows with several responses are never in one with rows above `limits.shared`, whose
        windows of attention are the model's own.
    """
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
    """Work of all responses to one prompt, as `Limits.work` counts: how ranks are balanced."""
    members = [index for index, extent in enumerate(extents) if extent.sampled]
    return sum(limits.work(_block_width(extents, block)) for block in _blocks(extents, members, limits))


def split(widths: Sequence[int], cap: int) -> list[list[int]]:
    """Cut rows into micro-batches, widest first.

    A micro-batch holds at most `cap` tokens, padding included, or a single row. A narrower row joins the micro-batch
    of a wider one only as long as all padding of that micro-batch costs less than one more pass.

    Args:
        widths: tokens of each row before padding.
        cap: most tokens of a micro-batch, padding included.

    Returns:
        Indices into `widths`, one list per micro-batch.
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
    """Blocks of the responses to one prompt: several in one where that is less work, else one each."""
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
    """Fill rows up to a length, widest blocks first, each into the first row that has room.

    First fit decreasing (Johnson 1973): at most 11/9 of the fewest possible rows, and one more. A block above the
    length is a row.
    """
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

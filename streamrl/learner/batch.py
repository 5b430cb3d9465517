"""From samples to micro-batches: no prompt computed twice, rows of like length together, little padding.

A row is a prompt with one or more responses to it. The responses of a row lie side by side, each attends to the prompt
and to itself, and their positions all begin behind the prompt; so every token sees exactly what it would see alone.
The last token of a response is left out, because nothing is predicted from it. Rows are sorted by length and cut into
micro-batches of at most `tokens_per_microbatch` tokens, padding included. Widths are multiples of `WIDTH_STEP`,
because kernels are prepared anew for every new shape. Padding is on the right, where a causal model cannot see it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from streamrl.wire import Float32Array, Int32Array

Int64Array: TypeAlias = npt.NDArray[np.int64]

WIDTH_STEP = 16
PASS_TOKENS = 96
"""What one more pass costs, in tokens: padding up to that is cheaper than another micro-batch (measured on one core
with the 1M-parameter model of `examples/sort`; larger models care less)."""
PROMPT, PADDING = -1, -2


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes that rows and micro-batches must keep.

    Attributes:
        tokens: most tokens of a micro-batch, padding included; a single longer row still gets one of its own.
        longest: longest sequence the model takes; padding does not go beyond it.
        shared: longest row with several responses, in tokens; 0: never share a prompt.
        hidden: hidden size of the model, for the choice between sharing and not.
    """

    tokens: int
    longest: int = 1 << 30
    shared: int = 0
    hidden: int = 1

    def work(self, width: int) -> int:
        """Work of a row, padding included, in arbitrary units.

        A token costs 24 hidden^2 in a layer's products with weights and 4 width hidden in its attention, in which a
        shared row also computes the pairs of different responses, for nothing.
        """
        width = padded_width(width)
        return width * (6 * self.hidden + width)


@dataclass(frozen=True, slots=True, eq=False)
class TrainSample:
    """One response with what the learner needs of it; n sampled tokens.

    Attributes:
        gid: id of its group.
        prompt: token ids of the prompt, shape (prompt tokens,), at least one.
        tokens: sampled token ids, shape (n,); without any, the sample gives no gradient.
        logprobs: log-probability that each token was sampled with, shape (n,), finite.
        steps: step of the version that sampled each token, shape (n,), at least 0.
        reward: of the response, finite.
        advantages: of each token, float32, shape (n,), finite.
        proximal: log-probability under the policy of the start of the step, shape (n,); None until it is computed.
        reference: the same under the reference policy.
        entropy: of the distribution of each token under the policy of the start of the step, in nats; None likewise.
        values: the critic's value of the state before each token; None likewise.
        returns: what the critic learns, shape (n,); None likewise.
    """

    gid: int
    prompt: Int32Array
    tokens: Int32Array
    logprobs: Float32Array
    steps: Int64Array
    reward: float
    advantages: Float32Array
    proximal: Float32Array | None = None
    reference: Float32Array | None = None
    entropy: Float32Array | None = None
    values: Float32Array | None = None
    returns: Float32Array | None = None

    def __post_init__(self) -> None:
        count = len(self.tokens)
        if count != len(self.logprobs):
            raise ValueError(f"group {self.gid}: {count} tokens with {len(self.logprobs)} log-probabilities")
        if count != len(self.steps) or count != len(self.advantages):
            raise ValueError(f"group {self.gid}: {count} tokens need as many steps and advantages")
        if not len(self.prompt):
            raise ValueError(f"group {self.gid}: a prompt without tokens, nothing predicts the first sampled token")
        if not np.all(np.isfinite(self.logprobs)):
            raise ValueError(f"group {self.gid}: a log-probability of the sampling policy is not finite")
        if not np.all(np.isfinite(self.advantages)):
            raise ValueError(f"group {self.gid}: an advantage is not finite in float32")

    @property
    def width(self) -> int:
        """Tokens that go through the model."""
        return len(self.prompt) + len(self.tokens) - 1

    @property
    def has_advantage(self) -> bool:
        """Whether some token has an advantage other than 0."""
        return bool(self.advantages.any())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Microbatch:
    """Rows of one forward pass, and the places in them where sampled tokens are predicted.

    Attributes:
        samples: index in the batch of each sample, shape (samples,), row by row.
        counts: sampled tokens of each sample, shape (samples,), their sum is n.
        input_ids: shape (rows, width), zeros to the right.
        segments: shape (rows, width): `PROMPT`, the number of the response in its row, or `PADDING`.
        position_ids: shape (rows, width), place of each token in its own sequence, 0 for padding.
        shared: some row holds more than one response.
        positions: flat index (row * width + column) of the place that predicts each sampled token, shape (n,).
        targets: sampled token ids, shape (n,).
        behaviour: `TrainSample.logprobs`, shape (n,).
        steps: shape (n,).
        advantages: shape (n,).
        proximal: shape (n,); None when some sample has none. So are the following.
        reference: see `TrainSample`.
        values: see `TrainSample`.
        returns: see `TrainSample`.
    """

    samples: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int64]
    input_ids: npt.NDArray[np.int64]
    segments: npt.NDArray[np.int64]
    position_ids: npt.NDArray[np.int64]
    shared: bool
    positions: npt.NDArray[np.int64]
    targets: npt.NDArray[np.int64]
    behaviour: Float32Array
    steps: Int64Array
    advantages: Float32Array
    proximal: Float32Array | None = None
    reference: Float32Array | None = None
    values: Float32Array | None = None
    returns: Float32Array | None = None

    def deal_out(self, tokens: npt.NDArray[np.float32], batch: list[Float32Array]) -> None:
        """Put what was computed for each token, shape (n,), to the places of its samples in a list over the batch."""
        if len(self.samples):
            for index, piece in zip(self.samples, np.split(tokens, np.cumsum(self.counts)[:-1]), strict=True):
                batch[index] = piece


def padded_width(tokens: int) -> int:
    """Width of a row of so many tokens: the next multiple of `WIDTH_STEP`."""
    return -(-tokens // WIDTH_STEP) * WIDTH_STEP


def layout(batch: Sequence[TrainSample], limits: Limits) -> list[Microbatch]:
    """Lay the samples of a batch out in micro-batches; samples without sampled tokens are left out."""
    groups: dict[tuple[int, bytes], list[int]] = {}
    for index, sample in enumerate(batch):
        if len(sample.tokens):
            groups.setdefault((sample.gid, sample.prompt.tobytes()), []).append(index)
    rows = [row for members in groups.values() for row in _rows(batch, members, limits)]
    parts = split([_width(batch, row) for row in rows], limits.tokens)
    return [_microbatch(batch, [rows[place] for place in part], limits.longest) for part in parts]


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


def _rows(batch: Sequence[TrainSample], members: list[int], limits: Limits) -> list[list[int]]:
    """Rows of the responses to one prompt: shared where that is less work, else one each."""
    alone = [[member] for member in members]
    shared: list[list[int]] = []
    for member in sorted(members, key=lambda index: -len(batch[index].tokens)):
        if not shared or _width(batch, [*shared[-1], member]) > limits.shared:
            shared.append([])
        shared[-1].append(member)
    work = [sum(limits.work(_width(batch, row)) for row in rows) for rows in (shared, alone)]
    return shared if work[0] < work[1] else alone


def _width(batch: Sequence[TrainSample], row: Sequence[int]) -> int:
    return len(batch[row[0]].prompt) + sum(len(batch[index].tokens) - 1 for index in row)


def _microbatch(batch: Sequence[TrainSample], rows: list[list[int]], longest: int) -> Microbatch:
    shared = any(len(row) > 1 for row in rows)
    width = padded_width(max(_width(batch, row) for row in rows))
    if not shared:
        width = min(width, longest)
    ids = np.zeros((len(rows), width), dtype=np.int64)
    segments = np.full((len(rows), width), PADDING, dtype=np.int64)
    places = np.zeros((len(rows), width), dtype=np.int64)
    positions: list[npt.NDArray[np.int64]] = []
    for number, row in enumerate(rows):
        prompt = batch[row[0]].prompt
        start = len(prompt)
        ids[number, :start], segments[number, :start], places[number, :start] = prompt, PROMPT, np.arange(start)
        for segment, index in enumerate(row):
            tokens = batch[index].tokens
            end = start + len(tokens) - 1
            ids[number, start:end], segments[number, start:end] = tokens[:-1], segment
            places[number, start:end] = np.arange(end - start) + len(prompt)
            first = np.asarray([number * width + len(prompt) - 1])
            positions += [first, np.arange(number * width + start, number * width + end)]
            start = end
    order = [index for row in rows for index in row]
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
    """All of them in one, None when one is missing."""
    known = [array for array in arrays if array is not None]
    return np.concatenate(known).astype(np.float32) if len(known) == len(arrays) else None

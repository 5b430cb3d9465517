"""The turns of a sample as a tree, its branches, and how branches become segments of rows.

```
prompt ─ turn 0 (sampled) ─ turn 1 (observed) ┬ turn 2 (sampled)      branch 0: turns 0 1 2, trains 0 and 2
                                              └ turn 3 (sampled)      branch 1: turns 0 1 3, trains 3
NOTHING ─ turn 4 (observed) ─ turn 5 (sampled)                        branch 2: turns 4 5, has a prompt of its own
```
Branches are the paths from a root to a last sampled turn, in depth-first order, so what a branch shares with earlier
ones is its beginning. Each sampled token is trained in the first branch that holds it; turns that no sampled turn
follows take no place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from streamrl.wire import NOTHING, PROMPT, Int32Array, Sample

Int64Array: TypeAlias = npt.NDArray[np.int64]
FloatArray: TypeAlias = npt.NDArray[np.float64]


class EpisodeBranch(NamedTuple):
    turns: tuple[int, ...]  # from the root to a sampled turn; an own prompt is the first of them
    new: int  # place in `turns` of the first turn that no earlier branch holds
    own_prompt: bool  # begins with an observed turn that continues nothing


@dataclass(frozen=True, slots=True, eq=False)
class Tree:
    parents: tuple[int, ...]  # as in `wire.Turn`
    sampled: tuple[int, ...]  # sampled tokens of each turn, 0 for an observed one
    observed: tuple[Int32Array, ...]  # ids of each turn, none for a sampled one
    rewards: tuple[float, ...]  # of each turn, 0 for none
    media: tuple[tuple[str, ...], ...]  # images of each observed turn, by hash
    branches: tuple[EpisodeBranch, ...] = field(init=False)
    starts: tuple[int, ...] = field(init=False)  # first token of each turn in the arrays of the sample

    def __post_init__(self) -> None:
        starts = np.cumsum([0, *self.sampled[:-1]]) if self.sampled else np.zeros(0, dtype=np.int64)
        object.__setattr__(self, "starts", tuple(starts.tolist()))
        object.__setattr__(self, "branches", tuple(self._walk()))

    @classmethod
    def of(cls, sample: Sample) -> Tree | None:
        """None for a single answer, which needs none."""
        if not sample.turns:
            return None
        return cls(
            parents=tuple(turn.parent for turn in sample.turns),
            sampled=tuple(turn.sampled for turn in sample.turns),
            observed=tuple(turn.observed_ids for turn in sample.turns),
            rewards=tuple(turn.reward or 0.0 for turn in sample.turns),
            media=tuple(tuple(turn.media) for turn in sample.turns),
        )

    def length(self, turn: int) -> int:
        return self.sampled[turn] or len(self.observed[turn])

    @property
    def observed_ids(self) -> Int32Array:
        return np.concatenate([np.zeros(0, dtype=np.int32), *self.observed])

    def places(self, turns: Iterable[int]) -> Int64Array:
        """Where the sampled tokens of turns are in the arrays of the sample."""
        found = [np.arange(self.starts[turn], self.starts[turn] + self.sampled[turn]) for turn in turns]
        return np.concatenate([np.zeros(0, dtype=np.int64), *found])

    @property
    def threads(self) -> list[Int64Array]:
        """Places of the sampled tokens that each branch trains: its actions one after the other, without gaps."""
        return [self.places(branch.turns[branch.new :]) for branch in self.branches]

    def width(self, branch: EpisodeBranch, prompt: int) -> int:
        """Tokens that a pass over this branch alone has."""
        tokens = sum(self.length(turn) for turn in branch.turns) - 1
        return tokens if branch.own_prompt else prompt + tokens

    def cost(self, prompt: int) -> int:
        """Tokens that go through the model when each turn is computed once, after a prompt of so many."""
        fresh = [turn for branch in self.branches for turn in branch.turns[branch.new :]]
        prompts = any(not branch.own_prompt for branch in self.branches) * prompt
        return prompts + sum(map(self.length, fresh)) - len(self.branches)

    def _walk(self) -> Iterator[EpisodeBranch]:
        children: dict[int, list[int]] = {}
        live = [count > 0 for count in self.sampled]
        for turn in range(len(self.parents) - 1, -1, -1):
            if live[turn]:
                children.setdefault(self.parents[turn], []).append(turn)
                if self.parents[turn] >= 0:
                    live[self.parents[turn]] = True
        # The lists run backwards, and a stack turns them round: the oldest turn comes first.
        stack = [(turn, 0) for root in (NOTHING, PROMPT) for turn in children.get(root, [])]
        path: list[int] = []
        new = 0
        while stack:
            turn, depth = stack.pop()
            new = min(new, depth)
            path[depth:] = [turn]
            below = children.get(turn, [])
            stack += [(child, depth + 1) for child in below]
            if not below:
                yield EpisodeBranch(tuple(path), new, self.parents[path[0]] == NOTHING)
                new = len(path)


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """Tokens of one sample behind a prompt, as they stand in a row: a chain, or a tree in depth-first order."""

    prompt: Int32Array
    prompt_images: tuple[str, ...]  # in the order of their tokens, as `images`
    ids: Int32Array  # shape (n,), without the last token of each branch, from which nothing is predicted
    images: tuple[str, ...]
    visible_until: Int64Array  # first place in `ids` that does not see each token, shape (n,)
    depth: Int64Array  # positions from the first one behind the prompt on, shape (axes, n)
    before: Int64Array  # place in `ids` that predicts each trained token, -1: the end of the prompt, shape (m,)
    targets: Int64Array  # place of each trained token in the arrays of the sample, shape (m,)
    branches: int

    @classmethod
    def of_answer(cls, prompt: Int32Array, tokens: Int32Array, images: tuple[str, ...] = ()) -> Segment:
        places = np.arange(len(tokens))
        until = np.full(len(tokens) - 1, len(tokens) - 1)
        return cls(prompt, images, tokens[:-1], (), until, places[None, :-1], places - 1, places, 1)


Places: TypeAlias = Callable[[Int32Array, tuple[str, ...]], tuple[Int64Array, int]]
"""Positions of ids with these images, from 0 on, shape (axes, n), and the position behind them."""


def in_turn(ids: Int32Array, _: tuple[str, ...] = ()) -> tuple[Int64Array, int]:
    """One position for each token: `Places` of text."""
    return np.arange(len(ids))[None], len(ids)


def segments(
    tree: Tree,
    prompt: Int32Array,
    tokens: Int32Array,
    widest: int,
    *,
    images: tuple[str, ...] = (),
    places: Places = in_turn,
) -> list[Segment]:
    """The branches of a sample by prompt; a segment has one, or several in at most `widest` tokens with the prompt.

    `images` are those of the prompt.
    """
    widths = [tree.width(branch, len(prompt)) for branch in tree.branches]
    # The mask of several branches and the model's own attention do not go together in one pass.
    together = max(widths, default=0) <= widest
    parts: list[list[EpisodeBranch]] = []
    taken: list[int] = []
    last: dict[int, int] = {}  # the last part of each root, because branches of other roots may lie between
    for branch, width in zip(tree.branches, widths, strict=True):
        root = branch.turns[0] if branch.own_prompt else PROMPT
        more = sum(tree.length(turn) for turn in branch.turns[max(branch.new, branch.own_prompt) :]) - 1
        part = last.get(root)
        # The last token of a turn that a later branch continues is left out only where nothing continues it.
        if together and part is not None and taken[part] + more <= widest:
            parts[part].append(branch)
            taken[part] += more
        else:
            last[root] = len(parts)
            parts.append([branch])
            taken.append(width)
    return [_segment(tree, prompt, tokens, part, images=images, places=places) for part in parts]


def _segment(
    tree: Tree,
    prompt: Int32Array,
    tokens: Int32Array,
    branches: Sequence[EpisodeBranch],
    *,
    images: tuple[str, ...],
    places: Places,
) -> Segment:
    own = branches[0].own_prompt
    seen: list[str] = []
    ids: list[Int32Array] = []
    depth: list[Int64Array] = []
    before: list[Int64Array] = []
    begin: list[int] = []
    close: dict[int, int] = {}
    ends: dict[int, tuple[int, int]] = {}  # place of the last token of each turn, and the position behind it
    end = 0
    for number, branch in enumerate(branches):
        for place in range(branch.new if number else 0, len(branch.turns)):
            turn = branch.turns[place]
            if own and not place:
                ends[turn] = (-1, 0)
                continue
            last = place == len(branch.turns) - 1
            at, deep = ends[branch.turns[place - 1]] if place else (-1, 0)
            count = tree.length(turn)
            start = tree.starts[turn]
            mine = tokens[start : start + count] if tree.sampled[turn] else tree.observed[turn]
            ids.append(mine[: count - last])
            seen += tree.media[turn]
            positions, behind = places(mine, tree.media[turn])
            depth.append(positions[:, : count - last] + deep)
            if tree.sampled[turn] and place >= branch.new:
                before.append(np.concatenate([[at], np.arange(end, end + count - 1)]))
            begin.append(turn)
            end += count - last
            ends[turn] = (end - 1, deep + behind)
        for turn in branch.turns:
            close[turn] = end
    return Segment(
        prompt=tree.observed[branches[0].turns[0]] if own else prompt,
        prompt_images=tree.media[branches[0].turns[0]] if own else images,
        ids=np.concatenate([np.zeros(0, dtype=np.int32), *ids]),
        images=tuple(seen),
        visible_until=np.repeat(np.asarray([close[turn] for turn in begin], dtype=np.int64), [len(one) for one in ids]),
        depth=_side_by_side(depth),
        before=np.concatenate([np.zeros(0, dtype=np.int64), *before]),
        targets=np.concatenate([tree.places(branch.turns[branch.new :]) for branch in branches]),
        branches=len(branches),
    )


def _side_by_side(depths: Sequence[Int64Array]) -> Int64Array:
    """Text has one axis, an image may need more: text then has the same positions on each."""
    axes = max((len(each) for each in depths), default=1)
    wide = [np.broadcast_to(each, (axes, each.shape[1])) for each in depths]
    return np.concatenate([np.zeros((axes, 0), dtype=np.int64), *wide], axis=1)


class Span(NamedTuple):
    ids: Int32Array
    at: Int64Array  # places in `ids` of the trained tokens
    targets: Int64Array  # places of the same in the arrays of the sample


def spans(tree: Tree | None, prompt: Int32Array, tokens: Int32Array) -> list[Span]:
    """Each branch of a sample with sampled tokens as one sequence, for a server that scores sequences."""
    if tree is None:
        every = np.arange(len(tokens))
        return [Span(np.concatenate([prompt, tokens]), every + len(prompt), every)] if len(tokens) else []
    found = []
    for branch in tree.branches:
        parts: list[Int32Array] = [] if branch.own_prompt else [prompt]
        at: list[Int64Array] = []
        end = sum(map(len, parts))
        for place, turn in enumerate(branch.turns):
            start, count = tree.starts[turn], tree.length(turn)
            parts.append(tokens[start : start + count] if tree.sampled[turn] else tree.observed[turn])
            if tree.sampled[turn] and place >= branch.new:
                at.append(np.arange(end, end + count))
            end += count
        found.append(Span(np.concatenate(parts), np.concatenate(at), tree.places(branch.turns[branch.new :])))
    return found


def return_to_go(tree: Tree | None) -> FloatArray | None:
    """Sum of the rewards of turns from each sampled token on, shape (n,); None where no turn has a reward.

    A turn's reward is for each sampled token of itself and of the turns that it continues. The baseline is taken over
    samples: a mean subtracted from each reward before this sum would be charged for every further turn (verl 7244).
    """
    if tree is None or not any(tree.rewards):
        return None
    going = list(tree.rewards)
    for turn in range(len(going) - 1, -1, -1):
        if tree.parents[turn] >= 0:
            going[tree.parents[turn]] += going[turn]
    return np.repeat(np.asarray(going, dtype=np.float64), tree.sampled)

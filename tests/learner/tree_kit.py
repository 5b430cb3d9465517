"""Episodes with made-up turns, and what one branch alone looks like."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from tiny_policy import VOCABULARY, train_sample

from streamrl import wire
from streamrl.learner.batch import TrainSample
from streamrl.learner.tree import Tree
from streamrl.wire import NOTHING, PROMPT

Row = tuple[int, int, int]
"""Parent, sampled tokens, observed tokens of a turn."""
THREE: Sequence[Row] = (
    (PROMPT, 3, 0),
    (0, 0, 4),
    (1, 2, 0),
    (1, 0, 2),
    (3, 4, 0),
    (NOTHING, 0, 5),
    (5, 3, 0),
    (6, 0, 2),
)
"""Two branches from one prompt, one with a prompt of its own, and an answer at the end that nothing follows."""


def tree_of(rows: Sequence[Row], random: np.random.Generator, rewards: Sequence[float | None] = ()) -> Tree:
    """A tree of these turns, decoded from a sample as it comes over the wire."""
    count = sum(sampled for _, sampled, _ in rows)
    turns = [
        wire.Turn(
            parent=parent,
            role="assistant" if sampled else "tool",
            sampled=sampled,
            observed=wire.pack_int32(random.integers(0, VOCABULARY, observed)),
            reward=rewards[number] if number < len(rewards) else None,
        )
        for number, (parent, sampled, observed) in enumerate(rows)
    ]
    sample = wire.Sample(
        v=2,
        tokens=wire.pack_int32(np.zeros(count)),
        logprobs=wire.pack_float32(np.zeros(count)),
        runs=[(0, 1)],
        finish="stop",
        turns=turns,
    )
    tree = Tree.of(wire.decode(wire.encode(sample), wire.Sample))
    assert tree is not None
    return tree


def random_rows(random: np.random.Generator, turns: int = 8, longest: int = 6) -> list[Row]:
    """Turns of a random tree, the first one sampled."""
    rows: list[Row] = [(PROMPT, int(random.integers(1, longest)), 0)]
    for number in range(1, turns):
        size = int(random.integers(1, longest))
        parent = int(random.integers(-2, number))
        sampled = parent != NOTHING and bool(random.integers(0, 2))
        rows.append((parent, size, 0) if sampled else (parent, 0, size))
    return rows


def episode(group_id: int, prompt: Any, tree: Tree, random: np.random.Generator, advantage: float = 1.0) -> TrainSample:
    """A sample with made-up tokens for a tree; advantages differ from token to token."""
    count = sum(tree.sampled)
    tokens = random.integers(0, VOCABULARY, count).astype(np.int32)
    logprobs = random.normal(-3, 1, count).astype(np.float32)
    sample = train_sample(group_id, prompt, tokens, logprobs, advantage)
    spread = (advantage * random.normal(1, 0.3, count)).astype(np.float32)
    return replace(sample, tree=tree, advantages=spread)


def make_episodes(seed: int, groups: int = 3, size: int = 3, rows: Sequence[Row] = ()) -> list[TrainSample]:
    """Groups of episodes; without `rows` each has a random tree, and every third sample is a single answer."""
    random = np.random.default_rng(seed)
    batch = []
    for group_id in range(groups):
        prompt = random.integers(0, VOCABULARY, int(random.integers(1, 12))).astype(np.int32)
        for number in range(size):
            tree = tree_of(rows or random_rows(random), random)
            one = episode(group_id, prompt, tree, random, float(random.normal()))
            batch.append(one if rows or number % 3 != 2 else replace(one, tree=None))
    return batch


def past_of(sample: TrainSample, token: int) -> list[int]:
    """Ids before a sampled token, by its parents alone."""
    assert sample.tree is not None
    tree = sample.tree
    turn = next(
        number
        for number, (start, count) in enumerate(zip(tree.starts, tree.sampled, strict=True))
        if count and start <= token < start + count
    )
    found = sample.tokens[tree.starts[turn] : token].tolist()
    while (turn := tree.parents[turn]) >= 0:
        start = tree.starts[turn]
        own = sample.tokens[start : start + tree.sampled[turn]] if tree.sampled[turn] else tree.observed[turn]
        found = own.tolist() + found
    return found if turn == NOTHING else sample.prompt.tolist() + found

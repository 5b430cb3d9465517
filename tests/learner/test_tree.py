"""Branches of episodes in rows: each sampled token once, after what its branch holds."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_batch import LIMITS, past
from tree_kit import THREE, make_episodes, past_of, tree_of

from streamrl.learner.batch import RowLimits, pack, work_of
from streamrl.learner.tree import Tree, segments, spans
from streamrl.wire import NOTHING, PROMPT

RANDOM = np.random.default_rng(0)


@settings(max_examples=150, deadline=None)
@given(st.builds(make_episodes, st.integers(0, 10_000), st.integers(1, 3), st.integers(1, 4)), LIMITS)
def test_each_sampled_token_is_predicted_once_from_its_own_branch(batch, limits):
    seen = Counter()
    for part in pack(batch, limits):
        width = part.input_ids.shape[1]
        ends = np.cumsum(part.counts)
        assert not part.shared or width <= limits.padded(limits.shared)
        for index, end, count in zip(part.samples, ends, part.counts, strict=True):
            one = batch[index]
            seen[int(index)] += 1
            places = slice(end - count, end)
            assert part.targets[places].tolist() == one.tokens.tolist()
            assert part.advantages[places].tolist() == one.advantages.tolist()
            for token, flat in enumerate(part.positions[places]):
                expected = [*one.prompt, *one.tokens[:token]] if one.tree is None else past_of(one, token)
                assert past(part, *divmod(int(flat), width)) == expected
    assert seen == Counter(range(len(batch))), "a sample is in one micro-batch"


@settings(max_examples=50, deadline=None)
@given(st.builds(make_episodes, st.integers(0, 10_000), st.just(1), st.just(1)))
def test_a_server_scores_each_sampled_token_once(batch):
    (one,) = batch
    found = {}
    for span in spans(one.tree, one.prompt, one.tokens):
        for place, token in zip(span.at.tolist(), span.targets.tolist(), strict=True):
            assert token not in found
            found[token] = span.ids[:place].tolist()
            assert span.ids[place] == one.tokens[token]
    assert found == {token: past_of(one, token) for token in range(len(one.tokens))}


def test_branches_by_hand():
    tree = tree_of(THREE, RANDOM)
    assert [branch.turns for branch in tree.branches] == [(0, 1, 2), (0, 1, 3, 4), (5, 6)]
    assert [branch.new for branch in tree.branches] == [0, 2, 0]
    assert [thread.tolist() for thread in tree.threads] == [[0, 1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11]]
    prompt, tokens = np.zeros(10, np.int32), np.arange(12, dtype=np.int32)

    def cut(widest):
        return [(len(one.prompt), len(one.ids), one.branches) for one in segments(tree, prompt, tokens, widest)]

    # 3 + 4 + (2 - 1) + 2 + (4 - 1), and the prompt of 5 with 3 - 1 tokens; the last turn takes no place.
    assert cut(64) == [(10, 13, 2), (5, 2, 1)]
    assert cut(22) == [(10, 8, 1), (10, 12, 1), (5, 2, 1)]
    assert cut(21) == cut(0) == cut(22), "all alone"
    (first, _) = segments(tree, prompt, tokens, 64)
    assert first.visible_until.tolist() == [13] * 7 + [8] + [13] * 5
    assert first.depth.tolist() == [[*range(8), *range(7, 12)]]
    assert first.before.tolist() == [-1, 0, 1, 6, 7, 9, 10, 11, 12]


def test_a_chain_of_turns_is_one_response_in_a_row():
    rows = [(PROMPT, 3, 0), (0, 0, 4), (1, 2, 0), (2, 0, 9)]
    (part,) = pack(make_episodes(1, groups=1, size=1, rows=rows), RowLimits(tokens=512, hidden=64))
    assert not part.shared
    assert part.counts.tolist() == [5]
    first = part.positions[0]
    assert (part.positions - first).tolist() == [0, 1, 2, 7, 8]


def test_a_turn_is_computed_once_where_rows_may_be_shared():
    rows = [(PROMPT, 20, 0), (0, 0, 40), (1, 5, 0), (1, 6, 0), (1, 7, 0)]
    batch = make_episodes(1, groups=1, size=1, rows=rows)
    prompt = len(batch[0].prompt)
    bounds = RowLimits(tokens=4096, shared=512, hidden=64)
    (part,) = pack(batch, bounds)
    assert part.input_ids.shape == (1, bounds.padded(prompt + 60 + 4 + 5 + 6))
    assert work_of(batch, bounds) == bounds.work(prompt + 75)
    (part,) = pack(batch, RowLimits(tokens=64, shared=64, hidden=64))
    assert part.input_ids.shape[0] == 3, "rows of their own, in one micro-batch whatever its size"
    assert not part.shared
    assert batch[0].width == prompt + 66
    assert batch[0].cost == prompt + 75


def test_a_prompt_that_tools_were_rendered_into_is_computed_once_for_its_group():
    rows = [(NOTHING, 0, 30), (0, 3, 0)]
    one = make_episodes(1, groups=1, size=1, rows=rows)[0]
    batch, bounds = [one] * 4, RowLimits(tokens=512, shared=256, hidden=64)
    (part,) = pack(batch, bounds)
    assert part.input_ids.shape == (1, bounds.padded(30 + 4 * 2))
    other = replace(make_episodes(2, groups=1, size=1, rows=rows)[0], group_id=one.group_id, prompt=one.prompt)
    assert not pack([one, other], bounds)[0].shared, "other tools"


def test_ten_samples_with_sub_agents_fill_rows_together():
    batch = make_episodes(1, groups=1, size=10, rows=THREE)
    (part,) = pack(batch, RowLimits(tokens=4096, shared=1024, packed=True))
    assert len(part.input_ids) == 1


@pytest.mark.parametrize("count", [1000, 4000])
def test_long_chains_and_many_forks_do_not_recurse(count):
    chain = [(PROMPT, 1, 0), *((turn, 1, 0) for turn in range(count - 1))]
    assert len(tree_of(chain, RANDOM).branches) == 1
    forks = [(PROMPT, 1, 0)] * count
    assert len(tree_of(forks, RANDOM).branches) == count


def test_turns_without_sampled_tokens_have_no_branch():
    tree = Tree((PROMPT, NOTHING), (0, 0), (np.ones(2, np.int32),) * 2, (0.0, 0.0), ((), ()))
    assert tree.branches == ()
    assert segments(tree, np.zeros(3, np.int32), np.zeros(0, np.int32), 64) == []

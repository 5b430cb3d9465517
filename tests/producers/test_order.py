"""Which prompt a group has is a pure function of seed, data and id, for every kind of source and of mixture."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from streamrl.config import RunConfig
from streamrl.config.data import quotas
from streamrl.errors import ConfigError, DataError, PluginError
from streamrl.producers.dataset import Faults
from streamrl.producers.order import fingerprint_of, permutation
from tests.producers.data_kit import numbered, open_training, prompts, texts, write, write_module


@given(st.integers(1, 300), st.integers(0, 2**40), st.integers(0, 1000))
def test_a_permutation_has_every_number_once_and_is_a_function_of_its_key(count, seed, epoch):
    order = permutation(count, seed, epoch)
    assert sorted(order.tolist()) == list(range(count))
    assert permutation(count, seed, epoch).tolist() == order.tolist()


def test_permutations_are_frozen_and_differ():
    """The first is pinned: a run that is resumed with a newer program or NumPy must find the same order."""
    assert permutation(10, 0, 0).tolist() == [9, 2, 5, 3, 7, 1, 8, 4, 6, 0]
    assert len({tuple(permutation(50, seed, epoch)) for seed in range(10) for epoch in range(10)}) == 100
    # No place prefers a number: over 2,000 epochs each of 8 numbers comes first 250 times, standard deviation 15.
    first = [int(permutation(8, 1, epoch)[0]) for epoch in range(2000)]
    assert all(175 < first.count(number) < 325 for number in range(8))


def test_every_epoch_has_every_prompt_once_in_any_order_of_asking(tmp_path):
    path = numbered(tmp_path / "p.jsonl", 7)
    data = open_training(path)
    forward = texts(data, range(21))
    for start in (0, 7, 14):
        assert sorted(forward[start : start + 7]) == [f"p{number}" for number in range(7)]
    assert [texts(data, [group_id])[0] for group_id in reversed(range(21))] == forward[::-1]
    assert texts(open_training(path), range(15, 21)) == forward[15:]
    assert forward[:7] != forward[7:14]
    assert texts(open_training(path, shuffle=False), range(9)) == [f"p{number % 7}" for number in range(9)]
    assert (data.epoch(13), data.epoch(14), data.end(5)) == (1, 2, None)
    assert open_training(path, epochs=3).end(5) == 21


@settings(max_examples=20, deadline=None)
@given(
    long=st.lists(st.booleans(), min_size=2, max_size=40).filter(lambda long: not all(long)), cursor=st.integers(0, 99)
)
def test_long_prompts_are_skipped_in_the_order_of_all(tmp_path_factory, long, cursor):
    records = [{"prompt": f"{number}{'x' * 30 * is_long}"} for number, is_long in enumerate(long)]
    path = write(tmp_path_factory.mktemp("d") / "p.jsonl", *records)
    walked = [n for epoch in range(100) for n in permutation(len(long), 3, epoch) if not long[n]]
    data = open_training(path, drop=True)
    assert texts(data, range(cursor, cursor + 3)) == [str(number) for number in walked[cursor : cursor + 3]]
    assert data.dropped == sum(long)
    assert texts(data, [0]) == [str(walked[0])]  # Redis went back
    short = len(long) - sum(long)
    bounded = open_training(path, drop=True, epochs=2)
    assert bounded.end(10_000) == 2 * short
    assert bounded.epoch(2 * short - 1) == 1


def test_data_of_long_prompts_alone_is_refused(tmp_path):
    data = open_training(write(tmp_path / "p.jsonl", {"prompt": "a" * 30}), drop=True)
    with pytest.raises(DataError, match=r"p\.jsonl has no prompts that are short enough"):
        data.prompt(0)


def test_a_list_is_one_order_of_all_prompts_and_each_says_its_source(tmp_path):
    a, b = numbered(tmp_path / "a.jsonl", 3, "a"), numbered(tmp_path / "b.jsonl", 2, "b")
    data = open_training([a, {"source": b, "name": "second"}], epochs=2)
    found = prompts(data, range(10))
    assert (
        sorted(prompt.text for prompt in found[:5])
        == ["a0", "a1", "a2", "b0", "b1"]
        == sorted(prompt.text for prompt in found[5:])
    )
    assert {(prompt.text[0], prompt.source) for prompt in found} == {("a", "a"), ("b", "second")}
    assert {prompt.text: prompt.line for prompt in found}["b1"] == 1
    assert data.end(0) == 10
    assert prompts(open_training(a), [0])[0].source == ""
    assert prompts(open_training({"source": a, "name": "only"}), [0])[0].source == "only"


def test_quotas_are_those_of_the_largest_remainder():
    assert quotas([1, 1, 1]) == [334, 333, 333]
    assert quotas([2, 1]) == [667, 333]
    assert quotas([0, 5]) == [0, 1000]
    assert quotas([0.001, 0.0004, 1]) == [1, 0, 999]


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=9).filter(lambda weights: sum(weights) > 0))
def test_quotas_fill_a_block_and_are_off_by_less_than_one(weights):
    found = quotas(weights)
    assert sum(found) == 1000
    assert all(abs(quota - 1000 * w / sum(weights)) < 1 for quota, w in zip(found, weights, strict=True))


def test_a_mixture_has_its_weights_in_each_block_and_epochs_of_each_source(tmp_path):
    sources = [
        {"source": numbered(tmp_path / "a.jsonl", 30, "a"), "weight": 3},
        {"source": numbered(tmp_path / "b.jsonl", 50, "b"), "weight": 1},
        {"source": numbered(tmp_path / "c.jsonl", 5, "c"), "weight": 0},
    ]
    data = open_training(sources)
    found = [
        text
        for block in (0, 1)
        for start in range(0, 1000, 50)
        for text in texts(data, range(1000 * block + start, 1000 * block + start + 50))
    ]
    for block in (found[:1000], found[1000:]):
        assert Counter(text[0] for text in block) == {"a": 750, "b": 250}
    for letter, size in (("a", 30), ("b", 50)):
        own = [text for text in found if text[0] == letter]
        for start in range(0, len(own) - size, size):
            assert len(set(own[start : start + size])) == size, "each epoch of a source has each of its prompts once"
    # About as even as chance: 100 groups in a row have 75 of the first, standard deviation 4.
    assert all(55 < sum(text[0] == "a" for text in found[start : start + 100]) < 95 for start in range(0, 2000, 100))
    again = open_training(sources)
    for group_id in (1999, 0, 1003):
        assert texts(again, [group_id]) == [found[group_id]]
    assert (data.epoch(5), data.end(5)) == (None, None)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"train": [{"source": "a.jsonl", "weight": 0}, {"source": "b.jsonl", "weight": 0}]}, "weights that sum to 0"),
        ({"train": [{"source": "a.jsonl", "weight": 1}, "b.jsonl"]}, "with a weight and without"),
        ({"train": ["a.jsonl", "sub/a.jsonl"]}, "two sources of one name: a, a"),
        ({"train": [{"source": "a.jsonl", "weight": 1e-4}, {"source": "b.jsonl", "weight": 1}]}, "less than 1 group"),
        ({"train": {"source": "a.jsonl", "weight": 1}, "epochs": 2}, "set learner.steps"),
        ({"held_out": {"source": "a.jsonl", "weight": 1}}, "leave out `weight`"),
        ({"train": []}, "at least 1 item"),
        ({"train": "hf:gsm8k"}, "write hf:OWNER/NAME:SPLIT"),
        ({"train": {"source": "a.jsonl", "weight": -1}}, "greater than or equal to 0"),
    ],
)
def test_what_the_configuration_refuses(change, why):
    with pytest.raises(ValidationError, match=why):
        RunConfig.model_validate({"data": change})


def test_the_fingerprint_covers_all_that_an_order_depends_on(tmp_path):
    def fingerprint(train, top=None, **data):
        return open_training(train, top=top, **data).fingerprint

    a, b = numbered(tmp_path / "a.jsonl", 3), numbered(tmp_path / "b.jsonl", 4)
    first = fingerprint(a)
    others = [
        fingerprint(b),
        fingerprint([a, b]),
        fingerprint([b, a]),
        fingerprint([{"source": a, "weight": 1}, {"source": b, "weight": 1}]),
        fingerprint([{"source": a, "weight": 2}, {"source": b, "weight": 1}]),
        fingerprint({"source": a, "name": "x"}),
        fingerprint(a, columns={"answer": "prompt", "prompt": "prompt"}),
        fingerprint(a, prompt="{prompt}="),
    ]
    assert len({first, *others}) == 9
    assert fingerprint(a) == first
    moved = write(tmp_path / "moved.jsonl", a.read_bytes().removesuffix(b"\n"))
    assert fingerprint(moved) == first, "it is of the bytes, not of their place"
    large = write(tmp_path / "large.jsonl", *({"prompt": str(number)} for number in range(3000)))
    before = fingerprint(large)
    large.write_bytes(large.read_bytes().replace(b'"2999"', b'"2998"'))
    assert fingerprint(large) != before, "bytes behind the prompts whose tokens are covered"
    assert fingerprint(write(tmp_path / "l.jsonl", {"prompt": "a"}, {"prompt": "a" * 30}), drop=True) != fingerprint(
        write(tmp_path / "s.jsonl", {"prompt": "a"}), drop=True
    )


def test_the_fingerprint_of_a_small_file_is_that_of_earlier_versions(tmp_path):
    """Pinned: a run that an earlier version began is resumed."""
    data = open_training(write(tmp_path / "p.jsonl", {"prompt": "a"}, {"prompt": "b"}))
    assert fingerprint_of(data, seed=0, shuffle=True) == "d688d61741ef9fcefad47737c5ad6b7f"


SEQUENCE = """
class Prompts:
    def __init__(self, count=5): self.count = count
    def __len__(self): return self.count
    def __getitem__(self, row): return {"prompt": f"p{row}", "answer": row}
"""
ITERABLE = """
import itertools
opened = []
def prompts(start=0, stop=None):
    opened.append(start)
    numbers = itertools.count(start) if stop is None else range(start, stop)
    return ({"prompt": f"p{number}"} for number in numbers)
"""


def test_a_sequence_in_python_is_shuffled_like_a_file(tmp_path, monkeypatch):
    top = write_module(monkeypatch, tmp_path, "sequence_data", SEQUENCE)
    data = open_training({"source": "sequence_data:Prompts", "args": {"count": 7}}, top=top, epochs=2)
    assert texts(data, range(14)) == texts(open_training(numbered(tmp_path / "p.jsonl", 7)), range(14))
    assert (data.end(0), data.of_code) == (14, True)


def test_an_iterable_is_read_again_up_to_the_cursor_and_from_its_start_when_it_ends(tmp_path, monkeypatch):
    top = write_module(monkeypatch, tmp_path, "iterable_data", ITERABLE)
    endless = open_training("iterable_data:prompts", top=top)
    assert texts(endless, range(5000, 5003)) == ["p5000", "p5001", "p5002"]
    import iterable_data

    before = len(iterable_data.opened)
    assert texts(endless, [4900]) == ["p4900"]
    assert len(iterable_data.opened) == before, "what Redis may lose is kept"
    assert texts(endless, [3]) == ["p3"]
    assert len(iterable_data.opened) == before + 1
    ends = open_training({"source": "iterable_data:prompts", "args": {"start": 2, "stop": 5}}, top=top)
    assert texts(ends, range(7)) == ["p2", "p3", "p4", "p2", "p3", "p4", "p2"]
    assert [prompt.line for prompt in prompts(ends, range(4))] == [0, 1, 2, 0]


def test_an_iterable_may_be_one_of_a_mixture_and_of_no_list(tmp_path, monkeypatch):
    top = write_module(monkeypatch, tmp_path, "mixed_data", ITERABLE)
    file = numbered(tmp_path / "a.jsonl", 2, "a")
    mixed = open_training([{"source": "mixed_data:prompts", "weight": 1}, {"source": file, "weight": 1}], top=top)
    found = texts(mixed, range(40))
    own = [text for text in found if text[0] == "p"]
    assert own == [f"p{number}" for number in range(len(own))]
    assert len(own) > 5
    with pytest.raises(ConfigError, match="and no place in one order") as caught:
        open_training(["mixed_data:prompts", file], top=top)
    assert "weight" in caught.value.hint
    with pytest.raises(ConfigError, match=r"mixed_data:prompts is an iterable.* has no epochs") as caught:
        open_training("mixed_data:prompts", top=top, epochs=1)
    assert "learner.steps" in caught.value.hint


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("prompts = 5", "is no class or function"),
        ("def prompts(): return 5", "neither a sequence nor an iterable"),
        ("def prompts(): return iter([])", "is empty"),
        ("def prompts(): return [1]", r":prompts:1: not a JSON object"),
        ("def prompts(): raise OSError('no disk')", "cannot be built: OSError: no disk"),
        ("class prompts(list):\n    def __len__(self): return 3", "record 0 cannot be read: IndexError"),
        ("def prompts(wanted): return []", "args do not fit"),
    ],
)
def test_code_that_cannot_be_used(tmp_path, monkeypatch, text, why):
    top = write_module(monkeypatch, tmp_path, tmp_path.name, text)
    with pytest.raises((DataError, PluginError), match=why):
        open_training(f"{tmp_path.name}:prompts", top=top)


def test_a_missing_column_in_line_90000_is_found_before_it_is_admitted(tmp_path):
    lines = [b'{"prompt": "p", "answer": 1}'] * 90_010
    lines[89_999] = lines[90_003] = b'{"question": "p"}'
    lines[70_000] = b'{"prompt": "' + b"a" * 30 + b'"}'
    data = open_training(write(tmp_path / "p.jsonl", *lines))
    faults = Faults()
    for reader, rows in data.pieces():
        reader.check(rows, faults)
    with pytest.raises(DataError) as caught:
        faults.check()
    first, second = caught.value.message.split("; ")
    assert "p.jsonl:70001: the prompt has 31 tokens" in first
    assert second.endswith("p.jsonl:90000: needs either `prompt` (text) or `messages` (chat) (also 90004)")
    assert "its columns are question" in caught.value.hint
    group_id = int(np.flatnonzero(permutation(90_010, 3, 0) == 89_999)[0])
    with pytest.raises(DataError, match=r":90000: needs"):
        data.prompt(group_id)

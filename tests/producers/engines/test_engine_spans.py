"""Version runs against a list of one version per token."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from streamrl import wire
from streamrl.producers.engines.decoder import Spans


@given(st.integers(0, 9), st.lists(st.tuples(st.integers(0, 5), st.integers(1, 3))), st.integers(0, 5))
def test_runs_say_which_version_sampled_which_token(version, steps, tail):
    spans, truth = Spans(version), []
    for tokens, newer in steps:
        truth += [version] * tokens
        version += newer
        spans.swap(len(truth), version)
    truth += [version] * tail
    runs = spans.runs(len(truth))
    blank = bytes(4 * len(truth))
    # the wire refuses runs that are out of order or do not cover the tokens
    sample = wire.Sample(tokens=blank, logprobs=blank, runs=runs, finish="stop")
    assert sample.token_versions.tolist() == truth


def test_by_hand():
    spans = Spans(4)
    spans.swap(0, 5)
    spans.swap(3, 6)
    spans.swap(3, 8)
    assert spans.runs(3) == [(0, 5)]
    assert spans.runs(4) == [(0, 5), (3, 8)]
    assert spans.runs(0) == []

"""What a recording may do between two starts of its player."""

from __future__ import annotations

import pytest

from streamrl.archive.reader import Header
from streamrl.errors import CannotCreate, Refused
from streamrl.producers.player import LENGTH_FILE, keep_length

HEADER = Header(id="one", run="r", model="m", temperature=1.0)
OTHER = Header(id="two", run="r", model="m", temperature=1.0)


@pytest.mark.parametrize("epochs", [2, None])
def test_a_recording_that_grows_under_several_passes_is_refused(tmp_path, epochs):
    """Group 10 was the first one of the second pass; among 12 it would be the last but one of the first."""
    path = tmp_path / LENGTH_FILE
    for _ in range(2):
        keep_length(path, HEADER, 10, epochs)
    for header, count in ((HEADER, 12), (OTHER, 10)):
        for again in (epochs, 1):
            with pytest.raises(Refused, match="had 10 when its first pass began"):
                keep_length(path, header, count, again)
    keep_length(path, HEADER, 10, 3)


def test_one_pass_goes_on_over_a_recording_that_grows_and_more_passes_hold_its_length(tmp_path):
    path = tmp_path / LENGTH_FILE
    for count in (10, 12):
        keep_length(path, HEADER, count, 1)
    keep_length(path, HEADER, 12, 2)
    with pytest.raises(Refused, match="has 13 groups"):
        keep_length(path, HEADER, 13, 2)


def test_a_length_that_cannot_be_read_or_written_is_said(tmp_path):
    (tmp_path / LENGTH_FILE).write_text("rubbish")
    with pytest.raises(CannotCreate, match=LENGTH_FILE):
        keep_length(tmp_path / LENGTH_FILE, HEADER, 1, 2)
    with pytest.raises(CannotCreate, match="gone"):
        keep_length(tmp_path / "gone" / LENGTH_FILE, HEADER, 1, 2)

"""Names of sources in figures: a data set with a thousand sources must not make a thousand series."""

from __future__ import annotations

from typing import Final

MOST_SOURCES: Final = 16


def series_of(source: str, known: set[str]) -> str:
    """The first `MOST_SOURCES` sources have figures of their own, which `known` keeps; all later ones are `other`."""
    if len(known) < MOST_SOURCES:
        known.add(source)
    return source if source in known else "other"

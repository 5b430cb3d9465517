"""Lines of engine servers' own logs: plain text of vLLM and SGLang, read as the records that roles write."""

from __future__ import annotations

import re
import time
from typing import Any, Final

# vLLM: "(APIServer pid=7) INFO 11-20 13:15:21 [file.py:1] words"; SGLang and uvicorn: "[2026-11-20 13:15:21] words".
_STAMP: Final = re.compile(r"(?:(\d{4})-)?(\d\d)-(\d\d) (\d\d:\d\d:\d\d)")
_COLOUR: Final = re.compile(r"\x1b\[[0-9;]*m")
_LOUD: Final = re.compile(r"\b(WARNING|ERROR|CRITICAL)\b")
_HEAD: Final = 80


def server_record(record: dict[str, Any], now: float) -> dict[str, Any]:
    """Return a record with the time and level that its text tells, and its text without colours.

    Args:
        record: with the line in `event`; one with a time of its own is returned as it is.
        now: seconds since 1970; a stamp without a year is the last such day before tomorrow.
    """
    if "at" in record or "event" not in record:
        return record
    text = _COLOUR.sub("", str(record["event"])).rstrip("\r").rpartition("\r")[2]  # of a progress bar the last state
    found: dict[str, Any] = {"event": text}
    head = text[:_HEAD]
    stamp = _STAMP.search(head)
    if stamp is not None and (at := _seconds(stamp, now)) is not None:
        found["at"] = at
    loud = _LOUD.search(head)
    if loud is not None:
        found["level"] = loud.group(1).lower()
    return found


def _seconds(stamp: re.Match[str], now: float) -> float | None:
    year, month, day, clock = stamp.groups()
    this_year = time.localtime(now).tm_year
    for guess in (year,) if year else (this_year, this_year - 1):
        try:
            at = time.mktime(time.strptime(f"{guess}-{month}-{day} {clock}", "%Y-%m-%d %H:%M:%S"))
        except ValueError:
            continue
        if year or at < now + 86400:
            return at
    return None

"""Which version a token of SGLang belongs to, when it was in flight while the weights changed.

A pause leaves the results of the last batch unprocessed; SGLang counts their tokens to the version after the change.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any


def renamed(original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    """Let the scheduler record where the version changes, and count tokens in flight to the version before.

    With speculative decoding, where one batch brings several tokens to a request, only one of them is counted.
    """
    underway = {
        request: len(request.weight_version_events)
        for batch, _ in getattr(scheduler, "result_queue", ())
        for request in batch.reqs
        if not request.finished() and not request.is_retracted and request.inflight_middle_chunks <= 0
    }
    before = _version()
    answer = original(scheduler, *args, **kwargs)
    if _version() == before:
        return answer
    from sglang.srt.utils.weight_versions import WeightVersionEvent

    for request, count in underway.items():
        events = request.weight_version_events
        if len(events) > count:
            events[-1] = dataclasses.replace(events[-1], num_output_tokens=events[-1].num_output_tokens + 1)
        else:  # its first token is in flight
            events.append(WeightVersionEvent(old_version=before, num_output_tokens=len(request.output_ids) + 1))
    return answer


def _version() -> Any:
    from sglang.srt.runtime_context import get_serving

    return get_serving().weight_version

"""What a failure of a request says of the server that it came from. Values only, no I/O."""

from __future__ import annotations

from typing import Final, TypeGuard

from streamrl.consumers.models.router import Outcome
from streamrl.errors import StreamrlError
from streamrl.http import BadAnswer, BadRequest, Lost

NOT_NOW: Final = frozenset({429, 503})
"""What a server answers that is busy."""
_NO_ROUTE: Final = frozenset({404, 405})
_NOT_FOR_US: Final = _NO_ROUTE | {401, 403, 501}
"""What a server answers that has another model, or none that can be asked so, or that wants another key."""


def outcome_of(error: StreamrlError) -> Outcome:
    """What a failure is to the router."""
    if isinstance(error, BadAnswer) and error.status in NOT_NOW:
        return Outcome.BUSY
    if isinstance(error, BadRequest) and error.status not in _NO_ROUTE:
        return Outcome.OK
    return Outcome.FAULT


def is_away(error: StreamrlError) -> bool:
    """Whether a fault says nothing of the request: the server is not there, or is the wrong one."""
    if isinstance(error, Lost):
        return not error.late
    return refuses(error)


def refuses(error: BaseException | None) -> TypeGuard[BadAnswer | BadRequest]:
    """Whether a server refuses whatever it is asked: it is the wrong one, or wants another key."""
    return isinstance(error, BadAnswer | BadRequest) and error.status in _NOT_FOR_US

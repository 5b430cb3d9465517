"""Whether an error of a reward says that a service is away for the moment, so that the same call may succeed later."""

from __future__ import annotations

from typing import Final

from streamrl.errors import DeadlineExceeded, StreamrlError, Unreachable

_OF_FILES: Final = (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError, PermissionError)
_LATER: Final = frozenset({408, 425, 429})
"""Refusals of HTTP that ask for another attempt."""
_LONGEST_CHAIN: Final = 10


def may_pass(error: BaseException) -> bool:
    """Whether it may pass by itself: no connection, no answer in time, a server that fails or is overloaded.

    Errors of HTTP clients are known by their status, those of other libraries by the `OSError` that they are raised
    from. What is wrong with a file, a value, or a key that the server refuses does not pass.
    """
    if isinstance(error, StreamrlError):
        return isinstance(error, Unreachable | DeadlineExceeded)
    status = _status(error)
    if status is not None:
        return status in _LATER or status >= 500
    cause: BaseException | None = error
    for _ in range(_LONGEST_CHAIN):
        if isinstance(cause, OSError):
            return not isinstance(cause, (*_OF_FILES, ValueError))
        if cause is None:
            break
        cause = cause.__cause__
    return False


def _status(error: BaseException) -> int | None:
    """Status of HTTP that an error of urllib, aiohttp, requests, httpx or openai carries."""
    response = getattr(error, "response", None)
    for owner, name in ((error, "status"), (error, "status_code"), (response, "status_code")):
        status = getattr(owner, name, None)
        if isinstance(status, int) and 400 <= status < 600:
            return status
    return None

"""Whether an error of a reward says that a service is away for the moment, so that the same call may succeed later."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from typing import Final

from streamrl.errors import DeadlineExceeded, StreamrlError, Unreachable

_OF_NETWORKS: Final = frozenset(
    {
        errno.EADDRNOTAVAIL,
        errno.ECONNABORTED,
        errno.ECONNREFUSED,
        errno.ECONNRESET,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
        errno.ENETDOWN,
        errno.ENETRESET,
        errno.ENETUNREACH,
        errno.EPIPE,
        errno.ESHUTDOWN,
        errno.ETIMEDOUT,
    }
)
_SEVERAL: Final = "Multiple exceptions: [Errno "
"""How asyncio begins the error, without a number, of a host none of whose addresses it could connect to."""
_LATER: Final = frozenset({408, 425, 429})
"""Refusals of HTTP that ask for another attempt."""
_LONGEST_CHAIN: Final = 20


def may_pass(error: BaseException) -> bool:
    """Whether it may pass by itself: no connection, no answer in time, a server that fails or is overloaded.

    Libraries wrap such errors in their own, so the chain of causes is read too. The first error in it that has a status
    of HTTP, or is of a network, decides. What is wrong with a file, a value, or a key that the server refuses does not
    pass.
    """
    if isinstance(error, StreamrlError):
        return isinstance(error, Unreachable | DeadlineExceeded)
    for link in _chain(error):
        status = _status(link)
        if status is not None:
            return status in _LATER or status >= 500
        if _of_network(link):
            return True
    return False


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An error and those that led to it; of a group that a library has made, its first one."""
    link: BaseException | None = error
    for _ in range(_LONGEST_CHAIN):
        if link is None:
            return
        yield link
        if isinstance(link, BaseExceptionGroup):
            link = link.exceptions[0]
        else:
            link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)


def _of_network(error: BaseException) -> bool:
    if isinstance(error, ConnectionError | TimeoutError | socket.gaierror):
        return True
    return isinstance(error, OSError) and (error.errno in _OF_NETWORKS or str(error).startswith(_SEVERAL))


def _status(error: BaseException) -> int | None:
    """Status of HTTP that an error of urllib, aiohttp, requests, httpx or openai carries."""
    response = getattr(error, "response", None)
    for owner, name in ((error, "status"), (error, "status_code"), (response, "status_code")):
        status = getattr(owner, name, None)
        if isinstance(status, int) and 400 <= status < 600:
            return status
    return None

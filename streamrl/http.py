"""HTTP to engine servers: pooled connections, deadlines, and no request sent twice by accident.

The failures: `Lost` (no answer; did it arrive?) and `BadAnswer` (an error of the server), both `Unreachable`,
`BadRequest` (the request itself is refused), a `DataError`, and `WireError` (an answer that cannot be read).
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import random
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, TypeVar
from urllib.parse import urlsplit

import aiohttp
import orjson

from streamrl.atomic import write_whole
from streamrl.config.base import is_loopback
from streamrl.errors import UNKNOWN_NAME, CannotCreate, ConfigError, DataError, Unreachable, WireError

MAX_BODY: Final = 64 << 20
MAX_MESSAGE: Final = 16 << 20  # bytes of the longest event of a stream
_CONNECT_SECONDS: Final = 10.0
_KEEP_ALIVE: Final = 2.0  # less than any server's (uvicorn: 5): a request on a connection that it closes is lost
_ATTEMPTS: Final = 4
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 2.0
_NOT_CARRIED_OUT: Final = frozenset({429, 503})
_REFUSED: Final = frozenset({400, 404, 405, 409, 413, 415, 422})

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Call:
    """One HTTP request to a server; sent again only where it was certainly not carried out, or if `repeatable`."""

    method: Literal["GET", "POST"]
    path: str  # below the server's URL, with its leading slash
    body: Mapping[str, Any] | None = None  # sent as JSON
    query: Mapping[str, str] = field(default_factory=dict)
    repeatable: bool = False  # may be sent again if the server may have got it
    optional: bool = False  # every error answer but 401 counts as an empty one
    pooled: bool = False  # may use an old connection, which the server may be about to close


class Lost(Unreachable):
    """No answer came. `sent`: the request may have arrived. `late`: the time was over, the connection holds."""

    def __init__(self, message: str, hint: str = "", sent: bool = True, late: bool = False) -> None:
        super().__init__(message, hint)
        self.sent = sent
        self.late = late


class BadAnswer(Unreachable):
    """The server answered with an error of its own; `rest`: seconds until it may be asked again (`Retry-After`)."""

    def __init__(self, message: str, hint: str = "", status: int = 500, rest: float | None = None) -> None:
        super().__init__(message, hint)
        self.status = status
        self.rest = rest


class BadRequest(DataError):
    """The server refuses the request itself."""

    def __init__(self, message: str, hint: str = "", status: int = 400) -> None:
        super().__init__(message, hint)
        self.status = status


class HttpClient:
    """A session with one server, in one event loop. `hint` says how to fix a server that does not answer.

    `api_key` is sent as a bearer token and appears in no message and no log; the configuration key `key_option` names
    its file.
    """

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        hint: str = "",
        *,
        key_option: str = "engine.api_key_file",
        max_body: int = MAX_BODY,
    ) -> None:
        self.url = url.rstrip("/")
        self._max_body, self._key, self._hint, self._key_option = max_body, api_key, hint, key_option
        self.headers: dict[str, str] = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS),
            headers=self.headers,
            trust_env=behind_proxy(url),
        )

    async def close(self) -> None:
        await self._session.close()

    async def call(self, call: Call, seconds: float, *, retry: bool = True) -> Any:
        """Send a call and return its answer: parsed JSON, else text, None for an error that is allowed.

        Sent again if it certainly was not carried out (connection refused, 503, 429), or if that is unknown and the
        call is repeatable. `seconds` include repeats and pauses. `Lost`, `BadAnswer`, `BadRequest`, `WireError`.
        """

        async def attempt() -> Any:
            # vLLM resets a connection on which a control failed, maybe just as the next one goes out on it
            response = await self._open(call, fresh=call.method == "POST" and not call.pooled)
            try:
                body = await self._read(response)
            except (aiohttp.ClientError, OSError) as error:
                response.close()
                raise self._lost(call, error) from error
            self._check(call, response, body)
            return self._parsed(response, body) if response.status < 300 else None

        return await self._within(call, seconds, self._repeated(call, seconds, attempt) if retry else attempt())

    async def stream(self, call: Call, seconds: float) -> AsyncGenerator[Any, None]:
        """Send a call and yield the events of its answer, parsed; a plain JSON answer is one event.

        Its reader sets a deadline; `seconds` limit how long the server may answer 503 or refuse connections. It is not
        sent again once the server may have it. Closing the generator closes the connection, which aborts at the server.
        """

        async def attempt() -> aiohttp.ClientResponse:
            response = await self._open(call)
            if response.status != 200:
                self._check(call, response, await self._within(call, _CONNECT_SECONDS, self._read(response)))
            return response

        response = await self._repeated(call, seconds, attempt)
        try:
            if response.content_type != "text/event-stream":
                yield self._parsed(response, await self._read(response))
                return
            events = Events()
            async for data in response.content.iter_any():
                for message in events.feed(data):
                    if message != b"[DONE]":
                        yield self._json(message)
        except (aiohttp.ClientError, OSError) as error:
            raise self._lost(call, error) from error
        finally:
            response.close()

    async def _repeated(self, call: Call, seconds: float, attempt: Callable[[], Awaitable[_T]]) -> _T:
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        tries = 0
        while True:
            try:
                return await attempt()
            except Unreachable as error:
                tries += 1
                pause = random.uniform(0, min(_LONGEST_PAUSE, _FIRST_PAUSE * 2**tries))  # noqa: S311
                if not _may_repeat(call, error, tries) or loop.time() + pause >= end:
                    raise
            await asyncio.sleep(pause)

    async def _within(self, call: Call, seconds: float, work: Awaitable[_T]) -> _T:
        try:
            async with asyncio.timeout(seconds):
                return await work
        except TimeoutError as error:
            raise Lost(f"{self._name(call)}: no answer within {seconds:g} s", self._hint, late=True) from error

    async def _open(self, call: Call, *, fresh: bool = False) -> aiohttp.ClientResponse:
        """Send a call once, `fresh` on a connection of its own; return at its headers."""
        body = None if call.body is None else orjson.dumps(call.body)
        headers = {} if body is None else {"Content-Type": "application/json"}
        if fresh:
            headers["Connection"] = "close"
        asked: dict[str, Any] = {"params": dict(call.query), "data": body, "headers": headers}
        try:
            return await self._session.request(call.method, self.url + call.path, **asked, allow_redirects=False)
        except (aiohttp.ClientError, OSError) as error:
            raise self._lost(call, error) from error

    async def _read(self, response: aiohttp.ClientResponse) -> bytes:
        body = bytearray()
        async for data in response.content.iter_any():
            body += data
            if len(body) > self._max_body:
                response.close()
                raise WireError(f"{response.url.origin()}: an answer of more than {self._max_body} bytes")
        return bytes(body)

    def _check(self, call: Call, response: aiohttp.ClientResponse, body: bytes) -> None:
        status = response.status
        if 200 <= status < 300 or (call.optional and status != 401):
            return
        response.close()
        said = f"{self._name(call)} answered {status}: {explanation(body, self._key)}"
        if status in _REFUSED:
            raise BadRequest(said, status=status)
        hint = f"set {self._key_option} to the key of the server" if status == 401 else self._hint
        raise BadAnswer(said, hint, status, _rest(response.headers.get("Retry-After")))

    def _parsed(self, response: aiohttp.ClientResponse, body: bytes) -> Any:
        return self._json(body) if "json" in response.content_type else body.decode(errors="replace")

    def _json(self, data: bytes) -> Any:
        try:
            return orjson.loads(data)
        except orjson.JSONDecodeError as error:
            said = without(data[:1000].decode(errors="replace"), self._key)[:100]
            raise WireError(f"{self.url} did not answer with JSON ({error}): {said!r}") from error

    def _lost(self, call: Call, error: Exception) -> Lost:
        sent = not isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError)
        hint = UNKNOWN_NAME if isinstance(error, aiohttp.ClientConnectorDNSError) else self._hint
        return Lost(f"{self._name(call)}: {_reason(error)}", hint, sent)

    def _name(self, call: Call) -> str:
        return f"{call.method} {self.url}{call.path}"


def behind_proxy(url: str) -> bool:
    """Whether the proxies of the environment hold for a server: it is on another host."""
    return not is_loopback(urlsplit(url).hostname or "")


class Events:
    """Cuts a stream of bytes into the data of its server-sent events; other fields are ignored."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []
        self._size = 0

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the data of each complete event; WireError for one of more than `MAX_MESSAGE` bytes."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            text = line.removesuffix(b"\r")
            if text.startswith(b"data:"):
                self._data.append(text[5:].removeprefix(b" "))
                self._size += len(text)
            elif not text and self._data:
                message, self._data, self._size = b"\n".join(self._data), [], 0
                yield message
        if self._size + len(self._rest) > MAX_MESSAGE:
            raise WireError(f"an event of more than {MAX_MESSAGE} bytes")


def _may_repeat(call: Call, error: Unreachable, tries: int) -> bool:
    if isinstance(error, BadAnswer):
        return error.status in _NOT_CARRIED_OUT
    return isinstance(error, Lost) and tries < _ATTEMPTS and (call.repeatable or not error.sent)


def read_key(name: str, path: Path | None) -> str | None:
    """The key in the file that configuration key `name` names; `ConfigError`: it is not one ASCII word."""
    if path is None:
        return None
    try:
        words = path.read_bytes().decode("latin-1").split()
    except OSError as error:
        raise ConfigError(f"{name} {path} cannot be read: {error.strerror}") from error
    if len(words) != 1 or not (words[0].isascii() and words[0].isprintable()):
        raise ConfigError(f"{name} {path} is not a key", "the file must hold the key alone, one word in ASCII")
    return words[0]


def own_key(name: str, given: Path | None, path: Path) -> str:
    """The key of a server of ours: the file that `name` names, else `path`, which is made for its owner alone."""
    if given is None and not path.exists():
        draft = path.with_name(f"{path.name}.{secrets.token_hex(8)}.draft")
        try:
            write_whole(draft, f"{secrets.token_urlsafe(32)}\n".encode(), private=True)
            with contextlib.suppress(FileExistsError):  # another process of the run was first
                path.hardlink_to(draft)
        except OSError as error:
            raise CannotCreate(f"the key of {name} cannot be written to {path}: {error.strerror}") from error
        finally:
            with contextlib.suppress(OSError):
                draft.unlink()
    elif given is None:
        with contextlib.suppress(OSError):  # of another user, who decides who may read it
            path.chmod(path.stat().st_mode & 0o700)
    key = read_key(name, given or path)
    assert key is not None
    return key


def without(text: str, secret: str | None) -> str:
    """Text of a server for people, with `[key]` in place of the key that it was sent."""
    return text.replace(secret, "[key]") if secret else text


def explanation(body: bytes, secret: str | None = None) -> str:
    """What an error answer says, in one short line, without `secret`."""
    try:
        said: Any = orjson.loads(body)
    except orjson.JSONDecodeError:
        said = body.decode(errors="replace")
    for key in ("error", "message", "detail"):
        if isinstance(said, dict) and key in said:
            said = said[key]
    return without(" ".join(str(said).split()), secret)[:300] or "nothing"


def _rest(said: str | None) -> float | None:
    """Seconds of a `Retry-After`; None for none and for a date, which needs the server's clock."""
    try:
        seconds = float(said or "")
    except ValueError:
        return None
    return seconds if 0 <= seconds < math.inf else None


def _reason(error: BaseException) -> str:
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return error.os_error.strerror or str(error)  # its number is none of the operating system
    if isinstance(error, aiohttp.ClientConnectorError) and error.os_error.errno:
        return os.strerror(error.os_error.errno)
    return str(error) or type(error).__name__

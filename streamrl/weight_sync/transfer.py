"""One file on its way from a server onto this host, hashed as it comes, in a thread.

Not in the event loop: the loop of a replica has tokens to receive, and a socket read into one buffer again and again
costs a third of what an event loop's streams cost.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import xxhash

from streamrl.errors import CannotCreate, WeightsError
from streamrl.weight_sync.manifest import Shard

_CONNECT_SECONDS: Final = 5.0
_BUFFER_BYTES: Final = 1 << 20
_NO_LONGER_THERE: Final = (404, 410)
_REFUSED: Final = (401, 403)


class Gone(Exception):
    """This server does not have the version."""


class Busy(Exception):
    """This server has enough to do."""


class Broken(Exception):
    """The transfer ended early, or the answer is not what was asked for; another try may go better."""


class Denied(Exception):
    """This server does not know the token."""


@dataclass
class Part:
    """A file of a version on its way.

    Attributes:
        shard: its entry in the manifest.
        at: bytes that are here, from the first on.
        state: checksum of these.
        origins: servers they came from.
    """

    shard: Shard
    at: int = 0
    state: xxhash.xxh3_128 = field(default_factory=xxhash.xxh3_128)
    origins: set[str] = field(default_factory=set)

    @property
    def whole(self) -> bool:
        """Whether all bytes are here."""
        return self.at >= self.shard.bytes

    @property
    def proven(self) -> bool:
        """Whether all bytes are here, and the right ones."""
        return self.whole and self.state.hexdigest() == self.shard.checksum

    def reset(self) -> None:
        """Begin anew."""
        self.at, self.state, self.origins = 0, xxhash.xxh3_128(), set()


class Transfer:
    """One request for the rest of a file.

    Args:
        url: of the file.
        headers: that bear the token.
        part: moved on with every byte that was written.
        path: file to write into.
        silence: seconds for which the server may say nothing.
    """

    def __init__(self, url: str, headers: Mapping[str, str], part: Part, path: Path, silence: float) -> None:
        self._url, self._headers, self._part, self._path, self._silence = url, headers, part, path, silence
        self._given_up = threading.Event()
        self._socket: socket.socket | None = None

    def give_up(self) -> None:
        """End `run` soon; may be called from any thread, and before `run`."""
        self._given_up.set()
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def run(self) -> None:
        """Fetch; returns when the file is whole, or when it was given up.

        Raises:
            Gone, Busy, Broken, Denied: see there; what came is in the file.
            WeightsError: the file has another size there.
            CannotCreate: it cannot be written, for want of room for example.
        """
        address = urlsplit(self._url)
        kind = http.client.HTTPSConnection if address.scheme == "https" else http.client.HTTPConnection
        connection = kind(address.hostname or "", address.port, timeout=_CONNECT_SECONDS)
        try:
            connection.connect()
            self._socket = connection.sock
            if self._given_up.is_set():
                return
            connection.sock.settimeout(self._silence)
            span = f"bytes={self._part.at}-{self._part.shard.bytes - 1}"
            wanted = {**self._headers, "Range": span, "Accept-Encoding": "identity", "Connection": "close"}
            connection.request("GET", address.path, headers=wanted)
            answer = connection.getresponse()
            self._check(answer)
            self._copy(answer)
        except (http.client.HTTPException, OSError) as error:
            if isinstance(error, CannotCreate):
                raise
            raise Broken(str(error) or type(error).__name__) from error
        finally:
            connection.close()

    def _check(self, answer: http.client.HTTPResponse) -> None:
        """Refuse any answer but the bytes that were asked for."""
        part, status = self._part, answer.status
        found = answer.headers.get("Content-Range", "")
        if status in _NO_LONGER_THERE:
            raise Gone
        if status in _REFUSED:
            raise Denied
        if status == 503:
            raise Busy
        if status == 416 or (status == 206 and not found.endswith(f"/{part.shard.bytes}")):
            raise WeightsError(f"{self._url} does not have the {part.shard.bytes} bytes of its manifest ({found})")
        whole = status == 200 and part.at == 0
        rest = status == 206 and found.startswith(f"bytes {part.at}-{part.shard.bytes - 1}/")
        if not (whole or rest) or answer.length != part.shard.bytes - part.at:
            raise Broken(f"answered {status} {found}, {answer.length} bytes")

    def _copy(self, answer: http.client.HTTPResponse) -> None:
        part = self._part
        buffer = memoryview(bytearray(min(_BUFFER_BYTES, part.shard.bytes - part.at)))
        with self._path.open("r+b", buffering=0) as file:
            while part.at < part.shard.bytes:
                # One read of the socket at a time: what came before the connection broke is kept.
                count = answer.fp.readinto1(buffer[: part.shard.bytes - part.at])
                if self._given_up.is_set():
                    return
                if not count:
                    raise Broken("the answer ended early")
                self._write(file.fileno(), buffer[:count])

    def _write(self, descriptor: int, data: memoryview) -> None:
        while data.nbytes:
            try:
                written = os.pwrite(descriptor, data, self._part.at)
            except OSError as error:
                hint = "give this host a larger /dev/shm (container: --shm-size)"
                raise CannotCreate(f"cannot write {self._path}: {error}", hint) from error
            self._part.state.update(data[:written])  # while it is in the processor's cache
            self._part.at += written
            data = data[written:]

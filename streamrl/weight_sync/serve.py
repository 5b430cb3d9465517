"""The server of the http transport: the files of versions below one folder, for clients with the token of the run.

```
GET, HEAD /v-EPOCH-VERSION/manifest.json          200 | 404
GET, HEAD /v-EPOCH-VERSION/FILE  [Range: bytes=]  200 | 206 | 404 | 416 | 503 + Retry-After (enough transfers run)
```
Every answer says in `X-Streamrl-Busy` how many transfers run. Files go out by sendfile. The token travels in clear
text, so networks that are not private need a tunnel or a proxy with TLS in front.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import os
import re
import stat
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter

from streamrl import listening
from streamrl.weight_sync.manifest import MANIFEST_FILE, parse_folder

logger = logging.getLogger(__name__)
BUSY_HEADER: Final = "X-Streamrl-Busy"
DEFAULT_TRANSFERS: Final = 16
"""Transfers at the same time. Later clients look for a relay, so many replicas form a tree by themselves."""
HELD: Final = 2
"""Versions held at most: so many times the weights that memory may hold in addition."""
IDLE_SECONDS: Final = 30.0
"""A held version without requests for this time is let go."""
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_CHUNK_BYTES: Final = 4 << 20


@dataclass
class Hold:
    used: float
    transfers: int = 0
    files: dict[str, int] = field(default_factory=dict)


class HeldVersions:
    """Versions below `root` that a replica is pulling stay readable after the publisher has removed them.

    Otherwise a replica whose pull takes longer than two steps of the learner would find each version gone and get none.
    Holding is an open descriptor for each file, so a process that dies leaves nothing behind. The clock is an argument.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._holds: dict[str, Hold] = {}

    def begin(self, folder: str, now: float) -> Hold | None:
        """Hold a version because a transfer of one of its files begins; None when there is no room for one more."""
        self.expire(now)
        hold = self._holds.get(folder)
        if hold is None and len(self._holds) < HELD:
            hold = self._holds[folder] = Hold(now)
            try:
                for entry in os.scandir(self._root / folder):
                    if entry.is_file(follow_symlinks=False):
                        hold.files[entry.name] = os.open(entry.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            except OSError as error:  # it is being removed, or this process may not open so many files
                logger.debug("version not held", extra={"folder": folder, "error": str(error)})
                self._drop(folder)
                return None
        if hold is not None:
            hold.used, hold.transfers = now, hold.transfers + 1
        return hold

    def end(self, hold: Hold | None, now: float) -> None:
        if hold is not None:
            hold.used, hold.transfers = now, hold.transfers - 1

    def find(self, folder: str, name: str, now: float) -> Path | None:
        """A path by which a file of a held version can be opened; it extends the hold.

        The path names a descriptor, whose number may mean any other file once the version is let go.
        """
        hold = self._holds.get(folder)
        if hold is None or name not in hold.files:
            return None
        hold.used = now
        return Path(f"/proc/self/fd/{hold.files[name]}")

    def expire(self, now: float) -> None:
        for folder, hold in list(self._holds.items()):
            if not hold.transfers and now - hold.used >= IDLE_SECONDS:
                self._drop(folder)

    def close(self) -> None:
        for folder in list(self._holds):
            self._drop(folder)

    def _drop(self, folder: str) -> None:
        for descriptor in self._holds.pop(folder).files.values():
            os.close(descriptor)


class ShardServer:
    """Serves the folders of versions below `root` to bearers of `token`.

    `limit` transfers run at the same time, more are answered 503; `transfers` is how many run now.
    """

    def __init__(self, root: Path, token: str, *, limit: int = DEFAULT_TRANSFERS) -> None:
        self._root = root
        self._token = token.encode()
        self._limit = limit
        self._held = HeldVersions(root)
        self.transfers = 0

    def app(self, routes: Sequence[web.RouteDef] = ()) -> web.Application:
        """The application; `routes` are served next to the files, to bearers of the token only."""
        app = web.Application(middlewares=[self._guard])
        app.add_routes([*routes, web.get("/{folder}/{file}", self._file)])
        app.on_response_prepare.append(self._say_busy)
        app.cleanup_ctx.append(self._holding)
        return app

    async def _holding(self, app: web.Application) -> AsyncIterator[None]:
        del app
        expiring = asyncio.create_task(self._expire(), name="held versions")
        yield
        expiring.cancel()
        await asyncio.gather(expiring, return_exceptions=True)
        self._held.close()

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(IDLE_SECONDS / 4)
            self._held.expire(time.monotonic())

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        known = hmac.compare_digest(token.strip().encode(errors="replace"), self._token)
        if scheme.lower() != "bearer" or not known:
            logger.warning("weights asked for without the token", extra={"peer": request.remote})
            raise web.HTTPUnauthorized(headers={"WWW-Authenticate": "Bearer"})
        return await handler(request)

    async def _file(self, request: web.Request) -> web.StreamResponse:
        folder, name = request.match_info["folder"], request.match_info["file"]
        path = self._path(folder, name)
        if name == MANIFEST_FILE or request.method == "HEAD":
            return web.FileResponse(path)
        if self.transfers >= self._limit:
            raise web.HTTPServiceUnavailable(headers={"Retry-After": "1"}, text="busy")
        return _Transfer(self, folder, path)

    @contextlib.contextmanager
    def transfer(self, folder: str) -> Iterator[None]:
        """Count a transfer of a file of this version, and keep the version readable."""
        self.transfers += 1
        hold = self._held.begin(folder, time.monotonic())
        try:
            yield
        finally:
            self._held.end(hold, time.monotonic())
            self.transfers -= 1

    def _path(self, folder: str, name: str) -> Path:
        """The regular file with names that a manifest may have; 404 for anything else."""
        if parse_folder(folder) is None or not _NAME.fullmatch(folder) or not _NAME.fullmatch(name):
            raise web.HTTPNotFound
        held = self._held.find(folder, name, time.monotonic())
        if held is not None:
            return held
        path = self._root / folder / name
        try:
            if not stat.S_ISREG(path.lstat().st_mode):
                raise web.HTTPNotFound
        except OSError as error:
            raise web.HTTPNotFound from error
        return path

    async def _say_busy(self, request: web.Request, response: web.StreamResponse) -> None:
        del request
        response.headers[BUSY_HEADER] = str(self.transfers)


class _Transfer(web.FileResponse):
    def __init__(self, server: ShardServer, folder: str, path: Path) -> None:
        super().__init__(path, chunk_size=_CHUNK_BYTES)
        self._server, self._folder = server, folder

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        with self._server.transfer(self._folder):
            return await super().prepare(request)


def listen(app: web.Application, host: str, port: int) -> AbstractAsyncContextManager[str]:
    hint = "set weights.host to an address of this host, and weights.port to a free port or 0"
    return listening.listen(app, host, port, what="the weights", hint=hint)

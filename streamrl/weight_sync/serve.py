"""The server of the http transport: the files of versions below one folder, for clients with the token of the run.

```
GET, HEAD /v-EPOCH-VERSION/FILE  [Range: bytes=]  200 | 206 | 401 | 404 | 416
```
Files go out by sendfile. The token travels in clear text, so networks that are not private need a tunnel or a proxy
with TLS in front.
"""

from __future__ import annotations

import hmac
import logging
import re
import stat
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Final

from aiohttp import web

from streamrl import listening
from streamrl.weight_sync.manifest import parse_folder

logger = logging.getLogger(__name__)
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_CHUNK_BYTES: Final = 4 << 20


def weights_app(root: Path, token: str) -> web.Application:
    """Serves the folders of versions below `root` to bearers of `token`."""

    @web.middleware
    async def guard(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        scheme, _, found = request.headers.get("Authorization", "").partition(" ")
        known = hmac.compare_digest(found.strip().encode(errors="replace"), token.encode())
        if scheme.lower() != "bearer" or not known:
            logger.warning("weights asked for without the token", extra={"peer": request.remote})
            raise web.HTTPUnauthorized(headers={"WWW-Authenticate": "Bearer"})
        return await handler(request)

    async def file(request: web.Request) -> web.StreamResponse:
        folder, name = request.match_info["folder"], request.match_info["file"]
        if parse_folder(folder) is None or not _NAME.fullmatch(name):
            raise web.HTTPNotFound
        path = root / folder / name
        try:
            if not stat.S_ISREG(path.lstat().st_mode):
                raise web.HTTPNotFound
        except OSError as error:
            raise web.HTTPNotFound from error
        return web.FileResponse(path, chunk_size=_CHUNK_BYTES)

    app = web.Application(middlewares=[guard])
    app.add_routes([web.get("/{folder}/{file}", file)])
    return app


def listen(app: web.Application, host: str, port: int) -> AbstractAsyncContextManager[str]:
    hint = "set weights.host to an address of this host, and weights.port to a free port or 0"
    return listening.listen(app, host, port, what="the weights", hint=hint)

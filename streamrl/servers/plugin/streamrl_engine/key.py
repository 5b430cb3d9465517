"""The key of a vLLM server on every route: vLLM's own check leaves those open that pause it and replace its weights."""

from __future__ import annotations

import os
import secrets
from typing import Any

_OPEN = ("/health", "/metrics", "/ping")


class KeyGuard:
    """ASGI middleware (`--middleware`): each request wants the key in $VLLM_API_KEY as a bearer token."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._wanted = f"Bearer {os.environ['VLLM_API_KEY']}".encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        headers = dict(scope.get("headers") or ())
        given = headers.get(b"authorization", b"")
        guarded = scope["type"] in ("http", "websocket") and scope["path"] not in _OPEN
        if not guarded or secrets.compare_digest(given, self._wanted):
            await self._app(scope, receive, send)
            return
        answer = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 401, "headers": answer})
        await send({"type": "http.response.body", "body": b'{"error": "this server wants its key"}'})

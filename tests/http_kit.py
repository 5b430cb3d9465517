"""A small HTTP server in a thread."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@contextlib.contextmanager
def answering(answer: Callable[[BaseHTTPRequestHandler], tuple[int, bytes]], **headers: str) -> Iterator[str]:
    """Answer every request with the status and the body that `answer` returns for it; yields the URL."""

    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            self.body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            status, body = answer(self)
            self.send_response(status)
            for name, value in {
                "Content-Type": "application/json",
                "Content-Length": str(len(body)),
                **headers,
            }.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        do_GET = do_POST = do_HEAD = _answer  # noqa: N815 (the names that the base class calls)

        def log_message(self, *_: object) -> None:
            """Nothing on stderr."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()

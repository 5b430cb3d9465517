"""A real MCP server with tools that go wrong.

Arguments: `stdio`, or `http` or `deaf` and a port; then a file for its pids.
"""

import asyncio
import os
import signal
import sys
import time

import uvicorn
from mcp.server.mcpserver import Image, MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("crooked", log_level="CRITICAL")
calls = 0


def note():
    """At the start, when `hang` hangs, and when `Deaf` hears the end of a session."""
    with open(sys.argv[3], "a") as file:  # noqa: PTH123
        file.write(f"{os.getpid()}\n")


@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@server.tool(structured_output=False)
def count() -> str:
    """Count the calls of this process."""
    global calls  # noqa: PLW0603
    calls += 1
    return f"{calls} in {os.getpid()}"


@server.tool(structured_output=False)
def secret() -> str:
    """Tell a variable."""
    return f"{os.environ.get('MCP_TEST_SECRET')} {os.environ.get('MCP_TEST_OTHER')}"


@server.tool()
def fall() -> str:
    """Raise."""
    raise ToolError("the floor broke")


@server.tool()
def picture() -> Image:
    """Return an image."""
    return Image(data=b"\x89PNG", format="png")


@server.tool(structured_output=False)
def flood() -> str:
    """Return ten megabytes."""
    return "x" * 10_000_000


@server.tool()
async def hang() -> str:
    """Take a minute."""
    import anyio

    note()
    await anyio.sleep(60)
    return "late"


@server.tool()
def die() -> str:
    """Kill this process."""
    os.kill(os.getpid(), signal.SIGKILL)
    return ""


class Deaf:
    """A server of the protocol with sessions, which hears the end of a session and never answers."""

    def __init__(self, app):
        self.app = app

    async def __call__(self, scope, receive, send):
        if scope.get("method") == "DELETE":
            note()
            await asyncio.sleep(60)
        if (b"mcp-method", b"server/discover") in scope.get("headers", ()):
            await send({"type": "http.response.start", "status": 400})
            await send({"type": "http.response.body"})
        else:
            await self.app(scope, receive, send)


if __name__ == "__main__":
    transport, port = sys.argv[1], int(sys.argv[2])
    note()
    if transport == "never":
        time.sleep(60)
    elif transport == "http":
        server.run("streamable-http", port=port)
    elif transport == "deaf":
        uvicorn.run(Deaf(server.streamable_http_app()), port=port, log_level="error")
    else:
        server.run("stdio")

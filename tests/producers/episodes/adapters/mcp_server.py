"""A real MCP server with tools that go wrong. Arguments: `stdio`, or `http` and a port; then a file for its pids."""

import os
import signal
import sys
import time

from mcp.server.mcpserver import Image, MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("crooked", log_level="CRITICAL")
calls = 0


def note():
    """At the start, and when `hang` hangs."""
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


if __name__ == "__main__":
    transport, port = sys.argv[1], int(sys.argv[2])
    note()
    if transport == "never":
        time.sleep(60)
    elif transport == "http":
        server.run("streamable-http", port=port)
    else:
        server.run("stdio")

"""An MCP server for tests, over standard input and output, or over HTTP in a thread. `python mcp_server.py` runs it."""

import os
import sys
import threading
import time
from contextlib import contextmanager

try:
    from mcp.server.mcpserver import MCPServer
except ImportError:  # mcp 1
    from mcp.server.fastmcp import FastMCP as MCPServer

import anyio
from mcp.types import EmbeddedResource, ImageContent, ResourceLink, TextContent, TextResourceContents

RED_PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4z8AAAAMBAQDJ/pLvAAAAAElFTkSuQmCC"
"""A PNG file in base64."""


def make_server():
    server = MCPServer("tests")
    counts = {"calls": 0}

    @server.tool()
    def add(a: int, b: int = 1) -> str:
        """Add two numbers."""
        return str(a + b)

    @server.tool()
    def count() -> str:
        """Count the calls of this process."""
        counts["calls"] += 1
        return str(counts["calls"])

    @server.tool()
    def fail(message: str) -> str:
        """Raise an error."""
        raise ValueError(message)

    @server.tool()
    async def wait(seconds: float) -> str:
        """Wait."""
        await anyio.sleep(seconds)
        return "waited"

    @server.tool()
    def echo(text: str) -> str:
        """Return a text."""
        return text

    @server.tool(structured_output=False)
    def blocks() -> list:
        """Return several blocks."""
        resource = TextResourceContents(uri="file:///a", text=" of a file")
        return [
            TextContent(type="text", text="text"),
            EmbeddedResource(type="resource", resource=resource),
            ResourceLink(type="resource_link", uri="file:///b", name=" b"),
        ]

    @server.tool(structured_output=False)
    def image() -> list:
        """Return an image."""
        media_type = {"mimeType": "image/png"}
        return [TextContent(type="text", text="see"), ImageContent(type="image", data=RED_PIXEL, **media_type)]

    @server.tool(name="exit-now")
    def exit_now() -> str:
        """End the process."""
        print("the last words", file=sys.stderr, flush=True)
        os._exit(3)

    return server


@contextmanager
def serving(port=0):
    """The URL of a server in a thread."""
    import uvicorn

    config = uvicorn.Config(make_server().streamable_http_app(), port=port, log_config=None, lifespan="on")
    http = uvicorn.Server(config)
    thread = threading.Thread(target=http.run, daemon=True)
    thread.start()
    while not http.started:
        assert thread.is_alive()
        time.sleep(0.01)
    port = http.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        http.should_exit = True
        thread.join(30)


if __name__ == "__main__":
    make_server().run("stdio")

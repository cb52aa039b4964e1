"""Tools of MCP servers (Model Context Protocol, modelcontextprotocol.io), through the library `mcp`."""

from __future__ import annotations

import asyncio
import json
import math
import shlex
import subprocess
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, TextIO

from pl_grouprl.episodes.tools import ListedEnvironment, Tool, ToolServer, tool_schema
from pl_grouprl.utilities.optional import MCP_AVAILABLE, require
from pl_grouprl.utilities.options import check_options
from pl_grouprl.utilities.processes import BackgroundLoop, keep_task
from pl_grouprl.utilities.text import describe_error

if TYPE_CHECKING:
    from anyio import CancelScope

_LOST = {-32000, -32600, 32600}
"""JSON-RPC codes of a closed connection, and of a session that the server does not know (any longer)."""

_MAX_PAGES = 1000


class MCPTools(ToolServer):
    """The tools of an MCP server, which is started by a command or is reached at a URL.

    Passed in `tools`, all episodes share one session. Passed as `environment_factory`, each episode has a separate
    session, for servers with state; it opens while the model writes the first turn. A session whose server is gone is
    opened again if it is shared; otherwise all later calls of its episode fail.

    The model reads the texts and images of a result. A result that the server marks as an error is a failed call.

    Args:
        command: Starts a server that speaks over its standard input and output, as a list or a line of a shell. Logs
            and model cards show it: pass keys by `env`.
        url: Address of a server that speaks over HTTP ("streamable HTTP"), such as `http://localhost:8000/mcp`.
        include: Names of the tools to use; all if None.
        env: Environment variables of the command; of the others, it inherits only a few such as PATH and HOME.
        cwd: Working directory of the command.
        headers: HTTP headers, such as `Authorization`.
        start_timeout: Maximum seconds until the server, once started, has named its tools, and until a session is open.

    Raises:
        ModuleNotFoundError: If the library is missing.
        ValueError: If there is not exactly one of `command` and `url`.
    """

    def __init__(
        self,
        command: str | Sequence[str] | None = None,
        url: str | None = None,
        *,
        include: Sequence[str] | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        headers: Mapping[str, str] | None = None,
        start_timeout: float = 60.0,
    ) -> None:
        require(MCP_AVAILABLE, "MCPTools", "mcp")
        one = (command is None) != (url is None)
        check_options({"MCPTools.url": (url, one, "set if command is not, and otherwise None")})
        self.command = shlex.split(command) if isinstance(command, str) else command
        self.url, self.include, self.start_timeout = url, include, start_timeout
        self.env, self.cwd, self.headers = env, cwd, headers

    @cached_property
    def schemas(self) -> list[dict[str, Any]]:
        """JSON schemas of the tools, in the server's order; asked in a session that is closed again.

        Raises:
            ValueError: If the server cannot be reached, or lacks a tool of `include`.
        """
        with tempfile.TemporaryFile("w+") as log:
            loop = BackgroundLoop("mcp-list")
            try:
                listed = loop.submit("MCPTools", asyncio.wait_for(self._list(log), self.start_timeout)).result()
            except Exception as error:
                log.seek(0)
                where = self.url or shlex.join(self.command or ())
                reason = describe_error(_cause(error)) or type(error).__name__
                raise ValueError(f"MCPTools: {where!r} does not serve tools ({reason}). {log.read()[-500:]}") from error
            finally:
                loop.close()
        names = [tool["name"] for tool in listed]
        if missing := sorted({*(self.include or ())} - {*names}):
            raise ValueError(f"MCPTools.include has {missing}, which the server does not have; it has {names}.")
        return [
            tool_schema(tool["name"], tool.get("description") or "", tool["inputSchema"])
            for tool in listed
            if self.include is None or tool["name"] in self.include
        ]

    async def _list(self, log: TextIO) -> list[dict[str, Any]]:
        listed: list[dict[str, Any]] = []
        cursor: dict[str, Any] = {}
        async with self.connect(log) as client:
            for _ in range(_MAX_PAGES):
                page = _plain(await client.list_tools(**cursor))
                listed += page["tools"]
                if page.get("nextCursor") is None:
                    return listed
                from mcp.types import PaginatedRequestParams

                cursor = {"params": PaginatedRequestParams(cursor=page["nextCursor"])}
        raise ValueError(f"its list of tools has more than {_MAX_PAGES} pages")

    @asynccontextmanager
    async def connect(self, log: TextIO | None = None) -> AsyncIterator[Any]:
        """Open a session, an `mcp.ClientSession`. It must be closed by the task that opened it.

        Args:
            log: Where a command's standard error goes; discarded if None.
        """
        from mcp import ClientSession, StdioServerParameters, stdio_client
        from mcp.client.streamable_http import create_mcp_http_client, streamable_http_client

        async with AsyncExitStack() as stack:
            if self.url is None:
                assert self.command is not None
                name, *arguments = self.command
                env = None if self.env is None else dict(self.env)
                parameters = StdioServerParameters(command=name, args=arguments, env=env, cwd=self.cwd)
                errors: Any = log or subprocess.DEVNULL
                transport: Any = stdio_client(parameters, errlog=errors)
            else:
                headers = None if self.headers is None else dict(self.headers)
                client = await stack.enter_async_context(create_mcp_http_client(headers=headers))
                transport = streamable_http_client(self.url, http_client=client)
            read, write, *_ = await stack.enter_async_context(transport)
            session = await stack.enter_async_context(ClientSession(read, write))
            await session.initialize()
            yield session

    def tools(self) -> list[Tool]:
        """Describe the tools; they share one session."""
        session = MCPSession(self, reopens=True)
        return [
            Tool(name, partial(session.call, name), True, schema)
            for schema in self.schemas
            for name in [schema["function"]["name"]]
        ]

    def __call__(self) -> MCPEnvironment:
        """Make an environment with its own session."""
        return MCPEnvironment(self)


class MCPEnvironment(ListedEnvironment):
    """An episode's separate session with an MCP server, without a reward; `MCPTools` makes it."""

    def __init__(self, server: MCPTools) -> None:
        self._server = server
        self._session = MCPSession(server)

    async def reset(self, **row: Any) -> None:
        """Close the session and begin to open another, without waiting for either."""
        self._session.close()
        self._session = MCPSession(self._server)
        self._session.open()

    def list_tools(self) -> list[Tool]:
        """The tools of the server."""
        return [Tool(schema["function"]["name"], None, True, schema) for schema in self._server.schemas]

    async def call_tool(self, name: str, /, **arguments: Any) -> Any:
        """Call a tool of the server."""
        return await self._session.call(name, **arguments)


class MCPSession:
    """A session, opened by the first call at the latest.

    A separate task keeps it open, because anyio must close it in the task that opened it.

    Args:
        server: The server.
        reopens: Whether a call opens another session if the server has gone, or the event loop is another one.
    """

    def __init__(self, server: MCPTools, *, reopens: bool = False) -> None:
        self._server, self._reopens = server, reopens
        self._is_lost = False
        self._keeper: asyncio.Task[None] | None = None
        self._scope: CancelScope | None = None
        self._client: asyncio.Future[Any] | None = None

    def __reduce__(self) -> Any:
        return partial(MCPSession, reopens=self._reopens), (self._server,)  # a copy starts closed

    async def call(self, name: str, /, **arguments: Any) -> Any:
        """Call a tool.

        Returns:
            Blocks of text and images, and the types of other blocks.

        Raises:
            ConnectionError: If the server is gone, or was in an earlier call of a session that does not reopen.
            RuntimeError: The error that the tool or the server reports.
        """
        opening = self.open()
        client = await asyncio.shield(opening)
        try:
            result = _plain(await client.call_tool(name, arguments))
        except Exception as error:
            # Without a code it is no answer of the server: the connection broke, unless the library rejects the call.
            code = getattr(getattr(error, "error", None), "code", None)
            is_lost = not isinstance(error, RuntimeError | ValueError | TypeError) if code is None else code in _LOST
            if not is_lost:
                raise RuntimeError(describe_error(error)) from error
            if self._client is opening:  # a later call may have opened another
                self.close()
            raise ConnectionError(f"The MCP server is gone: {describe_error(error)}") from error
        blocks = [_block(block) for block in result["content"]]
        if not blocks and result.get("structuredContent") is not None:
            blocks = [{"type": "text", "text": json.dumps(result["structuredContent"])}]
        if result.get("isError"):
            raise RuntimeError("".join(block.get("text", "") for block in blocks))
        return blocks

    def open(self) -> asyncio.Future[Any]:
        """Begin to open it, unless it is open, on the running event loop.

        Returns:
            The library's session.

        Raises:
            ConnectionError: If it was lost, and does not reopen.
        """
        loop = asyncio.get_running_loop()
        is_lost = self._is_lost or (self._keeper is not None and self._keeper.done())
        if is_lost and not self._reopens:
            raise ConnectionError("The MCP session of this episode was lost.")
        if is_lost or self._keeper is None or self._keeper.get_loop() is not loop:
            from anyio import CancelScope

            self._client, self._scope, self._is_lost = loop.create_future(), CancelScope(), False
            self._keeper = keep_task(_keep(self._server, self._client, self._scope), self._scope.cancel)
        assert self._client is not None
        return self._client

    def close(self) -> None:
        """Let the session end; its task closes it."""
        self._is_lost = True
        if self._keeper is not None and self._scope is not None:
            with suppress(RuntimeError):  # its loop is closed, which has ended it
                self._keeper.get_loop().call_soon_threadsafe(self._scope.cancel)

    def __del__(self) -> None:
        self.close()


async def _keep(server: MCPTools, client: asyncio.Future[Any], scope: CancelScope) -> None:
    """Open a session, and keep it until the scope is cancelled."""
    from anyio import current_time, sleep_forever

    reason = "The MCP session was closed."
    scope.deadline = current_time() + server.start_timeout
    try:
        with scope:
            async with server.connect() as opened:
                scope.deadline = math.inf
                client.set_result(opened)
                await sleep_forever()
        if current_time() >= scope.deadline:
            reason = f"The MCP server cannot be reached: no answer in {server.start_timeout:g} seconds."
    except Exception as error:
        reason = f"The MCP server cannot be reached: {describe_error(_cause(error))}"
    finally:
        if not client.done():
            client.set_exception(ConnectionError(reason))
            client.exception()  # retrieved, even if nobody waits for it any longer


def _cause(error: BaseException) -> BaseException:
    """The first error in groups of errors, such as anyio raises."""
    while nested := getattr(error, "exceptions", None):
        error = nested[0]
    return error


def _plain(result: Any) -> dict[str, Any]:
    """A result with the names of the protocol; the attributes have other names in `mcp` 1 and 2."""
    dumped: dict[str, Any] = result.model_dump(by_alias=True, mode="json")
    return dumped


def _block(block: Mapping[str, Any]) -> dict[str, Any]:
    """A block of a result as a tool of this package returns it."""
    if block["type"] == "resource":
        resource = block["resource"]
        return {"type": "text", "text": resource.get("text") or f"{resource['uri']} (binary)"}
    if block["type"] == "resource_link":
        return {"type": "text", "text": block["uri"]}
    return {key: block[key] for key in ("type", "text", "data") if key in block}

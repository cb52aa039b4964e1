"""Environments of an OpenEnv server in a thread, by the library `openenv`, and the same by a client without it."""

import sys
import threading
import time
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace

ACTION = {
    "title": "Add",
    "type": "object",
    "description": "Add a number.",
    "additionalProperties": False,
    "required": ["number"],
    "properties": {
        "metadata": {"type": "object"},
        "number": {"type": "integer", "description": "What to add", "title": "Number"},
    },
}
MCP_ACTION = {"properties": {"type": {"const": "call_tool"}, "tool_name": {}, "arguments": {}}}
ECHO = {
    "name": "echo",
    "description": "Return a text.",
    "input_schema": {"properties": {"text": {"type": "string"}}, "required": ["text"], "type": "object"},
}


class Adding:
    """Adds numbers until they are 10; the seed is the first one. Adding 0 has no reward."""

    def start(self, seed=None):
        self.total = seed or 0
        return {"text": f"The sum is {self.total}.", "left": 10 - self.total}

    def add(self, number):
        self.total += number
        reward = None if number == 0 else number / 10
        return {"text": f"Now {self.total}.", "left": 10 - self.total or None}, reward, self.total >= 10


def fake_library(environments):
    """Stands for `openenv.core`; `environments` gets the kind of environment of each address."""

    class GenericEnvClient:
        def __init__(self, base_url, message_timeout_s, headers):
            self.kind, self.environment = environments[base_url], Adding()

        def sync(self):
            return self

        def close(self):
            pass

        def reset(self, **columns):
            found = {"metadata": {}} if self.kind == "mcp" else self.environment.start(**columns)
            return SimpleNamespace(observation=found, reward=0.0, done=False)

        def step(self, action):
            if self.kind == "adding":
                if set(action) != {"number"}:
                    raise RuntimeError("Server error: Invalid message (code: VALIDATION_ERROR)")
                if action["number"] < 0:
                    raise RuntimeError("Server error: negative (code: EXECUTION_ERROR)")
                observation, reward, done = self.environment.add(**action)
                return SimpleNamespace(observation=observation, reward=reward, done=done)
            observation = {"metadata": {}, "tools": [ECHO]}
            if action["type"] == "call_tool":
                text = action["arguments"].get("text")
                error = None if text is not None else {"message": "text\n  Missing required argument"}
                result = {"content": [{"type": "text", "text": text}], "is_error": False}
                observation = {"tool_name": "echo", "result": None if error else result, "error": error}
            return SimpleNamespace(observation=observation, reward=None, done=False)

    module = ModuleType("openenv.core")
    module.GenericEnvClient = GenericEnvClient
    return {"openenv": ModuleType("openenv"), "openenv.core": module}


def fake_get(environments):
    """Stands for `httpx2.get`."""

    def get(address, headers, timeout):
        action = {"adding": ACTION, "mcp": MCP_ACTION}[environments[address.removesuffix("/schema")]]
        reply = SimpleNamespace(json=lambda: {"action": action})
        reply.raise_for_status = lambda: reply
        return reply

    return get


@contextmanager
def serving(kind):
    """The URL of a server of the library."""
    import uvicorn
    from fastmcp import FastMCP
    from openenv.core.env_server.http_server import create_app
    from openenv.core.env_server.interfaces import Environment
    from openenv.core.env_server.mcp_environment import MCPEnvironment
    from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
    from openenv.core.env_server.types import Action, Observation, State
    from pydantic import Field

    class Add(Action):
        """Add a number."""

        number: int = Field(description="What to add")

    class Sum(Observation):
        text: str
        left: int | None

    class AddingEnvironment(Environment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def reset(self, seed=None, episode_id=None, **kwargs):
            self.adding = Adding()
            return Sum(**self.adding.start(seed), reward=0.0)

        def step(self, action, timeout_s=None, **kwargs):
            if action.number < 0:
                raise ValueError("negative")
            observation, reward, done = self.adding.add(action.number)
            return Sum(**observation, reward=reward, done=done)

        @property
        def state(self):
            return State()

    class EchoEnvironment(MCPEnvironment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def __init__(self):
            server = FastMCP("echo")

            @server.tool
            def echo(text: str) -> str:
                """Return a text."""
                return text

            super().__init__(server)

        def reset(self, seed=None, episode_id=None, **kwargs):
            return Observation(reward=0.0)

        def _step_impl(self, action, timeout_s=None, **kwargs):
            return Observation()

        @property
        def state(self):
            return State()

    made = {"adding": (AddingEnvironment, Add, Sum), "mcp": (EchoEnvironment, CallToolAction, CallToolObservation)}
    app = create_app(*made[kind], env_name=kind, max_concurrent_envs=8)
    http = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None))
    thread = threading.Thread(target=http.run, daemon=True)
    thread.start()
    while not http.started:
        assert thread.is_alive()
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{http.servers[0].sockets[0].getsockname()[1]}"
    finally:
        http.should_exit = True
        thread.join(30)


if __name__ == "__main__":
    with serving(sys.argv[1]) as url:
        print(url, flush=True)
        sys.stdin.read()

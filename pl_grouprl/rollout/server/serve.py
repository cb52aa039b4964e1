"""Runs vLLM and the web server in front of it."""

from __future__ import annotations

import argparse
import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

from pl_grouprl.rollout.server.app import leftovers, make_app
from pl_grouprl.rollout.server.connections import MAX_HEADER_BYTES, LimitedProtocol
from pl_grouprl.rollout.server.reaper import start_reaper
from pl_grouprl.rollout.server.sampler import Sampler

_GRACE = 5
"""Seconds for open connections to finish when the server stops."""


def run(options: argparse.Namespace) -> int:
    """Start the engine, serve, stop the engine.

    Returns:
        The exit code: 0, or 1 if the engine died.
    """
    start_reaper(leftovers())
    return asyncio.run(_serve(options))


async def _serve(options: argparse.Namespace) -> int:
    from vllm.v1.engine.async_llm import AsyncLLM

    engine = AsyncLLM.from_engine_args(engine_arguments(options))
    try:
        sampler = Sampler(engine, transfer=options.transfer)
        app = make_app(sampler, token=options.token, max_bucket_bytes=options.max_bucket_mib << 20)
        server = make_server(app, options.host, options.port)
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, _stop, server)
        watch = asyncio.create_task(_stop_with_engine(engine, server))
        await server.serve()
        watch.cancel()
        return 1 if engine.errored else 0
    finally:
        engine.shutdown()


def make_server(app: Any, host: str, port: int) -> uvicorn.Server:
    """Create the web server: HTTP with limits, no WebSockets."""
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        http=LimitedProtocol,
        ws="none",
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        access_log=False,
        log_level="info",
        server_header=False,
        timeout_graceful_shutdown=_GRACE,
    )
    return _Server(config)


class _Server(uvicorn.Server):
    """Leaves signals to `_serve`: uvicorn would raise them again before vLLM has shut down."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield


def _stop(server: uvicorn.Server) -> None:
    server.should_exit = True


async def _stop_with_engine(engine: Any, server: uvicorn.Server) -> None:
    """Stop the server if its engine dies, so a supervisor may restart it."""
    while not engine.errored:
        await asyncio.sleep(1)
    _stop(server)


def engine_arguments(options: argparse.Namespace) -> Any:
    """Arguments for vLLM.

    Args:
        options: Options of the command line.

    Raises:
        ValueError: If vLLM does not have one.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs

    from pl_grouprl.rollout.vllm.arguments import common_arguments

    requested = {
        "gpu_memory_utilization": options.gpu_memory_utilization,
        "max_model_len": options.max_model_len,
        "max_num_seqs": options.max_num_seqs,
        **dict(options.option),
    }
    common = common_arguments(transfer="nccl" if options.transfer == "nccl" else "pl_grouprl")
    twice = common.keys() & requested.keys()
    if twice:
        raise ValueError(f"--option sets {min(twice)}, which the server decides for this device; drop it.")
    try:
        return AsyncEngineArgs(
            model=options.model,
            dtype=options.dtype,
            tensor_parallel_size=options.tensor_parallel_size,
            enforce_eager=options.enforce_eager,
            seed=options.seed,
            load_format=options.load_format,
            **common,
            **{name: value for name, value in requested.items() if value is not None},
        )
    except TypeError as error:
        raise ValueError(f"vLLM does not know an --option: {error}") from error

"""The routes of a sampling server. Bodies are JSON, or safetensors for weights sent by HTTP; nothing is unpickled."""

from __future__ import annotations

import errno
import json
import secrets
import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated, Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import ClientDisconnect

from pl_grouprl.rollout.server.auth import TokenAuth
from pl_grouprl.rollout.server.bodies import BodyLimit
from pl_grouprl.rollout.server.protocol import MAX_JSON
from pl_grouprl.rollout.server.sampler import PromptRequest, RefusalError, Sampler
from pl_grouprl.types import SamplingConfig

_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 (folders in it have unique names)
_PREFIX = f"pl-grouprl-{secrets.token_hex(8)}-"
"""Prefix of this process's folders for buckets."""

_SPARE = 64 << 20
"""Bytes to leave free in shared memory."""

Model = TypeVar("Model", bound=BaseModel)
Token = Annotated[int, Field(ge=0, lt=2**31)]
Id = Annotated[str, Field(min_length=1, max_length=64)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _Prompt(_Strict):
    prompt: list[Token]
    seeds: list[Annotated[int, Field(ge=0, lt=2**63)]]


class _Sampling(_Strict):
    max_new_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    stop: list[str]
    stop_token_ids: list[Token]


class _Generate(_Strict):
    version: int
    update: Id
    requests: list[_Prompt]
    sampling: _Sampling
    tokenizer: Id | None = None
    end_ids: list[Token] = []
    never: list[Token] = []


class _Begin(_Strict):
    pass


class _Update(_Strict):
    update: Id


class _End(_Update):
    version: int
    names: list[str]


class _Broadcast(_Update):
    index: Annotated[int, Field(ge=0)]
    names: list[str]
    dtypes: list[str]
    shapes: list[list[Annotated[int, Field(ge=0)]]]


class _Connect(_Strict):
    unique_id: Annotated[str, Field(max_length=256)]
    rank_offset: Annotated[int, Field(ge=1)]
    world_size: Annotated[int, Field(ge=2)]


def make_app(sampler: Sampler, *, token: str | None, max_bucket_bytes: int) -> Any:
    """Make the application.

    Args:
        sampler: The sampler to serve.
        token: Required in every request but `GET /health`; None requires none.
        max_bucket_bytes: Largest body with weights.
    """
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)

    @app.exception_handler(RefusalError)
    async def refuse(request: Request, refusal: RefusalError) -> JSONResponse:
        return JSONResponse(refusal.answer, refusal.status)

    @app.exception_handler(404)
    @app.exception_handler(405)
    async def unknown(request: Request, error: Any) -> JSONResponse:
        return JSONResponse({"error": f"there is no {request.method} {request.url.path[:100]}."}, error.status_code)

    @app.get("/health")
    async def health() -> dict[str, str]:
        sampler.check_alive()
        return {"status": "ok"}

    @app.get("/info")
    async def info() -> dict[str, Any]:
        sampler.check_alive()
        return sampler.info()

    @app.post("/generate")
    async def generate(request: Request) -> StreamingResponse:
        body = await _read(request, _Generate)
        sampling = _sampling(body.sampling)
        requests = [PromptRequest(item.prompt, item.seeds) for item in body.requests]
        sampler.check(body.version, body.update, requests, sampling, body.tokenizer)
        rollouts = sampler.rollouts(
            body.version, body.update, requests, sampling, end_ids=body.end_ids, never=body.never
        )
        return StreamingResponse(_lines(rollouts), media_type="application/x-ndjson")

    _add_weights(app, sampler, max_bucket_bytes)
    return TokenAuth(BodyLimit(app), token)


def _add_weights(app: FastAPI, sampler: Sampler, max_bucket_bytes: int) -> None:
    @app.post("/weights/begin")
    async def begin(request: Request) -> dict[str, str]:
        await _read(request, _Begin)
        return {"update": await sampler.begin()}

    @app.post("/weights/end")
    async def end(request: Request) -> dict[str, Any]:
        body = await _read(request, _End)
        return {"workers": await sampler.end(body.update, body.version, body.names)}

    @app.post("/weights/abort")
    async def abort(request: Request) -> dict[str, Any]:
        await sampler.abort((await _read(request, _Update)).update)
        return {}

    (_add_nccl if sampler.transfer == "nccl" else _add_buckets)(app, sampler, max_bucket_bytes)


def _add_buckets(app: FastAPI, sampler: Sampler, max_bytes: int) -> None:
    @app.post("/weights/bucket")
    async def bucket(request: Request, update: str = "", index: str = "") -> dict[str, Any]:
        if not index.isdecimal() or not update:
            raise RefusalError(422, "the address needs ?update=ID&index=NUMBER.")
        size = _length(request, "application/octet-stream", max_bytes)
        with tempfile.TemporaryDirectory(prefix=_PREFIX, dir=_folder(size)) as folder:  # readable by this user only
            path = Path(folder) / "bucket.safetensors"
            await _store(request, path, size)
            _check_safetensors(path)
            await sampler.load(update, int(index), {"path": str(path)})
        return {}


def _add_nccl(app: FastAPI, sampler: Sampler, max_bytes: int) -> None:
    @app.post("/weights/connect")
    async def connect(request: Request) -> dict[str, Any]:
        from pl_grouprl.rollout.server.nccl import init_info

        await sampler.connect(init_info(**(await _read(request, _Connect)).model_dump()))
        return {}

    @app.post("/weights/broadcast")
    async def broadcast(request: Request) -> dict[str, Any]:
        from pl_grouprl.rollout.server.nccl import check_bucket

        body = await _read(request, _Broadcast)
        try:
            bucket = check_bucket(body.names, body.dtypes, body.shapes, max_bytes)
        except ValueError as error:
            raise RefusalError(422, str(error)) from None
        await sampler.load(body.update, body.index, bucket)
        return {}


async def _lines(messages: AsyncIterator[dict[str, Any] | None]) -> AsyncIterator[bytes]:
    async for message in messages:
        yield b"\n" if message is None else json.dumps(message).encode() + b"\n"


def _length(request: Request, kind: str, limit: int) -> int:
    if request.headers.get("content-type") != kind:  # a page in a browser cannot set it without permission
        raise RefusalError(415, f"the request's Content-Type is not {kind}.")
    length = request.headers.get("content-length", "")
    if not length.isdecimal():
        raise RefusalError(411, "the request has no Content-Length; send one.")
    if int(length) > limit:
        raise RefusalError(413, f"the body has {length} bytes; at most {limit} are read.")
    return int(length)


async def _read(request: Request, model: type[Model]) -> Model:
    _length(request, "application/json", MAX_JSON)
    try:
        return model.model_validate_json(await request.body())
    except ClientDisconnect:
        raise _ended_early() from None
    except ValidationError as error:
        faults = [f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors()[:3]]
        raise RefusalError(422, f"the body is invalid: {'; '.join(faults)}"[:1000]) from None


def _ended_early() -> RefusalError:
    return RefusalError(400, "the body ended early.")


def _sampling(received: _Sampling) -> SamplingConfig:
    options = received.model_dump()
    for name in ("stop", "stop_token_ids"):
        options[name] = tuple(options[name])
    try:
        return SamplingConfig(**options)
    except ValueError as error:
        raise RefusalError(422, f"sampling is refused: {error}"[:1000]) from None


def _folder(size: int) -> Path | None:
    """Folder for a bucket: in memory if there is room, else None for the default temporary folder."""
    if _SHARED_MEMORY.is_dir() and shutil.disk_usage(_SHARED_MEMORY).free > size + _SPARE:
        return _SHARED_MEMORY
    return None


def leftovers() -> list[str]:
    """Patterns of the folders that remain if this process is killed."""
    return [str(parent / f"{_PREFIX}*") for parent in (_SHARED_MEMORY, Path(tempfile.gettempdir()))]


async def _store(request: Request, path: Path, size: int) -> None:
    try:
        with path.open("wb") as file:
            async for piece in request.stream():
                file.write(piece)
            if file.tell() != size:
                raise RefusalError(400, f"the body has {file.tell()} bytes, its Content-Length says {size}.")
    except ClientDisconnect:
        raise _ended_early() from None
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise RefusalError(
            507, f"{path.parent.parent} has no room for {size} bytes; make some, or lower bucket_mib."
        ) from error


def _check_safetensors(path: Path) -> None:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            count = len(file.keys())
    except SafetensorError as error:
        raise RefusalError(422, f"the body is not in safetensors format: {error}"[:1000]) from None
    if count == 0:
        raise RefusalError(422, "the body has no weights.")

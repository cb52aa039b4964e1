"""Everything that this package uses of the library `verifiers`, imported when it is needed."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from importlib.metadata import distributions
from itertools import islice
from typing import Any

_MODEL = "policy"
"""Name of the model in requests; the gateway serves only one."""


def read_config(taskset: str, config: Mapping[str, Any]) -> Any:
    """Read the library's config of an environment.

    Raises:
        ValueError: If there is no such taskset, the library refuses the config, or the config sets the sampling of an
            agent that the policy plays.
    """
    from pydantic import ValidationError
    from verifiers.v1.configs.agent import agent_config_fields
    from verifiers.v1.utils.loaders import resolve_env_config

    _check_exists(taskset)
    try:
        read = resolve_env_config({**config, "taskset": {**(config.get("taskset") or {}), "id": taskset}})
    except (ValidationError, ModuleNotFoundError, TypeError) as error:
        raise ValueError(f"Verifiers.config is refused by the library verifiers: {error}") from error
    for name, agent in agent_config_fields(read).items():
        if agent.client is None and agent.sampling is not None:
            raise ValueError(
                f"Verifiers.config sets the sampling of agent {name!r}, which the policy plays with the run's "
                "`sampling`; leave it out, or give the agent its own client."
            )
    return read


def _check_exists(taskset: str) -> None:
    from verifiers.v1.utils.loaders import taskset_class

    try:
        taskset_class(taskset)
    except (ModuleNotFoundError, TypeError, AttributeError) as error:
        raise ValueError(
            f"Verifiers.taskset is {taskset!r}, which the library verifiers cannot load ({error}). It includes "
            f"{', '.join(bundled_tasksets())}; packages that depend on it: {', '.join(installed_packages()) or 'none'}."
        ) from error


def bundled_tasksets() -> list[str]:
    """Tasksets that come with the library."""
    import pkgutil

    from verifiers.v1 import tasksets

    return sorted(module.name for module in pkgutil.iter_modules(tasksets.__path__))


def installed_packages() -> list[str]:
    """Installed packages that may hold environments, because they depend on the library."""
    found = {
        distribution.metadata["Name"]
        for distribution in distributions()
        if any(requirement.split(";")[0].strip().startswith("verifiers") for requirement in distribution.requires or ())
    }
    return sorted(found)


def load_tasks(config: Any, seed: int, limit: int | None) -> list[Any]:
    """Load the data of a taskset's tasks, in random order; an endless one gives its first tasks in its own order.

    Args:
        config: See `read_config`.
        seed: Determines the order.
        limit: Most tasks to return; None returns all.

    Raises:
        ValueError: If the taskset has no end and there is no limit.
    """
    from verifiers.v1.utils.loaders import load_taskset

    taskset = load_taskset(config.taskset)
    if taskset.bounded:
        tasks = list(taskset)
        random.Random(seed).shuffle(tasks)
    elif limit is None:
        raise ValueError(f"Verifiers.size is None, but taskset {config.taskset.id!r} has no end; set it.")
    else:
        tasks = list(islice(taskset, limit))
    return [task.data for task in tasks[:limit]]


def renderer_config(tokenizer: Any, options: Mapping[str, Any] | None) -> Any:
    """Config of the renderer, which turns messages into tokens.

    Args:
        tokenizer: The policy's tokenizer.
        options: Its `name` and options; None is the library's for the tokenizer's model, or else the chat template.

    Raises:
        ValueError: If the options are refused.
    """
    from pydantic import TypeAdapter, ValidationError
    from renderers import RendererConfig
    from renderers.base import MODEL_RENDERER_MAP

    if options is None:
        options = {"name": MODEL_RENDERER_MAP.get(tokenizer.name_or_path, "default")}
    try:
        return TypeAdapter(RendererConfig).validate_python(dict(options))
    except ValidationError as error:
        raise ValueError(f"Verifiers.renderer is {dict(options)}, which the library refuses: {error}") from error


@dataclass(frozen=True)
class EpisodeRequest:
    """An episode to play.

    Attributes:
        task: The task's data, as JSON.
        seed: Seed of the rollout.
    """

    task: str
    seed: int


class Environment:
    """An environment of the library, with the policy behind a gateway as its model; for one event loop.

    Args:
        config: See `read_config`.
        base_url: URL of the gateway.
        tokenizer_folder: Where the policy's tokenizer is saved.
        renderer: See `renderer_config`.
        max_concurrent: Most episodes at a time.
    """

    def __init__(self, config: Any, base_url: str, tokenizer_folder: str, renderer: Any, max_concurrent: int) -> None:
        from verifiers.v1.configs.client import TrainClientConfig
        from verifiers.v1.utils.loaders import load_environment

        self._env = load_environment(config)
        self._config = config
        self._client = TrainClientConfig(
            base_url=base_url, api_key_var="", renderer=renderer, renderer_model_name=tokenizer_folder
        )
        self._semaphore = asyncio.Semaphore(max_concurrent)

    def serving(self) -> AbstractAsyncContextManager[Any]:
        """Context of what episodes share: tool servers, and the server that intercepts the harness's model calls."""
        serving: AbstractAsyncContextManager[Any] = self._env.serving()
        return serving

    async def play(self, episode: EpisodeRequest, sampling: Mapping[str, Any]) -> Any:
        """Play one episode; the result records its errors."""
        from verifiers.v1.clients import ModelContext
        from verifiers.v1.types import SamplingConfig

        task_class = type(self._env.taskset).task_type()
        task = task_class(task_class.data_type().model_validate_json(episode.task), self._config.taskset.task)
        context = ModelContext(_MODEL, self._client, SamplingConfig(**sampling, seed=episode.seed))
        (slot,) = self._env.slots(task)
        return await self._env.run_slot(slot, context, self._semaphore)

"""Environments of the library `verifiers`: their tasks as prompts, their episodes as rollouts."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from itertools import islice
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from pl_grouprl.episodes.loop import EpisodeLimits, smallest
from pl_grouprl.harnesses.gateway import RoundRequests, Stage, check_sampling
from pl_grouprl.harnesses.traces import make_group, read_episode
from pl_grouprl.media.inputs import placeholder_ids
from pl_grouprl.rewards.base import EnvironmentReward
from pl_grouprl.rollout.engine import end_token_ids, length_limits
from pl_grouprl.types import Messages, Prompt, Rollout, SamplingConfig
from pl_grouprl.utilities.distributed import derive_seed
from pl_grouprl.utilities.optional import VERIFIERS_AVAILABLE, require
from pl_grouprl.utilities.options import check_options

_SPLITS = ("val", "test", "train")


class Verifiers:
    """An environment of the library verifiers, for the option `episodes.harness` and the prompts of a data module.

    The library's harness plays the episodes, and calls the policy on the engine's servers. A group is `num_generations`
    episodes of a task. Each branch of an episode's trace becomes a row of the episode (`Rollout.episode`), and the
    tokens that the policy wrote in it are trained. The rewards are the environment's.

    As a source of prompts it has the columns `prompt`, `data_source` (the taskset) and `extra_info`, with the task.

    Each turn of the model has a seed, derived from the rollout's seed and from what the model reads. Anything else that
    is random in the environment is not reproducible.

    Args:
        taskset: The taskset, by the name of an installed package or module, or of a taskset of the library.
        config: The rest of the environment's config, the library's `[env]` block. `agent: {harness: {id: "null"},
            runtime: {type: subprocess}}` plays a chat in a local process; the default is the taskset's harness, or
            else `bash`, in a sandbox of Prime Intellect.
        size: Maximum number of tasks of the split `train`; defaults to all that are left.
        val_size: Number of tasks of the split `val`.
        test_size: Number of tasks of the split `test`.
        seed: Decides the order of the tasks: `val` takes the first, then `test`, then `train`. An endless taskset keeps
            its own order.
        renderer: Turns messages into tokens: `name` and options of one in the library renderers. Defaults to the one
            for the tokenizer's model, or else the tokenizer's chat template (`name: default`), which has no tools.
        max_concurrent: Maximum number of episodes at a time on each rank.

    Raises:
        ModuleNotFoundError: If the library is missing.
        ValueError: If an option is out of range, there is no such taskset, or the library rejects the config.
    """

    def __init__(
        self,
        taskset: str,
        config: dict[str, Any] | None = None,
        *,
        size: int | None = None,
        val_size: int = 0,
        test_size: int = 0,
        seed: int = 0,
        renderer: dict[str, Any] | None = None,
        max_concurrent: int = 64,
    ) -> None:
        require(VERIFIERS_AVAILABLE, "Verifiers", "verifiers")
        check_options(
            {
                "Verifiers.size": (size, size is None or size >= 1, "at least 1, or None"),
                "Verifiers.val_size": (val_size, val_size >= 0, "0 or larger"),
                "Verifiers.test_size": (test_size, test_size >= 0, "0 or larger"),
                "Verifiers.seed": (seed, seed >= 0, "0 or larger"),
                "Verifiers.max_concurrent": (max_concurrent, max_concurrent >= 1, "at least 1"),
            }
        )
        self.taskset, self.config = taskset, config or {}
        self.sizes = {"val": val_size, "test": test_size, "train": size}
        self.seed, self.renderer, self.max_concurrent = seed, renderer, max_concurrent
        read_config(taskset, self.config)
        self._stage: Stage | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Omit the stage, which is started again when it is needed."""
        return vars(self) | {"_stage": None}

    @property
    def name(self) -> str:
        """Name of the taskset, without owner and version."""
        return self.taskset.rsplit("/", 1)[-1].split("@", 1)[0]

    def rows(self, split: str) -> list[dict[str, Any]]:
        """The tasks of a split.

        Args:
            split: `train`, `val` or `test`.

        Raises:
            ValueError: If there is no such split, there are too few tasks, or a task has no text prompt.
        """
        if split not in self.sizes:
            raise ValueError(f"Verifiers has no split {split!r}; it has {sorted(self.sizes)}.")
        kept = sum(self.sizes[name] or 0 for name in ("val", "test"))
        size = self.sizes["train"]
        config = read_config(self.taskset, self.config)
        tasks = load_tasks(config, self.seed, None if size is None else kept + size)
        if len(tasks) <= kept:
            raise ValueError(
                f"val_size and test_size are {kept} together, but taskset {self.taskset!r} has only {len(tasks)}."
            )
        start = sum(self.sizes[name] or 0 for name in _SPLITS[: _SPLITS.index(split)])
        end = None if split == "train" else start + (self.sizes[split] or 0)
        return [
            {
                "prompt": _messages(task),
                "data_source": self.name,
                "extra_info": {"taskset": self.name, "task": task.model_dump_json()},
            }
            for task in tasks[start:end]
        ]

    def reward(self) -> EnvironmentReward:
        """The environment's reward."""
        return _TaskReward(self.name)

    def check(self, engine: object, samplings: Sequence[SamplingConfig], max_staleness: int = 0) -> None:
        """Check, before anything is loaded, that options go with a harness.

        Raises:
            ValueError: If the engine has no servers, a sampling option cannot be passed on, or rollouts are to be
                sampled ahead.
        """
        if not hasattr(engine, "urls"):
            raise ValueError(
                f"episodes.harness needs servers, but engine is {type(engine).__name__}; pass VLLMServerRolloutEngine."
            )
        for sampling in samplings:
            check_sampling(sampling)
        if max_staleness:
            raise ValueError(f"max_staleness is {max_staleness} together with episodes.harness; set it to 0.")

    def play(
        self,
        engine: Any,
        policy: Any,
        tokenizer: Any,
        prompts: Sequence[Prompt],
        sampling: SamplingConfig,
        num_generations: int,
        *,
        seed: int,
        prompt_indices: Sequence[int],
        limits: EpisodeLimits,
    ) -> tuple[list[Prompt], list[list[Rollout]]]:
        """Play `num_generations` episodes of each prompt's task.

        Args:
            engine: A `VLLMServerRolloutEngine`; its servers have the policy's weights.
            policy: The policy, for its vocabulary and limits.
            tokenizer: Its tokenizer.
            prompts: Open prompts, from rows of this class.
            sampling: How the policy's turns are sampled.
            num_generations: Episodes of each prompt.
            seed: Together with the prompt's index and the rollout's number, determines the seed of each rollout.
            prompt_indices: Index of each prompt in the batch of all ranks.
            limits: Limits on an episode.

        Returns:
            The prompts, each with the tokens that all rows of its group begin with, and each prompt's rollouts, one per
            row of an episode.

        Raises:
            ValueError: If an episode trains several agents or has images, or a group's rows share no prompt.
            RuntimeError: If all episodes fail, or no server sampled the tokens to train.
            SamplerLostError: If a server has lost its weights.
            WeightsMismatchError: If a server has other weights.
        """
        if not prompts:
            return [], []
        vocab_size = policy.config.get_text_config(decoder=True).vocab_size  # without placeholders beyond it: text only
        round_requests = RoundRequests(
            sampling,
            engine.weight_version,
            limits,
            max_model_len=smallest(engine.max_model_len, *length_limits(policy).values()),
            end_ids=[token for token in end_token_ids(policy, tokenizer, sampling) if token < vocab_size],
            never=[token for token in sorted(placeholder_ids(policy).values()) if token < vocab_size],
            vocab_size=vocab_size,
            model=engine.served_model,
        )
        if self._stage is None:
            config, renderer = read_config(self.taskset, self.config), renderer_config(tokenizer, self.renderer)
            make = partial(Environment, config, renderer=renderer, max_concurrent=self.max_concurrent)
            self._stage = Stage(engine.urls, engine.token, tokenizer, make)
        asked = [
            (prompt.columns["extra_info"]["task"], derive_seed(seed, index, number))
            for prompt, index in zip(prompts, prompt_indices, strict=True)
            for number in range(num_generations)
        ]
        recorded = {"temperature": sampling.temperature, "max_tokens": sampling.max_new_tokens}
        played = [
            read_episode(episode, round_requests.was_sampled, round_requests.ran_out)
            for episode in self._stage.play(asked, round_requests, recorded)
        ]
        failures = Counter(episode.failure for episode in played if episode.failure is not None)
        if failures:
            text = (
                f"{failures.total()} of {len(played)} episodes failed, most often with: {failures.most_common(1)[0][0]}"
            )
            if failures.total() == len(played):
                raise RuntimeError(f"{text}. Nothing can be learned; correct the environment or its config.")
            rank_zero_warn(f"{text}. They have no reward, and are not trained.")
        groups = [
            make_group(prompt, played[place * num_generations : (place + 1) * num_generations], self.name)
            for place, prompt in enumerate(prompts)
        ]
        return [prompt for prompt, _ in groups], [rollouts for _, rollouts in groups]

    def close(self) -> None:
        """Stop the harness; the next `play` starts it again. Idempotent."""
        if self._stage is not None:
            self._stage.close()
            self._stage = None


class _TaskReward(EnvironmentReward):
    """The reward of an environment of verifiers."""

    def check_row(self, columns: Mapping[str, Any]) -> None:
        """Check that a row is from this taskset.

        Raises:
            ValueError: If it is not.
        """
        info = columns.get("extra_info")
        found = info.get("taskset") if isinstance(info, Mapping) else None
        if found != self.name:
            raise ValueError(f"episodes.harness is Verifiers({self.name!r}), but `extra_info` names {found!r}.")


def _messages(task: Any) -> Messages:
    """The messages that open a task's episode, only for display and length checks: the harness makes its own."""
    opening = [] if task.system_prompt is None else [{"role": "system", "content": task.system_prompt}]
    if isinstance(task.prompt, str):
        return [*opening, {"role": "user", "content": task.prompt}]
    messages = [message.model_dump(exclude_none=True) for message in task.prompt or ()]
    if not messages or any(not isinstance(message["content"], str) for message in messages):
        raise ValueError(f"task {task.name or task.idx!r} opens without a prompt of text, which Verifiers needs.")
    return [*opening, *messages]


# Everything that this package uses of the library `verifiers`, imported when it is needed.


def read_config(taskset: str, config: Mapping[str, Any]) -> Any:
    """Read the library's config of an environment.

    Raises:
        ValueError: If there is no such taskset, the library rejects the config, or the config sets the sampling of an
            agent that the policy plays.
    """
    from pydantic import ValidationError
    from verifiers.v1.configs.agent import agent_config_fields
    from verifiers.v1.utils.loaders import resolve_env_config

    try:
        read = resolve_env_config({**config, "taskset": {**(config.get("taskset") or {}), "id": taskset}})
    except (ValidationError, ModuleNotFoundError, TypeError, AttributeError) as error:
        raise ValueError(f"Verifiers({taskset!r}) is rejected by the library verifiers: {error}") from error
    for name, agent in agent_config_fields(read).items():
        if agent.client is None and agent.sampling is not None:
            raise ValueError(f"Verifiers.config sets the sampling of agent {name!r}, which the policy plays; omit it.")
    return read


def load_tasks(config: Any, seed: int, limit: int | None) -> list[Any]:
    """Load the data of a taskset's tasks, in random order; an endless one gives its first tasks in its own order.

    Args:
        config: See `read_config`.
        seed: Determines the order.
        limit: Maximum number of tasks; no limit if None.

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
        options: Its `name` and options; defaults to the library's for the tokenizer's model, or else the chat template.

    Raises:
        ValueError: If the library rejects the options.
    """
    from pydantic import TypeAdapter, ValidationError
    from renderers import RendererConfig
    from renderers.base import MODEL_RENDERER_MAP

    if options is None:
        options = {"name": MODEL_RENDERER_MAP.get(tokenizer.name_or_path, "default")}
    try:
        return TypeAdapter(RendererConfig).validate_python(dict(options))
    except ValidationError as error:
        raise ValueError(f"Verifiers.renderer is {dict(options)}, which the library rejects: {error}") from error


class Environment:
    """An environment of the library, with the policy behind a gateway as its model; for one event loop.

    Args:
        config: See `read_config`.
        base_url: URL of the gateway.
        tokenizer_folder: Where the policy's tokenizer is saved.
        renderer: See `renderer_config`.
        max_concurrent: Maximum number of episodes at a time.
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

    async def play(self, task: str, seed: int, sampling: Mapping[str, Any]) -> Any:
        """Play one episode of a task, given as JSON; the result records its errors."""
        from verifiers.v1.clients import ModelContext
        from verifiers.v1.types import SamplingConfig

        task_class = type(self._env.taskset).task_type()
        opened = task_class(task_class.data_type().model_validate_json(task), self._config.taskset.task)
        # The model's name in requests does not matter, because the gateway serves only one.
        context = ModelContext("policy", self._client, SamplingConfig(**sampling, seed=seed))
        (slot,) = self._env.slots(opened)
        return await self._env.run_slot(slot, context, self._semaphore)

"""The three signatures of reward functions: which one a function has, and its arguments."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Literal

from pl_grouprl.rewards.base import FunctionFromFile, RewardFunction, Weighted
from pl_grouprl.rewards.completion_text import completion_text
from pl_grouprl.types import LiveObject, Messages, Rollout, RolloutGroup

Convention = Literal["trl", "verl", "groups"]

_NO_ENVIRONMENTS = (
    " `environments` are those of an environment_factory, in the training process: leave tool_workers, "
    "reward_workers and max_staleness at 0."
)

_OF_TRL_TRAINER = ("trainer_state", "log_extra", "log_metric")
"""What TRL's trainer passes to reward functions besides columns."""


@dataclass
class RewardInputs:
    """The rollouts of all groups in one flat list, as reward functions see them.

    Attributes:
        prompts: Prompt of each rollout, length B: a string or messages, with the observation of its environment.
        texts: Decoded completion of each rollout; an episode's includes tool results.
        completion_ids: Tokens of each completion.
        data_sources: Name of each prompt's data set.
        columns: Every column of the data, one value per rollout; None if the prompt's row lacks it.
        groups: Group of each rollout, numbered from 0.
        rollout_groups: The groups themselves.
        of_prompts: Cached arguments about a prompt for functions of verl's signature, by function name and group.
        messages: Completion of each rollout as messages; None for one that is not an episode.
        completion_masks: For each token of each completion, 1 if the model wrote it; None if there are no episodes.
        environments: The environment of each rollout; None if there are none in this process.
    """

    prompts: list[str | Messages]
    texts: list[str]
    completion_ids: list[list[int]]
    data_sources: list[str]
    columns: dict[str, list[Any]]
    groups: list[int]
    rollout_groups: list[RolloutGroup] = field(default_factory=list)
    of_prompts: dict[tuple[str, int], dict[str, Any]] = field(default_factory=dict)
    messages: list[Messages | None] = field(default_factory=list)
    completion_masks: list[list[int]] | None = None
    environments: list[LiveObject | None] | None = None


@dataclass(frozen=True)
class PreparedReward:
    """A reward function with what is known about it.

    Attributes:
        function: The callable.
        name: Name in metrics.
        weight: Factor in the weighted sum.
        convention: Whose signature the function has.
        parameters: Names of its parameters; None if it takes any (`**kwargs`).
        required: Names of its required parameters.
        is_async: Whether it is a coroutine function.
        in_process: Whether it is never sent to a worker process: it is async, or has a true `stays_in_process`.
        final_answer: Its attribute `reads_final_answer`.
        names_environments: Whether it has a parameter `environments`.
        needs_time_limit: Its attribute `needs_time_limit`.
        ground_truth_column: Its attribute `ground_truth_column`.
    """

    function: RewardFunction
    name: str
    weight: float
    convention: Convention
    parameters: frozenset[str] | None
    required: frozenset[str]
    is_async: bool
    in_process: bool
    final_answer: bool = False
    names_environments: bool = False
    needs_time_limit: bool = False
    ground_truth_column: str | None = None


def prepare_reward(weighted: Weighted) -> PreparedReward:
    """Determine the signature of a named function by its parameters.

    With `solution_str` it is verl's; with `completions`, or `**kwargs` alone, TRL's; with `groups`, that of whole
    groups.

    Raises:
        ValueError: If it is none of these.
    """
    function, name = weighted.function, weighted.name or ""
    if isinstance(function, FunctionFromFile):  # kept as the callable: it can be pickled, the function cannot
        function = function.function
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"Reward function {name!r} has no readable signature; wrap it in a Python function."
        ) from error
    by_name = {
        parameter.name: parameter
        for parameter in signature.parameters.values()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }
    takes_any = any(parameter.kind == parameter.VAR_KEYWORD for parameter in signature.parameters.values())
    convention = _convention(by_name.keys(), takes_any)
    if convention is None:
        raise ValueError(
            f"Reward function {name!r} has the signature {signature}, which is not one of the known ones; write "
            "f(prompts, completions, **columns) -> list[float | None] (TRL), "
            "f(data_source, solution_str, ground_truth, extra_info=None) -> float | dict (verl) or "
            "f(groups) -> list[list[float | None]]. Instead of a number, it may return a list with one per token."
        )
    is_async = _is_async(function)
    return PreparedReward(
        function=weighted.function,
        name=name,
        weight=weighted.weight,
        convention=convention,
        parameters=None if takes_any else frozenset(by_name),
        required=frozenset(key for key, parameter in by_name.items() if parameter.default is parameter.empty),
        is_async=is_async,
        in_process=is_async or getattr(function, "stays_in_process", False),
        final_answer=getattr(function, "reads_final_answer", False),
        names_environments="environments" in by_name,
        needs_time_limit=getattr(function, "needs_time_limit", False),
        ground_truth_column=getattr(function, "ground_truth_column", None),
    )


def check_environments(rewards: Sequence[PreparedReward]) -> None:
    """Refuse reward workers for functions that take environments, which live in this process.

    Raises:
        ValueError: Names the functions.
    """
    if stranded := [reward.name for reward in rewards if reward.names_environments and not reward.in_process]:
        raise ValueError(
            f"The reward functions {stranded} take `environments`, which live in this process, and reward_workers "
            "would run them in another; set reward_workers to 0, or set `stays_in_process = True` on each."
        )


def _convention(parameters: Set[str], takes_any: bool) -> Convention | None:
    if "solution_str" in parameters:
        return "verl"
    if "completions" in parameters:
        return "trl"
    if "groups" in parameters:
        return "groups"
    return "trl" if takes_any else None


def flatten_groups(groups: Sequence[RolloutGroup]) -> RewardInputs:
    """List the rollouts of all groups, in order. Every rollout must have its text."""
    pairs = [(index, group, rollout) for index, group in enumerate(groups) for rollout in group.rollouts]
    rollouts = [rollout for _, _, rollout in pairs]
    names = {name: None for group in groups for name in group.columns}  # a dictionary keeps the order
    return RewardInputs(
        prompts=[group.prompt if rollout.prompt is None else rollout.prompt for _, group, rollout in pairs],
        texts=[rollout.text or "" for rollout in rollouts],
        completion_ids=[rollout.completion_ids for rollout in rollouts],
        data_sources=[group.data_source for _, group, _ in pairs],
        columns={name: [group.columns.get(name) for _, group, _ in pairs] for name in names},
        groups=[index for index, _, _ in pairs],
        rollout_groups=list(groups),
        messages=[rollout.messages for rollout in rollouts],
        completion_masks=_completion_masks(rollouts),
        environments=_environments(rollouts),
    )


def _completion_masks(rollouts: Sequence[Rollout]) -> list[list[int]] | None:
    if all(rollout.messages is None for rollout in rollouts):
        return None
    return [
        [1] * len(rollout.completion_ids)
        if rollout.loss_mask is None
        else rollout.loss_mask[rollout.num_observation_tokens :]
        for rollout in rollouts
    ]


def _environments(rollouts: Sequence[Rollout]) -> list[LiveObject | None] | None:
    environments = [rollout.environment for rollout in rollouts]
    return (
        environments
        if any(environment is not None and environment.value is not None for environment in environments)
        else None
    )


def call_units(reward: PreparedReward, inputs: RewardInputs, *, by_group: bool = False) -> list[list[int]]:
    """Return the rollouts of each call.

    Args:
        reward: The function. verl's signature is called once per rollout.
        inputs: All rollouts.
        by_group: Call functions of the other signatures once per group, instead of once for all rollouts.
    """
    everything = list(range(len(inputs.texts)))
    if not everything:
        return []
    if reward.convention == "verl":
        return [[index] for index in everything]
    return _by_group(everything, inputs) if by_group else [everything]


def smaller_units(reward: PreparedReward, unit: list[int], inputs: RewardInputs) -> list[list[int]]:
    """Split a failed call into one call per group, so a single bad completion costs only its group."""
    if reward.convention == "verl":
        return []
    parts = _by_group(unit, inputs)
    return parts if len(parts) > 1 else []


def _by_group(unit: list[int], inputs: RewardInputs) -> list[list[int]]:
    parts: dict[int, list[int]] = {}
    for index in unit:
        parts.setdefault(inputs.groups[index], []).append(index)
    return list(parts.values())


def call_arguments(reward: PreparedReward, inputs: RewardInputs, unit: list[int]) -> dict[str, Any]:
    """Return the keyword arguments of one call.

    Raises:
        ValueError: If the function requires an argument that neither the convention nor a column provides.
    """
    if reward.convention != "verl":
        make = _trl_arguments if reward.convention == "trl" else _groups_arguments
        return _taken(reward, inputs, make(inputs, unit))
    (index,) = unit
    text, messages = inputs.texts[index], inputs.messages[index]
    if reward.final_answer and messages is not None:
        text = completion_text(messages)
    of_prompt = (reward.name, inputs.groups[index])  # computed once for all rollouts of a prompt
    if of_prompt not in inputs.of_prompts:
        inputs.of_prompts[of_prompt] = _taken(reward, inputs, _verl_arguments(reward, inputs, index))
    return inputs.of_prompts[of_prompt] | {"solution_str": text}


def _taken(reward: PreparedReward, inputs: RewardInputs, available: dict[str, Any]) -> dict[str, Any]:
    """The available arguments that a function takes.

    Raises:
        ValueError: If a required one is missing.
    """
    missing = sorted(reward.required - available.keys())
    if missing:
        raise ValueError(
            f"Reward function {reward.name!r} requires {missing}, and the data has the columns "
            f"{sorted(inputs.columns)}; {_remedy(missing)}"
        )
    if reward.parameters is None:
        return available
    return {key: value for key, value in available.items() if key in reward.parameters}


def _remedy(missing: Sequence[str]) -> str:
    of_trainer = [name for name in missing if name in _OF_TRL_TRAINER]
    if of_trainer:
        return f"TRL's {', '.join(of_trainer)} are not passed: give the parameters a default."
    add = "add the column, or give the parameter a default."
    return add + (_NO_ENVIRONMENTS if "environments" in missing else "")


def _groups_arguments(inputs: RewardInputs, unit: list[int]) -> dict[str, Any]:
    numbers = dict.fromkeys(inputs.groups[index] for index in unit)  # each once, in order
    return {"groups": [inputs.rollout_groups[number] for number in numbers]}


def _trl_arguments(inputs: RewardInputs, unit: list[int]) -> dict[str, Any]:
    columns = {name: [values[index] for index in unit] for name, values in inputs.columns.items()}
    available = columns | {
        "prompts": [inputs.prompts[index] for index in unit],
        "completions": [_completion(inputs, index) for index in unit],
        "completion_ids": [inputs.completion_ids[index] for index in unit],
    }
    of_episodes = {"completion_mask": inputs.completion_masks, "environments": inputs.environments}
    return available | {
        name: [values[index] for index in unit] for name, values in of_episodes.items() if values is not None
    }


def _completion(inputs: RewardInputs, index: int) -> str | Messages:
    messages, text = inputs.messages[index], inputs.texts[index]
    if messages is not None:
        return messages
    return text if isinstance(inputs.prompts[index], str) else [{"role": "assistant", "content": text}]


def _verl_arguments(reward: PreparedReward, inputs: RewardInputs, index: int) -> dict[str, Any]:
    columns = {name: values[index] for name, values in inputs.columns.items()}
    return {
        "data_source": inputs.data_sources[index],
        "solution_str": inputs.texts[index],
        "ground_truth": _ground_truth(reward, columns),
        "extra_info": columns.get("extra_info"),
    }


def _ground_truth(reward: PreparedReward, columns: Mapping[str, Any]) -> Any:
    found = ground_truth_of(columns, reward.ground_truth_column)
    if found is not None or "ground_truth" not in reward.required:
        return found
    wanted = "reward_model.ground_truth (verl), or a column `ground_truth` or `answer`"
    raise ValueError(
        f"Reward function {reward.name!r} requires a ground_truth, and the row has only the columns "
        f"{sorted(columns)}; add {wanted if reward.ground_truth_column is None else repr(reward.ground_truth_column)}."
    )


def ground_truth_of(columns: Mapping[str, Any], column: str | None = None) -> Any:
    """Find the reference: verl's `reward_model["ground_truth"]`, or a column `ground_truth` or `answer`.

    Args:
        columns: The columns of one row.
        column: Look only in this column.
    """
    if column is not None:
        return columns.get(column)
    reward_model = columns.get("reward_model")
    if isinstance(reward_model, Mapping) and reward_model.get("ground_truth") is not None:
        return reward_model["ground_truth"]
    return next((columns[name] for name in ("ground_truth", "answer") if columns.get(name) is not None), None)


def _is_async(function: RewardFunction) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004

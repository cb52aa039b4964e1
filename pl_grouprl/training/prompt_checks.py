"""Finds prompts that the model cannot take, in all rows, before anything is sampled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pl_grouprl.data.loaders import PromptBatch
from pl_grouprl.models.policy import PolicySource
from pl_grouprl.rollout.engine import declares
from pl_grouprl.types import Prompt, SamplingConfig

_SPLITS_OF_STAGE = {"fit": ("train", "val"), "validate": ("val",), "test": ("test",)}


def limits_of_source(source: PolicySource) -> dict[str, int]:
    """The longest sequence a model takes, as far as its source knows before loading it; see `length_limits`."""
    load_config = getattr(source, "load_config", None)
    if load_config is not None:
        limit = getattr(load_config().get_text_config(decoder=True), "max_position_embeddings", None)
    else:
        architecture = getattr(source, "architecture", None)
        limit = architecture.get("max_position_embeddings") if isinstance(architecture, dict) else None
    return {} if limit is None else {"max_position_embeddings": int(limit)}


def check_prompts(
    prompts: Sequence[Prompt],
    split: str,
    sampling: SamplingConfig,
    option: str,
    engine: Any,
    limits: dict[str, int],
    vocab_size: int | None = None,
) -> None:
    """Refuse prompts that leave no room for a completion, or hold tokens that the model does not know.

    Images and videos that are not processed yet count as one token each; the sampler checks those prompts again.

    Args:
        prompts: The prompts of a split.
        split: Its name.
        sampling: Says how long completions may be.
        option: What sets `sampling`, for the error.
        engine: Samples them. Unless it reserves room for all of `max_new_tokens`, room for one token is enough.
        limits: Longest sequence, prompt and completion together, by the name of what sets the limit.
        vocab_size: Number of tokens that the model knows; None if unknown.

    Raises:
        ValueError: If there is such a prompt. Names its row, its length, the limit, how many there are, and the remedy.
    """
    new_tokens = sampling.max_new_tokens if declares(engine, "reserves_max_new_tokens") else 1
    for name, limit in (limits | _engine_limit(engine)).items():
        reason = f"with {new_tokens} new ones exceeds the model's {name}={limit}"
        _refuse_longer(prompts, split, limit - new_tokens, reason, f"lower {option}.max_new_tokens")
    if vocab_size is not None:
        _refuse_unknown_tokens(prompts, split, vocab_size)


def _refuse_longer(prompts: Sequence[Prompt], split: str, room: int, reason: str, remedy: str) -> None:
    longer = [prompt for prompt in prompts if prompt.num_tokens > room]
    if not longer:
        return
    longest = max(prompt.num_tokens for prompt in longer)
    if room > 0:
        remedy = f"set data.max_prompt_length={room} (overlong_prompts: drop or truncate), or {remedy}"
    raise ValueError(
        f"{longer[0].where or split}: the prompt has {longer[0].num_tokens} tokens, which {reason}, as {len(longer)} "
        f"of {len(prompts)} prompts of `{split}` do (the longest has {longest}); {remedy}."
    )


def _refuse_unknown_tokens(prompts: Sequence[Prompt], split: str, vocab_size: int) -> None:
    for prompt in prompts:
        if max(prompt.token_ids) >= vocab_size:
            raise ValueError(
                f"{prompt.where or split}: the prompt holds the token id {max(prompt.token_ids)}, but the model has "
                f"vocab_size={vocab_size}; use the tokenizer that belongs to the model."
            )


def _engine_limit(engine: Any) -> dict[str, int]:
    """The longest sequence that the engine is configured to serve."""
    limit = getattr(engine, "max_model_len", None)
    return {} if limit is None else {"max_model_len": limit}


def prompts_of_stage(trainer: Any, stage: str) -> dict[str, Sequence[Prompt]]:
    """The prompts that a stage uses, by split, if the data module has them."""
    prompts = getattr(getattr(trainer, "datamodule", None), "prompts", {})
    return {split: prompts[split] for split in _SPLITS_OF_STAGE.get(stage, ()) if split in prompts}


def check_batch(batch: Any) -> None:
    """Refuse batches of a loader that is not about rollouts.

    Raises:
        TypeError: If it is no `PromptBatch`.
    """
    if not isinstance(batch, PromptBatch):
        raise TypeError(
            f"the loader yields {type(batch).__name__}, but rollouts need a pl_grouprl.data.PromptBatch: prompts, and "
            "which update of their rollouts it is. Put the prompts into a PromptDataModule and pass it as datamodule; "
            "a loader of your own must yield PromptBatch objects, each module.updates_per_rollout times in a row."
        )

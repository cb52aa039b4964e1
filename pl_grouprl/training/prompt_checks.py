"""Checks all prompts against the model's limits before anything is sampled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.utils.data import DataLoader, default_collate

from pl_grouprl.data.loaders import PromptBatch
from pl_grouprl.models.policy import PolicySource
from pl_grouprl.rollout.engine import declares
from pl_grouprl.types import Prompt, SamplingConfig

_REMEDY = (
    "rollouts need a pl_grouprl.data.PromptBatch: prompts, and which update of their rollouts it is. Put the prompts "
    "into a PromptDataModule and pass it as datamodule; a custom loader must yield PromptBatch objects, each "
    "module.updates_per_rollout times in a row."
)
_SPLITS_OF_STAGE = {"fit": ("train", "val"), "validate": ("val",), "test": ("test",)}


def limits_of_source(source: PolicySource) -> dict[str, int]:
    """The model's maximum sequence length, if its source knows it before loading; see `length_limits`."""
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
    """Refuse prompts that leave no room for a completion, or contain tokens outside the vocabulary.

    Unprocessed images and videos count as one token each; the sampler checks those prompts again.

    Args:
        prompts: The prompts of a split.
        split: Name of the split.
        sampling: Its `max_new_tokens` is the longest completion.
        option: Name of the option that sets `sampling`, for the error.
        engine: The rollout engine. Unless it reserves room for all of `max_new_tokens`, room for one token is enough.
        limits: Maximum length of prompt plus completion, by the name of what sets it.
        vocab_size: Size of the vocabulary; None if unknown.

    Raises:
        ValueError: Names the first such prompt's row and length, the limit, the number of such prompts and the remedy.
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
        remedy = f"set max_prompt_length={room} of PromptDataModule (overlong_prompts: drop or truncate), or {remedy}"
    raise ValueError(
        f"{longer[0].where or split}: the prompt has {longer[0].num_tokens} tokens, which {reason}, as {len(longer)} "
        f"of {len(prompts)} prompts of `{split}` do (the longest has {longest}); {remedy}."
    )


def _refuse_unknown_tokens(prompts: Sequence[Prompt], split: str, vocab_size: int) -> None:
    for prompt in prompts:
        if max(prompt.token_ids) >= vocab_size:
            raise ValueError(
                f"{prompt.where or split}: the prompt has token id {max(prompt.token_ids)}, but the model has "
                f"vocab_size={vocab_size}; use the tokenizer that belongs to the model."
            )


def _engine_limit(engine: Any) -> dict[str, int]:
    """The longest sequence that the engine is configured to serve."""
    limit = getattr(engine, "max_model_len", None)
    return {} if limit is None else {"max_model_len": limit}


def prompts_of_stage(trainer: Any, stage: str) -> dict[str, Sequence[Prompt]]:
    """The prompts of a stage, by split, if the data module has them."""
    prompts = getattr(getattr(trainer, "datamodule", None), "prompts", {})
    return {split: prompts[split] for split in _SPLITS_OF_STAGE.get(stage, ()) if split in prompts}


def check_loader(trainer: Any, stage: str) -> None:
    """Refuse a stage without data, and loaders that cannot yield a `PromptBatch`.

    Raises:
        ValueError: If the Trainer has got no data.
        TypeError: If it has got rows, or a DataLoader that collates rows into tensors.
    """
    stage = str(getattr(stage, "value", stage))
    source = getattr(trainer, f"{stage}_loop")._data_source
    if not source.is_defined():
        raise ValueError(
            f"trainer.{stage} has no data: neither module nor data module defines {source.name}; pass "
            "datamodule=PromptDataModule(...)."
        )
    if not source.is_module() and _yields_rows(source.instance):
        raise TypeError(f"trainer.{stage} was given {_kind_of(source.instance)}; {_REMEDY}")


def _yields_rows(data: Any) -> bool:
    """Whether it is text, rows, or a DataLoader that turns rows into tensors; a list may hold several loaders."""
    if isinstance(data, DataLoader):
        return data.collate_fn is default_collate
    if isinstance(data, list | tuple):
        return any(_yields_rows(item) for item in data[:1])
    return isinstance(data, Mapping | str)


def _kind_of(data: Any) -> str:
    return "a DataLoader of rows" if isinstance(data, DataLoader) else f"a {type(data).__name__} of rows"


def check_batch(batch: Any) -> None:
    """Refuse batches that are not prompts for rollouts.

    Raises:
        TypeError: If the batch is not a `PromptBatch`.
    """
    if not isinstance(batch, PromptBatch):
        raise TypeError(f"the loader yields {type(batch).__name__}; {_REMEDY}")

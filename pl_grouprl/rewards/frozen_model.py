"""A frozen classifier that scores rollouts, run over groups with shared prefixes."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn

from pl_grouprl.attention import find_decoder, shared_prefix
from pl_grouprl.attention.backends.choice import get_backend
from pl_grouprl.checks.model_introspection import check_causal, check_score_head
from pl_grouprl.models.adapters import check_adapters
from pl_grouprl.models.loading import check_patterns
from pl_grouprl.models.policy import Dtype, PretrainedPolicy
from pl_grouprl.models.score import hidden_states
from pl_grouprl.models.sequence_classifier import is_classifier, score_head
from pl_grouprl.packing import ScoringBatch, Sharing, pack
from pl_grouprl.rewards.base import RewardConfigurationError
from pl_grouprl.types import RolloutGroup
from pl_grouprl.utilities.memory import naming_memory

log = logging.getLogger(__name__)

Kind = Literal["SequenceClassification", "TokenClassification"]

_CLASSIFIES = {"SequenceClassification": "sequence", "TokenClassification": "token"}


class FrozenModel:
    """A sequence or token classifier, by name or already loaded, with the options of `ModelReward`.

    Args:
        owner: Name of the reward's class, for errors.
        kind: Kind of transformers classifier that it must be.
        model: Name, folder, or transformers model.
        max_tokens_per_pass: Limit on the tokens of a forward pass. A larger group gets a pass to itself.
        sharing: `shared` encodes prompts once, `repeated` once per rollout.
        attention_backend: As in `pl_grouprl.attention.shared_prefix`.
        device: Where it runs. `auto` is this process's GPU; a model that was passed stays where it is.
        dtype: As in `PretrainedPolicy`, as are all options below.
        attn_implementation: As in transformers.
        revision: Branch, tag or commit on the hub.
        trust_remote_code: Run model code that comes with the checkpoint.
        allow_mismatched_weights: Weights that may be missing, unexpected or of another shape.

    Raises:
        FileNotFoundError: If `model` is a path and not a folder.
        TypeError: If it is neither a name nor a model.
        ValueError: If an option is out of range.
    """

    def __init__(
        self,
        owner: str,
        kind: Kind,
        model: Any,
        *,
        max_tokens_per_pass: int,
        sharing: Sharing,
        attention_backend: str,
        device: str,
        dtype: Dtype,
        attn_implementation: str | None,
        revision: str | None,
        trust_remote_code: bool,
        allow_mismatched_weights: Sequence[str],
    ) -> None:
        if sharing not in ("shared", "repeated"):
            raise ValueError(f"{owner}.sharing is {sharing!r}; pass 'shared' or 'repeated'.")
        if max_tokens_per_pass < 1:
            raise ValueError(f"{owner}.max_tokens_per_pass is {max_tokens_per_pass}; it must be at least 1.")
        check_patterns(allow_mismatched_weights, owner)
        _check_type(model, owner)
        get_backend(attention_backend, "attention_backend")  # refuses an unknown name before the first reward
        self.owner = owner
        self.kind = kind
        self.model = model
        self.max_tokens_per_pass = max_tokens_per_pass
        self.sharing: Sharing = sharing
        self.attention_backend = attention_backend
        self.device = device
        self.checkpoint: PretrainedPolicy | None = None
        if isinstance(model, str):
            self.checkpoint = PretrainedPolicy(
                model,
                dtype,
                attn_implementation,
                revision=revision,
                trust_remote_code=trust_remote_code,
                allow_mismatched_weights=tuple(allow_mismatched_weights),
            )

    def __repr__(self) -> str:
        return f"{self.owner}({self.model!r})" if self.checkpoint else f"{self.owner}({type(self.model).__name__})"

    def load(self) -> Any:
        """Load the model, put it in evaluation mode, and check that its head reads the states of a causal decoder.

        Raises:
            OSError, ValueError: If it cannot be loaded or used.
        """
        model = self._load_or_move().eval()
        check_adapters(model, repr(self))
        head = score_head(model, self.kind)
        if self.sharing == "shared":
            with shared_prefix(model, self.attention_backend):  # refuses a model that cannot share prefixes
                pass
        check_score_head(model, head, repr(self), self.kind)
        if self.sharing == "shared":
            check_causal(find_decoder(model), repr(self))
        log.info("%r: %s on %s, sharing=%r.", self, type(model).__name__, model.device, self.sharing)
        return model

    def label(self, model: Any, label: int | None) -> int:
        """The index of the label that is the reward; 0 if None was passed and the model has a single label.

        Raises:
            ValueError: If None was passed and the model has several labels, or the index is out of range.
        """
        labels = model.config.num_labels
        chosen = 0 if label is None and labels == 1 else label
        if chosen is None or not 0 <= chosen < labels:
            raise ValueError(
                f"{self.owner}.label is {label}, and {type(model).__name__} has {labels} labels; pass a label from "
                f"0 to {labels - 1}."
            )
        return chosen

    def states(self, model: Any, groups: list[RolloutGroup]) -> Iterator[tuple[ScoringBatch, Tensor]]:
        """Run the model over groups, pass by pass; yields each pass's batch and its hidden states, shape [T, D].

        Iterate under `torch.no_grad()`. The body of the caller's loop runs inside the context of the pass: prefixes are
        shared, and autocast is off.

        Raises:
            RewardConfigurationError: If a token id is beyond the model's embeddings.
        """
        least = get_backend(self.attention_backend).min_saved_tokens
        for groups_of_pass in _passes(groups, self.sharing, self.max_tokens_per_pass):
            batch = pack(groups_of_pass, self.sharing, min_saved_tokens=least, device=model.device)
            self._check_tokens(model, batch)
            context = nullcontext() if self.sharing == "repeated" else shared_prefix(model, self.attention_backend)
            memory = naming_memory(
                f"a pass of {self.owner} with max_tokens_per_pass={self.max_tokens_per_pass}",
                "lower it, or put the reward model on another device (device)",
            )
            with memory, torch.autocast(model.device.type, enabled=False), context:
                yield batch, hidden_states(model, batch)

    def configuration_error(self, error: Exception) -> RewardConfigurationError:
        """Turn an error into one that ends the run and names this model."""
        text = str(error)
        return RewardConfigurationError(text if repr(self) in text else f"{self!r}: {text}")

    def _check_tokens(self, model: Any, batch: ScoringBatch) -> None:
        largest, known = int(batch.model_inputs["input_ids"].max()), model.get_input_embeddings().num_embeddings
        if largest >= known:
            raise RewardConfigurationError(
                f"{self!r} has embeddings for {known} tokens and was given token {largest}; its vocabulary is not the "
                f"policy's, so pass its own tokenizer: {self.owner}(..., tokenizer=...)."
            )

    def _load_or_move(self) -> Any:
        if self.checkpoint is None:
            return self.model if self.device == "auto" else self.model.to(self.device)
        if not is_classifier(self.checkpoint.load_config(), self.kind):
            raise ValueError(
                f"{self!r} is not a {_CLASSIFIES[self.kind]} classifier, so it has no head that scores; pass a "
                f"checkpoint of a ...For{self.kind} model."
            )
        available = "cuda" if torch.cuda.is_available() else "cpu"  # "cuda" is this rank's GPU
        device = available if self.device == "auto" else self.device
        return self.checkpoint.load_as(f"AutoModelFor{self.kind}").to(device)


def load_tokenizer(tokenizer: Any) -> Any:
    """Load a tokenizer by name or folder; return any other object unchanged."""
    return PretrainedPolicy(tokenizer).load_tokenizer() if isinstance(tokenizer, str) else tokenizer


def check_label(label: int | None, owner: str) -> None:
    """Refuse anything but None or a non-negative integer.

    Raises:
        ValueError: If it is anything else.
    """
    if label is not None and (isinstance(label, bool) or not isinstance(label, int) or label < 0):
        raise ValueError(f"{owner}.label is {label!r}; pass the index of a label, counted from 0.")


def check_tokenizer(tokenizer: Any, owner: str, otherwise: str) -> None:
    """Refuse anything but None, a name or a tokenizer.

    Args:
        tokenizer: The option.
        owner: Name of the reward's class.
        otherwise: What None means, for the error.

    Raises:
        TypeError: If it is anything else.
    """
    if tokenizer is not None and not isinstance(tokenizer, str) and not callable(tokenizer):
        raise TypeError(
            f"{owner}.tokenizer is {tokenizer!r:.80} of type {type(tokenizer).__name__}; pass a name, a folder as "
            f"a string, a tokenizer, or None for {otherwise}."
        )


def _check_type(model: Any, owner: str) -> None:
    if not isinstance(model, str) and not (isinstance(model, nn.Module) and hasattr(model, "config")):
        raise TypeError(
            f"{owner}.model is {model!r:.80} of type {type(model).__name__}; pass a name on the hub, a folder as a "
            "string, or a transformers model."
        )


def _passes(groups: list[RolloutGroup], sharing: Sharing, max_tokens: int) -> Iterator[list[RolloutGroup]]:
    """Split groups, in order, into passes of at most `max_tokens` tokens, or of a single group."""
    current: list[RolloutGroup] = []
    for group in groups:
        if current and _num_tokens([*current, group], sharing) > max_tokens:
            yield current
            current = []
        current.append(group)
    if current:
        yield current


def _num_tokens(groups: list[RolloutGroup], sharing: Sharing) -> int:
    """Number of tokens in a pass; with repeated prefixes, rows are padded to the longest."""
    if sharing == "shared":
        return sum(len(group.prompt_ids) + sum(len(r.token_ids) for r in group.rollouts) for group in groups)
    lengths = [len(group.prompt_ids) + len(rollout.token_ids) for group in groups for rollout in group.rollouts]
    return len(lengths) * max(lengths)

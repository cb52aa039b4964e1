"""Critic sources: a copy of the policy, separate pretrained weights, or a head on the policy's trunk."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from torch import nn

from pl_grouprl.attention import find_backbone, find_decoder, in_force
from pl_grouprl.checks.model_introspection import check_causal, check_score_head, hidden_size
from pl_grouprl.models.adapter_layers import has_adapters, merged_copy
from pl_grouprl.models.critic import DEFAULT_HEAD_STD, Critic, ValueHead
from pl_grouprl.models.policy import Dtype, PretrainedPolicy
from pl_grouprl.models.sequence_classifier import is_sequence_classifier, score_head
from pl_grouprl.utilities.arguments import checked_arguments

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@runtime_checkable
class CriticSource(Protocol):
    """Creates the initial critic. Called on every rank and on every resume, with the same result each time.

    A source whose critic shares storage with the policy sets `needs_whole_weights = True`; strategies that shard
    weights refuse it.
    """

    def load(self, policy: nn.Module) -> Critic:
        """Return a new critic in training mode.

        Args:
            policy: The initial policy, an unpatched transformers causal language model.
        """
        ...


@checked_arguments
@dataclass(frozen=True)
class PolicyCopyCritic:
    """A separate, fully trained critic, initialized as a copy of the initial policy's decoder.

    A policy's adapter is merged into the copy; `LoRACritic` then needs far less memory.

    Attributes:
        head_std: Standard deviation of the new value head's weights; its bias is 0. With 0 all values start at exactly
            0, and no gradient reaches the trunk until the head has moved.
        seed: Seed of the new value head.
    """

    head_std: float = DEFAULT_HEAD_STD
    seed: int = 0

    def __post_init__(self) -> None:
        check_head_std(self, self.head_std)

    def load(self, policy: nn.Module) -> Critic:
        """Copy the policy's decoder, with its vision tower if it has one, and put a new head on it."""
        backbone = unpatched_backbone(policy)
        trunk = copy.deepcopy(merged_copy(backbone) if has_adapters(backbone) else backbone)
        if has_adapters(backbone):
            trunk.requires_grad_(True)
        return Critic(trunk, ValueHead.near_zero(hidden_size(trunk), self.head_std, self.seed)).train()


@checked_arguments
@dataclass(frozen=True)
class SharedTrunkCritic:
    """A value head on the policy's decoder: one forward serves policy and critic.

    Attributes:
        detach: Whether to stop the value loss's gradient at the policy; only the head then learns from it.
        head_std: As in `PolicyCopyCritic`.
        seed: Seed of the new value head.
    """

    detach: bool = False
    head_std: float = DEFAULT_HEAD_STD
    seed: int = 0

    def __post_init__(self) -> None:
        check_head_std(self, self.head_std)

    def load(self, policy: nn.Module) -> Critic:
        """Create a new head for the policy's decoder."""
        trunk = find_backbone(policy)  # type: ignore[arg-type]
        head = ValueHead.near_zero(hidden_size(trunk), self.head_std, self.seed)
        return Critic(trunk, head, shares_trunk=True, detach_trunk=self.detach).train()


class _CriticCheckpoint(PretrainedPolicy):
    @property
    def _owner(self) -> str:
        return f"the critic's {super()._owner}"


@checked_arguments
@dataclass(frozen=True)
class PretrainedCritic:
    """A separate critic in Hugging Face format.

    The head of a sequence classifier with one label (a reward model) becomes the value head. In any other model, a new
    head near zero replaces the head. Encoders are refused, because they see future tokens.

    Attributes:
        path: Name on the model hub or a local folder. Its vocabulary must be the policy's.
        dtype: See `PretrainedPolicy`, also for the options down to `trust_remote_code`.
        attn_implementation: As in transformers.
        gradient_checkpointing: Recompute the activations of each layer in the backward pass. None: if the policy does.
        disable_dropout: Set every dropout rate of the config to 0.
        revision: Branch, tag or commit on the hub.
        trust_remote_code: Run model code that comes with the checkpoint. It can do anything on this machine.
        head_std: As in `PolicyCopyCritic`, if the checkpoint has no head.
        seed: Seed of the new value head.
        allow_mismatched_weights: As in `PretrainedPolicy`; need not list the replaced and the new head.
        gguf_file: As in `PretrainedPolicy`.
    """

    path: str
    dtype: Dtype = "float32"
    attn_implementation: str | None = None
    gradient_checkpointing: bool | None = None
    disable_dropout: bool = True
    revision: str | None = None
    trust_remote_code: bool = False
    head_std: float = DEFAULT_HEAD_STD
    seed: int = 0
    allow_mismatched_weights: tuple[str, ...] = ()
    gguf_file: str | None = None

    def __post_init__(self) -> None:
        check_head_std(self, self.head_std)
        _ = self._checkpoint  # checks the path

    def load(self, policy: nn.Module) -> Critic:
        """Load the weights.

        Raises:
            OSError: If `path` is neither a folder with a model nor a reachable name on the hub.
            ValueError: If its vocabulary is smaller than the policy's, it is not causal, its head does not score a
                sequence at the last token, or its weights do not match its config.
        """
        owner = f"PretrainedCritic(path={self.path!r})"
        config = self.load_config()
        if is_sequence_classifier(config) and config.num_labels == 1:
            model = self._checkpoint.load_as("AutoModelForSequenceClassification")
            trunk, score = find_decoder(model), score_head(model)
            check_causal(trunk, owner)
            check_score_head(model, score, owner)
            head = ValueHead.from_score(score)
        else:
            trunk = find_backbone(self._checkpoint.load_as("AutoModel"))
            check_causal(trunk, owner)
            head = ValueHead.near_zero(hidden_size(trunk), self.head_std, self.seed)
        self._check_vocabulary(trunk, policy)
        if self.gradient_checkpointing is None and getattr(policy, "is_gradient_checkpointing", False):
            self._checkpoint.enable_checkpointing(trunk)
        return Critic(trunk, head).train()

    def _check_vocabulary(self, trunk: Any, policy: Any) -> None:
        available, needed = (model.get_input_embeddings().num_embeddings for model in (trunk, policy))
        if available < needed:
            raise ValueError(
                f"PretrainedCritic(path={self.path!r}) has embeddings for {available} tokens and the policy for "
                f"{needed}; choose a critic with the policy's tokenizer."
            )

    def load_config(self) -> PretrainedConfig:
        """Load the config of the critic's model."""
        return self._checkpoint.load_config()

    @property
    def _checkpoint(self) -> PretrainedPolicy:
        return _CriticCheckpoint(
            self.path,
            self.dtype,
            self.attn_implementation,
            self.gradient_checkpointing,
            self.disable_dropout,
            self.revision,
            self.trust_remote_code,
            allow_mismatched_weights=self.allow_mismatched_weights,
            gguf_file=self.gguf_file,
        )


def unpatched_backbone(policy: Any) -> Any:
    """The policy's decoder, with its vision tower if it has one, for copying.

    Raises:
        RuntimeError: If it is inside `shared_prefix`: the copy would include the patch.
    """
    if in_force(policy) is not None:
        raise RuntimeError(
            f"{type(policy).__name__} is inside a shared_prefix context, whose patch a copied critic would include; "
            "create the critic before entering the context."
        )
    return find_backbone(policy)


def check_head_std(source: Any, head_std: float) -> None:
    """Refuse an invalid standard deviation.

    Raises:
        ValueError: Names the class and the value.
    """
    if not 0 <= head_std < math.inf:  # nor NaN
        raise ValueError(f"{type(source).__name__}.head_std is {head_std}; it must be 0 or larger, and finite.")

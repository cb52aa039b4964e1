"""Where a critic comes from: a copy of the policy, weights of its own, or a head on the policy's trunk."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import nn

from pl_grouprl.attention import find_backbone, find_decoder, in_force
from pl_grouprl.checks.model_introspection import check_causal, check_score_head, hidden_size
from pl_grouprl.models.adapter_layers import has_adapters, merged_copy
from pl_grouprl.models.critic import DEFAULT_HEAD_STD, Critic, ValueHead
from pl_grouprl.models.policy import Dtype, PretrainedPolicy
from pl_grouprl.models.sequence_classifier import is_sequence_classifier, score_head
from pl_grouprl.utilities.arguments import checked_arguments


@runtime_checkable
class CriticSource(Protocol):
    """Makes the initial critic. Called again on every rank and on every resume, with the same result each time.

    A source whose critic shares storage with the policy declares `needs_whole_weights = True`: strategies that shard
    weights refuse it.
    """

    def load(self, policy: nn.Module) -> Critic:
        """Return a new critic in training mode.

        Args:
            policy: The initial policy, a transformers causal language model that no context has patched.
        """
        ...


@checked_arguments
@dataclass(frozen=True)
class PolicyCopyCritic:
    """A critic with weights of its own, all trained, which begin as a copy of the initial policy's decoder.

    Where the policy has an adapter, it is merged into the copy. `LoRACritic` then needs far less memory.

    Attributes:
        head_std: Standard deviation of the new value head's weights; its bias is 0. With 0 all values begin at exactly
            0, and no gradient reaches the trunk before the head has moved.
        seed: Of the new value head.
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
        zero_dropout_rates(trunk)
        return Critic(trunk, ValueHead.near_zero(hidden_size(trunk), self.head_std, self.seed)).train()


@checked_arguments
@dataclass(frozen=True)
class SharedTrunkCritic:
    """A value head on the policy's own decoder: one forward serves policy and critic.

    Attributes:
        detach: The value loss sends no gradient into the policy; the head alone learns from it.
        head_std: As in `PolicyCopyCritic`.
        seed: Of the new value head.
    """

    detach: bool = False
    head_std: float = DEFAULT_HEAD_STD
    seed: int = 0

    def __post_init__(self) -> None:
        check_head_std(self, self.head_std)

    def load(self, policy: nn.Module) -> Critic:
        """Put a new head beside the policy's decoder."""
        trunk = find_backbone(policy)  # type: ignore[arg-type]
        head = ValueHead.near_zero(hidden_size(trunk), self.head_std, self.seed)
        return Critic(trunk, head, shares_trunk=True, detach_trunk=self.detach).train()


@checked_arguments
@dataclass(frozen=True)
class PretrainedCritic:
    """A critic in Hugging Face format, with weights of its own.

    The head of a sequence classifier with one label (a reward model) becomes the value head. Any other model loses its
    head and gets a new one near zero. Encoders, which see the tokens to come, are refused.

    Attributes:
        path: Name on the model hub or a local folder. Its vocabulary must be the policy's.
        dtype: As in `PretrainedPolicy`, like all that follow down to `trust_remote_code`.
        attn_implementation: As in transformers.
        gradient_checkpointing: Recompute the activations of each layer in the backward pass.
        disable_dropout: Set every dropout rate of the config to 0.
        revision: Branch, tag or commit on the hub.
        trust_remote_code: Run model code that comes with the checkpoint. It can do anything on this machine.
        head_std: As in `PolicyCopyCritic`, where the checkpoint brings no head.
        seed: Of the new value head.
        allow_mismatched_weights: As in `PretrainedPolicy`; the replaced head and the new one need not be named.
    """

    path: str
    dtype: Dtype = "float32"
    attn_implementation: str | None = None
    gradient_checkpointing: bool = False
    disable_dropout: bool = True
    revision: str | None = None
    trust_remote_code: bool = False
    head_std: float = DEFAULT_HEAD_STD
    seed: int = 0
    allow_mismatched_weights: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_head_std(self, self.head_std)
        _ = self._checkpoint  # checks the path

    def load(self, policy: nn.Module) -> Critic:
        """Load the weights.

        Raises:
            OSError: If `path` is neither a folder with a model nor a reachable name on the hub.
            ValueError: If the model knows fewer tokens than the policy, is not causal, does not score a sequence by its
                head at the last token, or its weights do not match its config.
        """
        owner = f"PretrainedCritic(path={self.path!r})"
        config = self._checkpoint.load_config()
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
        return Critic(trunk, head).train()

    def _check_vocabulary(self, trunk: Any, policy: Any) -> None:
        own, needed = (model.get_input_embeddings().num_embeddings for model in (trunk, policy))
        if own < needed:
            raise ValueError(
                f"PretrainedCritic(path={self.path!r}) has embeddings for {own} tokens and the policy for {needed}; "
                "choose a critic with the policy's tokenizer."
            )

    @property
    def _checkpoint(self) -> PretrainedPolicy:
        return PretrainedPolicy(
            self.path,
            self.dtype,
            self.attn_implementation,
            self.gradient_checkpointing,
            self.disable_dropout,
            self.revision,
            self.trust_remote_code,
            allow_mismatched_weights=self.allow_mismatched_weights,
        )


def unpatched_backbone(policy: Any) -> Any:
    """The policy's decoder, with its vision tower if it has one, for copying.

    Raises:
        RuntimeError: If it shares prefixes at the moment: a copy would take the patch along.
    """
    if in_force(policy) is not None:
        raise RuntimeError(
            f"{type(policy).__name__} is inside a shared_prefix context, which a copied critic would take along; make "
            "the critic before the context is entered."
        )
    return find_backbone(policy)


def zero_dropout_rates(model: nn.Module) -> None:
    """Set the dropout rates of a finished model to 0, in place: its modules keep copies of those in the config."""
    from pl_grouprl.models.policy import zero_dropout

    zero_dropout(model.config)  # type: ignore[arg-type]
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)


def check_head_std(source: Any, head_std: float) -> None:
    """Refuse what is no standard deviation.

    Raises:
        ValueError: With the class and the value.
    """
    if not 0 <= head_std < math.inf:  # nor NaN
        raise ValueError(f"{type(source).__name__}.head_std is {head_std}; it must be 0 or larger, and finite.")

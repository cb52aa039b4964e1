"""Critics: values for every state of a rollout, computed on the policy's packed rows.

V[t] is read at the position that predicts token t, so it depends on the prompt and the tokens before t.

Legend: B rollouts, N response tokens of all rollouts, concatenated, K requested positions, D hidden size.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from pl_grouprl.attention import find_backbone, find_decoder, in_force
from pl_grouprl.attention.backends.saved import checkpointing_of
from pl_grouprl.attention.support import is_classifier, score_head
from pl_grouprl.checks import ParityReport, compare_paths
from pl_grouprl.checks.model_introspection import check_causal, check_score_head, hidden_size
from pl_grouprl.models.adapters import (
    LoRAOptions,
    aliased_copy,
    has_adapters,
    leave_parameters_out_of_checkpoints,
    merged_copy,
    remove_adapters,
)
from pl_grouprl.models.policy import Dtype, PretrainedPolicy
from pl_grouprl.models.score import hidden_states
from pl_grouprl.packing import ScoringBatch
from pl_grouprl.types import RolloutGroup
from pl_grouprl.utilities.device_defaults import Checkpointing
from pl_grouprl.utilities.distributed import derive_seed
from pl_grouprl.utilities.options import check_options

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

DEFAULT_HEAD_STD = 1e-3
"""Standard deviation of a new value head's weights. Hidden states have entries of about 1 after the last norm, so with
D = 1024 initial values are about 0.03: near zero, but not zero, or no gradient would reach the trunk."""


class ValueHead(nn.Linear):
    """Maps hidden states [..., D] to values [..., 1], in float32 (float64 for float64 states) even under autocast.

    Weights and bias are zero until one of the two constructors below, or a checkpoint, sets them.
    """

    def __init__(self, hidden_size: int) -> None:
        super().__init__(hidden_size, 1)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set weights and bias to zero."""
        self.weight.zero_()
        self.bias.zero_()

    @classmethod
    def near_zero(cls, hidden_size: int, std: float = DEFAULT_HEAD_STD, seed: int = 0) -> ValueHead:
        """Create a head with normal weights of standard deviation `std` and bias 0, the same on every rank."""
        head = cls(hidden_size)
        generator = torch.Generator().manual_seed(derive_seed("value head", seed))
        with torch.no_grad():
            head.weight.copy_(torch.randn(1, hidden_size, generator=generator, device="cpu") * std)
        return head

    @classmethod
    def from_score(cls, score: nn.Linear) -> ValueHead:
        """Copy the head of a classifier with one label."""
        head = cls(score.in_features)
        with torch.no_grad():
            head.weight.copy_(score.weight)
            if score.bias is not None:
                head.bias.copy_(score.bias)
        return head

    def forward(self, states: Tensor) -> Tensor:
        """Return one value per state."""
        dtype = torch.promote_types(states.dtype, torch.float32)
        with torch.autocast(states.device.type, enabled=False):
            return nn.functional.linear(states.to(dtype), self.weight.to(dtype), self.bias.to(dtype))


class Critic(nn.Module):
    """A decoder and a value head.

    A batch with shared prefixes needs `shared_prefix(critic.trunk)` to be active until the backward pass is done; for a
    shared trunk, the policy's context is enough.

    Args:
        trunk: A transformers decoder without a language model head.
        head: Turns its hidden states into values.
        shares_trunk: Whether the trunk belongs to the policy. It is then not a submodule of the critic.
        detach_trunk: Whether to stop the value loss's gradient at the trunk.
    """

    def __init__(
        self, trunk: PreTrainedModel, head: ValueHead, *, shares_trunk: bool = False, detach_trunk: bool = False
    ) -> None:
        super().__init__()
        self.shares_trunk = shares_trunk
        self.detach_trunk = detach_trunk
        self.head = head
        self._unregistered: tuple[PreTrainedModel, ...] = (trunk,) if shares_trunk else ()
        if not shares_trunk:
            self.own_trunk = trunk

    @property
    def trunk(self) -> PreTrainedModel:
        """The decoder: the critic's, or the policy's if shared."""
        return self._unregistered[0] if self.shares_trunk else self.own_trunk

    def values(self, batch: ScoringBatch, index: Tensor | None = None, *, states: Tensor | None = None) -> Tensor:
        """Compute values at given positions; the head only runs on these.

        Args:
            batch: Result of `packing.pack`, on the critic's device.
            index: Positions in the flattened hidden states, int64, shape [K]. By default `batch.predict_index_N`: the
                value before each response token. `batch.final_index_B` gives the value after the last token.
            states: Hidden states of all positions, shape [positions, D], if the trunk has already run (see
                `models.score.hidden_states`): with a shared trunk the policy's forward serves both.

        Returns:
            Shape [K], float32 (float64 for a float64 trunk), with gradient where it is enabled.

        Raises:
            RuntimeError: If the batch has shared prefixes and no context is active for the trunk.
        """
        if states is None:
            with torch.set_grad_enabled(torch.is_grad_enabled() and not self.detach_trunk):
                states = hidden_states(self.trunk, batch)
        elif self.detach_trunk:
            states = states.detach()
        values_K1: Tensor = self.head(states.index_select(0, batch.predict_index_N if index is None else index))
        return values_K1[:, 0]

    def as_token_classifier(self) -> PreTrainedModel:
        """Express the critic in transformers' names: an `AutoModelForTokenClassification` with one label.

        Its logit at a position is the value after that token. It shares trunk and head with the critic, adapters
        included; `ExportPolicy(attribute="critic")` saves it, merged.

        Raises:
            ValueError: If transformers has no token classifier for the trunk's family, such as for images.
        """
        from transformers import AutoModelForTokenClassification

        config = copy.deepcopy(self.trunk.config)
        config.num_labels, config.classifier_dropout = 1, 0.0
        with torch.device("meta"):
            model = AutoModelForTokenClassification.from_config(config)
        setattr(model, model.base_model_prefix, self.trunk)
        name = next(name for name, child in model.named_children() if isinstance(child, nn.Linear))
        setattr(model, name, self.head)
        config.architectures = [type(model).__name__]
        return model

    def forward(self, batch: ScoringBatch, index: Tensor | None = None, *, states: Tensor | None = None) -> Tensor:
        """Same as `values`."""
        return self.values(batch, index, states=states)


def check_critic_parity(
    critic: Critic, groups: Sequence[RolloutGroup] | None = None, *, backend: str = "auto"
) -> ParityReport:
    """Run groups through the critic's trunk with repeated and with shared prefixes, and compare.

    Compares the projection of each hidden state onto the direction of the value head's weights, and its gradients: the
    values of a new head are near zero on both paths, so they would show nothing.

    Args:
        critic: The critic; unchanged. A detached trunk has no gradients to compare: use `check_parity` on the policy.
        groups: Groups to compare on; by default two small random groups.
        backend: Attention backend of the shared path.

    Raises:
        UnsupportedModelError: If the trunk cannot share prefixes.
        ValueError: If `groups` has no rollouts, or the trunk is not trained.
    """
    trunk = critic.trunk
    weight = critic.head.weight.detach()
    weight_D = (weight.full_tensor() if hasattr(weight, "full_tensor") else weight)[0].float()  # whole, if sharded
    if not weight_D.any():
        weight_D = torch.ones_like(weight_D)
    direction_D = weight_D / weight_D.norm()

    def along(states: Tensor) -> Tensor:
        wide = torch.promote_types(states.dtype, torch.float32)
        return states.to(wide) @ direction_D.to(wide)

    def from_sequence(tokens: Tensor, prompt_length: int) -> Tensor:
        states = trunk(input_ids=tokens, use_cache=False, return_dict=True).last_hidden_state[0]
        return along(states[prompt_length - 1 : -1])

    def from_batch(batch: ScoringBatch) -> Tensor:
        return along(hidden_states(trunk, batch).index_select(0, batch.predict_index_N))

    return compare_paths(
        trunk, from_sequence, from_batch, groups, backend=backend, quantity="hidden states along the value head"
    )


# Critic sources: a copy of the policy, separate pretrained weights, or a head on the policy's trunk.


@runtime_checkable
class CriticSource(Protocol):
    """Creates the initial critic. Called on every rank and on every resume, with the same result each time.

    A source whose critic shares storage with the policy sets `needs_whole_weights = True`; strategies that shard
    weights do not support it.
    """

    def load(self, policy: nn.Module) -> Critic:
        """Return a new critic in training mode.

        Args:
            policy: The initial policy, an unpatched transformers causal language model.
        """
        ...


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
        _check_head_std(self.head_std)

    def load(self, policy: nn.Module) -> Critic:
        """Copy the policy's decoder, with its vision tower if it has one, and put a new head on it."""
        backbone = unpatched_backbone(policy)
        trunk = copy.deepcopy(merged_copy(backbone) if has_adapters(backbone) else backbone)
        if has_adapters(backbone):
            trunk.requires_grad_(True)
        return Critic(trunk, ValueHead.near_zero(hidden_size(trunk), self.head_std, self.seed)).train()


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
        _check_head_std(self.head_std)

    def load(self, policy: nn.Module) -> Critic:
        """Create a new head for the policy's decoder."""
        trunk = find_backbone(policy)  # type: ignore[arg-type]
        head = ValueHead.near_zero(hidden_size(trunk), self.head_std, self.seed)
        return Critic(trunk, head, shares_trunk=True, detach_trunk=self.detach).train()


@dataclass(frozen=True)
class PretrainedCritic:
    """A separate critic in Hugging Face format.

    The head of a sequence classifier with one label (a reward model), or of a token classifier with one (an exported
    critic), becomes the value head. In any other model, a new head near zero replaces the head. Encoders do not work,
    because they see future tokens.

    Attributes:
        path: Name on the model hub or a local folder. Its vocabulary must be the policy's.
        dtype: See `PretrainedPolicy`, also for the options down to `trust_remote_code`.
        attn_implementation: As in transformers.
        gradient_checkpointing: As in `PretrainedPolicy`. Defaults to the policy's.
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
    gradient_checkpointing: Checkpointing | None = None
    disable_dropout: bool = True
    revision: str | None = None
    trust_remote_code: bool = False
    head_std: float = DEFAULT_HEAD_STD
    seed: int = 0
    allow_mismatched_weights: tuple[str, ...] = ()
    gguf_file: str | None = None

    def __post_init__(self) -> None:
        _check_head_std(self.head_std)
        _ = self._checkpoint  # checks its options

    def load(self, policy: nn.Module) -> Critic:
        """Load the weights.

        Raises:
            OSError: If `path` is neither a folder with a model nor a reachable name on the hub.
            ValueError: If its vocabulary is smaller than the policy's, it is not causal, its head does not score the
                last token's state, or its weights do not match its config.
        """
        owner = f"PretrainedCritic(path={self.path!r})"
        config = self.load_config()
        kinds = [kind for kind in ("SequenceClassification", "TokenClassification") if is_classifier(config, kind)]
        if kinds and config.num_labels == 1:
            model = self._checkpoint.load_as(f"AutoModelFor{kinds[0]}")
            trunk, score = find_decoder(model), score_head(model, kinds[0])
            check_causal(trunk, owner)
            check_score_head(model, score, owner, kinds[0])
            head = ValueHead.from_score(score)
        else:
            trunk = find_backbone(self._checkpoint.load_as("AutoModel"))
            check_causal(trunk, owner)
            head = ValueHead.near_zero(hidden_size(trunk), self.head_std, self.seed)
        both: tuple[Any, Any] = (trunk, policy)
        available, needed = (model.get_input_embeddings().num_embeddings for model in both)
        if available < needed:
            raise ValueError(f"{owner} has embeddings for {available} tokens and the policy for {needed}.")
        if self.gradient_checkpointing is None and (mode := checkpointing_of(policy)):
            replace(self._checkpoint, gradient_checkpointing=mode).enable_checkpointing(trunk)
        return Critic(trunk, head).train()

    def load_config(self) -> PretrainedConfig:
        """Load the config of the critic's model."""
        return self._checkpoint.load_config()

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
            gguf_file=self.gguf_file,
        )


def unpatched_backbone(policy: Any) -> Any:
    """The policy's decoder, with its vision tower if it has one, for copying.

    Raises:
        RuntimeError: If it is inside `shared_prefix`: the copy would include the patch.
    """
    if in_force(policy) is not None:
        raise RuntimeError("the policy is inside a shared_prefix context; create the critic before entering it.")
    return find_backbone(policy)


def _check_head_std(head_std: float) -> None:
    check_options({"head_std": (head_std, head_std >= 0, "0 or larger")})


# A critic made of the policy's base weights, its own low-rank layers and a value head. The base weights exist once: the
# critic's alias the policy's storage, so they follow the policy as it trains, and the
# critic's gradient never reaches them. The critic does not include the policy's adapter.


@dataclass(frozen=True)
class LoRACritic(LoRAOptions):
    """A value head on the policy's decoder, with separate low-rank layers for the critic.

    Attributes:
        r: See `LoRAOptions`, also for the options down to `use_rslora`.
        alpha: The output of the low-rank layers is multiplied by alpha / r.
        dropout: Dropout rate of their input: 0, as in `LoRAOptions`.
        target_modules: `all-linear`, suffixes of layer names, or a regular expression.
        use_dora: Also learn the norms of the weights' columns (DoRA).
        use_rslora: Multiply by alpha / sqrt(r) instead.
        seed: Seed of the new layers and the value head.
        head_std: As in `PolicyCopyCritic`.

    Raises:
        ModuleNotFoundError: If PEFT is not installed.
        ValueError: If an option is out of range.
    """

    needs_whole_weights: ClassVar[bool] = True

    head_std: float = DEFAULT_HEAD_STD

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_head_std(self.head_std)

    def load(self, policy: nn.Module) -> Critic:
        """Build the critic on the policy's base, without the policy's adapter, if any.

        Raises:
            ValueError: If no layer matches `target_modules`.
        """
        trunk, names = aliased_copy(unpatched_backbone(policy))
        remove_adapters(trunk)
        self.put_on(trunk, "critic")
        tied = {name: names[parameter] for name, parameter in trunk.named_parameters() if parameter in names}
        head = ValueHead.near_zero(hidden_size(trunk), self.head_std, self.seed)
        return TiedCritic(trunk, head, tied).train()


class TiedCritic(Critic):
    """A critic whose trunk has frozen parameters that alias the policy's.

    Its `state_dict` omits these, and loading does not report them missing. Call `retie` when either model gets new
    storage: after moving or casting one, after `copy.deepcopy` or pickling of both, and after
    `policy.load_state_dict(..., assign=True)`. Until then the critic uses its old weights.

    Args:
        trunk: A structural copy of the policy's decoder, with additional layers.
        head: The value head.
        tied: For each aliased parameter of the trunk, its name in the policy's decoder.
    """

    def __init__(self, trunk: Any, head: ValueHead, tied: dict[str, str]) -> None:
        super().__init__(trunk, head)
        self.tied = tied
        leave_parameters_out_of_checkpoints(self, [f"own_trunk.{name}" for name in tied])

    @torch.no_grad()
    def retie(self, policy: nn.Module) -> None:
        """Point the aliases at the policy's storage again.

        Raises:
            ValueError: If the policy's parameters are not whole tensors of the same shapes (as when sharded by FSDP).
        """
        aliases = dict(self.trunk.named_parameters())
        sources = dict(find_backbone(policy).named_parameters())  # type: ignore[arg-type]
        for name, source in self.tied.items():
            alias, parameter = aliases[name], sources.get(source)
            if parameter is None or type(parameter) is not type(alias) or parameter.shape != alias.shape:
                found = "missing" if parameter is None else f"a {type(parameter).__name__} of {list(parameter.shape)}"
                raise ValueError(
                    f"LoRACritic shares storage with the policy's {source!r} of shape {list(alias.shape)}, which is "
                    f"now {found}; with sharded weights use PolicyCopyCritic or SharedTrunkCritic."
                )
            alias.data = parameter.data

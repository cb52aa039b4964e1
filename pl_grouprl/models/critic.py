"""A critic: values for every state of a rollout, computed on the policy's packed rows.

V[t] is read at the position that predicts token t, so it depends on the prompt and the tokens before t.

Legend: B rollouts, N response tokens of all rollouts, concatenated, K requested positions, D hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from pl_grouprl.checks import ParityReport, compare_paths
from pl_grouprl.checks.model_introspection import hidden_size
from pl_grouprl.models.score import hidden_states
from pl_grouprl.packing import ScoringBatch
from pl_grouprl.types import RolloutGroup
from pl_grouprl.utilities.distributed import derive_seed

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DEFAULT_HEAD_STD = 1e-3
"""Standard deviation of a new value head's weights. Hidden states have entries of about 1 after the last norm, so with
D = 1024 initial values are about 0.03: near zero, but not zero, or no gradient would reach the trunk."""


class ValueHead(nn.Linear):
    """Maps hidden states [K, D] to values [K], in float32 (float64 for float64 states) even under autocast.

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
        """Copy the head of a sequence classifier with one label."""
        head = cls(score.in_features)
        with torch.no_grad():
            head.weight.copy_(score.weight)
            if score.bias is not None:
                head.bias.copy_(score.bias)
        return head

    def forward(self, states_KD: Tensor) -> Tensor:
        """Return one value per state."""
        dtype = torch.promote_types(states_KD.dtype, torch.float32)
        with torch.autocast(states_KD.device.type, enabled=False):
            weight, bias = self.weight.to(dtype), self.bias.to(dtype)
            return nn.functional.linear(states_KD.to(dtype), weight, bias)[:, 0]


class Critic(nn.Module):
    """A decoder and a value head.

    A batch with shared prefixes needs `shared_prefix(critic.trunk)` to be active until the backward pass is done; for a
    shared trunk, the policy's context is enough.

    Args:
        trunk: A transformers decoder without a language model head.
        head: Turns its hidden states into values.
        shares_trunk: Whether the trunk belongs to the policy. It is then not a submodule of the critic.
        detach_trunk: Whether to stop the value loss's gradient at the trunk.

    Raises:
        ValueError: If the head's input size is not the trunk's hidden size.
    """

    def __init__(
        self, trunk: PreTrainedModel, head: ValueHead, *, shares_trunk: bool = False, detach_trunk: bool = False
    ) -> None:
        super().__init__()
        if head.in_features != (width := hidden_size(trunk)):
            raise ValueError(f"head takes {head.in_features} features, but the trunk's hidden size is {width}.")
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
        return self.head(states.index_select(0, batch.predict_index_N if index is None else index))

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

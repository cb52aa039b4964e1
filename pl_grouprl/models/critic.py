"""A critic: the value of every state of a rollout, from the same packed rows that the policy is scored on.

V[t] is read at the position that predicts token t, so it depends on the prompt and the tokens before t.

Legend: B rollouts, N response tokens of all rollouts one after another, K positions asked for, D hidden size.
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
"""Standard deviation of a new value head's weights. Hidden states leave the last norm with entries of about 1, so
with D = 1024 values begin at about 0.03: near zero, but not zero, or no gradient would reach the trunk."""


class ValueHead(nn.Linear):
    """Hidden states [K, D] to values [K], computed in float32 (float64 for float64 states), autocast or not.

    Weights and bias are zero until one of the two constructors below, or a checkpoint, fills them.
    """

    def __init__(self, hidden_size: int) -> None:
        super().__init__(hidden_size, 1)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set all to zero."""
        self.weight.zero_()
        self.bias.zero_()

    @classmethod
    def near_zero(cls, hidden_size: int, std: float = DEFAULT_HEAD_STD, seed: int = 0) -> ValueHead:
        """Make a head with normal weights of standard deviation `std` and bias 0, the same on every rank."""
        head = cls(hidden_size)
        generator = torch.Generator().manual_seed(derive_seed("value head", seed))
        with torch.no_grad():
            head.weight.copy_(torch.randn(1, hidden_size, generator=generator) * std)
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

    For a batch with shared prefixes `shared_prefix(critic.trunk)` must be in force until the backward pass is done;
    with a shared trunk the policy's own context is that.

    Args:
        trunk: A transformers decoder without a language model head.
        head: Turns its hidden states into values.
        shares_trunk: The trunk belongs to the policy. It is then no submodule of the critic: its parameters are
            the policy's, and listed there.
        detach_trunk: The value loss sends no gradient into the trunk.

    Raises:
        ValueError: If the head does not take the trunk's hidden states.
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
        """The decoder, the critic's own or the policy's."""
        return self._unregistered[0] if self.shares_trunk else self.own_trunk

    def values(self, batch: ScoringBatch, index: Tensor | None = None, *, states: Tensor | None = None) -> Tensor:
        """Values at given positions; the head runs on these alone.

        Args:
            batch: What `packing.pack` made, on the critic's device.
            index: Positions in the flattened hidden states, int64, shape [K]. By default `batch.predict_index_N`: the
                value before each response token. `batch.final_index_B` gives those behind the last tokens.
            states: Hidden states of all positions, shape [positions, D], where the trunk has been run already (see
                `models.score.hidden_states`): with a shared trunk the policy's forward serves both.

        Returns:
            Shape [K], float32 (float64 for a float64 trunk), with gradient where it is enabled.

        Raises:
            RuntimeError: If the batch has shared prefixes and no context is in force for the trunk.
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
    """Run groups through the critic's trunk on the repeated path and on the shared one, and compare.

    What is compared is the share of each hidden state that lies along the value head's weights, and its gradients:
    the values of a new head would be near zero on both paths, whatever the trunk did.

    Args:
        critic: The critic. Nothing of it changes; where nothing of its trunk is trained (a detached one) there is
            nothing to compare, and `check_parity` of the policy says it all.
        groups: What to compare on; by default two small random groups.
        backend: Attention backend of the shared path.

    Raises:
        UnsupportedModelError: If the trunk cannot share prefixes.
        ValueError: If there is no rollout in `groups`, or nothing in the trunk is trained.
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

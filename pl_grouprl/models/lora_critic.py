"""A critic beside the policy: the policy's own weights, plus low-rank layers and a value head that are the critic's.

The base weights exist once: the critic's are aliases of the policy's storage, so they follow the policy as it trains,
and the critic's gradient never reaches them. A policy's own adapter is no part of the critic: both stand on one base.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from pl_grouprl.attention import find_backbone
from pl_grouprl.checks.model_introspection import hidden_size
from pl_grouprl.models.adapter_layers import aliased_copy, leave_parameters_out_of_checkpoints, remove_adapters
from pl_grouprl.models.adapters import LoRAOptions
from pl_grouprl.models.critic import DEFAULT_HEAD_STD, Critic, ValueHead
from pl_grouprl.models.critic_sources import check_head_std, unpatched_backbone, zero_dropout_rates
from pl_grouprl.utilities.arguments import checked_arguments


@checked_arguments
@dataclass(frozen=True)
class LoRACritic(LoRAOptions):
    """A value head on the policy's decoder with low-rank layers of the critic's own.

    Attributes:
        r: As in `LoRAOptions`, like all that follow down to `use_rslora`.
        alpha: The output of the low-rank layers is multiplied by alpha / r.
        dropout: Rate of dropout in front of them, in training mode. With prefixes shared, a prompt's tokens are dropped
            once for all rollouts of a group.
        target_modules: `all-linear`, names of layers, or a regular expression.
        use_dora: Learn the norms of the weights' columns beside (DoRA).
        use_rslora: Multiply by alpha / sqrt(r) instead.
        seed: Of the new layers and of the value head.
        head_std: As in `PolicyCopyCritic`.

    Raises:
        ModuleNotFoundError: If PEFT is not installed.
        ValueError: If an option is out of range.
    """

    needs_whole_weights: ClassVar[bool] = True

    head_std: float = DEFAULT_HEAD_STD

    def __post_init__(self) -> None:
        super().__post_init__()
        check_head_std(self, self.head_std)

    def load(self, policy: nn.Module) -> Critic:
        """Build the critic beside the policy, without the adapter that the policy may have.

        Raises:
            ValueError: If no layer has one of the names in `target_modules`.
        """
        trunk, names = aliased_copy(unpatched_backbone(policy))
        remove_adapters(trunk)
        zero_dropout_rates(trunk)
        self.put_on(trunk, "critic")
        tied = {name: names[parameter] for name, parameter in trunk.named_parameters() if parameter in names}
        head = ValueHead.near_zero(hidden_size(trunk), self.head_std, self.seed)
        return TiedCritic(trunk, head, tied).train()


class TiedCritic(Critic):
    """A critic whose trunk has frozen parameters that are aliases of the policy's.

    They are no part of its `state_dict`, and loading does not miss them. `retie` is needed wherever one of both models
    got new storage: after a move or a cast of one, after `copy.deepcopy` or pickling of both, and after
    `policy.load_state_dict(..., assign=True)`. Until then the critic reads the weights that it had.

    Args:
        trunk: A structural copy of the policy's decoder, with layers of its own.
        head: The value head.
        tied: The name in the policy's decoder of each parameter of the trunk that is an alias.
    """

    def __init__(self, trunk: Any, head: ValueHead, tied: dict[str, str]) -> None:
        super().__init__(trunk, head)
        self.tied = tied
        leave_parameters_out_of_checkpoints(trunk, tied)

    @torch.no_grad()
    def retie(self, policy: nn.Module) -> None:
        """Point the aliases at the policy's storage again.

        Raises:
            ValueError: If the policy's parameters are not whole tensors of the same shapes (sharded by FSDP, say).
        """
        own = dict(self.trunk.named_parameters())
        theirs = dict(find_backbone(policy).named_parameters())  # type: ignore[arg-type]
        for name, source in self.tied.items():
            parameter = theirs.get(source)
            if parameter is None or type(parameter) is not nn.Parameter or parameter.shape != own[name].shape:
                found = "missing" if parameter is None else f"a {type(parameter).__name__} of {list(parameter.shape)}"
                raise ValueError(
                    f"LoRACritic shares storage with the policy's {source!r} of shape {list(own[name].shape)}, which "
                    f"is now {found}; it needs whole parameters (one device or DDP). With sharded weights use "
                    "PolicyCopyCritic or SharedTrunkCritic."
                )
            own[name].data = parameter.data

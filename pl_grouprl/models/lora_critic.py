"""A critic made of the policy's base weights, its own low-rank layers and a value head.

The base weights exist once: the critic's alias the policy's storage, so they follow the policy as it trains, and the
critic's gradient never reaches them. The critic does not include the policy's adapter.
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
from pl_grouprl.models.critic_sources import check_head_std, unpatched_backbone
from pl_grouprl.utilities.arguments import checked_arguments


@checked_arguments
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
        check_head_std(self, self.head_std)

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

    Its `state_dict` leaves these out, and loading does not report them missing. Call `retie` when either model gets new
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
        leave_parameters_out_of_checkpoints(trunk, tied)

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
                    f"LoRACritic shares storage with the policy's {source!r} of shape {list(alias.shape)}, which "
                    f"is now {found}; it needs whole parameters (one device or DDP). With sharded weights use "
                    "PolicyCopyCritic or SharedTrunkCritic."
                )
            alias.data = parameter.data

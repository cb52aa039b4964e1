"""A critic beside the policy: the policy's own weights, plus low-rank layers and a value head that are the critic's.

LoRA (arXiv:2106.09685) by PEFT. The base weights exist once: the critic's are aliases of the policy's storage, so they
follow the policy as it trains, and the critic's gradient never reaches them.
"""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from pl_grouprl.attention import find_decoder
from pl_grouprl.models.critic import DEFAULT_HEAD_STD, Critic, ValueHead
from pl_grouprl.models.critic_sources import check_head_std, unpatched_decoder, zero_dropout_rates
from pl_grouprl.models.probe import hidden_size
from pl_grouprl.utilities import optional
from pl_grouprl.utilities.distributed import derive_seed

_ADAPTER = "critic"


@dataclass(frozen=True)
class LoRACritic:
    """A value head on the policy's decoder with low-rank layers of the critic's own.

    Attributes:
        r: Rank of the layers.
        alpha: Their output is multiplied by alpha / r.
        dropout: Rate of dropout in front of them, in training mode. With prefixes shared, a prompt's tokens are dropped
            once for all rollouts of a group.
        target_modules: Names of the layers that get one, as in PEFT; `all-linear` for every linear layer.
        head_std: As in `PolicyCopyCritic`.
        seed: Of the new layers and of the value head.

    Raises:
        ModuleNotFoundError: If PEFT is not installed.
        ValueError: If an option is out of range.
    """

    r: int = 16
    alpha: int = 32
    dropout: float = 0.0
    target_modules: str | list[str] = "all-linear"
    head_std: float = DEFAULT_HEAD_STD
    seed: int = 0

    def __post_init__(self) -> None:
        optional.require(optional.PEFT_AVAILABLE, "LoRACritic", "lora")
        check_head_std(self, self.head_std)
        checks = {
            "r": (self.r >= 1, "at least 1"),
            "alpha": (self.alpha > 0, "larger than 0"),
            "dropout": (0 <= self.dropout < 1, "in [0, 1)"),
            "target_modules": (bool(self.target_modules), "'all-linear' or names of layers"),
        }
        for name, (valid, range_) in checks.items():
            if not valid:
                raise ValueError(f"LoRACritic.{name} is {getattr(self, name)!r}; it must be {range_}.")

    def load(self, policy: nn.Module) -> Critic:
        """Build the critic beside the policy.

        Raises:
            ValueError: If no layer has one of the names in `target_modules`, or the policy has PEFT layers itself.
        """
        decoder = unpatched_decoder(policy)
        _refuse_adapters(decoder)
        aliases = {id(p): nn.Parameter(p.detach(), requires_grad=False) for p in decoder.parameters()}
        # The memo makes the copy take the aliases where it meets a parameter.
        trunk = copy.deepcopy(decoder, dict(aliases))
        zero_dropout_rates(trunk)
        self._add_adapters(trunk)
        names = {id(aliases[id(parameter)]): name for name, parameter in decoder.named_parameters()}
        tied = {name: names[id(p)] for name, p in trunk.named_parameters() if id(p) in names}
        head = ValueHead.near_zero(hidden_size(trunk), self.head_std, self.seed)
        return TiedCritic(trunk, head, tied).train()

    def _add_adapters(self, trunk: Any) -> None:
        from peft import LoraConfig, inject_adapter_in_model

        config = LoraConfig(
            r=self.r, lora_alpha=self.alpha, lora_dropout=self.dropout, target_modules=self.target_modules
        )
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "fan_in_fan_out")  # GPT2's transposed layers, which PEFT handles
            torch.manual_seed(derive_seed("critic adapters", self.seed))
            inject_adapter_in_model(config, trunk, adapter_name=_ADAPTER)
        for parameter in trunk.parameters():
            if parameter.requires_grad:  # PEFT makes them in the base weights' dtype, too coarse to be trained
                parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, torch.float32))


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
        _leave_out_of_checkpoints(trunk, list(tied))

    @torch.no_grad()
    def retie(self, policy: nn.Module) -> None:
        """Point the aliases at the policy's storage again.

        Raises:
            ValueError: If the policy's parameters are not whole tensors of the same shapes (sharded by FSDP, say).
        """
        own = dict(self.trunk.named_parameters())
        theirs = dict(find_decoder(policy).named_parameters())  # type: ignore[arg-type]
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


def _refuse_adapters(decoder: nn.Module) -> None:
    """PEFT activates one adapter of a layer at a time: the critic's would switch the policy's off in the critic.

    Raises:
        ValueError: If there are PEFT layers in the decoder.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    name = next((name for name, module in decoder.named_modules() if isinstance(module, BaseTunerLayer)), None)
    if name is not None:
        raise ValueError(
            f"LoRACritic puts PEFT layers on a copy of the policy, whose {name!r} is one already, and would drop the "
            "policy's adapter in the critic; merge the policy's adapters into its weights (merge_and_unload of PEFT), "
            "or use PolicyCopyCritic or SharedTrunkCritic."
        )


def _leave_out_of_checkpoints(trunk: nn.Module, names: list[str]) -> None:
    """Keep parameters out of the `state_dict` of a trunk, and of all that contains it, and do not miss them.

    The hooks are functions of this module, as a critic could not be pickled with local ones.
    """
    trunk.register_state_dict_post_hook(partial(_drop, names))
    trunk.register_load_state_dict_pre_hook(partial(_fill_in, names))


def _drop(names: list[str], module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any]) -> None:
    for name in names:
        state.pop(prefix + name, None)


def _fill_in(names: list[str], module: nn.Module, state: dict[str, Any], prefix: str, *args: Any) -> None:
    own = dict(module.named_parameters())
    for name in names:
        state.setdefault(prefix + name, own[name])

"""Policy losses by name, with their options.

Legend: N response tokens of all rollouts, concatenated (flat, no padding).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from pl_grouprl.functional.policy_loss.base import PolicyLoss
from pl_grouprl.functional.registry import F, RegisteredFunction, build, registering
from pl_grouprl.utilities.annotations import describe_value


@dataclass(frozen=True, repr=False)
class PolicyLossFunction(RegisteredFunction):
    """A registered policy loss bound to its options; all losses are called the same way.

    Attributes:
        uses_rollouts: Whether the function takes `rollout_index_N` and `num_rollouts`.
        compares_tokens: Whether the loss of a token depends on the other tokens of the call, and so on how a mini-batch
            is split into micro-batches.
        is_zero_without_advantages: Whether loss and gradient of a rollout are 0 if all its advantages are.
    """

    uses_rollouts: bool = False
    compares_tokens: bool = False
    is_zero_without_advantages: bool = False

    argument: ClassVar[str] = "policy_loss"
    data: ClassVar[tuple[str, ...]] = ("mask_N", "rollout_index_N", "num_rollouts")

    @property
    def takes(self) -> tuple[str, ...]:
        """The mask, and the rollouts if used."""
        return self.data if self.uses_rollouts else self.data[:1]

    def __call__(
        self,
        policy_logprobs_N: Tensor,
        old_logprobs_N: Tensor,
        advantages_N: Tensor,
        *,
        mask_N: Tensor,
        rollout_index_N: Tensor | None = None,
        num_rollouts: int | None = None,
    ) -> PolicyLoss:
        """Return the loss of each token."""
        rollouts = {"rollout_index_N": rollout_index_N, "num_rollouts": num_rollouts} if self.uses_rollouts else {}
        tensors = (policy_logprobs_N, old_logprobs_N, advantages_N)
        result: PolicyLoss = self.function(*tensors, mask_N=mask_N, **rollouts, **self.options)
        return result

    def try_out(self) -> None:
        """Call the function on two tokens of one rollout, both trained, then both masked (as in a dummy micro-batch).

        Raises:
            TypeError: If it returns anything but a `PolicyLoss` with a loss per token and scalar metrics.
        """
        zeros_N = torch.zeros(2, device="cpu")
        for mask_N in (zeros_N == 0, zeros_N != 0):
            loss = self(zeros_N, zeros_N, zeros_N, mask_N=mask_N, rollout_index_N=zeros_N.long(), num_rollouts=1)
            if not isinstance(loss, PolicyLoss) or loss.per_token_N.shape != zeros_N.shape:
                raise TypeError(
                    f"policy_loss={self.name!r} returned {describe_value(loss)} for two tokens; return a PolicyLoss "
                    "whose per_token_N has one loss for each token, shape [N]."
                )
            numbers = {"metric_count": loss.metric_count} | dict(loss.metrics or {})
            wrong = [name for name, value in numbers.items() if not isinstance(value, Tensor) or value.dim()]
            if loss.metrics is None or wrong:
                raise TypeError(
                    f"policy_loss={self.name!r} returned {', '.join(wrong) or 'metrics=None'}; metrics must map names "
                    "to sums over tokens, and these and metric_count must be tensors of shape []."
                )


POLICY_LOSSES: dict[str, PolicyLossFunction] = {}
"""The registered losses."""


def register_policy_loss(
    name: str,
    *,
    uses_rollouts: bool = False,
    compares_tokens: bool = False,
    is_zero_without_advantages: bool = False,
) -> Callable[[F], F]:
    """Register a function as a policy loss; a decorator, `@register_policy_loss("name")`.

    The function takes `(policy_logprobs_N, old_logprobs_N, advantages_N, *, mask_N, ...)`, all of shape [N], and
    returns a `PolicyLoss`. Its other keyword-only arguments are the loss's options, with their types and defaults; it
    should raise a ValueError for values out of range. It is called on two tokens whenever it is chosen, as a check.

    Args:
        name: Its name as a value of the option `policy_loss`.
        uses_rollouts: The function also takes `rollout_index_N`, the rollout of each token, shape [N], and
            `num_rollouts`.
        compares_tokens: The loss of a token depends on the other tokens of the call.
        is_zero_without_advantages: Loss and gradient of a rollout are 0 if all its advantages are. Updates then leave
            out the rollouts that the estimator `vine` does not train.

    Raises:
        ValueError: If the name belongs to another function.
        TypeError: If the function's arguments do not fit what is declared.
    """
    return registering(
        POLICY_LOSSES,
        PolicyLossFunction,
        name,
        uses_rollouts=uses_rollouts,
        compares_tokens=compares_tokens,
        is_zero_without_advantages=is_zero_without_advantages,
    )


def make_policy_loss(name: str, /, **options: Any) -> PolicyLossFunction:
    """Return the loss registered as `name`, bound to options.

    Raises:
        ValueError: If the name is not registered, or an option is unknown, of the wrong type or out of range.
    """
    return build(POLICY_LOSSES, "policy_loss", name, options)

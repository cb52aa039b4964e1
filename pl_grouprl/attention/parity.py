"""Is it the same? A small group through the repeated and the shared path: log-probabilities and gradients compared.

Legend: N response tokens of all rollouts one after another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from pl_grouprl.attention.patch import shared_prefix
from pl_grouprl.packing import ScoringBatch, pack
from pl_grouprl.types import Rollout, RolloutGroup

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MAX_COMPARED_WEIGHTS = 200_000_000
"""Gradients of larger models are compared on the first and the last decoder layer only."""


class ParityError(RuntimeError):
    """The shared and the repeated path differ by more than the dtype explains."""


@dataclass(frozen=True)
class Tolerance:
    """What rounding explains in one dtype.

    Attributes:
        logprob: Difference of a log-probability, in nats: the largest in float32 and float64, the mean below. A
            critic's quantity, of about 1 as well, has the same.
        gradient: Norm of the difference of all gradients over the norm of the gradients.
    """

    logprob: float
    gradient: float


TOLERANCES = {
    torch.float64: Tolerance(1e-4, 1e-3),  # transformers takes norms and rotary angles in float32 all the same
    torch.float32: Tolerance(1e-4, 1e-3),
    torch.bfloat16: Tolerance(5e-2, 1e-1),
    torch.float16: Tolerance(1e-2, 5e-2),
}


@dataclass(frozen=True)
class ParityReport:
    """Differences between the shared and the repeated path.

    Attributes:
        model: Class of the model.
        backend: Attention backend of the shared path.
        dtype: In which it computes: that of the weights, or of autocast where it is on.
        device: Where it ran.
        max_logprob_difference: Largest difference of a response token's log-probability, in nats.
        mean_logprob_difference: Mean of the same.
        gradient_difference: Norm of the difference of the gradients over the norm of the gradients.
        compared_weights: Weights whose gradients were compared.
        token_ratio: Tokens of the repeated path over tokens of the shared one.
        tolerance: What was allowed.
        quantity: What was compared where it was not log-probabilities.
    """

    model: str
    backend: str
    dtype: torch.dtype
    device: torch.device
    max_logprob_difference: float
    mean_logprob_difference: float
    gradient_difference: float
    compared_weights: int
    token_ratio: float
    tolerance: Tolerance
    quantity: str = "log-probabilities"

    @property
    def passed(self) -> bool:
        """Whether both differences are what rounding explains (a NaN is not)."""
        exact = self.dtype in (torch.float32, torch.float64)
        logprob = self.max_logprob_difference if exact else self.mean_logprob_difference
        return logprob <= self.tolerance.logprob and self.gradient_difference <= self.tolerance.gradient

    def __str__(self) -> str:
        """Everything a person needs to judge, in three lines."""
        return (
            f"parity of shared and repeated prefix: {'passed' if self.passed else 'FAILED'} "
            f"({self.model}, backend {self.backend}, {self.dtype}, {self.device}, token ratio {self.token_ratio:.2f})\n"
            f"  {self.quantity}: largest difference {self.max_logprob_difference:.2e}, mean "
            f"{self.mean_logprob_difference:.2e} (allowed {self.tolerance.logprob:.0e})\n"
            f"  gradients: relative difference {self.gradient_difference:.2e} over {self.compared_weights:,} weights "
            f"(allowed {self.tolerance.gradient:.0e})"
        )

    def raise_if_failed(self) -> None:
        """Stop a run whose shared path differs.

        Raises:
            ParityError: With the numbers.
        """
        if not self.passed:
            raise ParityError(f"{self}\nTrain this model with sharing='repeated', or choose another attention backend.")


def check_parity(
    model: PreTrainedModel, groups: Sequence[RolloutGroup] | None = None, *, backend: str = "auto"
) -> ParityReport:
    """Run groups through the repeated path, one sequence at a time, and through the shared one, and compare.

    The logits are the model's own on both paths. Nothing of the model changes: no gradient is left behind. A model
    with dropout, or with reentrant activation checkpointing (which knows only `backward`), is compared in eval mode,
    otherwise in the mode that it is in.

    Args:
        model: A causal language model.
        groups: What to compare on; by default two small random groups, one rollout of them empty.
        backend: Attention backend of the shared path.

    Raises:
        UnsupportedModelError: If the model cannot share prefixes.
        ValueError: If there is no rollout in `groups`, or nothing in the model is trained.
    """

    def from_sequence(tokens: Tensor, prompt_length: int) -> Tensor:
        logits = model(input_ids=tokens, use_cache=False, return_dict=True).logits[0, prompt_length - 1 : -1]
        return _gather(logits, tokens[0, prompt_length:])

    def from_batch(batch: ScoringBatch) -> Tensor:
        logits = model(**batch.model_inputs, use_cache=False, return_dict=True).logits[0]
        return _gather(logits.index_select(0, batch.predict_index_N), batch.targets_N)

    return compare_paths(model, from_sequence, from_batch, groups, backend=backend)


def compare_paths(
    model: PreTrainedModel,
    from_sequence: Callable[[Tensor, int], Tensor],
    from_batch: Callable[[ScoringBatch], Tensor],
    groups: Sequence[RolloutGroup] | None = None,
    *,
    backend: str = "auto",
    quantity: str = "log-probabilities",
) -> ParityReport:
    """Compare any quantity of about 1 that belongs to response tokens, and its gradients, on both paths.

    Args:
        model: A decoder, with or without a head.
        from_sequence: Takes the tokens [1, L] of one sequence and the length of its prompt; returns one number for
            each token behind that.
        from_batch: Takes a packed batch; returns one number for each of its N response tokens.
        groups: As in `check_parity`, like all that is raised.
        backend: Attention backend of the shared path.
        quantity: Its name in the report.
    """
    groups = random_groups(model.config.get_text_config().vocab_size) if groups is None else groups
    batch = pack(groups, device=model.device)
    weights = _compared_weights(model)
    autocast = torch.is_autocast_enabled(model.device.type)
    dtype = torch.get_autocast_dtype(model.device.type) if autocast else model.dtype
    patch = shared_prefix(model, backend)
    with _comparable_mode(model), torch.enable_grad():
        repeated_N = torch.cat(
            [
                from_sequence(
                    torch.tensor([group.prompt_ids + rollout.token_ids], device=model.device), len(group.prompt_ids)
                )
                for group in groups
                for rollout in group.rollouts
            ]
        )
        repeated_gradients = torch.autograd.grad(_probe(repeated_N), weights, allow_unused=True)
        with patch:
            shared_N = from_batch(batch)
            shared_gradients = torch.autograd.grad(_probe(shared_N), weights, allow_unused=True)
    difference_N = (repeated_N - shared_N).detach().abs()
    return ParityReport(
        model=type(model).__name__,
        backend=backend,
        dtype=dtype,
        device=model.device,
        max_logprob_difference=difference_N.max().item() if len(difference_N) else 0.0,
        mean_logprob_difference=difference_N.mean().item() if len(difference_N) else 0.0,
        gradient_difference=_relative_difference(repeated_gradients, shared_gradients),
        compared_weights=sum(weight.numel() for weight in weights),
        token_ratio=batch.layout.token_ratio,
        tolerance=TOLERANCES[dtype],
        quantity=quantity,
    )


def random_groups(vocabulary: int, seed: int = 0) -> list[RolloutGroup]:
    """Two groups of random tokens: four rollouts of uneven length, one of them empty, and one rollout alone."""
    generator = torch.Generator().manual_seed(seed)

    def tokens(count: int) -> list[int]:
        return torch.randint(vocabulary, (count,), generator=generator).tolist()

    shapes = [(24, (7, 1, 12, 0)), (9, (5,))]
    return [RolloutGroup(tokens(prefix), [Rollout(tokens(n)) for n in suffixes]) for prefix, suffixes in shapes]


def _gather(logits: Tensor, targets_N: Tensor) -> Tensor:
    wide = torch.promote_types(logits.dtype, torch.float32)
    return logits.to(wide).log_softmax(dim=-1).gather(1, targets_N[:, None])[:, 0]


def _probe(logprobs_N: Tensor) -> Tensor:
    """A loss whose gradient differs from token to token, so that no error cancels."""
    return (logprobs_N * torch.linspace(0.5, 1.5, len(logprobs_N), device=logprobs_N.device)).sum()


def _relative_difference(expected: Sequence[Tensor | None], actual: Sequence[Tensor | None]) -> float:
    squared_error, squared_norm = 0.0, 0.0
    for one, other in zip(expected, actual, strict=True):
        if one is None and other is None:
            continue
        a, b = (torch.zeros(()) if grad is None else grad.double() for grad in (one, other))
        squared_error += (a - b).square().sum().item()
        squared_norm += a.square().sum().item()
    return (squared_error / squared_norm) ** 0.5 if squared_norm else squared_error**0.5


def _compared_weights(model: PreTrainedModel) -> list[nn.Parameter]:
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    if not weights:
        raise ValueError(
            "model has no parameter that requires a gradient; parity compares gradients, so unfreeze some."
        )
    if sum(weight.numel() for weight in weights) <= MAX_COMPARED_WEIGHTS:
        return weights
    layers = max((m for m in model.modules() if isinstance(m, nn.ModuleList)), key=len)
    return [weight for layer in (layers[0], layers[-1]) for weight in layer.parameters() if weight.requires_grad]


@contextmanager
def _comparable_mode(model: PreTrainedModel) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    drops = any(isinstance(module, nn.Dropout) and module.p > 0 for module in model.modules())
    attention_drops = any(
        getattr(model.config, name, 0.0) for name in ("attention_dropout", "attn_pdrop", "attn_dropout")
    )
    if drops or attention_drops or any(_checkpoints_reentrantly(module) for module in model.modules()):
        model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def _checkpoints_reentrantly(module: nn.Module) -> bool:
    function = getattr(module, "_gradient_checkpointing_func", None)
    return bool(getattr(function, "keywords", {}).get("use_reentrant")) and getattr(
        module, "gradient_checkpointing", False
    )

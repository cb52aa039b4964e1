"""Compares log-probabilities and gradients of a small group on the repeated and the shared path.

Legend: N response tokens of all rollouts, concatenated; V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from pl_grouprl.attention.backends.choice import get_backend
from pl_grouprl.attention.patch import in_force, shared_prefix, sharing_paused
from pl_grouprl.attention.support import find_decoder, has_dynamic_rope
from pl_grouprl.packing import ScoringBatch, pack
from pl_grouprl.types import Rollout, RolloutGroup
from pl_grouprl.utilities import internals
from pl_grouprl.utilities.modes import evaluating
from pl_grouprl.utilities.tolerances import Tolerance, compare, computing_dtype, gradient_difference, tolerance_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MAX_COMPARED_WEIGHTS = 200_000_000
"""In larger models, only gradients of the first and last decoder layers are compared."""

MAX_SPANNED = {"cpu": 1024, "cuda": 8192}
"""The default groups are longer than the model's windows and chunks, unless these exceed this length."""

_MARGIN = 8
"""Columns of padding in front of the longest prompt of the padded batch."""


class ParityError(RuntimeError):
    """The shared and the repeated path differ by more than the dtype's rounding."""


Results = tuple[Tensor, Sequence[Tensor | None]]
"""A quantity per token, shape [N], and the gradients of its weighted sum."""


def _compared(found: Results, expected: Results) -> tuple[float, float, float]:
    difference = compare(found[0], expected[0])
    return difference.largest, difference.mean, gradient_difference(found[1], expected[1])


@dataclass(frozen=True)
class _Differences:
    max_logprob_difference: float
    mean_logprob_difference: float
    gradient_difference: float

    @property
    def differences(self) -> tuple[float, float, float]:
        """The three differences."""
        return self.max_logprob_difference, self.mean_logprob_difference, self.gradient_difference


@dataclass(frozen=True)
class LayerParity(_Differences):
    """Differences if layers of one kind run the chosen backend, and all other attention the `reference`.

    Attributes:
        max_logprob_difference: As in `ParityReport`.
        mean_logprob_difference: As in `ParityReport`.
        gradient_difference: As in `ParityReport`, over all gradients of the model.
        kind: Kind of the layers: `full`, `window 512, sinks`, `with a state` and so on.
        count: Number of layers of that kind.
        backend: What ran them.
    """

    kind: str
    count: int
    backend: str


@dataclass(frozen=True)
class PaddedParity(_Differences):
    """Differences between a padded batch inside and outside a `shared_prefix` context, measured as in `ParityReport`.

    Attributes:
        max_logprob_difference: Largest difference of a log-probability.
        mean_logprob_difference: Mean difference of the log-probabilities.
        gradient_difference: Relative difference of all gradients.
        reason: Why the batch went through untouched, or None if its prefixes were shared.
    """

    reason: str | None = None


@dataclass(frozen=True)
class ParityReport(_Differences):
    """Differences between the shared and the repeated path.

    Attributes:
        max_logprob_difference: Largest difference of a response token's log-probability, in nats.
        mean_logprob_difference: Mean of the same.
        gradient_difference: Norm of the difference of the gradients over the norm of the gradients.
        model: Class of the model.
        backend: Attention backend of the shared path.
        dtype: Compute dtype: the weights' dtype, or autocast's if it is on.
        device: Where it ran.
        compared_weights: Weights whose gradients were compared.
        token_ratio: Tokens of the repeated path over tokens of the shared one.
        tolerance: Largest differences that rounding explains.
        quantity: What was compared.
        longest_sequence: Tokens of the longest sequence that was compared.
        longest_span: Tokens of the model's longest window or chunk, which only affects longer sequences; 0 if it has
            none.
        layers: Differences by kind of layer.
        padded: Differences for a short batch padded on the left and the right; None if not compared.
    """

    model: str
    backend: str
    dtype: torch.dtype
    device: torch.device
    compared_weights: int
    token_ratio: float
    tolerance: Tolerance
    quantity: str = "log-probabilities"
    longest_sequence: int = 0
    longest_span: int = 0
    layers: tuple[LayerParity, ...] = ()
    padded: PaddedParity | None = None

    @property
    def passed(self) -> bool:
        """Whether rounding explains all differences (never a NaN)."""
        return all(map(self._explained, (self, *self.layers, *([self.padded] if self.padded else []))))

    def _explained(self, part: _Differences) -> bool:
        exact = self.dtype in (torch.float32, torch.float64)
        logprob = part.max_logprob_difference if exact else part.mean_logprob_difference
        return logprob <= self.tolerance.logprob and part.gradient_difference <= self.tolerance.gradient

    def __str__(self) -> str:
        """A table with a line per kind of layer, then the whole model."""
        count = sum(layer.count for layer in self.layers)
        rows = [*self.layers, LayerParity(*self.differences, "whole model", count, self.backend)]
        kinds = max(len(kind) for kind in ("kind of layer", *(layer.kind for layer in rows)))
        lines = [
            f"parity of shared and repeated prefix: {'passed' if self.passed else 'FAILED'} ({self.model}, "
            f"{self.dtype}, {self.device}, sequences of up to {self.longest_sequence} tokens)",
            f"  differences of {self.quantity}, and relative differences of the gradients of {self.compared_weights:,} "
            f"weights; allowed: {self.tolerance.logprob:.0e} and {self.tolerance.gradient:.0e}",
            f"  {'kind of layer':<{kinds}}  layers  {'backend':<18}  max      mean     gradient  token ratio",
        ]
        for layer in rows:
            verdict = "" if self._explained(layer) else "  FAILED"
            largest, mean, gradient = (f"{difference:.1e}" for difference in layer.differences)
            lines.append(
                f"  {layer.kind:<{kinds}}  {layer.count:>6}  {layer.backend:<18}  {largest}  {mean}  {gradient}   "
                f"{self.token_ratio:>11.2f}{verdict}"
            )
        if self.padded is not None and self.padded.reason is not None:
            lines.append(f"  a padded batch goes through untouched: {self.padded.reason}")
        elif self.padded is not None:
            verdict = "" if self._explained(self.padded) else "  FAILED"
            largest, mean, gradient = (f"{difference:.1e}" for difference in self.padded.differences)
            lines.append(
                f"  tokens of a padded batch differ by {largest} (mean {mean}), gradients by {gradient}{verdict}"
            )
        if self.longest_span >= self.longest_sequence:
            lines.append(f"  no sequence was longer than the model's window or chunk of {self.longest_span} tokens")
        return "\n".join(lines)

    def raise_if_failed(self) -> None:
        """Raise if the paths differ.

        Raises:
            ParityError: Gives the numbers.
        """
        if not self.passed:
            raise ParityError(
                f"{self}\nTrain this model with sharing.mode='repeated', or choose another attention backend."
            )


def check_parity(
    model: PreTrainedModel,
    groups: Sequence[RolloutGroup] | None = None,
    *,
    backend: str = "auto",
    padded_rows: bool = True,
) -> ParityReport:
    """Compare shared with repeated prefixes (one sequence at a time) on a few groups.

    Then compare a short padded batch with and without a `shared_prefix` context, as in a training loop that does not
    pack rows itself.

    Both paths use the model's own logits. The model does not change, and no gradients remain. Models with dropout, or
    with reentrant activation checkpointing (which only supports `backward`), are compared in eval mode, others in their
    current mode.

    Args:
        model: A causal language model.
        groups: Groups to compare on; by default two small random groups with one empty rollout.
        backend: Attention backend of the shared path.
        padded_rows: Whether to compare the padded batch; not needed if your code packs rows itself.

    Raises:
        UnsupportedModelError: If the model cannot share prefixes.
        ValueError: If `groups` has no rollouts, or nothing in the model is trained.
    """

    def from_sequence(tokens: Tensor, prompt_length: int) -> Tensor:
        logits = model(input_ids=tokens, use_cache=False, return_dict=True).logits[0, prompt_length - 1 : -1]
        return token_logprobs(logits, tokens[0, prompt_length:])

    def from_batch(batch: ScoringBatch) -> Tensor:
        logits = model(**batch.model_inputs, use_cache=False, return_dict=True).logits[0]
        return token_logprobs(logits.index_select(0, batch.predict_index_N), batch.targets_N)

    report = compare_paths(model, from_sequence, from_batch, groups, backend=backend)
    if not padded_rows:
        return report
    config = find_decoder(model).config
    longest = getattr(config, "max_position_embeddings", None)
    few = random_groups(config.vocab_size, longest=longest)
    sequences = [(group.prompt_ids, rollout.token_ids) for group in few for rollout in group.rollouts]
    start = max(len(prompt) for prompt, _ in sequences)  # of the completions
    width = max(len(completion) for _, completion in sequences)
    start += _MARGIN if longest is None else max(min(_MARGIN, longest - start - width), 0)

    def laid_out(prompt: Sequence[int], completion: Sequence[int]) -> Tensor:
        return pad(torch.tensor([*prompt, *completion]), (start - len(prompt), width - len(completion)))

    tokens = torch.stack([laid_out(*sequence) for sequence in sequences]).to(model.device)
    mask = torch.stack([laid_out([1] * len(prompt), [1] * len(completion)) for prompt, completion in sequences])
    mask = mask.to(model.device)
    weights, patch = compared_weights(model), shared_prefix(model, backend)

    def run(context: AbstractContextManager[Any]) -> Results:
        with context:
            logits = model(input_ids=tokens, attention_mask=mask, use_cache=False, return_dict=True).logits
            logprobs_N = token_logprobs(logits[:, start - 1 : -1], tokens[:, start:])[mask[:, start:].bool()]
            return logprobs_N.detach(), torch.autograd.grad(weighted_sum(logprobs_N), weights, allow_unused=True)

    with comparable_mode(model), torch.enable_grad():
        expected, found = run(sharing_paused(model)), run(patch)
        call = (in_force(model) or patch).last_call  # an outer context, if any, runs the calls
    reason = None if call is None else call.reason
    return replace(report, padded=PaddedParity(*_compared(found, expected), reason))


def compare_paths(
    model: PreTrainedModel,
    from_sequence: Callable[[Tensor, int], Tensor],
    from_batch: Callable[[ScoringBatch], Tensor],
    groups: Sequence[RolloutGroup] | None = None,
    *,
    backend: str = "auto",
    quantity: str = "log-probabilities",
) -> ParityReport:
    """Compare any per-token quantity of size about 1, and its gradients, on both paths.

    Args:
        model: A decoder, with or without a head.
        from_sequence: Takes the tokens [1, L] of one sequence and the length of its prompt; returns one number per
            response token.
        from_batch: Takes a packed batch; returns one number for each of its N response tokens.
        groups: As in `check_parity`, as are the errors.
        backend: Attention backend of the shared path.
        quantity: Name of the quantity in the report.
    """
    decoder = find_decoder(model)
    config = decoder.config
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    spans = [span for span in (window, getattr(config, "attention_chunk_size", None)) if isinstance(span, int)]
    if groups is None:
        limit = MAX_SPANNED.get(model.device.type, 0)
        groups = random_groups(
            config.vocab_size,
            spanned=max((span for span in spans if span <= limit), default=0),
            longest=getattr(config, "max_position_embeddings", None),
        )
    batch = pack(groups, min_saved_tokens=get_backend(backend).min_saved_tokens, device=model.device)
    longest = max(batch.layout.repeated_lengths)
    weights, dtype, patch = compared_weights(model), computing_dtype(model), shared_prefix(model, backend)

    def repeated() -> Tensor:
        parts = []
        for group in groups:
            for rollout in group.rollouts:
                tokens = torch.tensor([group.prompt_ids + rollout.token_ids], device=model.device)
                # If frequencies depend on the longest sequence of a call, pad all sequences to the longest.
                padding = longest - tokens.shape[1] if has_dynamic_rope(decoder) else 0
                found = from_sequence(pad(tokens, (0, padding)), len(group.prompt_ids))
                parts.append(found[: len(rollout.token_ids)])
        return torch.cat(parts)

    def run(quantity: Callable[[], Tensor]) -> Results:
        found_N = quantity()
        return found_N.detach(), torch.autograd.grad(weighted_sum(found_N), weights, allow_unused=True)

    def shared(kind: str | None) -> tuple[float, float, float]:
        """The differences if attention of all other kinds runs the reference; None runs the model as in training."""
        patch.only = kind
        try:
            # Compiled layers cannot choose a backend by kind.
            with nullcontext() if kind is None else torch.compiler.set_stance("force_eager"):
                found = run(lambda: from_batch(batch))
        finally:
            patch.only = None
        return _compared(found, expected)

    with comparable_mode(model), torch.enable_grad():
        expected = run(repeated)
        with patch:
            overall = shared(None)
            layers = patch.layers
            by_kind = [overall] if len(layers) == 1 else [shared(kind) for kind in layers]
    return ParityReport(
        *overall,
        model=type(model).__name__,
        backend=backend,
        dtype=dtype,
        device=model.device,
        compared_weights=sum(weight.numel() for weight in weights),
        token_ratio=batch.layout.token_ratio,
        tolerance=tolerance_of(dtype),
        quantity=quantity,
        longest_sequence=longest,
        longest_span=max(spans, default=0),
        layers=tuple(
            LayerParity(*differences, kind, count, ran)
            for (kind, (ran, count)), differences in zip(layers.items(), by_kind, strict=True)
        ),
    )


def random_groups(
    vocabulary: int, seed: int = 0, *, spanned: int = 0, longest: int | None = None
) -> list[RolloutGroup]:
    """Two groups of random tokens: four rollouts of uneven length, one of them empty, and a single rollout.

    Only the first prompt is longer than `spanned` tokens. A `longest` below 64 reduces all lengths.
    """
    generator = torch.Generator().manual_seed(seed)

    def tokens(count: int) -> list[int]:
        return torch.randint(vocabulary, (count,), generator=generator, device="cpu").tolist()

    shapes = [(max(24, spanned + 8), (7, 1, 12, 0)), (9, (5,))]
    if longest is not None and longest < 64:
        third = max(longest // 3, 1)
        shapes = [(longest - third, (third, 1, third // 2, 0)), (third, (third,))]
    return [RolloutGroup(tokens(prefix), [Rollout(tokens(n)) for n in suffixes]) for prefix, suffixes in shapes]


def compared_weights(model: PreTrainedModel) -> list[nn.Parameter]:
    """The trained weights whose gradients a check compares: all, or those of two layers of a large model."""
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    if not weights:
        raise ValueError("model has no parameter that requires a gradient, which parity compares; unfreeze some.")
    if sum(weight.numel() for weight in weights) <= MAX_COMPARED_WEIGHTS:
        return weights
    layers = max((m for m in model.modules() if isinstance(m, nn.ModuleList)), key=len)
    return [weight for layer in (layers[0], layers[-1]) for weight in layer.parameters() if weight.requires_grad]


def comparable_mode(model: PreTrainedModel) -> AbstractContextManager[None]:
    """Evaluation mode if the model's mode is not deterministic, or its checkpointing only supports `backward`."""
    drops = any(isinstance(module, nn.Dropout) and module.p > 0 for module in model.modules())
    attention_drops = any(
        getattr(model.config, name, 0.0) for name in ("attention_dropout", "attn_pdrop", "attn_dropout")
    )
    reentrant = any(internals.checkpointing_options(module).get("use_reentrant") for module in model.modules())
    return evaluating(model) if drops or attention_drops or reentrant else nullcontext()


def token_logprobs(logits: Tensor, targets: Tensor) -> Tensor:
    """Log-probabilities of tokens, in float32 or wider: logits [..., V] and targets [...] to [...]."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    return logits.to(wide).log_softmax(dim=-1).gather(-1, targets[..., None])[..., 0]


def weighted_sum(values_N: Tensor) -> Tensor:
    """A loss whose gradient differs from token to token, so errors do not cancel."""
    return (values_N * torch.linspace(0.5, 1.5, len(values_N), device=values_N.device)).sum()

"""Results of a parity check, and whether rounding explains them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pl_grouprl.utilities.tolerances import Tolerance


class ParityError(RuntimeError):
    """The shared and the repeated path differ by more than the dtype's rounding."""


@dataclass(frozen=True)
class LayerParity:
    """Differences if layers of one kind run the chosen backend, and all other attention the `reference`.

    Attributes:
        kind: Kind of the layers: `full`, `window 512, sinks`, `with a state` and so on.
        count: Number of layers of that kind.
        backend: What ran them.
        max_logprob_difference: As in `ParityReport`.
        mean_logprob_difference: As in `ParityReport`.
        gradient_difference: As in `ParityReport`, over all gradients of the model.
    """

    kind: str
    count: int
    backend: str
    max_logprob_difference: float
    mean_logprob_difference: float
    gradient_difference: float

    @property
    def differences(self) -> tuple[float, float, float]:
        """The three differences."""
        return self.max_logprob_difference, self.mean_logprob_difference, self.gradient_difference


@dataclass(frozen=True)
class PaddedParity:
    """Differences between a padded batch inside and outside a `shared_prefix` context, measured as in `ParityReport`.

    Attributes:
        max_logprob_difference: Largest difference of a log-probability.
        mean_logprob_difference: Mean difference of the log-probabilities.
        gradient_difference: Relative difference of all gradients.
        reason: Why the batch went through untouched, or None if its prefixes were shared.
    """

    max_logprob_difference: float
    mean_logprob_difference: float
    gradient_difference: float
    reason: str | None = None

    @property
    def differences(self) -> tuple[float, float, float]:
        """The three differences."""
        return self.max_logprob_difference, self.mean_logprob_difference, self.gradient_difference


@dataclass(frozen=True)
class ParityReport:
    """Differences between the shared and the repeated path.

    Attributes:
        model: Class of the model.
        backend: Attention backend of the shared path.
        dtype: Compute dtype: that of the weights, or of autocast if it is on.
        device: Where it ran.
        max_logprob_difference: Largest difference of a response token's log-probability, in nats.
        mean_logprob_difference: Mean of the same.
        gradient_difference: Norm of the difference of the gradients over the norm of the gradients.
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
    max_logprob_difference: float
    mean_logprob_difference: float
    gradient_difference: float
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
        overall = (self.max_logprob_difference, self.mean_logprob_difference, self.gradient_difference)
        parts: list[LayerParity | PaddedParity] = [*self.layers, *([self.padded] if self.padded else [])]
        return all(self._within(*differences) for differences in (overall, *(part.differences for part in parts)))

    def _within(self, largest: float, mean: float, gradient: float) -> bool:
        exact = self.dtype in (torch.float32, torch.float64)
        return (largest if exact else mean) <= self.tolerance.logprob and gradient <= self.tolerance.gradient

    def __str__(self) -> str:
        """A table with a line per kind of layer, then the whole model."""
        whole = LayerParity(
            "whole model",
            sum(layer.count for layer in self.layers),
            self.backend,
            self.max_logprob_difference,
            self.mean_logprob_difference,
            self.gradient_difference,
        )
        kinds = max(len(kind) for kind in ("kind of layer", *(layer.kind for layer in (whole, *self.layers))))
        lines = [
            f"parity of shared and repeated prefix: {'passed' if self.passed else 'FAILED'} ({self.model}, "
            f"{self.dtype}, {self.device}, sequences of up to {self.longest_sequence} tokens)",
            f"  differences of {self.quantity}, and relative differences of the gradients of {self.compared_weights:,} "
            f"weights; allowed: {self.tolerance.logprob:.0e} and {self.tolerance.gradient:.0e}",
            f"  {'kind of layer':<{kinds}}  layers  {'backend':<18}  max      mean     gradient  token ratio",
        ]
        for layer in (*self.layers, whole):
            verdict = "" if self._within(*layer.differences) else "  FAILED"
            largest, mean, gradient = (f"{difference:.1e}" for difference in layer.differences)
            lines.append(
                f"  {layer.kind:<{kinds}}  {layer.count:>6}  {layer.backend:<18}  {largest}  {mean}  {gradient}   "
                f"{self.token_ratio:>11.2f}{verdict}"
            )
        if self.padded is not None:
            lines.append(self._padded_line(self.padded))
        if self.longest_span >= self.longest_sequence:
            lines.append(f"  no sequence was longer than the model's window or chunk of {self.longest_span} tokens")
        return "\n".join(lines)

    def _padded_line(self, padded: PaddedParity) -> str:
        if padded.reason is not None:
            return f"  a padded batch goes through untouched: {padded.reason}"
        largest, mean, gradient = (f"{difference:.1e}" for difference in padded.differences)
        verdict = "" if self._within(*padded.differences) else "  FAILED"
        return f"  tokens of a padded batch differ by {largest} (mean {mean}), gradients by {gradient}{verdict}"

    def raise_if_failed(self) -> None:
        """Raise if the paths differ.

        Raises:
            ParityError: Gives the numbers.
        """
        if not self.passed:
            raise ParityError(f"{self}\nTrain this model with sharing='repeated', or choose another attention backend.")

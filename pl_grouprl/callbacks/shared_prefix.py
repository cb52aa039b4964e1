"""Shared prefixes in any LightningModule: add this callback to the Trainer, and change nothing else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from pl_grouprl.attention import CallReport, SharedPrefix, find_decoder, in_force, shared_prefix
from pl_grouprl.attention.backends.choice import get_backend
from pl_grouprl.attention.padded_rows import CACHE_IN_USE
from pl_grouprl.attention.patch import measure_speedup
from pl_grouprl.checks import check_parity
from pl_grouprl.models.cost import ModelCost
from pl_grouprl.utilities.options import check_fields

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(eq=False, repr=False)
class SharedPrefixCallback(Callback):
    """Makes every transformers decoder of a LightningModule encode shared prefixes once, and logs the savings.

    The module keeps calling its model with ordinary padded batches; rows that repeat a prefix are found and packed (see
    `pl_grouprl.attention.shared_prefix`). A model that is already patched, as in `GRPO`, is only observed.

    Logged each step, over the step's decoder calls without a cache: `prefix/token_ratio` (tokens with repeated
    prefixes over tokens run), `prefix/flops_ratio` (the same for operations of linear layers and attention),
    `prefix/groups` (groups with a shared prefix in calls with gradient; with several models, the largest number) and
    `prefix/segments` of the same calls, `prefix/padding_fraction` (of the original batch) and, in every
    `measure_every_n_steps`-th step, `prefix/measured_speedup` (seconds of the decoder's forward and backward on padded,
    repeated rows over seconds on the packed row; a warning if it is below 1).

    Attributes:
        backend: `auto`, `cascade`, `flex`, `prefix_grouper` or `reference`.
        verify: Compare shared and repeated prefixes on small random groups before the first step, and stop the run if
            log-probabilities or gradients differ by more than the dtype explains.
        measure_every_n_steps: Optimizer steps between measurements, which time one call both ways; 0 for never. The
            call with repeated prefixes needs `prefix/token_ratio` times the memory for activations.
        min_saved_tokens: Rows share a prefix only if that saves at least this many tokens.

    Raises:
        ValueError: If the backend is unknown, or an option is negative.
    """

    backend: str = "auto"
    verify: bool = True
    measure_every_n_steps: int = 0
    min_saved_tokens: int = 16

    def __post_init__(self) -> None:
        get_backend(self.backend)
        counts = ("measure_every_n_steps", "min_saved_tokens")
        check_fields(self, **{name: (getattr(self, name) >= 0, "0 or larger") for name in counts})
        self._observed: dict[SharedPrefix, ModelCost] = {}
        self._entered: list[SharedPrefix] = []
        self._calls: list[tuple[SharedPrefix, CallReport]] = []
        self._trained: list[tuple[SharedPrefix, CallReport]] = []  # calls with gradient
        self._announced = self._warned_slower = False
        self._steps_before = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Patch or observe the module's models, and verify them.

        Raises:
            ValueError: If the module has no transformers decoder, one of them would give wrong results silently, or an
                active context uses another backend.
            ParityError: If shared and repeated prefixes differ.
        """
        models = decoders_of(pl_module)
        if not models:
            raise ValueError(
                f"{type(pl_module).__name__} has no transformers decoder; SharedPrefixCallback needs a module with a "
                "PreTrainedModel among its submodules by the time training starts."
            )
        for model in models:
            patch = in_force(model)
            if patch is None:
                patch = shared_prefix(model, self.backend, min_saved_tokens=self.min_saved_tokens).__enter__()
                self._entered.append(patch)
            elif get_backend(self.backend).choice is None and self.backend != patch.backend:
                raise ValueError(
                    f"SharedPrefixCallback(backend={self.backend!r}), but {type(model).__name__} already runs backend "
                    f"{patch.backend!r}; set the backend where the model is patched, or leave it at 'auto' here."
                )
            trained = any(weight.requires_grad for weight in model.parameters())
            if self.verify and trained and model.get_output_embeddings() is not None:
                with trainer.precision_plugin.forward_context():
                    report = check_parity(model, backend=patch.backend)
                report.raise_if_failed()
                rank_zero_info(str(report))

            def keep(call: CallReport, patch: SharedPrefix = patch) -> None:
                self._calls.append((patch, call))
                if torch.is_grad_enabled():
                    self._trained.append((patch, call))

            patch.listeners.append(keep)
            self._observed[patch] = ModelCost.of(patch.decoder)
        self._announced = self._warned_slower = False

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Start collecting the step's calls."""
        self._forget_calls()
        self._steps_before = trainer.global_step

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log how much the step's calls shared."""
        calls = [(patch, call) for patch, call in self._calls if call.reason != CACHE_IN_USE]
        metrics = self._metrics(calls) if calls else {}
        self._forget_calls()
        if not calls:
            return
        if not self._announced:
            self._announce(calls)
        step, every = trainer.global_step, self.measure_every_n_steps
        shared = [(patch, call) for patch, call in calls if call.layout is not None and call.part is None]
        if shared and every > 0 and step > self._steps_before and step % every == 0:
            with trainer.precision_plugin.forward_context():
                speedup = metrics["prefix/measured_speedup"] = measure_speedup(*shared[-1])
            if speedup < 1 and not self._warned_slower:
                self._warned_slower = True
                rank_zero_warn(
                    f"Sharing prefixes makes this run slower: the measured speedup is {speedup:.2f} at a token ratio "
                    f"of {metrics['prefix/token_ratio']:.2f}. For models and prompts this small, packing costs more "
                    "than it saves; use sharing.mode='repeated', or, in your own module, omit this callback."
                )
        pl_module.log_dict(metrics, batch_size=1)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore the models."""
        while self._entered:
            self._entered.pop().__exit__(None, None, None)
        self._observed.clear()
        self._forget_calls()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Restore the models."""
        self.on_train_end(trainer, pl_module)

    def _forget_calls(self) -> None:
        self._calls.clear()
        self._trained.clear()

    def _metrics(self, calls: list[tuple[SharedPrefix, CallReport]]) -> dict[str, float]:
        known: dict[Hashable, _Saving] = {}  # scoring and update share layouts
        savings = []
        for patch, call in calls:
            cost = self._observed[patch]
            key = (id(call if call.layout is None else call.layout), call.part, id(cost))
            if key not in known:
                known[key] = _Saving.of(call, cost)
            savings.append(known[key])
        # Groups and segments in the calls with gradient, of the model that has the most.
        counts: dict[SharedPrefix, tuple[int, int]] = {}
        for patch, call in self._trained:
            if (layout := call.layout) is not None:
                groups, segments = counts.get(patch, (0, 0))
                groups += 0 if layout.num_prefilled else layout.num_groups
                # Empty rollouts follow a prompt or branch that runs by itself; a slice starts with what it continues.
                segments += 1 if call.part == "prompt" else len(layout.segments) - bool(layout.num_prefilled)
                counts[patch] = (groups, segments)
        groups, segments = max(counts.values(), default=(0, 0))
        return {
            "prefix/token_ratio": sum(s.repeated_tokens for s in savings) / sum(s.tokens for s in savings),
            "prefix/flops_ratio": sum(s.repeated_flops for s in savings) / sum(s.flops for s in savings),
            "prefix/padding_fraction": sum(call.padding_fraction for _, call in calls) / len(calls),
            "prefix/groups": float(groups),
            "prefix/segments": float(segments),
        }

    def _announce(self, calls: list[tuple[SharedPrefix, CallReport]]) -> None:
        self._announced = True
        for patch, call in calls:
            if call.layout is not None and call.part != "prompt":
                layout, cost = call.layout, self._observed[patch]
                rank_zero_info(
                    f"shared prefixes: {type(patch.model).__name__} runs backend {patch.backend!r} over "
                    f"{patch.wrapped!r} attention ({patch.describe()}); the first batch has {layout.num_groups} "
                    f"group{'s' * (layout.num_groups != 1)} in {len(layout.segments)} segments, {layout.num_queries} "
                    f"tokens instead of {sum(layout.repeated_lengths)} (token ratio {layout.token_ratio:.2f}, "
                    f"operations {cost.repeated(layout) / cost.shared(layout):.2f})"
                )
                return
        reasons = Counter(call.reason for _, call in calls)
        rank_zero_warn(
            "SharedPrefixCallback shares nothing: of the first step's decoder calls "
            + ", ".join(f"{count} went through untouched because {reason}" for reason, count in reasons.items())
            + ". Training is as slow as without it."
        )


class _Saving(NamedTuple):
    """Tokens and operations of one decoder call, as run and with repeated prefixes."""

    tokens: int
    repeated_tokens: int
    flops: float
    repeated_flops: float

    @classmethod
    def of(cls, call: CallReport, cost: ModelCost) -> _Saving:
        layout = call.layout
        if layout is None:
            tokens = call.input_ids.numel()
            return cls(tokens, tokens, cost.per_token * tokens, cost.per_token * tokens)
        tokens, flops = layout.num_queries, cost.shared(layout)
        if call.part == "prompt":  # the slices that follow count the repetitions
            return cls(tokens, 0, flops, 0.0)
        return cls(tokens, sum(layout.repeated_lengths), flops, cost.repeated(layout))


def decoders_of(module: LightningModule) -> list[PreTrainedModel]:
    """The outermost transformers models of a module with a decoder."""
    from transformers import PreTrainedModel

    found: list[PreTrainedModel] = []
    inside: set[int] = set()
    for child in module.modules():
        if isinstance(child, PreTrainedModel) and id(child) not in inside:
            inside.update(id(part) for part in child.modules())
            if find_decoder(child) is not None:
                found.append(child)
    return found

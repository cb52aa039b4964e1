"""Shares prefixes in a run's models for the whole fit, after verifying that results do not change."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_info

from pl_grouprl.attention import shared_prefix
from pl_grouprl.attention.backends.choice import get_backend
from pl_grouprl.checks import ParityReport
from pl_grouprl.packing import Sharing
from pl_grouprl.training.run import Run
from pl_grouprl.utilities.memory import naming_memory


class PrefixSharing:
    """Patches models to encode shared tokens once, until closed.

    Args:
        run: The run.
        sharing: `shared` or `repeated`, which patches nothing.
        backend: Attention backend for shared prefixes; see `pl_grouprl.attention.shared_prefix`.
        verify: Compare shared with repeated prefixes before the first step.

    Attributes:
        dense: Names of the open models that get dense masks, so that their groups cannot be split.

    Raises:
        ValueError: If an option is unknown.
    """

    def __init__(self, run: Run, sharing: Sharing = "shared", backend: str = "auto", verify: bool = True) -> None:
        if sharing not in ("shared", "repeated"):
            raise ValueError(f"sharing is {sharing!r}; pass 'shared' (each prompt encoded once) or 'repeated'.")
        get_backend(backend, "attention_backend")  # fail early if unknown
        self._run = run
        self.sharing: Sharing = sharing
        self.backend = backend
        self.verify = verify
        self.dense: list[str] = []
        self._contexts = contextlib.ExitStack()

    def open(self, models: Mapping[str, Any], reports: Callable[[], list[ParityReport]]) -> None:
        """Patch the models of a fit.

        Args:
            models: The transformers models to patch, by name.
            reports: Compares shared with repeated prefixes.
        """
        if self.sharing == "repeated":
            rank_zero_info("sharing='repeated': every rollout is encoded with its own copy of the prompt.")
            return
        if self.verify:
            memory = naming_memory("the check of shared prefixes before training", "verify=False skips it")
            with memory, self._run.support.forward_context():
                found = reports()
            for report in found:
                report.raise_if_failed()
                rank_zero_info(str(report))
        named: dict[str, list[str]] = {}
        for name, model in models.items():
            # Patched for the whole fit, because activation checkpointing repeats the forward during the backward.
            with self._run.support.whole_weights(model):  # entering runs a short forward
                patch = self._contexts.enter_context(shared_prefix(model, self.backend))
            if patch.dense:
                self.dense.append(name)
            how = f"{type(model).__name__}, attention backend {self.backend!r}: {patch.describe()}"
            named.setdefault(how, []).append(name)
        for how, names in named.items():
            rank_zero_info(f"sharing='shared': each prompt is encoded once by {' and '.join(names)} ({how}).")

    def close(self) -> None:
        """Restore the models."""
        self._contexts.close()
        self.dense.clear()


def refuse_dropout(owner: str, model: Any) -> None:
    """Refuse dropout: old and reference scores are without, so ratios would differ from 1 by chance alone.

    Raises:
        ValueError: If the model is in training mode and has dropout.
    """
    for name, module in model.named_modules() if model.training else ():
        numbers = {option: rate for option, rate in vars(module).items() if type(rate) in (int, float)}
        rates = {option: rate for option, rate in numbers.items() if 0 < rate <= 1}
        for option, rate in rates.items():
            if "drop" in option or (option == "p" and "Drop" in type(module).__name__):
                raise ValueError(
                    f"{owner} has dropout ({name}.{option}={rate}), and what it computes with it cannot be compared "
                    "with old values and log-probabilities, computed without; set it to 0 in the model's config "
                    "(disable_dropout=True of PretrainedPolicy does that) or in the module."
                )

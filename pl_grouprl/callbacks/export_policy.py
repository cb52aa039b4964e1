"""The trained policy as a folder that `AutoModelForCausalLM.from_pretrained` loads, or its adapter as one of PEFT's."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from pl_grouprl.callbacks.run_folder import run_folder
from pl_grouprl.models.adapter_layers import has_adapters, merged_copy


class ExportPolicy(Callback):
    """Save a transformers model of the module, and its tokenizer, when training ends.

    Works with any module that holds a transformers model as an attribute. Written in safetensors format beside the
    target and renamed, so that the folder is complete or absent; what a former export left there is replaced.

    Args:
        attribute: Name of the model in the module.
        tokenizer_attribute: Name of the tokenizer; None saves none.
        folder: Name of the folder inside the run folder, or an absolute path.
        adapter: Of a model that has one, what is saved: `merged` into the weights, a whole model that needs no PEFT,
            or `separate`, the adapter alone, for `PeftModel.from_pretrained(base, folder)`. The model that was trained
            stays as it is. (Loaded by transformers 5.23 itself, an adapter's folder loses the norms of DoRA.)

    Raises:
        ValueError: If `adapter` is neither.
    """

    def __init__(
        self,
        attribute: str = "policy",
        tokenizer_attribute: str | None = "tokenizer",
        folder: str = "policy",
        adapter: Literal["merged", "separate"] = "merged",
    ) -> None:
        if adapter not in ("merged", "separate"):
            raise ValueError(f"ExportPolicy.adapter is {adapter!r}; pass 'merged' (a whole model) or 'separate'.")
        self.attribute = attribute
        self.tokenizer_attribute = tokenizer_attribute
        self.folder = folder
        self.adapter = adapter
        self._target: Path | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse, before any step, what could not be exported after the last one."""
        if stage != "fit":
            return
        if not isinstance(trainer.strategy, (SingleDeviceStrategy, DDPStrategy)):
            raise ValueError(
                f"ExportPolicy cannot gather the weights of strategy {type(trainer.strategy).__name__}; use a single "
                "device or ddp, or leave the callback out and export from a checkpoint."
            )
        for name in filter(None, (self.attribute, self.tokenizer_attribute)):
            if not hasattr(pl_module, name):
                raise TypeError(
                    f"ExportPolicy looks for the attribute {name!r}, which {type(pl_module).__name__} does not have; "
                    "name the attribute that holds the transformers model, or the tokenizer (None for none)."
                )
        folder = run_folder(trainer)
        self._target = None if folder is None else folder / self.folder

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse what is no transformers model, now that the model is there.

        Raises:
            TypeError: If it has no `save_pretrained`.
            ValueError: If its adapter is to be saved and it has none.
        """
        model = getattr(pl_module, self.attribute)
        if not hasattr(model, "save_pretrained"):
            raise TypeError(
                f"ExportPolicy(attribute={self.attribute!r}) is to save a {type(model).__name__}, which has no "
                "save_pretrained; name an attribute that holds a transformers model."
            )
        if self.adapter == "separate" and not has_adapters(model):
            raise ValueError(
                f"ExportPolicy(adapter='separate') is to save an adapter, and the {type(model).__name__} has none; "
                "leave adapter out, or train one (policy.init_args.adapter)."
            )

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the model."""
        if self._target is None or not trainer.is_global_zero:
            return
        tokenizer = None if self.tokenizer_attribute is None else getattr(pl_module, self.tokenizer_attribute)
        model = getattr(pl_module, self.attribute)
        merging = self.adapter == "merged" and has_adapters(model)
        export(merged_copy(model) if merging else model, tokenizer, self._target)
        rank_zero_info(f"Policy saved in Hugging Face format: {self._target}")


def export(model: Any, tokenizer: Any, target: Path) -> None:
    """Save a transformers model, and a tokenizer if there is one, in a folder that is replaced as a whole."""
    unfinished = target.with_name(f".{target.name}.{os.getpid()}")
    former = target.with_name(f".{target.name}.{os.getpid()}.old")
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        model.save_pretrained(unfinished)
        if tokenizer is not None:
            tokenizer.save_pretrained(unfinished)
        if target.exists():
            os.replace(target, former)
        os.replace(unfinished, target)
    except BaseException:
        if former.exists():
            os.replace(former, target)
        raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
        shutil.rmtree(former, ignore_errors=True)

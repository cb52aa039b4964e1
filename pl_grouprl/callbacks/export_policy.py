"""Exports the trained policy, or a critic, for transformers' `from_pretrained`, or an adapter in PEFT's format."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor

from pl_grouprl.callbacks.checkpoints import claim, on_rank_zero, refuse_foreign, run_folder
from pl_grouprl.callbacks.model_card import card_files, push, reserve_repository
from pl_grouprl.distributed.strategies import StrategySupport, support_of
from pl_grouprl.models import Critic
from pl_grouprl.models.adapters import base_of, has_adapters, merged_copy, save_adapter
from pl_grouprl.utilities.checkpoint_files import explain_os_error, replace
from pl_grouprl.utilities.options import check_fields
from pl_grouprl.utilities.progress import PROGRESS

EXPORTED = "export.json"
"""Marks folders written by `ExportPolicy`; only these are replaced."""


@dataclass(eq=False, repr=False)
class ExportPolicy(Callback):
    """Save a transformers model of the module, and its tokenizer, when training ends.

    It runs after all other callbacks, some of which finish the weights then, such as `EMAWeightAveraging`.

    Works with any module that has a transformers model as an attribute, under every strategy: sharded weights are
    gathered in rank 0's main memory. Safetensors files are written next to the target, then the folder is renamed, so
    it is either complete or absent. An earlier export, recognized by its `export.json`, is replaced; anything else
    there is an error and left untouched. The folder gets a model card, `README.md`, with the run's base, data, options,
    figures and versions.

    Attributes:
        attribute: Name of the model in the module. `critic` saves the critic of `PPO`, for
            `AutoModelForTokenClassification.from_pretrained`, always whole.
        tokenizer_attribute: Name of the tokenizer; none is saved if None.
        folder: Name of the folder inside the run folder, or an absolute path.
        adapter: What to save of a model with an adapter: `merged`, a whole model that needs no PEFT, or `separate`, the
            adapter alone, for `PeftModel.from_pretrained(base, folder)`. (Transformers 5.23 loses the norms of DoRA if
            it loads the adapter's folder directly.) The trained model does not change.
        push_to_hub: Repository on the Hugging Face Hub (`name` or `owner/name`) that gets the folder, too. It is
            created before training, with the token of `hf auth login` or `HF_TOKEN`; in an existing one, only an
            earlier export is replaced.
        private: Whether only the repository's owner sees it; defaults to the owner's setting.

    Raises:
        ValueError: If `adapter` is unknown, `private` is given without `push_to_hub`, or contradicts an existing
            repository.
        OSError: Before training, if the target is not writable or has anything but an earlier export; at the end, if
            the export fails. An earlier export stays. For the hub: before training, if the repository cannot be written
            to; at the end, if the upload fails. The export stays in its folder.
    """

    attribute: str = "policy"
    tokenizer_attribute: str | None = "tokenizer"
    folder: str = "policy"
    adapter: Literal["merged", "separate"] = "merged"
    push_to_hub: str | None = None
    private: bool | None = None

    def __post_init__(self) -> None:
        check_fields(
            self,
            adapter=(self.adapter in ("merged", "separate"), "merged (a whole model) or separate"),
            private=(self.private is None or self.push_to_hub is not None, "omitted without push_to_hub"),
        )
        self._repository: str | None = None
        self._target: Path | None = None
        self._support = StrategySupport(None)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check, before any step, that the model and tokenizer exist and the target can be written."""
        if stage != "fit":
            return
        self._support = support_of(trainer)
        for name in filter(None, (self.attribute, self.tokenizer_attribute)):
            getattr(pl_module, name)  # raises AttributeError if it is missing
        folder = run_folder(trainer)
        self._target = None if folder is None else folder / self.folder
        if self._target is not None:
            parent = self._target.parent

            def check_writable() -> None:
                parent.mkdir(parents=True, exist_ok=True)
                if not os.access(parent, os.W_OK):
                    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

            claim(trainer, self._target, self, is_export)
            on_rank_zero(trainer, check_writable, f"The policy could not be exported to {parent}")
            if (wanted := self.push_to_hub) is not None:
                self._repository = on_rank_zero(trainer, lambda: reserve_repository(wanted, self.private, EXPORTED))
        others = [callback for callback in trainer.callbacks if callback is not self]  # type: ignore[attr-defined]
        trainer.callbacks = [*others, self]  # type: ignore[attr-defined]  # a new list, as Lightning iterates over it

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check the model, now that it exists.

        Raises:
            TypeError: If it has no `save_pretrained`.
            ValueError: If it has no adapter to save, or if the adapter cannot be merged under the strategy; or if it is
                a critic whose family has no token classifier.
        """
        model = self._model(pl_module)
        if not hasattr(model, "save_pretrained"):  # would be found out only after the training
            raise TypeError(
                f"attribute={self.attribute!r} is a {type(model).__name__}, which has no save_pretrained; name an "
                "attribute with a transformers model."
            )
        if self.adapter == "separate" and isinstance(getattr(pl_module, self.attribute), Critic):
            raise ValueError("ExportPolicy(adapter='separate') would lose the head of a critic; omit adapter.")
        if self.adapter == "separate" and not has_adapters(model):
            raise ValueError(
                f"ExportPolicy(adapter='separate') saves an adapter, and the {type(model).__name__} has none; "
                "omit adapter, or train one (policy.init_args.adapter)."
            )
        if self._support.shards and self._merges(model):
            raise ValueError(
                f"ExportPolicy(adapter='merged') needs whole weights, which {type(trainer.strategy).__name__} shards; "
                "pass adapter='separate' and merge it afterwards, or train it with ddp."
            )

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the model."""
        target = self._target
        if target is None:
            return
        model = self._model(pl_module)
        merges = self._merges(model)
        plain = self._support.keeps_plain_weights
        state = None if plain else self._support.full_state_dict(base_of(model) if merges else model)
        tokenizer = None if self.tokenizer_attribute is None else getattr(pl_module, self.tokenizer_attribute)

        def save() -> None:
            whole = merged_copy(model, state) if merges else model
            separate = has_adapters(model) and not merges
            card = card_files(trainer, pl_module, model, self._repository or target.name, separate=separate)
            export(whole, tokenizer, target, None if merges else state, trainer.global_step, card)

        with PROGRESS.during("Exporting the policy"):
            on_rank_zero(trainer, save)
        rank_zero_info(f"Policy saved in Hugging Face format: {target}")
        if (repository := self._repository) is not None:
            message = f"{type(pl_module).__name__}, step {trainer.global_step}"
            with PROGRESS.during(f"Uploading the policy to {repository}"):
                rank_zero_info(f"Policy uploaded: {on_rank_zero(trainer, lambda: push(target, repository, message))}")

    def _model(self, module: LightningModule) -> Any:
        model = getattr(module, self.attribute)
        return model.as_token_classifier() if isinstance(model, Critic) else model

    def _merges(self, model: Any) -> bool:
        return self.adapter == "merged" and has_adapters(model)


def export(
    model: Any,
    tokenizer: Any,
    target: Path,
    state: dict[str, Tensor] | None = None,
    step: int | None = None,
    card: Mapping[str, bytes] | None = None,
) -> None:
    """Save a transformers model, and a tokenizer if given, to a folder, replacing it as a whole.

    Args:
        model: The model.
        tokenizer: Its tokenizer, if any.
        target: The folder.
        state: The weights to save, consumed by the call; defaults to the model's own.
        step: Optimizer steps done, recorded in the folder.
        card: By name, more files for the folder: its model card, and what the card shows.
    """
    from safetensors import SafetensorError

    unfinished = target.with_name(f".{target.name}.{os.getpid()}")
    what = f"The policy could not be exported to {target}, an earlier export is untouched"
    refuse_foreign(target, "ExportPolicy", is_export)
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        with explain_os_error(what):
            if has_adapters(model) and not hasattr(model, "get_base_model"):  # PeftModel saves its own
                save_adapter(model, unfinished, state)
            else:
                given = {}
                if state is not None:  # one name per tied weight; transformers ties them again on loading
                    names = {name for name, _ in model.named_parameters()}
                    repeated = {name for name, _ in model.named_parameters(remove_duplicate=False)} - names
                    given["state_dict"] = {name: value for name, value in state.items() if name not in repeated}
                model.save_pretrained(unfinished, **given)
                if state is not None and (unfinished / "config.json").exists():  # written with the model's dtype
                    model.config.dtype = str(next(iter(state.values())).dtype).removeprefix("torch.")
                    model.config.save_pretrained(unfinished)
            if tokenizer is not None:
                tokenizer.save_pretrained(unfinished)
            for name, content in (card or {}).items():
                (unfinished / name).write_bytes(content)
            note = {"written_by": "pl_grouprl.callbacks.ExportPolicy", "step": step}
            (unfinished / EXPORTED).write_text(json.dumps(note) + "\n", encoding="utf-8")
        refuse_foreign(target, "ExportPolicy", is_export)
        replace(unfinished, target)
    except SafetensorError as error:  # such as for a full disk
        raise OSError(f"{what}: {error}. The folder must be writable and have space.") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def is_export(path: Path) -> bool:
    """Whether a folder has the marker of `ExportPolicy`."""
    if path.is_symlink():
        return False
    try:
        note = json.loads((path / EXPORTED).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(note, dict) and str(note.get("written_by", "")).endswith(".ExportPolicy")

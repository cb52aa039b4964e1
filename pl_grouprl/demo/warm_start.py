"""A small base policy, built from a config and warm-started on demonstrations.

Supervised training on prompts and completions, with the loss on completions only, as is usual before reinforcement
learning. The result is a folder in Hugging Face format, cached under a hash of everything that determines it, so the
second run starts immediately.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import tempfile
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from pl_grouprl.models.adapters import LoRAAdapter
from pl_grouprl.models.kernels import Kernels, apply_kernels
from pl_grouprl.models.loading import load_model
from pl_grouprl.utilities.describe import field_values
from pl_grouprl.utilities.distributed import derive_seed, num_ranks, own_rank
from pl_grouprl.utilities.options import as_options, check_fields
from pl_grouprl.utilities.progress import PROGRESS, ProgressLines, tick

FORMAT_VERSION = 1
"""Part of the cache key; increment it when the same options give a different policy."""

_SAMPLE = 64
"""Number of demonstrations in the cache key, to detect changes to the task."""

_IGNORED = -100

Demonstration = tuple[list[int], list[int]] | tuple[list[int], list[int], list[int]]
"""Token ids of a prompt and of a completion with its end token; optionally the completion's loss mask, 1 for tokens to
imitate and 0 for context."""


@runtime_checkable
class Demonstrations(Protocol):
    """A task that can be demonstrated."""

    def demonstrations(self, count: int, seed: int) -> Any:  # not list[Demonstration]: YAML accepts exact types only
        """Return a list of `count` `Demonstration`s; the same seed gives the same ones."""
        ...

    def tokenizer(self) -> Any:
        """Return the tokenizer of the demonstrations."""
        ...


@dataclass(frozen=True)
class WarmStartedPolicy:
    """A policy source that trains its policy on demonstrations, once.

    Attributes:
        demonstrations: Source of prompts and completions. Some completions may be wrong; reinforcement learning then
            improves the policy. Its class and options (the fields of a dataclass, otherwise the attributes without a
            leading underscore) are part of the cache key.
        architecture: The model's config: `model_type` as in transformers, and any option of that config. Vocabulary
            and special tokens default to the tokenizer's.
        steps: Supervised optimizer steps.
        batch_size: Demonstrations per step.
        learning_rate: Peak learning rate of AdamW, after a linear warm-up over the first tenth of the steps; a cosine
            then decays it to a tenth.
        max_grad_norm: Clips the gradient norm.
        seed: Seed of the initial weights and the demonstrations.
        cache_dir: Folder of finished policies, one subfolder per set of options.
        progress_bar: Print a line at the start of the supervised training, at every tenth of it and at its end.
        adapter: As in `PretrainedPolicy`: train low-rank layers on top of the warm-started weights, which stay frozen.
            The warm start itself trains all weights.
        kernels: As in `PretrainedPolicy`. The warm start itself runs transformers' code.
    """

    demonstrations: Demonstrations
    architecture: dict[str, Any]
    steps: int = 600
    batch_size: int = 16
    learning_rate: float = 2e-3
    max_grad_norm: float = 1.0
    seed: int = 0
    cache_dir: str = ".cache/warm_start"
    progress_bar: bool = True
    adapter: LoRAAdapter | None = None
    kernels: Kernels | None = None

    def __post_init__(self) -> None:
        if self.adapter is not None:
            object.__setattr__(self, "adapter", as_options(LoRAAdapter, self.adapter, "WarmStartedPolicy.adapter"))
        check_fields(
            self,
            steps=(self.steps >= 0, "0 (random weights) or larger"),
            batch_size=(self.batch_size >= 1, "at least 1"),
            learning_rate=(self.learning_rate >= 0, "0 or larger"),
            max_grad_norm=(self.max_grad_norm > 0, "larger than 0"),
        )

    @property
    def folder(self) -> Path:
        """Folder of the finished policy, which may not exist yet. Its name has a hash of all that determines it."""
        options = asdict(self)
        for name in ("demonstrations", "cache_dir", "progress_bar", "adapter", "kernels"):
            del options[name]
        parts = {
            "format": FORMAT_VERSION,
            "options": options,
            "task": _describe(self.demonstrations),
            "vocabulary": sorted(self.load_tokenizer().get_vocab().items()),
            "sample": self.demonstrations.demonstrations(_SAMPLE, derive_seed("demonstrations", self.seed, 0)),
        }
        text = json.dumps(parts, sort_keys=True, default=_describe)
        key = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
        return Path(self.cache_dir).expanduser() / f"{self.architecture['model_type']}-{key}"

    def load(self) -> nn.Module:
        """Return the warm-started policy, from the cache if possible. With several ranks, rank 0 trains it."""
        folder = self.folder
        several, is_first = num_ranks() > 1, own_rank() == 0
        if several and not is_first:
            torch.distributed.barrier()  # until rank 0 is ready
        try:
            if not folder.is_dir():
                self._make(folder)
        finally:
            if several and is_first:
                torch.distributed.barrier()
        owner = f"the cached policy {str(folder)!r} (remove the folder to create it again)"
        model = load_model("AutoModelForCausalLM", str(folder), owner=owner, dtype=torch.float32)
        if self.adapter is not None:
            self.adapter.add_to(model)
        apply_kernels(model, self.kernels)
        return model

    def load_config(self) -> Any:
        """Return the config of the model."""
        return model_config(self.architecture, self.load_tokenizer())

    def load_tokenizer(self) -> Any:
        """Return the tokenizer of the demonstrations."""
        return self.demonstrations.tokenizer()

    def _make(self, folder: Path) -> None:
        """Train, and rename the finished folder into place, so readers see either all of it or nothing."""
        if os.path.lexists(folder) and not folder.is_dir():
            raise FileExistsError(f"cache_dir: {folder} is not a folder and is left untouched; move it away.")
        folder.parent.mkdir(parents=True, exist_ok=True)
        tokenizer = self.load_tokenizer()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive_seed("warm start", self.seed))
            model = build_model(self.architecture, tokenizer)
            self._train(model)
        unfinished = tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent)
        try:
            model.save_pretrained(unfinished)
            tokenizer.save_pretrained(unfinished)
            os.chmod(unfinished, 0o755)  # noqa: S103 (mkdtemp hides the folder from other users)
            os.replace(unfinished, folder)
        except OSError:
            if not folder.is_dir():  # otherwise another process finished first, with the same result
                raise
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)

    def _train(self, model: Any) -> None:
        def factor(step: int) -> float:
            """Linear warm-up over the first tenth of the steps, then cosine decay to a tenth."""
            progress = (step + 1) / max(self.steps, 1)
            return min(progress / 0.1, 1.0) * (0.1 + 0.9 * (1 + math.cos(math.pi * min(progress, 1.0))) / 2)

        model.train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=self.learning_rate, weight_decay=0.0)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        smoothed: float | None = None
        lines = ProgressLines("Warm start on demonstrations", self.steps) if self.progress_bar else None
        with PROGRESS.during("warm start"):
            for step in range(self.steps):
                batch = self.demonstrations.demonstrations(
                    self.batch_size, derive_seed("demonstrations", self.seed, step)
                )
                loss = supervised_loss(model, batch)
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), self.max_grad_norm)
                optimizer.step()
                scheduler.step()
                latest = float(loss.detach())
                smoothed = latest if smoothed is None else 0.98 * smoothed + 0.02 * latest
                if lines is not None:
                    lines.update(step + 1, {"loss": smoothed})
                tick()
        model.eval()


def build_model(architecture: dict[str, Any], tokenizer: Any) -> Any:
    """Build a causal language model with random weights; see `model_config`."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(model_config(architecture, tokenizer), dtype=torch.float32)


def model_config(architecture: dict[str, Any], tokenizer: Any) -> Any:
    """Build a model's config, with the tokenizer's vocabulary and special tokens.

    Args:
        architecture: `model_type` and options of that family's config.
        tokenizer: Provides `vocab_size` and special token ids unless `architecture` does.

    Raises:
        ValueError: If the family's config lacks an option; transformers would silently ignore it.
    """
    from transformers import AutoConfig

    options = {
        "vocab_size": len(tokenizer),
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        **architecture,
    }
    known = AutoConfig.for_model(options["model_type"])
    unknown = sorted(name for name in architecture if not hasattr(known, name))
    if unknown:
        raise ValueError(
            f"architecture has {unknown}, which the config of model_type {options['model_type']!r} does not have; "
            "remove or rename them."
        )
    return AutoConfig.for_model(**options)


def supervised_loss(model: nn.Module, demonstrations: list[Demonstration]) -> Tensor:
    """Mean cross-entropy of the imitated tokens, given the prompt and earlier tokens.

    Rows are padded on the right, where causal attention never looks, so no mask is needed. Positions before the end of
    the shortest prompt skip the output layer.

    Args:
        model: A transformers causal language model.
        demonstrations: Prompt ids, at least one each, completion ids and, optionally, their loss mask.
    """
    device = next(model.parameters()).device
    rows = [prompt + completion for prompt, completion, *_ in demonstrations]
    length = max(len(row) for row in rows)
    input_ids = torch.tensor([row + [0] * (length - len(row)) for row in rows], device=device)
    targets = torch.full_like(input_ids, _IGNORED)
    for i, (prompt, completion, *loss_mask) in enumerate(demonstrations):
        imitated = loss_mask[0] if loss_mask else [1] * len(completion)
        labels = [token if trained else _IGNORED for token, trained in zip(completion, imitated, strict=True)]
        targets[i, len(prompt) - 1 : len(rows[i]) - 1] = torch.tensor(labels, device=device)
    first = min(len(prompt) for prompt, *_ in demonstrations) - 1
    kept = torch.arange(first, length - 1, device=device)
    logits = model(input_ids=input_ids, logits_to_keep=kept, use_cache=False).logits
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), targets[:, kept].flatten(), ignore_index=_IGNORED)


def _describe(instance: Any) -> Any:
    """An object's class and options, for the cache key; `str` if it has no attributes."""
    if is_dataclass(instance):
        options = field_values(instance)
    elif hasattr(instance, "__dict__"):
        options = {name: value for name, value in vars(instance).items() if not name.startswith("_")}
    else:
        return str(instance)
    if hasattr(instance, "__qualname__"):  # a function or a class
        return f"{instance.__module__}.{instance.__qualname__}"
    return {"class": f"{type(instance).__module__}.{type(instance).__qualname__}", "options": options}

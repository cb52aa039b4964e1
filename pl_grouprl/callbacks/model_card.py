"""Writes the model card of a run, `README.md` of its export, and pushes the folder to the Hugging Face Hub."""

from __future__ import annotations

import contextlib
import importlib.metadata
import re
from pathlib import Path
from typing import Any

import yaml
from lightning.pytorch import LightningModule, Trainer

from pl_grouprl.attention.support import is_classifier
from pl_grouprl.callbacks.checkpoints import run_folder
from pl_grouprl.callbacks.run_summary import RunSummary
from pl_grouprl.models.adapters import has_adapters
from pl_grouprl.training.checkpoint import all_options

_FIGURES = re.compile(r"reward|val[/_].*|kl|entropy|completions/mean_length|prefix/token_ratio|perf/tokens_per_second")
"""Metrics that a card shows."""

_FOLDERS = re.compile(r"(?<![^\s'\"\[(])(?:[A-Za-z]:)?/(?:[^\s/'\"]+/)+")
"""Folders of absolute paths, which say nothing elsewhere and may name a person."""

_ADDRESSES = re.compile(r"(\w://)(?:[^\s/@]*@)?([^\s?'\"]*)(?:\?[^\s'\"]*)?")
"""Addresses, with a user and a query, which may hold a password or a key."""

_PACKAGES = ("pl_grouprl", "torch", "transformers", "lightning", "peft", "vllm")

_OWN_FILES = {".gitattributes", "README.md", "LICENSE"}
"""Files of a repository that was created on the hub's page."""


def card_files(trainer: Trainer, module: LightningModule, model: Any, name: str, *, separate: bool) -> dict[str, bytes]:
    """Describe a run for the users of its model.

    Args:
        trainer: At the end of the run.
        module: What it trained.
        model: The transformers model that is exported.
        name: Name on the hub, or of the folder.
        separate: Whether only the adapter is exported.

    Returns:
        By file name, `README.md`: base and its license, data, options, figures of `RunSummary`, versions; and
        `curves.png`, if the run has drawn it.
    """
    algorithm = type(module).__name__
    base = str(getattr(model.config, "name_or_path", None) or "")
    on_hub = bool(re.fullmatch(r"[\w.-]+(/[\w.-]+)?", base)) and not Path(base).exists()
    data = getattr(getattr(getattr(trainer, "datamodule", None), "train", None), "path", None)  # of a HubDataset
    if not isinstance(data, str) or Path(data).expanduser().exists():
        data = None
    critic = is_classifier(model.config, "TokenClassification")
    auto_class = f"AutoModelFor{'TokenClassification' if critic else 'CausalLM'}"
    facts = {
        "library_name": "peft" if separate else "transformers",
        "pipeline_tag": "token-classification" if critic else "text-generation",
        "tags": ["pl_grouprl", "reinforcement-learning", algorithm.lower()],
        "base_model": base if on_hub else None,
        "base_model_relation": ("adapter" if separate else "finetune") if on_hub else None,
        "datasets": [data] if data else None,
        "license": _license(base, on_hub),
    }
    shown = f"[{base}](https://huggingface.co/{base})" if on_hub else f"`{Path(base).name or type(model).__name__}`"
    if critic:
        shown = f"The critic of {shown}"
    usage = [f"from transformers import {auto_class}, AutoTokenizer", ""]
    usage += [f'model = {auto_class}.from_pretrained("{base if separate else name}", dtype="auto")']
    if separate:
        usage.insert(0, "from peft import PeftModel")
        usage.append(f'model = PeftModel.from_pretrained(model, "{name}")')
    usage.append(f'tokenizer = AutoTokenizer.from_pretrained("{name}")')
    parts = [
        f"---\n{yaml.safe_dump({k: v for k, v in facts.items() if v is not None}, sort_keys=False)}---",
        f"# {name.rpartition('/')[2]}",
        f"{shown}, trained {'with a low-rank adapter ' if has_adapters(model) else ''}by {algorithm} for "
        f"{trainer.global_step} steps{f' on [{data}](https://huggingface.co/datasets/{data})' if data else ''}.",
        "" if facts["license"] else "The license of the base model applies.",
        "## Use\n\n```python\n" + "\n".join(usage) + "\n```",
        "The logit at a token is the critic's value after it."
        if critic
        else f"or `python -m pl_grouprl.cli chat --policy {name}`.",
    ]
    files = {}
    summary = next((c for c in trainer.callbacks if isinstance(c, RunSummary)), None)  # type: ignore[attr-defined]
    if summary is not None and summary.history.points:
        table = ["| metric | first | last | lowest | highest |", "|---|---|---|---|---|"]
        for metric in sorted(filter(_FIGURES.fullmatch, summary.history.points)):
            values = summary.history.statistics(metric)
            cells = [f"`{metric}`", *(f"{values[name]:.4g}" for name in ("first", "last", "min", "max"))]
            table.append(f"| {' | '.join(cells)} |")
        parts.append("## Figures\n\n" + "\n".join(table))
        folder = run_folder(trainer)
        curves = None if folder is None or not summary.curves_filename else folder / summary.curves_filename
        if curves is not None and curves.is_file():
            files["curves.png"] = curves.read_bytes()
            parts.append("![metrics by optimizer step](curves.png)")
    parts.append(f"## Options\n\n```yaml\n{yaml.safe_dump(_publishable(all_options(module)))}```")
    versions = []
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions.append(f"{package} {importlib.metadata.version(package)}")
    parts.append(f"## Versions\n\n{', '.join(versions)}")
    files["README.md"] = ("\n\n".join(filter(None, parts)) + "\n").encode()
    return files


def _license(base: str, on_hub: bool) -> str | None:
    """The license that the base's own card states, if it has one and can be read."""
    from huggingface_hub import ModelCard

    if not base:
        return None
    try:
        return ModelCard.load(base if on_hub else Path(base) / "README.md", ignore_metadata_errors=True).data.license
    except (OSError, ValueError, yaml.YAMLError):
        return None


def _publishable(value: Any) -> Any:
    """Options as plain YAML values, without what may name a person."""
    if isinstance(value, dict):
        return {str(key): _publishable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_publishable(item) for item in value]
    if value is None or isinstance(value, bool | int | float):
        return value
    if Path(str(value)).is_absolute():
        return Path(value).name
    return _FOLDERS.sub("", _ADDRESSES.sub(r"\1\2", str(value)))


def reserve_repository(repo_id: str, private: bool | None, marker: str) -> str:
    """Create a repository for a model on the hub, or check that an existing one may be written to.

    Args:
        repo_id: `name`, or `owner/name`.
        private: Whether only its owner sees it; defaults to the owner's setting.
        marker: File that an earlier export has, and without which nothing is replaced.

    Returns:
        Its name with its owner.

    Raises:
        OSError: If the hub rejects the upload, as without a token.
        FileExistsError: If it has other files.
        ValueError: If it exists, and more or fewer people see it than `private` says.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
    found = api.model_info(repo_id)
    if private is not None and found.private != private:
        given = f"private is {private}, but {repo_id} exists with private={found.private}"
        raise ValueError(f"{given}; change it on the hub, or omit private.")
    names = {file.rfilename for file in found.siblings or ()}
    if marker not in names and names - _OWN_FILES:
        raise FileExistsError(f"push_to_hub {repo_id!r} has files that no export wrote; pass a new name.")
    return repo_id


def push(folder: Path, repo_id: str, message: str) -> str:
    """Make a repository's files those of a folder, in one commit, and return the commit's address."""
    from huggingface_hub import HfApi

    commit = HfApi().upload_folder(repo_id=repo_id, folder_path=folder, commit_message=message, delete_patterns="*")
    return str(commit.commit_url)

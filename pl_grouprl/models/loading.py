"""Loads a transformers model, requiring its weights to match its files exactly; reads GGUF files.

transformers itself only logs a line when it initializes missing weights at random or skips unexpected ones.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pl_grouprl.utilities.distributed import derive_seed
from pl_grouprl.utilities.modes import nonfinite_tensors
from pl_grouprl.utilities.text import first_names

if TYPE_CHECKING:
    from transformers import PretrainedConfig

OPTION = "allow_mismatched_weights"
"""Name of the option in every class that loads weights."""

_NAMED = 6
"""Maximum number of weights that an error lists."""


def load_model(auto_class: str, location: str, *, owner: str, allowed: Sequence[str] = (), **options: Any) -> Any:
    """Load a transformers model; raise an error unless its files have exactly its weights, all finite.

    With `AutoModel`, a head in the files is skipped. Weights that transformers expects to be missing or left over for a
    model family are not a mismatch, nor is the second name of a tied weight.

    Args:
        auto_class: Name of a class in transformers.
        location: Folder or hub name.
        owner: What the location is, for errors: `model path 'x'`.
        allowed: Glob patterns of weights that may be missing, unexpected or of another shape. These are initialized
            at random, identically on every rank and in every run.
        **options: Passed to `from_pretrained`.

    Raises:
        OSError: If there is no such folder or hub name.
        ValueError: If weights are missing, unexpected, misshaped or not finite, or a pattern matches nothing.
    """
    import transformers

    with torch.random.fork_rng(devices=[], enabled=bool(allowed)):
        if allowed:
            torch.manual_seed(derive_seed("new weights", 0))
        model, found = getattr(transformers, auto_class).from_pretrained(
            location, output_loading_info=True, ignore_mismatched_sizes=True, **options
        )
    unexpected = found["unexpected_keys"]
    if auto_class == "AutoModel":  # a head's weights: no child has the first part of their names
        body = {model.base_model_prefix, *(child for child, _ in model.named_children())}
        unexpected = {name for name in unexpected if name.partition(".")[0] in body}
    misshaped = {name: (in_files, expected) for name, in_files, expected in found["mismatched_keys"]}
    check_names(f"{owner} does not fit {type(model).__name__}", found["missing_keys"], unexpected, misshaped, allowed)
    check_finite_weights(model.state_dict(), owner)
    return model


def check_names(
    refusal: str,
    missing: Iterable[str],
    unexpected: Iterable[str],
    misshaped: Mapping[str, tuple[Sequence[int], Sequence[int]]],
    allowed: Sequence[str] = (),
) -> None:
    """Raise an error for weights that differ between files and model.

    Args:
        refusal: Beginning of the error.
        missing: Names of weights that the files lack.
        unexpected: Names of weights that the model lacks.
        misshaped: By name, the shape in the files and the shape in the model.
        allowed: Glob patterns of weights that may differ.

    Raises:
        ValueError: Lists the weights, or names a pattern that matches none.
    """
    names = {*missing, *unexpected, *misshaped}
    for pattern in allowed:
        if not any(fnmatchcase(name, pattern) for name in names):
            differing = first_names(sorted(names), _NAMED)
            raise ValueError(f"{OPTION} has {pattern!r}, which matches no weight that differs ({differing}); omit it.")
    left = {name for name in names if not any(fnmatchcase(name, pattern) for pattern in allowed)}
    if left:
        kinds = {
            "missing from it": left.intersection(missing),
            "unknown to the model": left.intersection(unexpected),
            "of another shape": {
                f"{name} ({list(found)}, and {list(model)} in the model)"
                for name, (found, model) in misshaped.items()
                if name in left
            },
        }
        listed = "; ".join(f"{kind}: {first_names(sorted(some), _NAMED)}" for kind, some in kinds.items() if some)
        raise ValueError(
            f"{refusal}: {len(left)} of its weights differ: {listed}. Use all files that belong together; for a whole "
            f"model, {OPTION} lists (as glob patterns) weights that may be initialized at random or skipped."
        )


def check_finite_weights(weights: dict[str, Tensor], owner: str) -> None:
    """Raise a ValueError that lists weights with NaN or infinity."""
    broken = nonfinite_tensors(weights.items())
    if broken:
        loaded = f"{len(broken)} of its weights, as loaded in {weights[broken[0]].dtype}"
        raise ValueError(f"{owner} has NaN or infinity in {loaded}: {first_names(sorted(broken), _NAMED)}.")


# GGUF files (the format of llama.cpp). Weights are dequantized as they are loaded, so nothing downstream (checkpoints,
# copies, exports, adapters) sees a quantized model.

_GPT2_SPLIT = frozenset({"gpt-2", "phi-2"})
"""Values of `tokenizer.ggml.pre` for GPT-2's splitting into words, the default of byte-level tokenizers."""

_DIGIT_SPLIT = frozenset({"smollm", "starcoder", "refact"})
"""Values for the same splitting after splitting off each digit, a step that transformers 5.23 leaves out."""


def split_gguf_path(path: str) -> tuple[str, str | None]:
    """Split the path of a GGUF file into its folder or hub name, and its file name; (path, None) for any other path."""
    location, slash, name = path.rpartition("/")
    return (location or slash or ".", name) if name.lower().endswith(".gguf") else (path, None)


def load_gguf_config(location: str, gguf_file: str, revision: str | None = None) -> PretrainedConfig:
    """Load the config of the model in a file.

    This takes seconds, and a run needs it several times, so the config is cached until the file changes.

    Args:
        location: Folder or hub name.
        gguf_file: Name of the file.
        revision: Branch, tag or commit on the hub.
    """
    file = _local_file(location, gguf_file, revision)
    status = file.stat()
    return copy.deepcopy(_read_config(file, (status.st_mtime_ns, status.st_size)))


@lru_cache(maxsize=4)
def _read_config(file: Path, stamp: tuple[int, int]) -> PretrainedConfig:
    """Read the config. `stamp` is part of the cache's key, and differs once the file has changed."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(str(file.parent), gguf_file=file.name)


def _local_file(location: str, gguf_file: str, revision: str | None) -> Path:
    """The local path of a file, downloaded if it is on the hub."""
    from transformers.utils import cached_file

    return Path(str(cached_file(location, gguf_file, revision=revision)))


def load_gguf_tokenizer(location: str, gguf_file: str, revision: str | None = None) -> Any:
    """Load the tokenizer in a file. It splits text into words as the model's original tokenizer does.

    Args:
        location: Folder or hub name.
        gguf_file: Name of the file.
        revision: Branch, tag or commit on the hub.

    Raises:
        ValueError: If it splits text in an unknown way, which would silently change the tokens.
    """
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer
    from transformers.integrations.gguf import read_gguf_metadata
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    file = _local_file(location, gguf_file, revision)
    metadata, _ = read_gguf_metadata(str(file))
    tokenizer = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
    rules = metadata.get("tokenizer.ggml.pre")
    if metadata.get("tokenizer.ggml.model") != "gpt2":  # only byte-level BPE splits text into words
        return tokenizer
    if rules in _DIGIT_SPLIT:
        words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        digits = pre_tokenizers.Digits(individual_digits=True)
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    elif rules not in _GPT2_SPLIT and rules not in GGUF_PRE_TOKENIZER_SPLITS:
        raise ValueError(
            f"the tokenizer in {str(file)!r} splits text by rules that are not known, {rules!r} (tokenizer.ggml.pre); "
            "save the model and its original tokenizer with save_pretrained, and pass that folder."
        )
    return tokenizer

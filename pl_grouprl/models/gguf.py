"""GGUF files (the format of llama.cpp): loads config and tokenizer, and has the options to load weights.

Weights are dequantized, so nothing downstream (checkpoints, copies, exports, adapters) sees a quantized model.
"""

from __future__ import annotations

import copy
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pl_grouprl.utilities import optional

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_GPT2_SPLIT = frozenset({"gpt-2", "phi-2"})
"""Values of `tokenizer.ggml.pre` for GPT-2's splitting into words, the default of byte-level tokenizers."""

_DIGIT_SPLIT = frozenset({"smollm", "starcoder", "refact"})
"""Values for the same splitting after splitting off each digit, a step that transformers 5.23 leaves out."""


def split_location(path: str) -> tuple[str, str | None]:
    """Split the path of a GGUF file into its folder or hub name, and its file name.

    Any other path is returned whole, with None as the file name.
    """
    location, _, name = path.rpartition("/")
    return (location or ".", name) if name.lower().endswith(".gguf") else (path, None)


def check_gguf_file(path: str, gguf_file: str | None) -> None:
    """Check a path and the name of a GGUF file in it, without access to the hub.

    Raises:
        FileNotFoundError: If the folder has no such file.
        ModuleNotFoundError: If a package that reads it is missing.
        ValueError: If `path` is itself a GGUF file, the folder has only GGUF files and `gguf_file` is None, or
            `gguf_file` is not the name of one.
    """
    location, name = split_location(path)
    if name is not None:
        raise ValueError(f"path is {path!r}, a GGUF file; pass path={location!r} and gguf_file={name!r}.")
    folder = Path(path).expanduser()
    present = sorted(file.name for file in folder.glob("*.gguf")) if folder.is_dir() else []
    if gguf_file is None:
        if present and not (folder / "config.json").exists():
            raise ValueError(
                f"path is {path!r}, which has no config.json but GGUF files; pass gguf_file, one of {present}."
            )
        return
    if split_location(gguf_file)[1] is None or Path(gguf_file).is_absolute():
        raise ValueError(f"gguf_file is {gguf_file!r}; pass the name of a .gguf file in path, {path!r}.")
    if folder.is_dir() and not (folder / gguf_file).is_file():
        raise FileNotFoundError(f"gguf_file {gguf_file!r} is not in {path!r}, which has {present or 'no GGUF file'}.")
    optional.require(optional.GGUF_AVAILABLE, f"gguf_file {gguf_file!r}", "gguf")


def dense_options(gguf_file: str) -> dict[str, Any]:
    """Arguments of `from_pretrained` that dequantize a file's weights and leave no trace of their quantization.

    Raises:
        ImportError: If transformers is too old.
    """
    try:
        from transformers import GgufConfig
    except ImportError as error:
        raise ImportError(
            f"gguf_file is {gguf_file!r}, which transformers {version('transformers')} cannot load as a dense model; "
            "upgrade it with `pip install 'transformers>=5.23'`."
        ) from error
    return {"gguf_file": gguf_file, "quantization_config": GgufConfig(dequantize=True)}


def load_config(location: str, gguf_file: str, revision: str | None = None) -> PretrainedConfig:
    """Load the config of the model in a file.

    This takes seconds, and a run needs it several times, so the config is cached until the file changes.

    Args:
        location: Folder or hub name.
        gguf_file: Name of the file.
        revision: Branch, tag or commit on the hub.

    Raises:
        OSError: If there is no such file.
        ValueError: If it cannot be read.
    """
    file = _resolve(location, gguf_file, revision)
    status = file.stat()
    return copy.deepcopy(_read_config(str(file), (status.st_mtime_ns, status.st_size)))


def load_tokenizer(location: str, gguf_file: str, revision: str | None = None) -> Any:
    """Load the tokenizer in a file. It splits text into words as the model's original tokenizer does.

    Args:
        location: Folder or hub name.
        gguf_file: Name of the file.
        revision: Branch, tag or commit on the hub.

    Raises:
        OSError: If there is no such file.
        ValueError: If it cannot be read, or splits text in an unknown way.
    """
    from transformers import AutoTokenizer

    file = _resolve(location, gguf_file, revision)
    with naming_gguf_file(file):
        kind, split_rules = _tokenizer_kind(file)
        tokenizer = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
    if kind == "gpt2":  # byte-level BPE; others do not split text into words
        _set_word_split(tokenizer, split_rules, file)
    return tokenizer


@contextmanager
def naming_gguf_file(file: Path | str) -> Iterator[None]:
    """Name the file if its content cannot be read.

    Raises:
        OSError: If the system refuses to read it.
        ValueError: Names the file and the cause.
    """
    try:
        yield
    except (ValueError, LookupError, OverflowError, struct.error, NotImplementedError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        cause = f"{' '.join(str(error).split()):.500} ({type(error).__name__})"
        raise ValueError(
            f"the GGUF file {str(file)!r} cannot be loaded: {cause}. If it is damaged, copy it again; if transformers "
            "does not support it, save the original model with save_pretrained."
        ) from error


@lru_cache(maxsize=4)
def _read_config(file: str, stamp: tuple[int, int]) -> PretrainedConfig:
    """Read the config. `stamp` is part of the cache's key, and differs once the file has changed."""
    from transformers import AutoConfig

    with naming_gguf_file(file):
        return AutoConfig.from_pretrained(str(Path(file).parent), gguf_file=Path(file).name)


def _resolve(location: str, gguf_file: str, revision: str | None) -> Path:
    """The local path of a file, downloaded if it is on the hub."""
    from transformers.utils import cached_file

    return Path(str(cached_file(location, gguf_file, revision=revision)))


def _tokenizer_kind(file: Path) -> tuple[str | None, str | None]:
    """The kind of a file's tokenizer and its rules for splitting text: `tokenizer.ggml.model`, `tokenizer.ggml.pre`."""
    from transformers.integrations.gguf import read_gguf_metadata

    metadata, _ = read_gguf_metadata(str(file))
    return metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")


def _set_word_split(tokenizer: Any, rules: str | None, file: Path) -> None:
    """Make a tokenizer split text as the original does; refuses unknown rules, which would silently change tokens."""
    from tokenizers import pre_tokenizers
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    if rules in _DIGIT_SPLIT:
        words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        digits = pre_tokenizers.Digits(individual_digits=True)
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    elif rules not in _GPT2_SPLIT and rules not in GGUF_PRE_TOKENIZER_SPLITS:
        known = sorted(_GPT2_SPLIT | _DIGIT_SPLIT | GGUF_PRE_TOKENIZER_SPLITS.keys())
        raise ValueError(
            f"the tokenizer in {str(file)!r} splits text by the rules {rules!r} (tokenizer.ggml.pre), of which only "
            f"{', '.join(known)} are known; save the model and its original tokenizer with save_pretrained, and pass "
            "that folder."
        )

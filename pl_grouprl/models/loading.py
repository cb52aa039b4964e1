"""Loads a transformers model, requiring its weights to match its files exactly."""

from __future__ import annotations

import copy
import json
import pickle
import struct
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pl_grouprl.utilities import optional
from pl_grouprl.utilities.distributed import derive_seed
from pl_grouprl.utilities.modes import nonfinite_tensors
from pl_grouprl.utilities.text import first_names

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# GGUF files (the format of llama.cpp): loads config and tokenizer, and has the options to load weights.
#
# Weights are dequantized, so nothing downstream (checkpoints, copies, exports, adapters) sees a quantized model.

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


# Loads a transformers model, requiring its weights to match its files exactly.
#
# transformers itself only logs a line when it initializes missing weights at random or skips unexpected ones.

OPTION = "allow_mismatched_weights"
"""Name of the option in every class that loads weights."""

_NAMED = 6
"""Maximum number of weights that an error lists."""


@dataclass(frozen=True)
class WeightMismatch:
    """How the weights in a folder differ from a model's, by name and shape.

    Attributes:
        missing: Weights that the folder lacks.
        unexpected: Weights that the model lacks.
        misshaped: By name, the shape in the folder and the shape in the model.
    """

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    misshaped: dict[str, tuple[Sequence[int], Sequence[int]]] = field(default_factory=dict)

    @property
    def names(self) -> set[str]:
        """Names of all weights that differ."""
        return {*self.missing, *self.unexpected, *self.misshaped}

    def without(self, patterns: Iterable[str]) -> WeightMismatch:
        """This mismatch, without names that match a glob pattern."""
        left = {name for name in self.names if not any(fnmatchcase(name, pattern) for pattern in patterns)}
        return WeightMismatch(
            tuple(name for name in self.missing if name in left),
            tuple(name for name in self.unexpected if name in left),
            {name: shapes for name, shapes in self.misshaped.items() if name in left},
        )

    def __str__(self) -> str:
        """For example `missing from it: a.weight; of another shape: b.weight ([3, 4], and [48, 32] in the model)`."""
        shapes = [
            f"{name} ({list(found)}, and {list(model)} in the model)" for name, (found, model) in self.misshaped.items()
        ]
        kinds = {
            "missing from it": sorted(self.missing),
            "unknown to the model": sorted(self.unexpected),
            "of another shape": sorted(shapes),
        }
        return "; ".join(f"{kind}: {first_names(names, _NAMED)}" for kind, names in kinds.items() if names)


def load_model(auto_class: str, location: str, *, owner: str, allowed: Sequence[str] = (), **options: Any) -> Any:
    """Load a transformers model; refuse it unless its files have exactly its weights, all finite.

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
        ValueError: If weights are missing, unexpected, misshaped, not finite or unreadable, or a pattern matches
            nothing.
    """
    import transformers

    with _repeatable(allowed), readable_weights(location, owner):
        model, found = getattr(transformers, auto_class).from_pretrained(
            location, output_loading_info=True, ignore_mismatched_sizes=True, **options
        )
    unexpected = found["unexpected_keys"]
    if auto_class == "AutoModel":
        unexpected = {name for name in unexpected if not _belongs_to_a_head(name, model)}
    misshaped = {name: (in_files, expected) for name, in_files, expected in found["mismatched_keys"]}
    mismatch = WeightMismatch(tuple(found["missing_keys"]), tuple(unexpected), misshaped)
    check_mismatch(mismatch, f"{owner} does not fit {type(model).__name__}", allowed)
    check_finite_weights(model.state_dict(), owner)
    return model


def check_mismatch(mismatch: WeightMismatch, refusal: str, allowed: Sequence[str] = (), remedy: str = "") -> None:
    """Refuse weights that do not fit.

    Args:
        mismatch: The mismatch.
        refusal: Beginning of the error.
        allowed: Glob patterns of weights that may differ.
        remedy: End of the error; by default, to use a matching folder or allow the names.

    Raises:
        ValueError: Lists the weights, or a pattern that matches none.
    """
    unused = [pattern for pattern in allowed if not any(fnmatchcase(name, pattern) for name in mismatch.names)]
    if unused:
        raise ValueError(
            f"{OPTION} has {unused[0]!r}, which matches no weight that is missing, unknown or of another shape "
            f"(those are {first_names(sorted(mismatch.names), _NAMED)}); leave it out."
        )
    left = mismatch.without(allowed)
    if left.names:
        remedy = remedy or (
            f"Use weights that belong to its config.json, or list in {OPTION} (glob patterns) those that may be "
            "initialized at random or left out."
        )
        raise ValueError(f"{refusal}: {len(left.names)} of its weights differ: {left}. {remedy}")


def check_finite_weights(weights: dict[str, Tensor], owner: str) -> None:
    """Refuse weights with NaN or infinity.

    Raises:
        ValueError: Lists them and the dtype they were loaded in.
    """
    broken = nonfinite_tensors(weights.items())
    if broken:
        dtype = weights[broken[0]].dtype
        raise ValueError(
            f"{owner} has NaN or infinity in {len(broken)} of its weights, as loaded in {dtype}: "
            f"{first_names(sorted(broken), _NAMED)}. Use earlier weights, or a dtype with a larger range."
        )


def check_patterns(patterns: Any, owner: str) -> None:
    """Refuse anything but a sequence of glob patterns.

    Raises:
        ValueError: Shows the value.
    """
    if isinstance(patterns, str) or not all(isinstance(pattern, str) and pattern for pattern in patterns):
        raise ValueError(f"{owner}.{OPTION} is {patterns!r}; pass a list of names of weights or of glob patterns.")


@contextmanager
def reachable(location: str, owner: str) -> Iterator[None]:
    """Say in one line that a model is neither a folder nor on the hub.

    Raises:
        OSError: Names the owner and the cause.
    """
    try:
        yield
    except OSError as error:
        if Path(location).expanduser().is_dir():
            raise
        cause = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise OSError(
            f"{owner} is neither a folder in {Path.cwd()} nor a name on the hub that can be reached ({cause:.300}); "
            "pass the path of a folder with a model, or look at the name, the network and HF_HUB_OFFLINE."
        ) from error


@contextmanager
def readable_weights(location: str, owner: str) -> Iterator[None]:
    """Name the damaged file if reading a folder's weights fails.

    Raises:
        ValueError: Names the file, if it can be found, and the cause.
    """
    try:
        yield
    except Exception as error:
        conversions = _conversion_errors(error)
        file = _damaged_file(Path(location)) if isinstance(error, (OSError, RuntimeError, *_unreadable())) else None
        absent = isinstance(error, FileNotFoundError) and Path(location).is_dir()
        if not (conversions or file or absent or isinstance(error, _unreadable())):
            raise
        cause = "; ".join(conversions) or " ".join(str(error).split())
        name, kind = file or location, type(error).__name__
        raise ValueError(f"{owner} cannot be loaded: {name}: {cause:.500} ({kind}). Copy or save it again.") from error


def _unreadable() -> tuple[type[Exception], ...]:
    """Error types that always indicate a damaged file."""
    from safetensors import SafetensorError

    return SafetensorError, json.JSONDecodeError, UnicodeDecodeError, EOFError, pickle.UnpicklingError


def _damaged_file(folder: Path) -> Path | None:
    """The first weight or JSON file that cannot be read, or None."""
    from safetensors import SafetensorError, safe_open

    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt"):
                pass
        except (SafetensorError, OSError):
            return file
    for file in sorted(folder.glob("*.json")):
        try:
            json.loads(file.read_text(encoding="utf-8"))
        except (ValueError, OSError):
            return file
    return next((file for file in sorted(folder.glob("*.bin")) if not zipfile.is_zipfile(file)), None)


def _conversion_errors(error: BaseException) -> list[str]:
    """Weights that transformers could not convert; it logs them, but its error does not mention them."""
    trace = error.__traceback__
    while trace is not None:
        report = getattr(trace.tb_frame.f_locals.get("loading_info"), "conversion_errors", None)
        if report:
            return [f"{name}: {' '.join(str(cause).split()):.200}" for name, cause in sorted(report.items())]
        trace = trace.tb_next
    return []


def _belongs_to_a_head(name: str, model: Any) -> bool:
    """Whether an unexpected weight belongs to a head, which `AutoModel` skips: no child has its first name part."""
    body = {model.base_model_prefix, *(child for child, _ in model.named_children())}
    return name.partition(".")[0] not in body


@contextmanager
def _repeatable(allowed: Sequence[str]) -> Iterator[None]:
    """Initialize allowed weights from a fixed seed, without changing the global random state."""
    if not allowed:
        yield
        return
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed("new weights", 0))
        yield

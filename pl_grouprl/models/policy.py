"""Policy sources, and the frozen models beside a policy: reference and teacher."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from pl_grouprl.attention import find_decoder
from pl_grouprl.attention.support import compile_layers
from pl_grouprl.media.rows import language_model_class
from pl_grouprl.models import loading as gguf
from pl_grouprl.models.adapters import (
    FourBit,
    LoRAAdapter,
    check_folder,
    expand_home,
    has_adapters,
    is_quantized,
    prepare_for_training,
)
from pl_grouprl.models.loading import check_patterns, load_model, reachable
from pl_grouprl.utilities import internals
from pl_grouprl.utilities.options import ArgumentError, checked_arguments, describe_value, drop_none
from pl_grouprl.utilities.text import first_names

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# Helpers for frozen models: teachers, and the reference policy of KL penalties, a copy of the initial policy.
#
# A policy with an adapter needs no copy: its frozen base, with the adapter off, is the reference.


def frozen_copy(model: nn.Module) -> nn.Module:
    """Copy a model and freeze the copy. Keeps its mode; put it in evaluation mode before scoring."""
    return copy.deepcopy(model).requires_grad_(False)


@contextmanager
def unfrozen(model: nn.Module) -> Iterator[None]:
    """Let all parameters of a frozen model require gradients, for checks that compare gradients."""
    frozen = [p for p in model.parameters() if not p.requires_grad and p.is_floating_point()]  # not quantized ones
    try:
        for parameter in frozen:
            parameter.requires_grad_(True)
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


def leave_out_of_checkpoints(module: nn.Module, child: str) -> None:
    """Leave a child out of `module.state_dict()`, and do not report it missing in `load_state_dict`, even if strict.

    For weights that are recreated from their source.
    """
    module.register_state_dict_post_hook(partial(_drop, child))  # not closures, which cannot be pickled
    module.register_load_state_dict_post_hook(partial(_ignore_missing, child))


def _drop(child: str, module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any]) -> None:
    for name in [name for name in state if name.startswith(f"{prefix}{child}.")]:
        del state[name]


def _ignore_missing(child: str, module: nn.Module, incompatible: Any) -> None:
    own = re.compile(rf"((_fsdp_wrapped_)?module\.)*{re.escape(child)}\.")  # FSDP1, or an average, may wrap the module
    incompatible.missing_keys[:] = [name for name in incompatible.missing_keys if not own.match(name)]


@torch.no_grad()
def fingerprint(model: nn.Module, *, frozen_only: bool = False) -> float:
    """Sum of the absolute weights, optionally of frozen ones only; detects that a source's model has changed."""
    parameters = (p for p in model.parameters() if not (frozen_only and p.requires_grad))
    return float(sum(parameter.abs().sum(dtype=torch.float64) for parameter in parameters))


# Checks that a teacher fits its student: tokenizer, vocabulary, and other weights.


def check_tokenizers(student: Any, teacher: Any) -> None:
    """Refuse a teacher whose tokenizer has other tokens, or other ids for the same tokens.

    Raises:
        ValueError: If one token differs.
    """
    ours, theirs = student.get_vocab(), teacher.get_vocab()
    differing = sorted(token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token))
    if differing:
        token = differing[0]
        raise ValueError(
            f"teacher has another tokenizer than policy: {len(differing)} tokens differ ({first_names(differing, 6)}); "
            f"{token!r} has the id {theirs.get(token)} there and {ours.get(token)} in the policy's. The teacher would "
            "score different text; use one with the policy's tokenizer."
        )


def check_pair(student: nn.Module, teacher: nn.Module) -> float:
    """Refuse a teacher that cannot score the student's tokens, or is the student itself.

    Args:
        student: As loaded, before any training.
        teacher: As loaded.

    Returns:
        The teacher's fingerprint, so that a resumed run can recognize it.

    Raises:
        ValueError: If the teacher's vocabulary is smaller, or the teacher is the student's initial or base model.
    """
    sizes = [model.get_output_embeddings().weight.shape[0] for model in (student, teacher)]  # type: ignore[operator]
    if sizes[1] < sizes[0]:
        raise ValueError(
            f"teacher has logits for {sizes[1]} tokens and policy for {sizes[0]}, so it cannot score all that the "
            "policy may sample; use a teacher with at least as many."
        )
    teacher_fingerprint = fingerprint(teacher)
    if teacher_fingerprint == fingerprint(student, frozen_only=has_adapters(student)):
        raise ValueError(
            "teacher is the model that policy starts from, so there is nothing to learn from it; pass another model. "
            "To keep the policy near its start, set beta of GRPO."
        )
    return teacher_fingerprint


# Policy sources: where a policy and its tokenizer come from.

Dtype = Literal["float32", "bfloat16", "float16", "auto"]


@runtime_checkable
class PolicySource(Protocol):
    """Creates the initial policy. Called on every rank and on every resume, with the same result each time."""

    def load(self) -> nn.Module:
        """Return a new transformers causal language model."""
        ...

    def load_tokenizer(self) -> Any:
        """Return its tokenizer."""
        ...


def as_policy_source(policy: Any, argument: str = "policy") -> PolicySource:
    """Return a policy source unchanged, or make one from a path.

    Args:
        policy: A source, or the path or hub name of a model.
        argument: Name of the option, for the error.

    Raises:
        ArgumentError: If it is a model, or anything else that cannot be reloaded.
    """
    if isinstance(policy, str):
        return policy_of_path(policy)
    if isinstance(policy, PolicySource):
        return policy
    raise ArgumentError(
        f"{argument} is {describe_value(policy)}; every rank and every resumed run reloads the initial model, which an "
        "object in memory does not allow. Save model and tokenizer with save_pretrained and pass the folder, or pass a "
        "PolicySource: an object whose load() and load_tokenizer() return the same each time."
    )


def policy_of_path(path: str) -> PretrainedPolicy:
    """The policy in a folder, under a name on the hub, or in a GGUF file."""
    location, gguf_file = gguf.split_location(path)
    return PretrainedPolicy(location, gguf_file=gguf_file)


@checked_arguments
@dataclass(frozen=True)
class PretrainedPolicy:
    """A policy in Hugging Face format, or in a GGUF file.

    Attributes:
        path: Name on the model hub or a local folder.
        dtype: Dtype of the loaded weights. The Trainer's precision applies on top: for `bf16-mixed`, load float32
            weights; `bf16-true` casts them to bfloat16 regardless. `auto` is the checkpoint's dtype.
        attn_implementation: As in transformers (`sdpa`, `flash_attention_2`, `eager`); None is its default. Prefix
            sharing wraps it.
        gradient_checkpointing: Recompute the activations of each layer in the backward pass. None: on a GPU.
        disable_dropout: Set every dropout rate of the config to 0; training refuses a model with another, since old
            and new log-probabilities would not be comparable.
        revision: Branch, tag or commit on the hub.
        trust_remote_code: Run model code that comes with the checkpoint. It can do anything on this machine.
        adapter: Train low-rank layers on frozen weights. The reference is then the policy with the adapter off, and
            checkpoints contain only the adapter.
        compile_layers: Compile each decoder layer for sequences of any length (`torch.compile`). Needs a C++ compiler
            or Triton, and slows the first steps. Rollouts and copies of the policy (reference, critic) run uncompiled.
        gradient_checkpointing_kwargs: Arguments of `torch.utils.checkpoint.checkpoint`; `use_reentrant` defaults to
            False.
        allow_mismatched_weights: Names or glob patterns of weights that may be missing from the folder, unexpected in
            it, or of another shape; any other mismatch is an error. These are initialized at random, identically in
            every run.
        gguf_file: Name of a GGUF file in `path`, which has config, weights and tokenizer in one. Quantized weights are
            dequantized to `dtype`, so the policy works like any other, and takes as much memory. Needs the
            extra `gguf`.
        quantization: Store the frozen linear layers under an `adapter` in 4 bits, quantized as they are loaded
            (QLoRA); see `FourBit`. None keeps `dtype`.

    Raises:
        FileNotFoundError: If `path` looks like a folder but is not one, or has no `gguf_file`.
        ModuleNotFoundError: If a package for `gguf_file` is missing.
        ValueError: If `path` is an adapter, or options contradict each other.
    """

    path: str
    dtype: Dtype = "float32"
    attn_implementation: str | None = None
    gradient_checkpointing: bool | None = None
    disable_dropout: bool = True
    revision: str | None = None
    trust_remote_code: bool = False
    adapter: LoRAAdapter | None = None
    compile_layers: bool = False
    gradient_checkpointing_kwargs: dict[str, Any] | None = None
    allow_mismatched_weights: tuple[str, ...] = ()
    gguf_file: str | None = None
    quantization: FourBit | None = None

    def __post_init__(self) -> None:
        gguf.check_gguf_file(self.path, self.gguf_file)
        check_folder(self.path, "model path")
        self._check_remote_code()
        self._check_checkpointing()
        check_patterns(self.allow_mismatched_weights, type(self).__name__)
        if Path(self.path).expanduser().joinpath("adapter_config.json").is_file():
            self._refuse_adapter()
        if self.quantization is not None:
            self._check_quantization()

    def _check_quantization(self) -> None:
        if self.adapter is None:
            raise ValueError(
                f"quantization is {self.quantization}, but there is no adapter, and weights of 4 bits cannot be "
                "trained; add one (adapter: {r: 16}), or leave quantization out."
            )
        if self.gguf_file is not None:
            raise ValueError(
                f"gguf_file is {self.gguf_file!r}, and quantization is {self.quantization}; transformers takes one of "
                "them. Leave quantization out, or load the policy without it, save_pretrained, and pass that folder."
            )
        if self.compile_layers:
            raise ValueError(
                f"compile_layers is true, and quantization is {self.quantization}, whose layers are not known to "
                "compile; leave out one of them."
            )

    def load(self) -> nn.Module:
        """Load the weights, including any vision tower, add the adapter, and compile.

        Raises:
            OSError: If `path` is neither a folder with a model nor a reachable name on the hub.
            ValueError: If `path` is an adapter, its weights do not match the model's, or `adapter` does not fit the
                model.
        """
        model = self.load_as(language_model_class(self.load_config()))
        if self.adapter is None and is_quantized(model):
            raise ValueError(
                f"model path {self.path!r} has weights of 4 bits, which cannot be trained; add an adapter "
                "(adapter: {r: 16}), or pass the path of the unquantized model."
            )
        if self.adapter is not None:
            self.adapter.add_to(model)
            self._refuse_lost_gradients(model)
        if self.compile_layers:
            compile_layers(model)
        return model

    def load_config(self) -> PretrainedConfig:
        """Load the model's config, with dropout disabled if requested."""
        from transformers import AutoConfig

        with reachable(self.path, self._owner):
            if self.gguf_file is None:
                config = AutoConfig.from_pretrained(self._location, **self._hub_options)
            else:
                config = gguf.load_config(self._location, self.gguf_file, self.revision)
        if self.disable_dropout:
            zero_dropout(config)
        return config

    def load_as(self, auto_class: str) -> Any:
        """Load the weights into another class of model.

        Args:
            auto_class: Its name in transformers: `AutoModel`, `AutoModelForSequenceClassification`.

        Raises:
            ValueError: If `path` is an adapter, or weights are missing, unexpected, misshaped, infinite or unreadable.
        """
        config = self.load_config()
        options: dict[str, Any] = drop_none(attn_implementation=self.attn_implementation)
        if self.gguf_file is not None:
            options |= gguf.dense_options(self.gguf_file)
        if self.quantization is not None:
            self._refuse_quantized(config)
            options["quantization_config"] = self.quantization.config()
        model = load_model(
            auto_class,
            self._location,
            owner=self._owner,
            allowed=self.allow_mismatched_weights,
            config=config,
            dtype=self.dtype,
            **options,
            **self._hub_options,
        )
        if has_adapters(model):  # transformers also loaded the base, and froze both
            self._refuse_adapter()
        prepare_for_training(model)
        if self.gradient_checkpointing:
            arguments = self._checkpointing_options
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=arguments)
            if arguments["use_reentrant"] and not internals.requires_input_gradients(model):
                # With frozen embeddings, a layer's input needs no gradient, so its weights would get none.
                model.enable_input_require_grads()
        return model

    def enable_checkpointing(self, model: Any) -> None:
        """Recompute activations of a loaded model, if its family supports that; for `gradient_checkpointing` None."""
        if model.supports_gradient_checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=self._checkpointing_options)

    def load_tokenizer(self) -> Any:
        """Load the tokenizer of the same folder, name or GGUF file."""
        from transformers import AutoTokenizer

        with reachable(self.path, self._owner):
            if self.gguf_file is not None:
                return gguf.load_tokenizer(self._location, self.gguf_file, self.revision)
            return AutoTokenizer.from_pretrained(self._location, **self._hub_options)

    def _check_remote_code(self) -> None:
        if self.gguf_file is not None and self.trust_remote_code:
            raise ValueError(
                f"trust_remote_code is true, but gguf_file {self.gguf_file!r} comes without code; leave it out."
            )

    def _check_checkpointing(self) -> None:
        if self.gradient_checkpointing_kwargs is None:
            return
        if not self.gradient_checkpointing:
            raise ValueError(
                f"gradient_checkpointing_kwargs is {self.gradient_checkpointing_kwargs}, but gradient_checkpointing is "
                "off; switch it on or leave them out."
            )
        parameters = signature(checkpoint).parameters.values()
        known = {"preserve_rng_state", *(option.name for option in parameters if option.kind is option.KEYWORD_ONLY)}
        unknown = sorted(self.gradient_checkpointing_kwargs.keys() - known)
        if unknown:
            raise ValueError(
                f"gradient_checkpointing_kwargs has {unknown}, which torch.utils.checkpoint.checkpoint does not know; "
                f"choose from {sorted(known)}."
            )

    def _refuse_lost_gradients(self, model: Any) -> None:
        """Refuse reentrant checkpointing of trained layers whose input needs no gradient: they would get none.

        The language model's embeddings are made to require gradients; the input of a vision tower is not.
        """
        if not (self.gradient_checkpointing and self._checkpointing_options["use_reentrant"]):
            return
        decoder = find_decoder(model)
        in_decoder = set(decoder.parameters())
        for module in model.modules():
            around = not getattr(module, "gradient_checkpointing", False) or decoder in set(module.modules())
            if not around and any(p.requires_grad and p not in in_decoder for p in module.parameters()):
                raise ValueError(
                    f"adapter has layers in a {type(module).__name__}, outside the language model, which get no "
                    "gradient if gradient_checkpointing_kwargs has use_reentrant: true; leave that out."
                )

    def _refuse_adapter(self) -> None:
        raise ValueError(
            f"model path {self.path!r} is an adapter; pass the path of its base, and this one as the adapter's "
            "(adapter: {path: ...}) to continue training it."
        )

    def _refuse_quantized(self, config: PretrainedConfig) -> None:
        if getattr(config, "quantization_config", None) is not None:
            raise ValueError(
                f"quantization is {self.quantization}, but model path {self.path!r} is quantized already "
                "(quantization_config in its config.json); leave quantization out."
            )

    @property
    def _checkpointing_options(self) -> dict[str, Any]:
        return {"use_reentrant": False} | (self.gradient_checkpointing_kwargs or {})

    @property
    def _location(self) -> str:
        return expand_home(self.path)

    @property
    def _owner(self) -> str:
        """What errors call it."""
        return f"model path {self.path!r}" + (f", gguf_file {self.gguf_file!r}" if self.gguf_file else "")

    @property
    def _hub_options(self) -> dict[str, Any]:
        return {"revision": self.revision, "trust_remote_code": self.trust_remote_code}


def zero_dropout(config: PretrainedConfig) -> None:
    """Set the dropout rates in a model's config and its sub-configs (language model, vision tower) to 0, in place.

    Their names differ between families, but all contain "drop".
    """
    from transformers import PretrainedConfig

    for name, value in vars(config).items():
        if isinstance(value, PretrainedConfig):
            zero_dropout(value)
        elif ("drop" in name) and isinstance(value, float):
            setattr(config, name, 0.0)

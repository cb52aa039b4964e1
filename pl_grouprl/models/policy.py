"""Policy sources, and the frozen models beside a policy: reference and teacher."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import nn

from pl_grouprl.attention import find_decoder
from pl_grouprl.attention.backends.saved import save_attention
from pl_grouprl.media.rows import language_model_class
from pl_grouprl.models.adapters import (
    FourBit,
    LoRAAdapter,
    drop_from_state,
    expand_home,
    has_adapters,
    is_quantized,
    prepare_for_training,
)
from pl_grouprl.models.kernels import Kernels, apply_kernels
from pl_grouprl.models.loading import load_gguf_config, load_gguf_tokenizer, load_model, split_gguf_path
from pl_grouprl.utilities import internals, optional
from pl_grouprl.utilities.device_defaults import Checkpointing
from pl_grouprl.utilities.distributed import local_shard
from pl_grouprl.utilities.options import as_options, drop_none
from pl_grouprl.utilities.text import first_names

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
        TypeError: If it is a model, or anything else that cannot be reloaded.
    """
    if isinstance(policy, str):
        return policy_of_path(policy)
    if isinstance(policy, PolicySource):
        return policy
    shown = "None" if policy is None else f"a {type(policy).__name__}"
    raise TypeError(f"{argument} is {shown}; every rank and resumed run reloads it, so pass a path or a PolicySource.")


def policy_of_path(path: str) -> PretrainedPolicy:
    """The policy in a folder, under a name on the hub, or in a GGUF file."""
    location, gguf_file = split_gguf_path(path)
    return PretrainedPolicy(location, gguf_file=gguf_file)


@dataclass(frozen=True)
class PretrainedPolicy:
    """A policy in Hugging Face format, or in a GGUF file.

    Attributes:
        path: Name on the model hub or a local folder.
        dtype: Dtype of the loaded weights. The Trainer's precision applies on top: for `bf16-mixed`, load float32
            weights; `bf16-true` casts them to bfloat16 regardless. `auto` is the checkpoint's dtype.
        attn_implementation: As in transformers (`sdpa`, `flash_attention_2`, `eager`); defaults to its choice. Prefix
            sharing wraps it.
        gradient_checkpointing: Recompute the activations of each layer in the backward pass; with `attention`,
            everything except the outputs of attention, which takes more memory and less time. Defaults to True on a
            GPU.
        disable_dropout: Set every dropout rate of the config to 0; training rejects a model with any other rate, since
            old and new log-probabilities would not be comparable.
        revision: Branch, tag or commit on the hub.
        trust_remote_code: Run model code that comes with the checkpoint. It can do anything on this machine.
        adapter: Train low-rank layers on frozen weights. The reference is then the policy with the adapter off, and
            checkpoints contain only the adapter.
        kernels: The implementation of RMSNorm, rotary positions and gated MLPs. `liger`: liger-kernel's Triton kernels,
            in the policy, its copies, and rollouts; needs a GPU and the extra `liger`. `compile`: `torch.compile`, of
            each decoder layer, for sequences of any length; needs a C++ compiler or Triton, slows the first steps, and
            leaves rollouts and copies (reference, critic) uncompiled. `none`: transformers' code. Defaults to `liger`
            for a fit on a GPU if it is installed. When a fit starts, liger's layers are compared with the model's own,
            and stay only if rounding explains the difference.
        gradient_checkpointing_kwargs: Arguments of `torch.utils.checkpoint.checkpoint`; `use_reentrant` defaults to
            False. With `attention`, it and `context_fn` are set.
        allow_mismatched_weights: Names or glob patterns of weights that may be missing from the folder, unexpected in
            it, or of another shape; any other mismatch is an error. These are initialized at random, identically in
            every run.
        gguf_file: Name of a GGUF file in `path`, which has config, weights and tokenizer in one. Quantized weights are
            dequantized to `dtype`, so the policy works like any other, and takes as much memory. Needs the
            extra `gguf`.
        quantization: Store the frozen linear layers under an `adapter` in 4 bits, quantized as they are loaded
            (QLoRA); see `FourBit`. Not quantized if None.

    Raises:
        ModuleNotFoundError: If a package for `gguf_file` is missing.
        ValueError: If options contradict each other.
    """

    path: str
    dtype: Dtype = "float32"
    attn_implementation: str | None = None
    gradient_checkpointing: Checkpointing | None = None
    disable_dropout: bool = True
    revision: str | None = None
    trust_remote_code: bool = False
    adapter: LoRAAdapter | None = None
    kernels: Kernels | None = None
    gradient_checkpointing_kwargs: dict[str, Any] | None = None
    allow_mismatched_weights: tuple[str, ...] = ()
    gguf_file: str | None = None
    quantization: FourBit | None = None

    def __post_init__(self) -> None:
        for name, config in (("adapter", LoRAAdapter), ("quantization", FourBit)):
            if isinstance(getattr(self, name), Mapping):
                object.__setattr__(self, name, as_options(config, getattr(self, name), f"{type(self).__name__}.{name}"))
        if self.gguf_file is not None:
            optional.require(optional.GGUF_AVAILABLE, f"gguf_file {self.gguf_file!r}", "gguf")
        if self.gradient_checkpointing_kwargs is not None and not self.gradient_checkpointing:
            raise ValueError("gradient_checkpointing_kwargs is set, but gradient_checkpointing is off; switch it on.")
        given = {"use_reentrant", "context_fn"} & set(self.gradient_checkpointing_kwargs or {})
        if self.gradient_checkpointing == "attention" and given:
            raise ValueError(f"gradient_checkpointing 'attention' sets {' and '.join(sorted(given))}; omit that.")
        if self.quantization is not None and (self.gguf_file is not None or self.kernels == "compile"):
            other = "kernels='compile'" if self.gguf_file is None else "gguf_file"
            raise ValueError(f"quantization does not work with {other}; omit one of them.")

    def load(self) -> nn.Module:
        """Load the weights, including any vision tower, add the adapter, and apply `kernels`.

        Raises:
            OSError: If `path` is neither a folder with a model nor a reachable name on the hub.
            ValueError: If `path` is an adapter, its weights do not match the model's, they have 4 bits and there is no
                adapter to train, or `adapter` does not fit the model.
        """
        model = self.load_as(language_model_class(self.load_config()))
        if self.adapter is None and is_quantized(model):
            raise ValueError(f"model path {self.path!r} has 4 bits, which cannot be trained; add an adapter.")
        if self.adapter is not None:
            self.adapter.add_to(model)
            self._check_gradients(model)
        apply_kernels(model, self.kernels)
        return model

    def load_config(self) -> Any:
        """Load the model's config, with dropout disabled if requested."""
        from transformers import AutoConfig

        if self.gguf_file is None:
            config = self._from_path(AutoConfig)
        else:
            config = load_gguf_config(expand_home(self.path), self.gguf_file, self.revision)
        if self.disable_dropout:
            zero_dropout(config)
        return config

    def load_as(self, auto_class: str) -> Any:
        """Load the weights into another class of model.

        Args:
            auto_class: Its name in transformers: `AutoModel`, `AutoModelForSequenceClassification`.

        Raises:
            ValueError: If `path` is an adapter, or weights are missing, unexpected, misshaped or not finite.
        """
        config, owner = self.load_config(), f"model path {self.path!r}"
        options: dict[str, Any] = drop_none(attn_implementation=self.attn_implementation)
        if self.gguf_file is not None:
            from transformers import GgufConfig

            owner += f", gguf_file {self.gguf_file!r}"
            # Leaves no trace of the quantization.
            options |= {"gguf_file": self.gguf_file, "quantization_config": GgufConfig(dequantize=True)}
        if self.quantization is not None:
            if getattr(config, "quantization_config", None) is not None:  # which transformers would use instead
                raise ValueError(f"quantization is {self.quantization}, but {owner} is quantized already; omit it.")
            options["quantization_config"] = self.quantization.config()
        model = load_model(
            auto_class,
            expand_home(self.path),
            owner=owner,
            allowed=self.allow_mismatched_weights,
            config=config,
            dtype=self.dtype,
            **options,
            **self._hub_options,
        )
        if has_adapters(model):  # transformers also loaded the base, and froze both
            raise ValueError(f"{owner} is an adapter; pass its base's path, and this one as adapter: {{path: ...}}.")
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

        if self.gguf_file is not None:
            return load_gguf_tokenizer(expand_home(self.path), self.gguf_file, self.revision)
        tokenizer = self._from_path(AutoTokenizer)
        if len(tokenizer) <= len(tokenizer.all_special_tokens):  # made from config.json alone
            raise ValueError(f"{self.path} has no tokenizer files.")
        return tokenizer

    def _from_path(self, auto_class: Any) -> Any:
        path = expand_home(self.path)
        try:
            return auto_class.from_pretrained(path, **self._hub_options)
        except OSError as error:
            if Path(path).is_dir():
                raise
            reason = str(error).splitlines()[0]
            raise OSError(f"there is no folder {self.path!r}, nor a model of that name on the hub: {reason}") from None

    def _check_gradients(self, model: Any) -> None:
        """Check that no trained layer loses its gradient to reentrant checkpointing, because its input needs none.

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
                    "gradient if gradient_checkpointing_kwargs has use_reentrant: true; omit that."
                )

    @property
    def _checkpointing_options(self) -> dict[str, Any]:
        saving = {"context_fn": save_attention} if self.gradient_checkpointing == "attention" else {}
        return {"use_reentrant": False} | saving | (self.gradient_checkpointing_kwargs or {})

    @property
    def _hub_options(self) -> dict[str, Any]:
        return {"revision": self.revision, "trust_remote_code": self.trust_remote_code}


def zero_dropout(config: Any) -> None:
    """Set the dropout rates in a model's config and its sub-configs (language model, vision tower) to 0, in place.

    Their names differ between families, but all contain "drop".
    """
    from transformers import PretrainedConfig

    for name, value in vars(config).items():
        if isinstance(value, PretrainedConfig):
            zero_dropout(value)
        elif ("drop" in name) and isinstance(value, float):
            setattr(config, name, 0.0)


# Frozen models: teachers, and the reference policy of KL penalties, a copy of the initial policy. A policy with an
# adapter needs no copy: its frozen base, with the adapter off, is the reference.


def frozen_copy(model: nn.Module) -> nn.Module:
    """Copy a model and freeze the copy. Keeps its mode; put it in evaluation mode before scoring."""
    return copy.deepcopy(model).requires_grad_(False)


@torch.no_grad()
def mix_into_reference(reference: nn.Module, policy: nn.Module, alpha: float) -> None:
    """Move a reference to alpha times the policy plus 1 - alpha times itself, in place, weight by weight.

    The soft update of TR-DPO ("Learn Your Reference Model for Real Good Alignment", arXiv:2404.09656), as TRL's
    `sync_ref_model`; alpha = 1 is its hard update.

    Args:
        reference: A copy of the policy's initial state, sharded like it.
        policy: The same model, trained.
        alpha: `ref_model_mixup_alpha`.
    """
    for own, new in zip(reference.parameters(), policy.parameters(), strict=True):
        local_shard(own).lerp_(local_shard(new), alpha)


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
    """Omit a child, which is recreated from its source, from `state_dict()`; loading does not need it."""
    module.register_state_dict_post_hook(partial(drop_from_state, [child]))  # not closures, which cannot be pickled
    module.register_load_state_dict_pre_hook(partial(drop_from_state, [child]))
    module.register_load_state_dict_post_hook(partial(_ignore_missing, child))


def _ignore_missing(child: str, module: nn.Module, incompatible: Any) -> None:
    own = re.compile(rf"((_fsdp_wrapped_)?module\.)*{re.escape(child)}\.")  # FSDP1, or an average, may wrap the module
    incompatible.missing_keys[:] = [name for name in incompatible.missing_keys if not own.match(name)]


@torch.no_grad()
def fingerprint(model: nn.Module, *, frozen_only: bool = False) -> float:
    """Sum of the absolute weights, optionally of frozen ones only; detects that a source's model has changed."""
    parameters = (p for p in model.parameters() if not (frozen_only and p.requires_grad))
    return float(sum(parameter.abs().sum(dtype=torch.float64) for parameter in parameters))


def check_tokenizers(student: Any, teacher: Any) -> None:
    """Raise a ValueError if a teacher's tokenizer has other tokens, or other ids for the same tokens."""
    ours, theirs = student.get_vocab(), teacher.get_vocab()
    differing = sorted(token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token))
    if differing:
        tokens = f"{len(differing)} tokens differ ({first_names(differing, 6)})"
        raise ValueError(f"teacher has another tokenizer than policy: {tokens}, so it would score different text.")


def check_pair(student: nn.Module, teacher: nn.Module) -> float:
    """Check that a teacher can score the student's tokens, and is not the student itself.

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
            f"teacher has logits for {sizes[1]} tokens and policy for {sizes[0]}; use a teacher with at least as many."
        )
    teacher_fingerprint = fingerprint(teacher)
    if teacher_fingerprint == fingerprint(student, frozen_only=has_adapters(student)):
        raise ValueError("teacher is the model that policy starts from; pass another, or set beta to stay near it.")
    return teacher_fingerprint

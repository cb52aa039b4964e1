"""Where a policy and its tokenizer come from."""

from __future__ import annotations

from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from torch import nn
from torch.utils.checkpoint import checkpoint

from pl_grouprl.attention import find_decoder
from pl_grouprl.media.processor import language_model_class
from pl_grouprl.models.adapter_layers import has_adapters
from pl_grouprl.models.adapters import LoRAAdapter, check_folder
from pl_grouprl.models.compile import compile_layers
from pl_grouprl.models.loading import check_patterns, load_model
from pl_grouprl.utilities.annotations import ArgumentError, describe_value
from pl_grouprl.utilities.arguments import checked_arguments

if TYPE_CHECKING:
    from transformers import PretrainedConfig

Dtype = Literal["float32", "bfloat16", "float16", "auto"]


@runtime_checkable
class PolicySource(Protocol):
    """Makes the initial policy. Called again on every rank and on every resume, with the same result each time."""

    def load(self) -> nn.Module:
        """Return a new transformers causal language model."""
        ...

    def load_tokenizer(self) -> Any:
        """Return its tokenizer."""
        ...


def as_policy_source(policy: Any) -> PolicySource:
    """Return a policy source as it is, or make one from a path.

    Raises:
        ArgumentError: If it is a model, or anything else that cannot be loaded again.
    """
    if isinstance(policy, str):
        return PretrainedPolicy(policy)
    if isinstance(policy, PolicySource):
        return policy
    raise ArgumentError(
        f"policy is {describe_value(policy)}; every rank and every resumed run loads the initial policy anew, which an "
        "object in memory cannot give. Save model and tokenizer with save_pretrained and pass the folder, or pass a "
        "PolicySource: an object whose load() and load_tokenizer() return the same each time."
    )


@checked_arguments
@dataclass(frozen=True)
class PretrainedPolicy:
    """A policy in Hugging Face format.

    Attributes:
        path: Name on the model hub or a local folder.
        dtype: Of the weights as loaded. The Trainer's precision comes on top: with `bf16-mixed` the weights should be
            float32, with `bf16-true` they are cast to bfloat16 whatever this says. `auto` is the checkpoint's own.
        attn_implementation: As in transformers (`sdpa`, `flash_attention_2`, `eager`); None is its default. Prefix
            sharing wraps it.
        gradient_checkpointing: Recompute the activations of each layer in the backward pass.
        disable_dropout: Set every dropout rate of the config to 0, as old and new log-probabilities are compared.
        revision: Branch, tag or commit on the hub.
        trust_remote_code: Run model code that comes with the checkpoint. It can do anything on this machine.
        adapter: Train low-rank layers on the frozen weights instead of the weights. The reference is then the policy
            with the adapter off, and checkpoints hold the adapter alone.
        compile_layers: Compile each decoder layer for sequences of any length (`torch.compile`), which takes a C++
            compiler or Triton and a while in the first steps. Rollouts and copies of the policy (reference, critic) run
            uncompiled.
        gradient_checkpointing_kwargs: Arguments of `torch.utils.checkpoint.checkpoint`; `use_reentrant` is False where
            they do not say otherwise.
        allow_mismatched_weights: Names or glob patterns of weights that may be missing from the folder, unexpected in
            it, or of another shape; any other mismatch is an error. The model's are then initialised at random,
            identically in every run.

    Raises:
        FileNotFoundError: If `path` looks like a folder and is none.
        ValueError: If `path` is that of an adapter, or options contradict each other.
    """

    path: str
    dtype: Dtype = "float32"
    attn_implementation: str | None = None
    gradient_checkpointing: bool = False
    disable_dropout: bool = True
    revision: str | None = None
    trust_remote_code: bool = False
    adapter: LoRAAdapter | None = None
    compile_layers: bool = False
    gradient_checkpointing_kwargs: dict[str, Any] | None = None
    allow_mismatched_weights: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_folder(self.path, "model path")
        self._check_checkpointing()
        check_patterns(self.allow_mismatched_weights, type(self).__name__)
        if Path(self.path).expanduser().joinpath("adapter_config.json").is_file():
            self._refuse_adapter()

    def load(self) -> nn.Module:
        """Load the weights, of the vision tower too where the model has one, put the adapter on them, and compile.

        Raises:
            OSError: If `path` is neither a folder with a model nor a reachable name on the hub.
            ValueError: If `path` holds an adapter, its weights do not match the model's, or `adapter` does not fit the
                model.
        """
        model = self.load_as(language_model_class(self.load_config()))
        if self.adapter is not None:
            self.adapter.add_to(model)
            self._refuse_lost_gradients(model)
        if self.compile_layers:
            compile_layers(model)
        return model

    def load_config(self) -> PretrainedConfig:
        """Load the model's config, dropout disabled where that is asked for."""
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(self._location, **self._hub_options)
        if self.disable_dropout:
            zero_dropout(config)
        return config

    def load_as(self, auto_class: str) -> Any:
        """Load the weights into another kind of model.

        Args:
            auto_class: Its name in transformers: `AutoModel`, `AutoModelForSequenceClassification`.

        Raises:
            ValueError: If `path` holds an adapter, or weights are missing, unexpected, of another shape, not finite or
                unreadable.
        """
        config = self.load_config()
        options = {} if self.attn_implementation is None else {"attn_implementation": self.attn_implementation}
        model = load_model(
            auto_class,
            self._location,
            owner=f"model path {self.path!r}",
            allowed=self.allow_mismatched_weights,
            config=config,
            dtype=self.dtype,
            **options,
            **self._hub_options,
        )
        if has_adapters(model):  # transformers has loaded its base too, and frozen both
            self._refuse_adapter()
        if self.gradient_checkpointing:
            arguments = self._checkpointing_options
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=arguments)
            if arguments["use_reentrant"] and not hasattr(model, "_require_grads_hook"):
                # A layer whose input needs no gradient would give its own weights none: behind frozen embeddings.
                model.enable_input_require_grads()
        return model

    def load_tokenizer(self) -> Any:
        """Load the tokenizer of the same folder or name."""
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self._location, **self._hub_options)

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
                f"choose of {sorted(known)}."
            )

    def _refuse_lost_gradients(self, model: Any) -> None:
        """Reentrant checkpointing gives a layer no gradients where nothing in front of it is trained.

        The language model's embeddings are made to require one, but not what is in front of a vision tower.
        """
        if not (self.gradient_checkpointing and self._checkpointing_options["use_reentrant"]):
            return
        decoder = find_decoder(model)
        own = set(decoder.parameters())
        for module in model.modules():
            around = not getattr(module, "gradient_checkpointing", False) or decoder in set(module.modules())
            if not around and any(p.requires_grad and p not in own for p in module.parameters()):
                raise ValueError(
                    f"adapter has layers in a {type(module).__name__}, outside the language model, which get no "
                    "gradient where gradient_checkpointing_kwargs has use_reentrant: true; leave that out."
                )

    def _refuse_adapter(self) -> None:
        raise ValueError(
            f"model path {self.path!r} holds an adapter; pass the path of its base, and this one as the adapter's "
            "(adapter: {path: ...}) to go on training it."
        )

    @property
    def _checkpointing_options(self) -> dict[str, Any]:
        return {"use_reentrant": False} | (self.gradient_checkpointing_kwargs or {})

    @property
    def _location(self) -> str:
        return str(Path(self.path).expanduser()) if self.path.startswith("~") else self.path

    @property
    def _hub_options(self) -> dict[str, Any]:
        return {"revision": self.revision, "trust_remote_code": self.trust_remote_code}


def zero_dropout(config: PretrainedConfig) -> None:
    """Set the dropout rates of a model's config to 0, in place, and those of its parts (language model, vision tower).

    Families name them differently, all with "drop".
    """
    from transformers import PretrainedConfig

    for name, value in vars(config).items():
        if isinstance(value, PretrainedConfig):
            zero_dropout(value)
        elif ("drop" in name) and isinstance(value, float):
            setattr(config, name, 0.0)

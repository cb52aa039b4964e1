"""Where a policy and its tokenizer come from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from torch import nn

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
    """

    path: str
    dtype: Dtype = "float32"
    attn_implementation: str | None = None
    gradient_checkpointing: bool = False
    disable_dropout: bool = True
    revision: str | None = None
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        if self.path.startswith((".", "/", "~")) and not Path(self.path).expanduser().is_dir():
            raise FileNotFoundError(
                f"model path {self.path!r} is not a folder; pass a folder written by save_pretrained or a hub name."
            )

    def load(self) -> nn.Module:
        """Load the weights.

        Raises:
            OSError: If `path` is neither a folder with a model nor a reachable name on the hub.
        """
        return self.load_as("AutoModelForCausalLM")

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
        """
        import transformers

        config = self.load_config()
        options = {} if self.attn_implementation is None else {"attn_implementation": self.attn_implementation}
        model = getattr(transformers, auto_class).from_pretrained(
            self._location, config=config, dtype=self.dtype, **options, **self._hub_options
        )
        if self.gradient_checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return model

    def load_tokenizer(self) -> Any:
        """Load the tokenizer of the same folder or name."""
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self._location, **self._hub_options)

    @property
    def _location(self) -> str:
        return str(Path(self.path).expanduser()) if self.path.startswith("~") else self.path

    @property
    def _hub_options(self) -> dict[str, Any]:
        return {"revision": self.revision, "trust_remote_code": self.trust_remote_code}


def zero_dropout(config: PretrainedConfig) -> None:
    """Set the dropout rates of a model's config to 0, in place. Families name them differently, all with "drop"."""
    for name, value in vars(config).items():
        if ("drop" in name) and isinstance(value, float):
            setattr(config, name, 0.0)

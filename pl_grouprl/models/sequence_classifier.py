"""Recognizes transformers' sequence and token classifiers, used as reward models, and finds their head."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


def is_sequence_classifier(config: PretrainedConfig) -> bool:
    """Whether a checkpoint was saved from a `...ForSequenceClassification`."""
    return is_classifier(config, "SequenceClassification")


def is_classifier(config: PretrainedConfig, kind: str) -> bool:
    """Whether a checkpoint was saved from a `...For{kind}`, such as `SequenceClassification`."""
    return any(name.endswith(f"For{kind}") for name in config.architectures or ())


def score_head(model: PreTrainedModel, kind: str = "SequenceClassification") -> nn.Linear:
    """The linear layer that maps a hidden state to the scores of a sequence or a token.

    Families differ in which state it reads: `checks.model_introspection.check_score_head` distinguishes decoders, which
    read the last token, from encoders.

    Raises:
        ValueError: Unless exactly one direct child of the model is such a layer.
    """
    heads = [child for child in model.children() if isinstance(child, nn.Linear)]
    if len(heads) != 1 or heads[0].out_features != model.config.num_labels:
        raise ValueError(
            f"{type(model).__name__} has no single linear layer from hidden states to its {model.config.num_labels} "
            f"labels; use a decoder's For{kind}, such as Qwen2For{kind}."
        )
    return heads[0]

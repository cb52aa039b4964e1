"""Recognizes transformers' sequence classifiers, used as reward models, and finds their head."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


def is_sequence_classifier(config: PretrainedConfig) -> bool:
    """Whether a checkpoint was saved from a `...ForSequenceClassification`."""
    return any(name.endswith("ForSequenceClassification") for name in config.architectures or ())


def score_head(model: PreTrainedModel) -> nn.Linear:
    """The linear layer that maps a hidden state to a sequence's scores.

    Families differ in which state it reads: `checks.model_introspection.check_score_head` distinguishes decoders, which
    read the last token, from encoders.

    Raises:
        ValueError: Unless exactly one direct child of the model is such a layer.
    """
    heads = [child for child in model.children() if isinstance(child, nn.Linear)]
    if len(heads) != 1 or heads[0].out_features != model.config.num_labels:
        raise ValueError(
            f"{type(model).__name__} has no single linear layer from hidden states to its {model.config.num_labels} "
            "labels; use a decoder's ForSequenceClassification, such as Qwen2ForSequenceClassification."
        )
    return heads[0]

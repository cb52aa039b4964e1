"""Sequence classifiers of transformers as reward models: recognised by their config, their head found."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


def is_sequence_classifier(config: PretrainedConfig) -> bool:
    """Whether a checkpoint was saved from a `...ForSequenceClassification`."""
    return any(name.endswith("ForSequenceClassification") for name in config.architectures or ())


def score_head(model: PreTrainedModel) -> nn.Linear:
    """The linear layer that turns a hidden state into the scores of a sequence.

    Which state, and whether as it is, differs between families: `checks.model_introspection.check_score_head` tells a
    decoder, whose last token is read, from an encoder with such a layer.

    Raises:
        ValueError: If the model has none, or several, as direct children.
    """
    heads = [child for child in model.children() if isinstance(child, nn.Linear)]
    if len(heads) != 1 or heads[0].out_features != model.config.num_labels:
        raise ValueError(
            f"{type(model).__name__} has no single linear layer from hidden states to its {model.config.num_labels} "
            "labels; use a decoder's ForSequenceClassification, such as Qwen2ForSequenceClassification."
        )
    return heads[0]

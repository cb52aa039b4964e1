"""What a layout costs in floating-point operations, and what the same sequences cost with their prefixes repeated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from pl_grouprl.packing.layout import SharedPrefixLayout

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class ModelCost:
    """Floating-point operations of one forward pass of a decoder; a backward pass takes about twice as many.

    Attributes:
        per_token: Of the linear layers, for one token.
        per_pair: Of attention, for one query and one key that it sees, over all layers and heads.
    """

    per_token: float
    per_pair: float

    @classmethod
    def of(cls, decoder: PreTrainedModel) -> ModelCost:
        """Count a decoder's matrices: 2 operations per weight and token, 4 per head dimension and pair.

        Of the experts of a mixture, those that a token visits are counted.
        """
        config = decoder.config
        names = ("num_experts_per_tok", "moe_k", "moe_topk")
        visited = next((value for name in names if isinstance(value := getattr(config, name, None), int)), None)
        weights = 0.0
        for module in decoder.modules():
            if isinstance(module, nn.Embedding):
                continue
            for parameter in module.parameters(recurse=False):
                if parameter.dim() == 2:
                    weights += parameter.numel()
                elif parameter.dim() == 3:  # the matrices of all experts
                    weights += parameter.numel() * min((visited or parameter.shape[0]) / parameter.shape[0], 1)
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return cls(2.0 * weights, 4.0 * head_dim * config.num_attention_heads * config.num_hidden_layers)

    def shared(self, layout: SharedPrefixLayout) -> float:
        """Operations of the packed row."""
        return self.per_token * layout.num_tokens + self.per_pair * layout.attention_pairs

    def repeated(self, layout: SharedPrefixLayout) -> float:
        """Operations of the same sequences, each with its whole prefix, without padding."""
        return self.per_token * sum(layout.repeated_lengths) + self.per_pair * layout.repeated_attention_pairs

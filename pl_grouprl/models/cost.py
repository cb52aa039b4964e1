"""Floating-point operations of a model for a layout, and for the same sequences with repeated prefixes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from pl_grouprl.models.adapters import whole_shape
from pl_grouprl.packing import SharedPrefixLayout, Sharing, Trie
from pl_grouprl.packing.trie import separate

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class ModelCost:
    """Floating-point operations of one forward pass of a decoder; a backward pass takes about twice as many.

    Attributes:
        per_token: Operations of the linear layers, per token.
        per_pair: Operations of attention, per query and visible key, summed over heads and layers; by the layers'
            window in tokens, or None for full attention.
        per_prediction: Operations of the head, per scored token; 0 without a head.
    """

    per_token: float
    per_pair: Mapping[int | None, float]
    per_prediction: float = 0.0

    @classmethod
    def of(cls, decoder: PreTrainedModel, head: nn.Module | None = None) -> ModelCost:
        """Count a decoder's matrices: 2 operations per weight and token, 4 per head dimension and pair.

        Counts only the experts that a token visits. Keys and values count by their sizes, which differ in multi-head
        latent attention. Chunked attention counts like a window. Stateful layers count their matrices, not the state
        update.

        Args:
            decoder: A decoder, with parameters whole or sharded by any strategy.
            head: Turns hidden states into logits, if tokens are scored.
        """
        config = decoder.config
        names = ("num_experts_per_tok", "moe_k", "moe_topk")
        visited = next((value for name in names if isinstance(value := getattr(config, name, None), int)), None)
        matrices = (module for module in decoder.modules() if not isinstance(module, nn.Embedding))
        weights = sum(_weights(module, visited) for module in matrices)

        heads = getattr(config, "num_attention_heads", 0)  # 0 for a model without attention
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // max(heads, 1)
        sizes = (getattr(config, name, None) or head_dim for name in ("qk_head_dim", "v_head_dim"))
        per_layer = 2.0 * sum(sizes) * heads
        has_window = getattr(config, "use_sliding_window", True)
        window = (getattr(config, "sliding_window", None) or None) if has_window else None
        kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
        limits = {"sliding_attention": window, "chunked_attention": getattr(config, "attention_chunk_size", None)}
        windows: list[int | None] = [window] * config.num_hidden_layers
        if kinds is not None:
            windows = [limits.get(kind) for kind in kinds if "attention" in kind and "linear" not in kind]
        per_pair: dict[int | None, float] = {}
        for size in windows:
            per_pair[size] = per_pair.get(size, 0.0) + per_layer
        # A tied head may itself be an embedding.
        return cls(2.0 * weights, per_pair, 2.0 * _weights(head, None) if head is not None else 0.0)

    def shared(self, layout: SharedPrefixLayout) -> float:
        """Operations of the decoder for the packed row."""
        runs = [
            (segment.position, segment.length) for segment in layout.segments if segment.start >= layout.num_prefilled
        ]
        return self._of_runs(runs)

    def repeated(self, layout: SharedPrefixLayout) -> float:
        """Operations of the decoder for the same sequences with repeated prefixes, without padding."""
        return self._of_runs([(0, length) for length in layout.repeated_lengths])

    def of_groups(self, groups: Sequence[tuple[int, Sequence[int] | Trie]], sharing: Sharing = "shared") -> list[float]:
        """Operations to score each group, for `balance`.

        Args:
            groups: Prompt length of each group, and its rollouts' lengths, or the trie of what they share. A group
                without rollouts does not run and costs nothing.
            sharing: Whether what is shared is encoded once or once per rollout.
        """
        costs = []
        for prompt, rollouts in groups:
            trie = rollouts if isinstance(rollouts, Trie) else separate(rollouts)
            if sharing == "repeated":
                trie = separate([trie.nodes[leaf].stop for leaf in trie.leaves])
                runs = [(0, prompt + node.length) for node in trie.nodes]
            else:
                runs = [*((prompt + node.start, node.length) for node in trie.nodes), (0, prompt)]
            cost = self._of_runs(runs) + self.per_prediction * trie.num_tokens
            costs.append(cost if trie.leaves else 0.0)
        return costs

    def _of_runs(self, runs: Sequence[tuple[int, int]]) -> float:
        """Operations of runs of tokens, each given by the position of its first token and its length."""
        cost = self.per_token * sum(length for _, length in runs)
        counted = Counter(runs).items()
        for window, per_pair in self.per_pair.items():
            pairs = (n * (_pairs(start + length, window) - _pairs(start, window)) for (start, length), n in counted)
            cost += per_pair * sum(pairs)
        return cost


def _pairs(length: int, window: int | None) -> int:
    """Pairs of a query and a visible key in one sequence."""
    within = length if window is None else min(length, window)
    return within * (within + 1) // 2 + (length - within) * within


def _weights(module: nn.Module, visited: int | None) -> float:
    """Weights of a module's matrices (not its children's) that multiply one token."""
    weights = 0.0
    for parameter in module.parameters(recurse=False):
        shape: Sequence[int] = getattr(parameter, "ds_shape", whole_shape(parameter))  # partitioned by DeepSpeed
        shape = getattr(parameter, "whole_shape", shape)  # flattened by FSDP1
        if len(shape) == 2:
            weights += math.prod(shape)
        elif len(shape) == 3:  # the matrices of all experts
            weights += math.prod(shape) * min((visited or shape[0]) / shape[0], 1)
    return weights

"""Floating-point operations of a model for a layout, and for the same sequences with their prefixes repeated."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from pl_grouprl.packing import SharedPrefixLayout, Sharing
from pl_grouprl.utilities.arguments import checked_arguments

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@checked_arguments
@dataclass(frozen=True)
class ModelCost:
    """Floating-point operations of one forward pass of a decoder; a backward pass takes about twice as many.

    Attributes:
        per_token: Of the linear layers, for one token.
        per_pair: Of attention, for one query and one key that it sees, over all layers and heads that see as far: a
            window in tokens, or None where all that came before is seen.
        per_prediction: Of the head, for one token that is scored; 0 for a decoder without one.
    """

    per_token: float
    per_pair: Mapping[int | None, float]
    per_prediction: float = 0.0

    @classmethod
    def of(cls, decoder: PreTrainedModel, head: nn.Module | None = None) -> ModelCost:
        """Count a decoder's matrices: 2 operations per weight and token, 4 per head dimension and pair.

        Of the experts of a mixture, those that a token visits are counted. Where keys and values differ in size
        (multi-head latent attention) each counts by its own. A chunk of attention is counted like a window. Of layers
        that carry a state, the matrices are counted and not the state's update.

        Args:
            decoder: With its parameters whole or sharded by any strategy.
            head: What turns hidden states into logits, where tokens are scored.
        """
        config = decoder.config
        names = ("num_experts_per_tok", "moe_k", "moe_topk")
        visited = next((value for name in names if isinstance(value := getattr(config, name, None), int)), None)
        matrices = (module for module in decoder.modules() if not isinstance(module, nn.Embedding))
        weights = sum(_weights(module, visited) for module in matrices)
        # A head that is tied to the embedding may be an embedding itself.
        return cls(2.0 * weights, _per_pair(config), 2.0 * _weights(head, None) if head is not None else 0.0)

    def shared(self, layout: SharedPrefixLayout) -> float:
        """Operations of the decoder for the packed row."""
        runs = [(segment.position, segment.length) for segment in layout.segments if segment.start >= layout.given]
        return self._of_runs(runs)

    def repeated(self, layout: SharedPrefixLayout) -> float:
        """Operations of the decoder for the same sequences, each with its whole prefix, without padding."""
        return self._of_runs([(0, length) for length in layout.repeated_lengths])

    def of_groups(self, groups: Sequence[tuple[int, Sequence[int]]], sharing: Sharing = "shared") -> list[float]:
        """Operations for each group, its rollouts scored: what `balance` takes.

        Args:
            groups: For each group the length of its prompt and the lengths of its rollouts. One without rollouts costs
                nothing, since it is not run.
            sharing: Whether each prompt is encoded once or once per rollout.
        """
        decode = self.shared if sharing == "shared" else self.repeated
        return [
            decode(SharedPrefixLayout.from_groups([group])) + self.per_prediction * sum(group[1]) if group[1] else 0.0
            for group in groups
        ]

    def _of_runs(self, runs: Sequence[tuple[int, int]]) -> float:
        """Runs of tokens, each as the position of its first token and its length."""
        cost = self.per_token * sum(length for _, length in runs)
        alike = Counter(runs).items()
        for window, per_pair in self.per_pair.items():
            pairs = (n * (_pairs(start + length, window) - _pairs(start, window)) for (start, length), n in alike)
            cost += per_pair * sum(pairs)
        return cost


def _pairs(length: int, window: int | None) -> int:
    """Pairs of a query and a key that it sees in one sequence from its beginning."""
    within = length if window is None else min(length, window)
    return within * (within + 1) // 2 + (length - within) * within


def _weights(module: nn.Module, visited: int | None) -> float:
    """Entries of a module's own matrices that one token is multiplied with."""
    weights = 0.0
    for parameter in module.parameters(recurse=False):
        shape: Sequence[int] = getattr(parameter, "ds_shape", parameter.shape)  # that of a partitioned parameter
        shape = getattr(parameter, "whole_shape", shape)  # that of one flattened by FSDP1
        if len(shape) == 2:
            weights += math.prod(shape)
        elif len(shape) == 3:  # the matrices of all experts
            weights += math.prod(shape) * min((visited or shape[0]) / shape[0], 1)
    return weights


def _per_pair(config: Any) -> dict[int | None, float]:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    sizes = (getattr(config, name, None) or head_dim for name in ("qk_head_dim", "v_head_dim"))
    per_layer = 2.0 * sum(sizes) * config.num_attention_heads
    per_pair: dict[int | None, float] = {}
    for window in _windows(config):
        per_pair[window] = per_pair.get(window, 0.0) + per_layer
    return per_pair


def _windows(config: Any) -> list[int | None]:
    """How far each layer with attention sees, in tokens; None: without a limit."""
    window = (getattr(config, "sliding_window", None) or None) if getattr(config, "use_sliding_window", True) else None
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    if kinds is None:
        return [window] * config.num_hidden_layers
    limits = {"sliding_attention": window, "chunked_attention": getattr(config, "attention_chunk_size", None)}
    return [limits.get(kind) for kind in kinds if "attention" in kind and "linear" not in kind]

"""What a layer tells its attention function apart from the mask, and the rule that the two make."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn

from pl_grouprl.attention.backends.rule import AttentionRule
from pl_grouprl.attention.mask import MaskRule
from pl_grouprl.packing import SharedPrefixLayout

OWN_MASK = (
    "has a mask or bias of its own, which shared-prefix attention does not apply; train this model with "
    "sharing='repeated'."
)
"""Why a layer is refused that was given another mask than ours."""

_WITHOUT_EFFECT = {
    *("position_ids", "cache_position", "position_embeddings", "output_attentions", "output_hidden_states"),
    *("use_cache", "past_key_values", "return_dict", "is_causal", "output_router_logits", "logits_to_keep"),
    *("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "deterministic", "num_items_in_batch"),
}
"""Keywords that reach attention functions without changing what is computed over a whole row."""


class LayerOptions(NamedTuple):
    """Keywords of transformers' attention functions that change the result; see `AttentionRule`.

    Attributes:
        scale: `scaling`.
        softcap: `softcap`.
        sinks_H: `s_aux`.
        window: `sliding_window`, which says again what the mask says.
    """

    scale: float
    softcap: float | None
    sinks_H: Tensor | None
    window: int | None

    def rule(self, mask: MaskRule, layout: SharedPrefixLayout) -> AttentionRule:
        """Put mask and keywords together.

        Raises:
            NotImplementedError: If their windows differ and a sequence is longer: then transformers' attention
                implementations differ among themselves.
        """
        longest = max(layout.repeated_lengths, default=0)
        if self.window is not None and self.window != mask.window and longest > self.window:
            raise NotImplementedError(
                f"a layer passes sliding_window={self.window} with a mask whose window is {mask.window}, so that its "
                "attention implementations differ among themselves; train this model with sharing='repeated'."
            )
        return AttentionRule(
            self.scale, mask.window, mask.chunk, self.softcap, self.sinks_H, mask.blocks, mask.window_bounds_blocks
        )


def read_layer_options(module: nn.Module, query: Tensor, kwargs: dict[str, Any]) -> LayerOptions:
    """Read the keywords that a layer passes to its attention function.

    Raises:
        NotImplementedError: If the layer is not causal, or a keyword is not understood.
        ValueError: If it has attention dropout.
    """
    name, kwargs = type(module).__name__, {key: value for key, value in kwargs.items() if value is not None}
    if getattr(module, "is_causal", True) is False or kwargs.get("is_causal") is False:
        raise NotImplementedError(
            f"{name} is not causal, so what a prefix becomes depends on what follows it; train this model with "
            "sharing='repeated'."
        )
    dropout = kwargs.pop("dropout", 0.0)
    if dropout:
        raise ValueError(
            f"{name} has attention dropout {dropout}, which cannot be the same for a shared and a repeated prefix; "
            "set the config's attention dropout to 0 or call model.eval()."
        )
    options = LayerOptions(
        scale=kwargs.pop("scaling", query.shape[-1] ** -0.5),
        softcap=kwargs.pop("softcap", None),
        sinks_H=kwargs.pop("s_aux", None),
        window=kwargs.pop("sliding_window", None),
    )
    unknown = sorted(key for key in kwargs if key not in _WITHOUT_EFFECT)
    if unknown:
        raise NotImplementedError(
            f"{name} passes {', '.join(unknown)}, which shared-prefix attention does not apply; train this model "
            "with sharing='repeated'."
        )
    return options

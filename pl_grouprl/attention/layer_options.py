"""Keywords that a layer passes to its attention function, combined with the mask into a rule."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn

from pl_grouprl.attention.backends.rule import AttentionRule
from pl_grouprl.attention.mask_rule import MaskRule
from pl_grouprl.packing import SharedPrefixLayout

OWN_MASK = (
    "has its own mask or bias, which shared-prefix attention does not support; train this model with "
    "sharing='repeated'."
)
"""Why a layer with a mask other than ours is refused."""

_WITHOUT_EFFECT = {
    *("position_ids", "cache_position", "position_embeddings", "output_attentions", "output_hidden_states"),
    *("use_cache", "cache", "past_key_values", "return_dict", "is_causal", "output_router_logits", "logits_to_keep"),
    *("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "deterministic", "num_items_in_batch"),
}
"""Keywords of attention functions that do not change the result for a whole row."""


class LayerOptions(NamedTuple):
    """Keywords of transformers' attention functions that change the result; see `AttentionRule`.

    Attributes:
        scale: `scaling`.
        softcap: `softcap`.
        sinks_H: `s_aux`.
        window: `sliding_window`, which repeats the mask's window.
    """

    scale: float
    softcap: float | None
    sinks_H: Tensor | None
    window: int | None

    def rule(self, mask: MaskRule, layout: SharedPrefixLayout) -> AttentionRule:
        """Combine mask and keywords.

        Raises:
            NotImplementedError: If their windows differ and a sequence is longer: then transformers' own attention
                implementations disagree.
        """
        longest = max(layout.repeated_lengths, default=0)
        if self.window is not None and self.window != mask.window and longest > self.window:
            raise NotImplementedError(
                f"a layer passes sliding_window={self.window} with a mask whose window is {mask.window}, so its "
                "attention implementations disagree; train this model with sharing='repeated'."
            )
        return AttentionRule(
            self.scale, mask.window, mask.chunk, self.softcap, self.sinks_H, mask.blocks, mask.window_bounds_blocks
        )


def read_layer_options(module: nn.Module, query: Tensor, kwargs: dict[str, Any]) -> LayerOptions:
    """Read the keywords that a layer passes to its attention function.

    Raises:
        NotImplementedError: If the layer is not causal, or a keyword is unknown.
        ValueError: If it has attention dropout.
    """
    name, kwargs = type(module).__name__, {key: value for key, value in kwargs.items() if value is not None}
    if getattr(module, "is_causal", True) is False or kwargs.get("is_causal") is False:
        raise NotImplementedError(
            f"{name} is not causal, so a prefix depends on what follows it; train this model with sharing='repeated'."
        )
    dropout = kwargs.pop("dropout", 0.0)
    if dropout:
        raise ValueError(
            f"{name} has attention dropout {dropout}, which cannot match between a shared and a repeated prefix; "
            "set the config's attention dropout (attention_dropout, in GPT-2 attn_pdrop) to 0 or call model.eval()."
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
            f"{name} passes {', '.join(unknown)}, which shared-prefix attention does not support; train this model "
            "with sharing='repeated'."
        )
    return options

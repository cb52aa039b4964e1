"""The load-balancing loss of a mixture of experts, with a weight per token.

Legend: T tokens of one decoder call, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def load_balancing_loss(router_logits: Sequence[Tensor], top_k: int, weights_T: Tensor | None = None) -> Tensor:
    """Penalize unequal use of experts (Switch Transformer, arXiv:2101.03961, eq. 4-6, for top-k routing).

    E * sum_e f_e P_e, where f_e is the fraction of tokens that choose expert e among their k and P_e the mean
    probability of e, both weighted means over the tokens of all layers together, as in transformers'
    `load_balancing_loss_func`. It is k if all experts are used equally. Gradients flow only through P.

    A token of weight w counts as w tokens. Pass the number of sequences that contain each token, so that a prefix that
    is encoded once counts as all of its copies, and 0 at padding.

    Args:
        router_logits: Router logits of each layer, before the softmax, shape [T, E] each.
        top_k: Experts of each token, 1 to E.
        weights_T: Weight of each token, 0 or more, shape [T]; None is 1 for each.

    Returns:
        A scalar, in float32 (float64 for float64 logits); 0 if all weights are 0.

    Raises:
        ValueError: If there are no logits, or shapes or `top_k` do not fit.
    """
    _check_shapes(router_logits, top_k, weights_T)
    tokens, experts = router_logits[0].shape
    dtype = torch.promote_types(router_logits[0].dtype, torch.float32)
    device = router_logits[0].device
    weights_T = torch.ones(tokens, device=device) if weights_T is None else weights_T
    weights_T = weights_T.detach().to(device, dtype)
    chosen_E = torch.zeros(experts, dtype=dtype, device=device)
    probability_E = torch.zeros_like(chosen_E)
    for logits_TE in router_logits:
        probabilities_TE = logits_TE.to(device, dtype).softmax(dim=-1)
        experts_TK = probabilities_TE.detach().topk(top_k, dim=-1).indices
        chosen_E = chosen_E.index_add(0, experts_TK.flatten(), weights_T.repeat_interleave(top_k))
        probability_E = probability_E + weights_T @ probabilities_TE
    total = (weights_T.sum() * len(router_logits)).clamp(min=torch.finfo(dtype).tiny)
    return experts * ((chosen_E / total) * (probability_E / total)).sum()


def _check_shapes(router_logits: Sequence[Tensor], top_k: int, weights_T: Tensor | None) -> None:
    if not router_logits:
        raise ValueError("router_logits is empty; pass the logits of at least one layer's router.")
    first = router_logits[0].shape
    for layer, logits_TE in enumerate(router_logits):
        if logits_TE.dim() != 2 or logits_TE.shape != first:
            raise ValueError(
                f"router_logits[{layer}] has shape {tuple(logits_TE.shape)}; pass [tokens, experts] for every layer, "
                f"all of the same shape (router_logits[0] has {tuple(first)})."
            )
    if not 1 <= top_k <= first[1]:
        raise ValueError(f"top_k is {top_k}; it must be 1 to {first[1]}, the number of experts.")
    if weights_T is not None and weights_T.shape != first[:1]:
        raise ValueError(f"weights_T has shape {tuple(weights_T.shape)}; pass one per token, shape [{first[0]}].")

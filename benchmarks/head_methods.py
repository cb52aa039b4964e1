"""Methods to compute log-probabilities from hidden states, and their errors against float64.

Legend: N tokens, D hidden size, V vocabulary, M tokens of one chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from benchmarks.methods import missing
from pl_grouprl.functional.logprobs import token_scores

BASELINE = "full logits"


@dataclass(frozen=True)
class Head:
    """Hidden states, the weight of a head, and targets.

    Every second target is likely under the model, as in rollouts; the others are drawn uniformly.

    Attributes:
        tokens: N.
        vocabulary: V.
        hidden: D.
        dtype: Dtype of hidden states and weight.
        device: Device of hidden states and weight.
        frozen: Whether the weight has no gradient, as with adapters.
    """

    tokens: int = 2048
    vocabulary: int = 151_936
    hidden: int = 1024
    dtype: str = "float32"
    device: str = "cpu"
    frozen: bool = False

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Hidden states [N, D], weight [V, D] and targets [N]; logits have a standard deviation of about 3."""
        generator = torch.Generator(self.device).manual_seed(0)
        options = {"generator": generator, "device": self.device}
        hidden_ND = torch.randn(self.tokens, self.hidden, **options)
        weight_VD = torch.randn(self.vocabulary, self.hidden, **options).mul_(3 / self.hidden**0.5)
        targets_N = torch.randint(self.vocabulary, (self.tokens,), **options)
        hidden_ND[::2] += 2 * weight_VD[targets_N[::2]]
        dtype = getattr(torch, self.dtype)
        weight_VD = weight_VD.to(dtype).requires_grad_(not self.frozen)
        return hidden_ND.to(dtype).requires_grad_(), weight_VD, targets_N


def full_logits(hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor) -> Tensor:
    """All logits, as a model returns them, then a log-softmax in float32."""
    logits_NV = hidden_ND @ weight_VD.T
    return logits_NV.float().log_softmax(-1).gather(1, targets_N[:, None]).squeeze(1)


def blocks(hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, *, entropy: bool = False) -> Tensor:
    """`token_scores` for a head that is a single matrix."""
    return token_scores(
        hidden_ND, targets_N, lambda h_MD: h_MD @ weight_VD.T, entropy=entropy, weight_VD=weight_VD
    ).logprobs_N


def chunks(hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor) -> Tensor:
    """`token_scores` for a head of any kind."""
    return token_scores(hidden_ND, targets_N, lambda h_MD: h_MD @ weight_VD.T).logprobs_N


def linear_cross_entropy(hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor) -> Tensor:
    """PyTorch's chunked implementation."""
    options = torch.nn.LinearCrossEntropyOptions()
    return -torch.nn.functional.linear_cross_entropy(hidden_ND, weight_VD, targets_N, reduction="none", options=options)


def liger(hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor) -> Tensor:
    """liger-kernel; with reduction="none" its gradients are computed in the backward pass since 0.7."""
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    return -LigerFusedLinearCrossEntropyLoss(reduction="none")(weight_VD, hidden_ND, targets_N)


def cut_cross_entropy(hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor) -> Tensor:
    """cut-cross-entropy with its default filter of small gradients."""
    from cut_cross_entropy import linear_cross_entropy

    return -linear_cross_entropy(hidden_ND, weight_VD, targets_N, reduction="none")


METHODS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    BASELINE: full_logits,
    "token_scores": blocks,
    "token_scores, entropy": partial(blocks, entropy=True),
    "token_scores, any head": chunks,
    "linear_cross_entropy": linear_cross_entropy,
    "liger-kernel": liger,
    "cut-cross-entropy": cut_cross_entropy,
}
PACKAGES = {"liger-kernel": "liger_kernel", "cut-cross-entropy": "cut_cross_entropy"}


def refusal(name: str, head: Head, most_gib: float) -> str | None:
    """Why a method cannot run, or None."""
    if name in PACKAGES:
        if head.device != "cuda":
            return "needs a CUDA device"
        if note := missing(PACKAGES[name], name):
            return note
    if name == "linear_cross_entropy" and not hasattr(torch.nn.functional, "linear_cross_entropy"):
        return "needs torch >= 2.13"
    needed = head.tokens * head.vocabulary * 12 / 2**30
    if name == BASELINE and needed > most_gib:
        return f"takes about {needed:.0f} GiB; --most-gib is {most_gib:g}"
    return None


def run(name: str, tensors: tuple[Tensor, Tensor, Tensor], upstream_N: Tensor | None = None) -> list[Tensor]:
    """Log-probabilities and, given an upstream gradient, the gradients of hidden states and weight."""
    hidden_ND, weight_VD, _ = tensors
    if upstream_N is None:
        with torch.no_grad():
            return [METHODS[name](*tensors)]
    leaves = [tensor for tensor in (hidden_ND, weight_VD) if tensor.requires_grad]
    logprobs_N = METHODS[name](*tensors)
    return [logprobs_N.detach(), *torch.autograd.grad(logprobs_N, leaves, upstream_N.to(logprobs_N.dtype))]


def reference(tensors: tuple[Tensor, Tensor, Tensor], upstream_N: Tensor) -> list[Tensor]:
    """The same in float64, 128 tokens at a time."""
    hidden_ND, weight_VD, targets_N = (tensor.detach() for tensor in tensors)
    weight_VD = weight_VD.double()
    logprobs, by_hidden, by_weight_VD = [], [], torch.zeros_like(weight_VD)
    for hidden_MD, targets_M, upstream_M in zip(
        hidden_ND.split(128), targets_N.split(128), upstream_N.split(128), strict=True
    ):
        all_MV = (hidden_MD.double() @ weight_VD.T).log_softmax(-1)
        logprobs.append(all_MV.gather(1, targets_M[:, None]).squeeze(1))
        gradient_MV = all_MV.exp_().neg_()
        gradient_MV[torch.arange(len(targets_M)), targets_M] += 1
        gradient_MV *= upstream_M[:, None].double()
        by_hidden.append(gradient_MV @ weight_VD)
        by_weight_VD.addmm_(gradient_MV.T, hidden_MD.double())
    return [torch.cat(logprobs), torch.cat(by_hidden), *([by_weight_VD] if tensors[1].requires_grad else [])]

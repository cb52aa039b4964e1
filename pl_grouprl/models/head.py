"""Maps hidden states to logits with the model's own code, including soft caps, scales and biases of its head.

Legend: N tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from pl_grouprl.attention import find_decoder, sharing_paused

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_LINEAR = nn.Linear.forward  # some libraries replace it


def logits_function(model: PreTrainedModel) -> Callable[[Tensor], Tensor]:
    """Return hidden states [N, D] -> logits [N, V], as the model computes them from its decoder's output.

    Runs the model's own forward with its decoder bypassed, so everything between decoder and logits is included. Does
    not run the model's hooks: those that gather sharded weights already ran with the decoder, and would deadlock if
    ranks have different numbers of chunks.
    """
    decoder = find_decoder(model)

    def logits(hidden_ND: Tensor) -> Tensor:
        with sharing_paused(model), _BypassDecoder(decoder, hidden_ND):
            return model.forward(inputs_embeds=hidden_ND[None], use_cache=False, return_dict=True).logits[0]

    return logits


def plain_weight(model: PreTrainedModel, dtype: torch.dtype) -> Tensor | None:
    """Return the head's weight, shape [V, D], if the model's logits are `hidden @ weight.T` and nothing else, or None.

    The head must be a plain `nn.Linear` (no adapter, quantized or sharded layer) without bias and hooks. A trial run of
    the model's forward, with decoder and head bypassed, shows whether it changes the head's input or output.

    Args:
        model: A causal language model.
        dtype: Dtype of the hidden states; must be the weight's, except under autocast.
    """
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear or head.bias is not None or "forward" in vars(head) or _hooked(head):
        return None
    if nn.Linear.forward is not _LINEAR:
        return None
    weight = head.weight
    if type(weight) not in (nn.Parameter, Tensor) or weight.dim() != 2:
        return None
    if weight.dtype != dtype and not torch.is_autocast_enabled(weight.device.type):
        return None
    with torch.inference_mode(False), torch.no_grad():  # inference tensors have no version counter
        plain = _leaves_unchanged(model, head, weight)
    return weight if plain else None


def _leaves_unchanged(model: PreTrainedModel, head: nn.Linear, weight: Tensor) -> bool:
    """Whether the model passes hidden states to its head, and returns the head's logits, as the same memory."""
    hidden_ND, logits_NV = weight.new_ones(2, weight.shape[1]), weight.new_ones(2, len(weight))
    versions = hidden_ND._version, logits_NV._version
    head_inputs: list[Tensor] = []

    def forward(states: Tensor) -> Tensor:
        head_inputs.append(states)
        return logits_NV[None]

    head.forward = forward  # type: ignore[method-assign,assignment]
    try:
        returned = logits_function(model)(hidden_ND)
    finally:
        del head.forward
    same = len(head_inputs) == 1 and _same(head_inputs[0], hidden_ND[None]) and _same(returned, logits_NV)
    return same and versions == (hidden_ND._version, logits_NV._version)


def _hooked(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def _same(one: Tensor, other: Tensor) -> bool:
    return one.data_ptr() == other.data_ptr() and one.shape == other.shape and one.stride() == other.stride()


class _BypassDecoder:
    """Context in which the decoder returns the given hidden states instead of running."""

    def __init__(self, decoder: nn.Module, hidden_ND: Tensor) -> None:
        self.decoder, self.hidden_ND = decoder, hidden_ND

    def __enter__(self) -> None:
        # Some libraries (accelerate) set `forward` on the instance.
        self.before = {name: value for name, value in vars(self.decoder).items() if name == "forward"}
        self.decoder.forward = self._forward

    def __exit__(self, *exception: object) -> None:
        del self.decoder.forward
        vars(self.decoder).update(self.before)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        return _output_class()(last_hidden_state=self.hidden_ND[None])


@cache
def _output_class() -> Any:
    from transformers.modeling_outputs import BaseModelOutputWithPast

    class HiddenStatesAlone(BaseModelOutputWithPast):
        """Hidden states, with None for router logits, cross attentions and other outputs."""

        def __getattr__(self, name: str) -> None:
            if name.startswith("__"):
                raise AttributeError(name)

    return HiddenStatesAlone

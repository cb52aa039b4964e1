"""Replays the experts that a sampler chose, in old log-probabilities and updates of a mixture of experts.

Sampler and trainer round differently, so some tokens get other experts, and their log-probabilities differ by far more
than rounding. Rollout routing replay (R3, arXiv:2510.11370) gives each token the sampler's experts, weighted by the
trainer's routers, which thus keep their gradients: the recorded indices replace the ones that the router's `topk`
returns, and the values are gathered from the scores that it was called with. The rest is the family's own code.

Legend: T tokens of one decoder call, M mixtures of the decoder, K experts of each token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pl_grouprl.attention import find_decoder
from pl_grouprl.attention.layer_check import layers_of
from pl_grouprl.attention.patch import Hook
from pl_grouprl.attention.support import unwrapped

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NOT_RECORDED = -1
"""In a record, all K experts of a token without one: the model chooses them."""

_TOP_K = (torch.topk, Tensor.topk)
_CHECKPOINTING = ("_gradient_checkpointing_func", "checkpoint_fn")
"""Attributes of modules with the function that checkpoints their activations: transformers' layers and FSDP1's."""


def mixtures_of(decoder: nn.Module) -> list[nn.Module]:
    """The modules of a decoder that choose experts and run them, in order.

    Raises:
        ValueError: If there are none.
    """
    found = [module for module in decoder.modules() if {"experts", "router"} & dict(module.named_children()).keys()]
    innermost = [module for module in found if not any(part in found for part in [*module.modules()][1:])]
    if not innermost:
        raise ValueError(f"{type(decoder).__name__} has no experts to replay; omit router_replay.")
    return innermost


def mixture_layers(model: PreTrainedModel) -> list[int]:
    """For each mixture, the index of the decoder layer that it is in."""
    decoder = find_decoder(unwrapped(model))
    parts = [set(layer.modules()) for layer in layers_of(decoder)]
    return [next(n for n, own in enumerate(parts) if mixture in own) for mixture in mixtures_of(decoder)]


class RoutedCall:
    """One call of the decoder, whose experts are replayed or recorded.

    Attributes:
        record_TMK: The experts to replay, integers, shape [T, M, K]; None only records.
    """

    def __init__(self, record_TMK: Tensor | None) -> None:
        self.record_TMK = record_TMK
        self._own: dict[int, Tensor] | None = {}  # the model's own choice by mixture, until the call is over

    def note(self, number: int, own_TK: Tensor) -> None:
        """Note what the model itself chose in a mixture; not again when layers are recomputed."""
        if self._own is not None:
            self._own[number] = own_TK

    def finish(self, mixtures: list[nn.Module]) -> Tensor:
        """The model's own choices, int16, shape [T, M, K].

        Raises:
            NotImplementedError: If a mixture chose without a top-k of its scores.
        """
        own, self._own = self._own or {}, None
        for number, mixture in enumerate(mixtures):
            if number not in own:
                raise NotImplementedError(
                    f"{type(mixture).__name__} does not choose its experts by a top-k of their scores, so they cannot "
                    "be replayed; omit router_replay."
                )
        return torch.stack([own[number] for number in range(len(mixtures))], dim=1).to(torch.int16)


class RouterReplay:
    """Context in which the experts of a model can be recorded and replayed; stay in it until backward is done.

    Args:
        model: A transformers decoder with mixtures of experts.

    Raises:
        ValueError: If the model has no mixtures that this knows, or compiled layers.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._decoder = find_decoder(unwrapped(model))
        self._mixtures = mixtures_of(self._decoder)
        if any(getattr(module, "_compiled_call_impl", None) is not None for module in self._decoder.modules()):
            raise ValueError("router_replay is on, which layers compiled by kernels='compile' cannot do; omit one.")
        self._now: RoutedCall | None = None
        self._choices: list[_Choice] = []
        self._handles: list[Any] = []
        self._checkpointing: list[tuple[nn.Module, str, Any]] = []
        self._differing: list[tuple[Tensor, Tensor]] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> RouterReplay:
        return self  # a copy of the model in the context shares its hooks

    def __enter__(self) -> RouterReplay:
        for number, mixture in enumerate(self._mixtures):
            # Hooks go on the router: not every mixture is called, and one that is a whole decoder layer would be
            # checkpointed inside its hooks.
            own: dict[str, Any] = dict(mixture.named_children())
            router, num_experts = own.get("router", mixture), getattr(own.get("experts"), "num_experts", 0)
            before, after = Hook(partial(self._before, number, num_experts)), Hook(partial(self._after, number))
            self._handles.append(router.register_forward_pre_hook(before))
            self._handles.append(router.register_forward_hook(after, always_call=True))
        for module in self._decoder.modules():
            for name in _CHECKPOINTING:
                if (function := vars(module).get(name)) is not None:
                    self._checkpointing.append((module, name, function))
                    setattr(module, name, partial(self._checkpoint, function, **getattr(function, "keywords", {})))
        _OPEN.setdefault(self._decoder, []).append(self)
        return self

    def __exit__(self, *error: object) -> None:
        _OPEN[self._decoder].remove(self)
        while self._handles:
            self._handles.pop().remove()
        while self._checkpointing:
            setattr(*self._checkpointing.pop())

    @contextmanager
    def recording(self) -> Iterator[Callable[[], Tensor]]:
        """Record one call of the decoder; yields a function that returns its experts, int16, [T, M, K], afterward."""
        call = RoutedCall(None)
        with self._during(call):
            yield lambda: call.finish(self._mixtures)

    @contextmanager
    def replaying(self, record_TMK: Tensor) -> Iterator[None]:
        """Replay a record in one call of the decoder, and wherever its layers are recomputed.

        Args:
            record_TMK: Experts of each token of the call, rows concatenated; `NOT_RECORDED` lets the model choose.

        Raises:
            ValueError: If the record is of another number of mixtures.
        """
        if record_TMK.shape[1] != len(self._mixtures):
            raise ValueError(
                f"routed_experts has records of {record_TMK.shape[1]} mixtures, but the model has "
                f"{len(self._mixtures)}; sample with the policy's own model."
            )
        call = RoutedCall(record_TMK)
        with self._during(call):
            yield
        own_TMK = call.finish(self._mixtures)
        if torch.is_grad_enabled():
            recorded_TM = (record_TMK != NOT_RECORDED).all(-1)
            same_TM = (own_TMK.sort(-1).values == record_TMK.to(own_TMK.dtype).sort(-1).values).all(-1)
            differs_T, recorded_T = (recorded_TM & ~same_TM).any(-1), recorded_TM.any(-1)
            self._differing.append((differs_T.sum(), recorded_T.sum()))

    def take_differing(self) -> tuple[Tensor, Tensor]:
        """Number of replayed tokens for which the model would have chosen other experts in some mixture, and of all.

        Counts the calls with gradient since the last time; each token of a packed row once.
        """
        pairs, self._differing = self._differing, []
        zero = torch.zeros((), dtype=torch.int64)
        return sum((a for a, _ in pairs), zero), sum((b for _, b in pairs), zero)

    @contextmanager
    def _during(self, call: RoutedCall | None) -> Iterator[None]:
        outer, self._now = self._now, call
        try:
            yield
        finally:
            self._now = outer

    def _checkpoint(
        self, checkpoint: Callable[..., Any], function: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Checkpoint a layer that replays the same call when it is recomputed, whatever has run in between."""
        call = self._now

        def run(*args: Any, **kwargs: Any) -> Any:
            with self._during(call):
                return function(*args, **kwargs)

        return checkpoint(run, *args, **kwargs)

    def _before(self, number: int, experts: int, mixture: nn.Module, args: Any) -> None:
        if self._now is not None:
            record = self._now.record_TMK
            choice = _Choice(experts, None if record is None else record[:, number].long())
            choice.__enter__()
            self._choices.append(choice)

    def _after(self, number: int, mixture: nn.Module, args: Any, output: Any) -> None:
        if self._now is not None:
            choice = self._choices.pop()
            choice.__exit__(None, None, None)
            if choice.own_TK is not None:
                self._now.note(number, choice.own_TK)


_OPEN: WeakKeyDictionary[nn.Module, list[RouterReplay]] = WeakKeyDictionary()


def open_replay(model: PreTrainedModel) -> RouterReplay | None:
    """The model's innermost `RouterReplay` context, or None."""
    contexts = _OPEN.get(find_decoder(unwrapped(model)))
    return contexts[-1] if contexts else None


class _Choice(TorchFunctionMode):
    """Sees how one call of a mixture chooses its experts, and replaces that by a record.

    Args:
        experts: Number of the mixture's experts; 0 if unknown.
        record_TK: The recorded experts, int64; None changes nothing.

    Attributes:
        own_TK: The mixture's own choice, once it was made; `NOT_RECORDED` for a token that it would have given experts
            of other groups than the recorded ones.
    """

    def __init__(self, experts: int, record_TK: Tensor | None) -> None:
        super().__init__()
        self._experts, self._record_TK = experts, record_TK
        self._other_groups_T: Tensor | None = None
        self.own_TK: Tensor | None = None

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = function(*args, **kwargs)
        if function not in _TOP_K or found.indices.dim() != 2:
            return found
        scores, record_TK = args[0], self._record_TK
        width = scores.shape[-1]
        if width < self._experts:
            # Group-limited routing (DeepSeek-V3): this top-k picks groups; make it pick those of the recorded experts.
            if record_TK is None:
                return found
            groups = torch.zeros_like(scores, dtype=torch.bool)
            groups.scatter_(1, record_TK.clamp(min=0) // (self._experts // width), record_TK >= 0)
            self._other_groups_T = groups.gather(1, found.indices).sum(-1) < groups.sum(-1)
            return function(scores.masked_fill(groups, torch.inf), *args[1:], **kwargs)
        self.own_TK = found.indices
        if self._other_groups_T is not None:
            self.own_TK = self.own_TK.masked_fill(self._other_groups_T[:, None], NOT_RECORDED)
        if record_TK is None:
            return found
        chosen_TK = torch.where(record_TK < 0, found.indices, record_TK)
        return torch.return_types.topk((scores.gather(-1, chosen_TK), chosen_TK))

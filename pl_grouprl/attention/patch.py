"""`shared_prefix(model)`: inside this context, the model's decoder encodes shared prefixes once.

Callers that build packed rows pass `prefix_layout`. Others pass an ordinary padded batch: rows with common prefixes are
detected, packed, run once and unpacked.

Legend: B rows, L their padded length, T packed tokens.
"""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from pl_grouprl.attention.backends.choice import ORACLE, get_backend
from pl_grouprl.attention.backends.interface import REMEDY
from pl_grouprl.attention.call import LayoutCall, PrefixStates
from pl_grouprl.attention.function import register
from pl_grouprl.attention.layer_check import (
    Padding,
    check_layers,
    differing_padding,
    layers_of,
    refuse_packed_row,
    tracking_idle_layers,
)
from pl_grouprl.attention.masks import set_packed_row
from pl_grouprl.attention.padded_rows import RowSharing, SharedRows, unpack_output
from pl_grouprl.attention.sequence_parallel import gather_output, shard_call
from pl_grouprl.attention.stateful import STATEFUL, StatefulHandle
from pl_grouprl.attention.support import (
    LayersFailedError,
    check_supported,
    find_backbone,
    find_decoder,
    selects_tokens,
    unwrapped,
    why_not_reached,
)
from pl_grouprl.packing import SharedPrefixLayout, repeat_rows
from pl_grouprl.utilities import internals
from pl_grouprl.utilities.modes import is_whole

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class CallReport:
    """How one call of the decoder ran.

    Attributes:
        layout: The forest that ran, or None if the call went through untouched.
        reason: Why it went through untouched, or None.
        input_ids: The packed row [1, T], or the caller's rows [B, L]; for embeddings, their first component.
        position_ids: Positions of the packed row, shape [1, T]; None if the call went through untouched.
        padding_fraction: Fraction of the caller's tokens that is padding.
        part: For a group split over several calls, which part ran: its prompt or a branch, or some of its rollouts.
    """

    layout: SharedPrefixLayout | None
    reason: str | None = None
    input_ids: Tensor = field(kw_only=True, repr=False)
    position_ids: Tensor | None = field(kw_only=True, repr=False)
    padding_fraction: float = 0.0
    part: Literal["prompt", "slice"] | None = None

    @property
    def token_ratio(self) -> float:
        """Tokens with repeated prefixes over tokens that ran."""
        return self.layout.token_ratio if self.layout is not None else 1.0


class Hook:
    """A hook that a deep copy of its module shares, and that a pickle replaces by a hook that does nothing."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any) -> Any:
        """Call the function."""
        return self._function(*args)

    def __deepcopy__(self, memo: dict[int, Any]) -> Hook:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")  # takes any arguments, returns None, needs the standard library


class SharedPrefix:
    """Context manager that makes a transformers decoder share prefixes; see `shared_prefix`.

    Attributes:
        model: The patched model, without wrappers such as DDP.
        backend: Name of the attention backend.
        decoder: Its decoder.
        backbone: For multimodal models, the parent of decoder and vision tower; otherwise the decoder.
        wrapped: The attention implementation for calls without a layout.
        last_call: Report of the decoder's last call; None before the first.
        listeners: Called with the `CallReport` of each decoder call.
        paused: Set it to let every call through untouched.
        layers: By kind of layer, what runs it and the number of layers; empty before the first call that shares.
        dense: Whether layers get a dense mask, because they compute with it; the wrapped implementation runs them.
        only: Restricts `backend` to this kind of layer; attention layers of other kinds run the `reference`.
    """

    def __init__(self, model: PreTrainedModel, backend: str = "auto", min_saved_tokens: int = 16) -> None:
        model = unwrapped(model)
        self.model, self.backend = model, backend
        self._max_depth = get_backend(backend).max_depth
        self.last_call: CallReport | None = None
        self.listeners: list[Callable[[CallReport], None]] = []
        self.paused = False
        self.layers: dict[str, tuple[str, int]] = {}
        self.only: str | None = None
        self.dense = False
        self._idle: list[nn.Module] = []
        self._handles: list[Any] = []
        self.wrapped = "eager"
        check_supported(model)
        self.decoder, self.backbone = find_decoder(model), find_backbone(model)
        self._parameters = list(inspect.signature(self.decoder.forward).parameters)
        self._row_sharing = RowSharing(self.decoder, min_saved_tokens, self._max_depth)

    def __enter__(self) -> SharedPrefix:
        if self._handles:
            raise RuntimeError("this shared_prefix context is already active; make a new one to nest it.")
        config = self.decoder.config
        self.wrapped = internals.attention_implementation(config) or "eager"
        internals.set_attention_implementation(config, register(self.backend, self.wrapped))
        decoder, backbone = self.decoder, self.backbone
        self._handles = [
            self.model.register_forward_pre_hook(Hook(self._note_labels), with_kwargs=True),
            decoder.register_forward_pre_hook(Hook(self._before), with_kwargs=True),
            decoder.register_forward_hook(Hook(self._after), with_kwargs=True),
            decoder.register_forward_hook(Hook(_end_masks), with_kwargs=True, always_call=True),
            StatefulHandle(decoder),
        ]
        if backbone is not decoder:
            self._handles += [
                backbone.register_forward_pre_hook(Hook(self._before_backbone), with_kwargs=True),
                backbone.register_forward_hook(Hook(_end_masks), with_kwargs=True, always_call=True),
            ]
        _IN_FORCE.setdefault(self.decoder, []).append(self)
        try:
            self._check_layers()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        contexts = _IN_FORCE[self.decoder]
        index = contexts.index(self)
        contexts.remove(self)
        if index < len(contexts):  # exits before the inner context, which then restores the model
            contexts[index].wrapped = self.wrapped
        else:
            internals.set_attention_implementation(self.decoder.config, self.wrapped)

    @torch.compiler.disable(reason="detects shared prefixes in Python; the decoder's layers compile")
    def _before(
        self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple, dict[str, Any]]:
        if not self._handles:  # a copy of the model made inside the context, used after it
            return args, kwargs
        kwargs = dict(zip(self._parameters, args, strict=False)) | kwargs
        layout, group_ids = kwargs.pop("prefix_layout", None), kwargs.pop("group_ids", None)
        if isinstance(layout, LayoutCall):  # handled by an outer context
            return (), kwargs | {"prefix_layout": layout}
        if placeholder := next((value for value in kwargs.values() if isinstance(value, _NoCache)), None):
            placeholder.get_seq_length()  # raises
        if layout is not None:
            return (), self._start_packed_row(kwargs, layout)
        if self.paused:
            return (), kwargs
        shared = self._row_sharing.pack(kwargs, group_ids, self.layers)
        if isinstance(shared, str):
            self._report(kwargs, None, reason=shared)
            return (), kwargs
        kwargs |= {"input_ids": shared.input_ids, "position_ids": shared.position_ids}
        kwargs |= self._as_packed_row(kwargs, shared.layout, shared)
        self._report(kwargs, shared.layout, padding_fraction=shared.padding_fraction)
        set_packed_row(kwargs["prefix_layout"])
        return (), kwargs

    @torch.compiler.disable(reason="reads the layout in Python; the decoder's layers compile")
    def _before_backbone(
        self, backbone: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple, dict[str, Any]]:
        """Prepare a packed row for a multimodal model, which creates the masks itself."""
        kwargs = dict(zip(inspect.signature(backbone.forward).parameters, args, strict=False)) | kwargs
        layout = kwargs.get("prefix_layout")
        if not self._handles or layout is None or isinstance(layout, LayoutCall):
            return (), kwargs
        media = [name for name in kwargs if ("pixel" in name or "grid" in name) and kwargs[name] is not None]
        if hasattr(backbone, "get_rope_index") and kwargs.get("position_ids") is None and media:
            raise ValueError(f"{', '.join(media)} passed without position_ids; score with pl_grouprl.models.score.")
        return (), self._start_packed_row(kwargs, layout)

    def _start_packed_row(self, kwargs: dict[str, Any], layout: SharedPrefixLayout) -> dict[str, Any]:
        """Arguments of the call on a row packed by the caller, or on this rank's part of it."""
        group, states = kwargs.pop("sequence_group", None), kwargs.pop("prefix_states", None)
        _check_packed_row(kwargs, layout, states)
        kwargs |= self._as_packed_row(kwargs, layout)
        kwargs["prefix_layout"].states = states
        records = states is not None and states.records
        self._report(kwargs, layout, part="prompt" if records else "slice" if layout.num_prefilled else None)
        if group is not None:
            kwargs |= shard_call(self.model, kwargs, group)
        set_packed_row(kwargs["prefix_layout"])
        return kwargs

    def _note_labels(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        labels, mask = kwargs.get("labels"), kwargs.get("attention_mask")
        if labels is not None and kwargs.get("prefix_layout") is not None:
            raise ValueError("labels are shifted by one token along the packed row, across rollouts; omit them.")
        self._row_sharing.note_labels(labels, mask)

    def _as_packed_row(
        self, kwargs: dict[str, Any], layout: SharedPrefixLayout, rows: SharedRows | None = None
    ) -> dict[str, Any]:
        """Arguments of a decoder call on a packed row."""
        tokens = kwargs["input_ids"] if kwargs.get("input_ids") is not None else kwargs["inputs_embeds"]
        positions = kwargs.get("position_ids")
        positions = layout.position_ids[layout.num_prefilled :] if positions is None else positions
        positions = positions.to(tokens.device)
        expects_cache = kwargs.get("use_cache") is None and bool(getattr(self.decoder.config, "use_cache", False))
        changed = {
            # Those of images stay [kinds, 1, T] (time, height, width).
            "position_ids": positions if positions.dim() == 3 else positions.reshape(1, -1),
            # A 2-d mask of ones makes the model create its masks, by our mask function.
            "attention_mask": torch.ones(1, layout.num_queries, dtype=torch.long, device=tokens.device),
            "prefix_layout": LayoutCall(
                layout,
                only=self.only,
                dense=self.dense,
                columns_T=None if rows is None else rows.columns_T,
                owner=self,
                rows=rows,
                expects_cache=expects_cache,
            ),
            "use_cache": False,
        }
        if kwargs.get("input_ids") is not None and tokens.dim() == 1:
            changed["input_ids"] = tokens[None]
        return changed

    @torch.compiler.disable(reason="unpacks hidden states in Python; the decoder's layers compile")
    def _after(self, decoder: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        call = kwargs.get("prefix_layout")
        if not isinstance(call, LayoutCall) or call.owner is not self:
            return None
        # Every layer that mixes tokens must have followed the layout. Compiled attention does not report; the check on
        # entry covers it. With a dense mask, attention needs no layout.
        if not self.layers or any(ran != STATEFUL for _, ran in call.ran.values()):
            layers = [] if call.dense else [layer for layer in layers_of(decoder) if layer not in self._idle]
            missing = why_not_reached(decoder, layers, call.ran)
            if missing is not None:
                raise RuntimeError(f"{missing}, so the result would be wrong{REMEDY}")
            self.layers = call.kinds()
        if call.states is not None:
            call.states.records = False
        if call.shards is not None:
            output = gather_output(output, call.shards)
        if call.expects_cache and isinstance(output, dict):
            output[internals.cache_argument(type(decoder).forward) or "past_key_values"] = _NoCache()
        return output if call.rows is None else unpack_output(output, call.rows)

    def _check_layers(self) -> None:
        """Compare shared and repeated prefixes on a few tokens, once per decoder and backend."""
        outer, rows = _IN_FORCE[self.decoder][0], self._row_sharing
        if outer is not self:  # already checked, and its backend runs the calls
            self.layers, self.dense, self._idle = outer.layers, outer.dense, outer._idle
            rows.positions_are_relative = outer._row_sharing.positions_are_relative
            rows.differing_padding = outer._row_sharing.differing_padding
            return
        seen = _CHECKED.setdefault(self.decoder, {})
        # Replacing a layer repeats the check.
        key = (self.backend, *((id(module), type(module)) for module in self.decoder.modules()))
        if key not in seen:
            seen[key] = self._run_layer_check()
        found = seen[key]
        if found is not None:
            self.layers, self.dense = found.layers, found.dense
            rows.positions_are_relative &= found.relative
            rows.differing_padding = found.padding
            self._idle = [layers_of(self.decoder)[index] for index in found.idle]
            hook = Hook(refuse_packed_row)
            self._handles += [layer.register_forward_pre_hook(hook, with_kwargs=True) for layer in self._idle]

    def _run_layer_check(self) -> _LayerFindings | None:
        if not is_whole(self.decoder):
            _LOG.warning(
                "%s was not compared between a shared and a repeated prefix on a few tokens, as its weights are "
                "sharded, quantized or on meta; check_parity compares it.",
                type(self.model).__name__,
            )
            self.dense = selects_tokens(self.decoder)
            return None
        listeners, self.listeners = self.listeners, []
        last_call, paused, min_saved_tokens = self.last_call, self.paused, self._row_sharing.min_saved_tokens
        try:
            self.paused = True
            with tracking_idle_layers(self.decoder) as self._idle:
                try:
                    relative = check_layers(self.model, self._max_depth)
                except LayersFailedError:  # with a dense mask, if markers fail
                    if self.backend not in ("auto", ORACLE.name) or self._row_sharing.scales_by_row:
                        raise
                    self.dense = True
                    relative = check_layers(self.model, self._max_depth, selects=True)
            self._row_sharing.positions_are_relative &= relative
            self._row_sharing.differing_padding, self._row_sharing.min_saved_tokens = None, 1
            padding = differing_padding(self)
            idle = tuple(index for index, layer in enumerate(layers_of(self.decoder)) if layer in self._idle)
            return _LayerFindings(self.layers, relative, padding, self.dense, idle)
        finally:
            self.listeners, self.last_call, self.paused = listeners, last_call, paused
            self._row_sharing.min_saved_tokens = min_saved_tokens

    def describe(self) -> str:
        """Which backend runs which layers, such as `window 512: cascade (20 layers); full: cascade (4 layers)`."""
        parts = [
            f"{kind}: {ran} ({count} layer{'s' if count > 1 else ''})" for kind, (ran, count) in self.layers.items()
        ]
        return "; ".join(parts) or f"{self.backend}, chosen at the first call"

    def _report(self, kwargs: dict[str, Any], layout: SharedPrefixLayout | None, **how: Any) -> None:
        tokens = kwargs["input_ids"] if kwargs.get("input_ids") is not None else kwargs["inputs_embeds"][..., 0]
        positions = kwargs.get("position_ids") if layout is not None else None
        self.last_call = CallReport(layout, input_ids=tokens.detach(), position_ids=positions, **how)
        for listener in self.listeners:
            listener(self.last_call)


def _check_packed_row(kwargs: dict[str, Any], layout: SharedPrefixLayout, states: PrefixStates | None) -> None:
    """Raise if the arguments of a call contradict its layout, which would silently give wrong results."""
    has_ids = kwargs.get("input_ids") is not None
    rows = kwargs["input_ids"].shape if has_ids else kwargs["inputs_embeds"].shape[:-1]
    length = layout.num_queries
    if tuple(rows) not in ((length,), (1, length)):
        raise ValueError(f"prefix_layout has {length} tokens for input of shape {list(rows)}; pass one packed row.")
    mask = kwargs.get("attention_mask")
    if mask is not None and not (isinstance(mask, Tensor) and bool((mask == 1).all())):
        raise ValueError("attention_mask hides tokens of a packed row, which prefix_layout alone may do; omit it.")
    if internals.holds_cache(kwargs) or kwargs.get("use_cache"):
        raise ValueError("a packed row with prefix_layout runs without a cache; pass use_cache=False.")
    if states is None and layout.num_prefilled:
        raise ValueError(f"prefix_layout has num_prefilled={layout.num_prefilled}; pass the states of these tokens.")
    if (
        states is not None
        and states.records
        and sum(s.length > 0 for s in layout.segments[layout.num_prefilled > 0 :]) > 1
    ):
        raise ValueError("prefix_states can record a row of one prompt or one branch only, without rollouts.")
    positions = kwargs.get("position_ids")
    if positions is None:
        return
    if positions.dim() == 3:  # of images; another length would broadcast
        if positions.shape[-1] != length:
            raise ValueError(f"position_ids has shape {list(positions.shape)} for a packed row of {length} tokens.")
        return
    # Accepts the layout's positions plus a constant per tree, as for callers that count from 1. Synchronizes with the
    # device, unless they are the layout's own tensor, as from `pack`.
    positions_T = positions.flatten()
    own_T = layout.positions_on(positions_T.device)[layout.num_prefilled :]
    if positions_T.is_set_to(own_T):
        return

    def first_tokens_of_roots() -> Tensor:
        first: list[int] = []
        for segment in layout.segments:
            first.append(segment.start if segment.parent is None else first[segment.parent])
        return layout.per_token(first)

    roots_T = layout.memo("roots", first_tokens_of_roots).to(positions_T.device)[layout.num_prefilled :]
    offsets_T = positions_T - own_T if len(positions_T) == len(own_T) else None
    if offsets_T is None or not torch.equal(offsets_T, offsets_T[roots_T]):
        raise ValueError("position_ids do not continue from a prefix to its suffixes; omit them.")


def shared_prefix(model: PreTrainedModel, backend: str = "auto", *, min_saved_tokens: int = 16) -> SharedPrefix:
    """Make a transformers model encode shared prefixes once, inside this context.

    Inside it, `model(input_ids [1, T], prefix_layout=layout)` runs a packed row of T tokens, and an ordinary padded
    batch `model(input_ids [B, L], attention_mask [B, L])` is packed, run and unpacked row by row: the decoder's hidden
    states, and so logits, losses and gradients, equal those of the repeated run; at padding they are zero.
    Rows are compared by their tokens, within each group where `group_ids` (one per row) is passed. Calls that cannot
    be shared (a cache, a custom mask, one row) go through untouched. Stay in the context until the backward pass is
    done: activation checkpointing runs the forward again.

    Args:
        model: A decoder, with or without a head; it may be wrapped by PEFT, DDP, FSDP, DeepSpeed or `torch.compile`.
        backend: `auto`, `cascade`, `flex`, `prefix_grouper` or `reference`.
        min_saved_tokens: Ordinary rows share a prefix only if that saves at least this many tokens.

    Raises:
        UnsupportedModelError: If the model would give wrong results silently.
        ValueError: If the backend is unknown.
    """
    return SharedPrefix(model, backend, min_saved_tokens)


def in_force(model: PreTrainedModel) -> SharedPrefix | None:
    """The model's outermost `shared_prefix` context, or None."""
    contexts = _IN_FORCE.get(find_decoder(unwrapped(model)))
    return contexts[0] if contexts else None


@contextmanager
def sharing_paused(model: PreTrainedModel) -> Iterator[None]:
    """Let ordinary calls of the model through untouched, in any context."""
    contexts = [(patch, patch.paused) for patch in _IN_FORCE.get(find_decoder(unwrapped(model)), [])]
    for patch, _ in contexts:
        patch.paused = True
    try:
        yield
    finally:
        for patch, paused in contexts:
            patch.paused = paused


_IN_FORCE: WeakKeyDictionary[nn.Module, list[SharedPrefix]] = WeakKeyDictionary()
"""The active contexts of each decoder, outermost first."""


class _LayerFindings(NamedTuple):
    """Result of the check on entry.

    Attributes:
        layers: See `SharedPrefix`.
        relative: Whether positions are relative.
        padding: The padding for which results differ.
        dense: See `SharedPrefix`.
        idle: Indices of the layers that did not run.
    """

    layers: dict[str, tuple[str, int]]
    relative: bool
    padding: Padding | None
    dense: bool
    idle: tuple[int, ...]


_CHECKED: WeakKeyDictionary[nn.Module, dict[tuple[Any, ...], _LayerFindings | None]] = WeakKeyDictionary()
"""For each decoder, by backend and modules; None if it could not be checked."""


class _NoCache:
    """Placeholder for the cache of a packed row: using it is an error, instead of silently starting afresh."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise RuntimeError("a call that shares its prefixes keeps no cache; pass use_cache=True to it.")


def _end_masks(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    if isinstance(kwargs.get("prefix_layout"), LayoutCall):
        set_packed_row(None)


def measure_speedup(patch: SharedPrefix, report: CallReport) -> float:
    """Seconds of the repeated run over seconds of the shared one, decoder forward and backward.

    Leaves no gradients and does not change the random state. Runs alternate and the fastest of each kind counts, so the
    first serve as warm-up.

    Args:
        patch: The active context.
        report: A call of its decoder that shared a prefix.
    """
    layout, decoder = report.layout, patch.decoder
    assert layout is not None
    assert report.position_ids is not None
    shared = {"input_ids": report.input_ids, "position_ids": report.position_ids, "prefix_layout": layout}
    repeated = repeat_rows(layout, report.input_ids)
    weights = [weight for weight in decoder.parameters() if weight.requires_grad]

    def seconds(inputs: dict[str, Any]) -> float:
        if decoder.device.type == "cuda":
            torch.cuda.synchronize(decoder.device)
        start = time.perf_counter()
        with sharing_paused(patch.model), torch.set_grad_enabled(bool(weights)):
            hidden = decoder(**inputs, use_cache=False).last_hidden_state
            if weights:
                torch.autograd.grad(hidden.float().sum(), weights, allow_unused=True)
        if decoder.device.type == "cuda":
            torch.cuda.synchronize(decoder.device)
        return time.perf_counter() - start

    listeners, patch.listeners = patch.listeners, []
    try:
        with torch.random.fork_rng(devices=[report.input_ids.device] if report.input_ids.is_cuda else []):
            runs = [(seconds(repeated), seconds(shared)) for _ in range(2)]
    finally:
        patch.listeners = listeners
    return min(slow for slow, _ in runs) / min(fast for _, fast in runs)

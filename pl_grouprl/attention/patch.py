"""`shared_prefix(model)`: inside this context, the model's decoder encodes shared prefixes once."""

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
from pl_grouprl.attention.call import LayoutCall, check_prefix_states
from pl_grouprl.attention.function import register
from pl_grouprl.attention.layer_check import (
    Padding,
    check_layers,
    differing_padding,
    layers_of,
    refuse_packed_row,
    tracking_idle_layers,
)
from pl_grouprl.attention.masks import end_packed_masks, start_packed_masks
from pl_grouprl.attention.padded_rows import RowSharing, SharedRows, unpack_output
from pl_grouprl.attention.sequence_parallel import gather_output, shard_call
from pl_grouprl.attention.stateful import STATEFUL, install
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

# Checks the arguments passed to a model with an explicit layout.


def check_packed_row(kwargs: dict[str, Any], layout: SharedPrefixLayout) -> None:
    """Refuse arguments that contradict an explicit layout.

    Raises:
        ValueError: If input or positions do not match the packed row, a mask hides tokens, or a cache is requested.
    """
    tokens = kwargs["input_ids"] if kwargs.get("input_ids") is not None else kwargs["inputs_embeds"]
    rows = tokens.shape if kwargs.get("input_ids") is not None else tokens.shape[:-1]
    length = layout.num_queries
    if tuple(rows) not in ((length,), (1, length)):
        raise ValueError(
            f"prefix_layout has {length} tokens, but the model was given input of shape {list(rows)}; "
            f"pass one packed row, of shape [1, {length}]."
        )
    positions, mask = kwargs.get("position_ids"), kwargs.get("attention_mask")
    if positions is not None and not (
        positions.shape[-1] == length and (positions.dim() == 3 or positions.numel() == length)
    ):
        raise ValueError(
            f"position_ids has shape {list(positions.shape)} for a prefix_layout of {length} tokens; pass "
            "prefix_layout.position_ids, or leave it out."
        )
    if positions is not None and positions.dim() < 3:
        _check_positions(positions.flatten(), layout)
    if mask is not None and not (isinstance(mask, Tensor) and bool((mask == 1).all())):
        raise ValueError(
            "attention_mask hides tokens of a packed row, where prefix_layout alone decides what is seen; leave it out."
        )
    if internals.holds_cache(kwargs) or kwargs.get("use_cache"):
        raise ValueError("a packed row with prefix_layout runs without a cache; pass use_cache=False.")


def _check_positions(positions_T: Tensor, layout: SharedPrefixLayout) -> None:
    """Accept the layout's positions plus a constant per tree, as for callers that count from 1.

    Synchronizes with the device, unless they are the layout's own tensor, as from `pack`.
    """
    own_T = layout.positions_on(positions_T.device)[layout.num_prefilled :]
    if positions_T.is_set_to(own_T):
        return
    offsets_T = positions_T - own_T
    roots = layout.memo("roots", lambda: _first_tokens_of_roots(layout)).to(positions_T.device)[layout.num_prefilled :]
    if not torch.equal(offsets_T, offsets_T[roots]):
        raise ValueError(
            "position_ids do not continue from a prefix to its suffixes; pass prefix_layout.position_ids, or "
            "leave them out."
        )


def _first_tokens_of_roots(layout: SharedPrefixLayout) -> Tensor:
    """The first token of each token's tree, shape [T]."""
    first: list[int] = []
    for segment in layout.segments:
        first.append(segment.start if segment.parent is None else first[segment.parent])
    return layout.per_token(first)


def media_arguments(kwargs: dict[str, Any]) -> list[str]:
    """Names of arguments with images or videos."""
    return [name for name in kwargs if ("pixel" in name or "grid" in name) and kwargs[name] is not None]


def row_of_positions(positions: Tensor) -> Tensor:
    """Reshape [T] or [1, T] to [1, T]; keeps the [kinds, 1, T] of images (time, height, width)."""
    return positions if positions.dim() == 3 else positions.reshape(1, -1)


# `shared_prefix(model)`: inside this context, the model's decoder encodes shared prefixes once.
#
# Callers that build packed rows pass `prefix_layout`. Others pass an ordinary padded batch: rows with common prefixes
# are
# detected, packed, run once and unpacked.

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
    reason: str | None
    input_ids: Tensor = field(repr=False)
    position_ids: Tensor | None = field(repr=False)
    padding_fraction: float = 0.0
    part: Literal["prompt", "slice"] | None = None

    @property
    def token_ratio(self) -> float:
        """Tokens with repeated prefixes over tokens that ran."""
        return self.layout.token_ratio if self.layout is not None else 1.0


class _Hook:
    """A hook that a deep copy of its module shares, and that a pickle replaces by one that does nothing."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any) -> Any:
        return self._function(*args)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Hook:
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
            self.model.register_forward_pre_hook(_Hook(self._note_labels), with_kwargs=True),
            decoder.register_forward_pre_hook(_Hook(self._before), with_kwargs=True),
            decoder.register_forward_hook(_Hook(self._after), with_kwargs=True),
            decoder.register_forward_hook(_Hook(_end_masks), with_kwargs=True, always_call=True),
            install(decoder),
        ]
        if backbone is not decoder:
            self._handles += [
                backbone.register_forward_pre_hook(_Hook(self._before_backbone), with_kwargs=True),
                backbone.register_forward_hook(_Hook(_end_masks), with_kwargs=True, always_call=True),
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
            check_packed_row(kwargs, layout)
            return (), self._start_packed_row(kwargs, layout)
        if self.paused:
            return (), kwargs
        shared = self._row_sharing.pack(kwargs, group_ids, self.layers)
        if isinstance(shared, str):
            self._report(kwargs, None, shared)
            return (), kwargs
        kwargs |= {"input_ids": shared.input_ids, "position_ids": shared.position_ids}
        kwargs |= self._as_packed_row(kwargs, shared.layout, shared)
        self._report(kwargs, shared.layout, padding_fraction=shared.padding_fraction)
        start_packed_masks(kwargs["prefix_layout"])
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
        check_packed_row(kwargs, layout)
        media = media_arguments(kwargs)
        if hasattr(backbone, "get_rope_index") and kwargs.get("position_ids") is None and media:
            raise ValueError(
                f"{', '.join(media)} passed without position_ids: {type(backbone).__name__} would count positions "
                "along the packed row; pass those of pl_grouprl.media.inputs, or score with pl_grouprl.models.score."
            )
        return (), self._start_packed_row(kwargs, layout)

    def _start_packed_row(self, kwargs: dict[str, Any], layout: SharedPrefixLayout) -> dict[str, Any]:
        """Arguments of the call on a row packed by the caller, or on this rank's part of it."""
        group, states = kwargs.pop("sequence_group", None), kwargs.pop("prefix_states", None)
        check_prefix_states(states, layout)
        kwargs |= self._as_packed_row(kwargs, layout)
        kwargs["prefix_layout"].states = states
        records = states is not None and states.records
        self._report(kwargs, layout, part="prompt" if records else "slice" if layout.num_prefilled else None)
        if group is not None:
            kwargs |= shard_call(self.model, kwargs, group)
        start_packed_masks(kwargs["prefix_layout"])
        return kwargs

    def _note_labels(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        labels, mask = kwargs.get("labels"), kwargs.get("attention_mask")
        if labels is not None and kwargs.get("prefix_layout") is not None:
            raise ValueError(
                "labels are shifted by one token along the packed row, from one rollout into the next; leave them out "
                "and compute the loss from pl_grouprl.models.score, or pass ordinary rows without prefix_layout."
            )
        self._row_sharing.note_labels(labels, mask)

    def _as_packed_row(
        self, kwargs: dict[str, Any], layout: SharedPrefixLayout, rows: SharedRows | None = None
    ) -> dict[str, Any]:
        """Arguments of a decoder call on a packed row."""
        tokens = kwargs["input_ids"] if kwargs.get("input_ids") is not None else kwargs["inputs_embeds"]
        positions = kwargs.get("position_ids")
        positions = layout.position_ids[layout.num_prefilled :] if positions is None else positions
        expects_cache = kwargs.get("use_cache") is None and bool(getattr(self.decoder.config, "use_cache", False))
        columns_T = None if rows is None else rows.columns_T
        call = _DecoderCall(
            layout, only=self.only, owner=self, rows=rows, expects_cache=expects_cache, columns_T=columns_T,
            dense=self.dense,
        )  # fmt: skip
        changed = {
            "position_ids": row_of_positions(positions.to(tokens.device)),
            # A 2-d mask of ones makes the model create its masks, by our mask function.
            "attention_mask": torch.ones(1, layout.num_queries, dtype=torch.long, device=tokens.device),
            "prefix_layout": call,
            "use_cache": False,
        }
        if kwargs.get("input_ids") is not None and tokens.dim() == 1:
            changed["input_ids"] = tokens[None]
        return changed

    @torch.compiler.disable(reason="unpacks hidden states in Python; the decoder's layers compile")
    def _after(self, decoder: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        call = kwargs.get("prefix_layout")
        if not isinstance(call, _DecoderCall) or call.owner is not self:
            return None
        self._account_for_layers(decoder, call)
        if call.states is not None:
            call.states.close()
        if call.shards is not None:
            output = gather_output(output, call.shards)
        if call.expects_cache and isinstance(output, dict):
            output[internals.cache_argument(type(decoder).forward) or "past_key_values"] = _NoCache()
        return output if call.rows is None else unpack_output(output, call.rows)

    def _account_for_layers(self, decoder: nn.Module, call: LayoutCall) -> None:
        """Raise unless every layer that mixes tokens followed the layout.

        Compiled attention does not report; the check on entry covers it.
        """
        if self.layers and all(ran == STATEFUL for _, ran in call.ran.values()):
            return
        # With a dense mask, attention needs no layout.
        layers = [] if call.dense else [layer for layer in layers_of(decoder) if layer not in self._idle]
        missing = why_not_reached(decoder, layers, call.reached)
        if missing is not None:
            raise RuntimeError(f"{missing}; the result would be wrong. Train this model with sharing='repeated'.")
        self.layers = call.kinds()

    def _check_layers(self) -> None:
        """Compare shared and repeated prefixes on a few tokens, once per decoder and backend."""
        outer = _IN_FORCE[self.decoder][0]
        if outer is not self:  # already checked, and its backend runs the calls
            self.layers, self.dense, self._idle = outer.layers, outer.dense, outer._idle
            self._row_sharing.learn(outer._row_sharing.positions_are_relative, outer._row_sharing.differing_padding)
            return
        seen = _CHECKED.setdefault(self.decoder, {})
        # Replacing a layer repeats the check.
        key = (self.backend, *((id(module), type(module)) for module in self.decoder.modules()))
        if key not in seen:
            seen[key] = self._run_layer_check()
        found = seen[key]
        if found is not None:
            self.layers, self.dense = found.layers, found.dense
            self._row_sharing.learn(found.relative, found.padding)
            self._idle = [layers_of(self.decoder)[index] for index in found.idle]
            hook = _Hook(refuse_packed_row)
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
            relative = self._compare_with_marker_or_dense_mask()
            self._row_sharing.learn(relative, None)
            self._row_sharing.min_saved_tokens = 1
            padding = differing_padding(self.decoder, self._set_paused)
            idle = [index for index, layer in enumerate(layers_of(self.decoder)) if layer in self._idle]
            return _LayerFindings(self.layers, relative, padding, self.dense, tuple(idle))
        finally:
            self.listeners, self.last_call, self.paused = listeners, last_call, paused
            self._row_sharing.min_saved_tokens = min_saved_tokens

    def _compare_with_marker_or_dense_mask(self) -> bool:
        """Check the layers, with a dense mask if markers fail; return whether positions are relative."""
        with tracking_idle_layers(self.decoder) as self._idle:
            try:
                return check_layers(self.model, self._max_depth)
            except LayersFailedError:
                if self.backend not in ("auto", ORACLE.name) or self._row_sharing.scales_by_row:
                    raise
            self.dense = True
            return check_layers(self.model, self._max_depth, selects=True)

    def _set_paused(self, paused: bool) -> None:
        self.paused = paused

    def describe(self) -> str:
        """Which backend runs which layers, such as `window 512: cascade (20 layers); full: cascade (4 layers)`."""
        parts = [
            f"{kind}: {ran} ({count} layer{'s' if count > 1 else ''})" for kind, (ran, count) in self.layers.items()
        ]
        return "; ".join(parts) or f"{self.backend}, chosen at the first call"

    def _report(
        self,
        kwargs: dict[str, Any],
        layout: SharedPrefixLayout | None,
        reason: str | None = None,
        padding_fraction: float = 0.0,
        part: Literal["prompt", "slice"] | None = None,
    ) -> None:
        tokens = kwargs["input_ids"] if kwargs.get("input_ids") is not None else kwargs["inputs_embeds"][..., 0]
        positions = kwargs.get("position_ids") if layout is not None else None
        self.last_call = CallReport(layout, reason, tokens.detach(), positions, padding_fraction, part)
        for listener in self.listeners:
            listener(self.last_call)


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


_Kinds = dict[str, tuple[str, int]]


class _LayerFindings(NamedTuple):
    """Result of the check on entry.

    Attributes:
        layers: See `SharedPrefix`.
        relative: Whether positions are relative.
        padding: The padding for which results differ.
        dense: See `SharedPrefix`.
        idle: Indices of the layers that did not run.
    """

    layers: _Kinds
    relative: bool
    padding: Padding | None
    dense: bool
    idle: tuple[int, ...]


_CHECKED: WeakKeyDictionary[nn.Module, dict[tuple[Any, ...], _LayerFindings | None]] = WeakKeyDictionary()
"""For each decoder, by backend and modules; None if it could not be checked."""


@dataclass
class _DecoderCall(LayoutCall):
    owner: SharedPrefix | None = None
    rows: SharedRows | None = None
    expects_cache: bool = False


class _NoCache:
    """Placeholder for the cache of a packed row: using it is an error, instead of silently starting afresh."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise RuntimeError(
            "this cache comes from a call that shared its prefixes, which keeps none; pass use_cache=True to that call "
            "to continue decoding from it."
        )


def _end_masks(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    if isinstance(kwargs.get("prefix_layout"), LayoutCall):
        end_packed_masks()


# Times one decoder call with shared and with repeated prefixes.


def measure_speedup(patch: SharedPrefix, report: CallReport, *, repeats: int = 2) -> float:
    """Seconds of the repeated run over seconds of the shared one, decoder forward and backward.

    Leaves no gradients and does not change the random state. Runs alternate and the fastest of each kind counts, so the
    first serve as warm-up.

    Args:
        patch: The active context.
        report: A call of its decoder that shared a prefix.
        repeats: Runs of each kind.
    """
    layout = report.layout
    assert layout is not None
    assert report.position_ids is not None
    shared = {"input_ids": report.input_ids, "position_ids": report.position_ids, "prefix_layout": layout}
    repeated = repeat_rows(layout, report.input_ids)
    seconds: dict[str, list[float]] = {"shared": [], "repeated": []}
    devices = [report.input_ids.device] if report.input_ids.is_cuda else []
    with torch.random.fork_rng(devices=devices):
        for _ in range(repeats):
            for name, inputs in (("repeated", repeated), ("shared", shared)):
                seconds[name].append(_time_call(patch, inputs))
    return min(seconds["repeated"]) / min(seconds["shared"])


def _time_call(patch: SharedPrefix, inputs: dict[str, Any]) -> float:
    weights = [weight for weight in patch.decoder.parameters() if weight.requires_grad]
    listeners, patch.listeners = patch.listeners, []
    try:
        start = _now(patch)
        with sharing_paused(patch.model), torch.set_grad_enabled(bool(weights)):
            hidden = patch.decoder(**inputs, use_cache=False).last_hidden_state
            if weights:
                torch.autograd.grad(hidden.float().sum(), weights, allow_unused=True)
        return _now(patch) - start
    finally:
        patch.listeners = listeners


def _now(patch: SharedPrefix) -> float:
    if patch.decoder.device.type == "cuda":
        torch.cuda.synchronize(patch.decoder.device)
    return time.perf_counter()

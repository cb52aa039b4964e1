"""Exact prefix sharing for stateful layers (gated delta nets, short convolutions, Mamba2).

In a packed row, a mask hides siblings from each other, but a recurrent state would mix them. So such a mixer runs
segment by segment, each starting from its parent's final state. The mixer's own forward gets the states through
transformers' cache interface, as in chunked prefill; gradients flow through them.

Parents come first. Within that order, segments are batched. Those whose final state is needed cannot be padded on the
right; the others can, as no real token sees that padding.

Legend: T packed tokens that run, D hidden size, R runs of a batch, L length of its rows, C channels, K convolution
kernel size.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from types import CodeType, MethodType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from pl_grouprl.attention.call import LayoutCall, Name
from pl_grouprl.packing import SharedPrefixLayout
from pl_grouprl.utilities import internals

_NAMES = re.compile(
    "Mamba|SSM|DeltaNet|DeltaAttention|DeltaRule|ShortConv|Recurrent|Rwkv|RWKV|LinearAttention|LightningAttention|RgLru|"
    "RetNet|Retention|LSTM|Hyena"
)
"""Class names of stateful layers that cannot be detected otherwise."""

_NOT_IN_SEQUENCE = re.compile("Norm$|Audio|Vision")
"""Class names of modules that see a single token or no text, despite their names."""

STATEFUL = "segment by segment"
"""Reported for such layers in place of a backend's name."""

_CACHE_METHODS = {"get_conv_state", "update_conv_state", "get_recurrent_state", "update_recurrent_state"}
_FORWARD_BEFORE = "_forward_before_sharing"

_INSTALLED: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
"""Number of handles that patch each mixer. A copied mixer has none, so its patch has no effect."""


class StatefulHandle:
    """Makes a decoder's stateful mixers accept `prefix_layout` until it is removed; other calls are unchanged.

    Handles of the same mixers may be removed in any order.
    """

    def __init__(self, decoder: nn.Module) -> None:
        self._mixers = stateful_mixers(decoder)
        for mixer in self._mixers:
            _INSTALLED[mixer] = _INSTALLED.get(mixer, 0) + 1
            if not _is_patched(mixer):
                if "forward" in mixer.__dict__:  # patched by another library, for offloading for example
                    setattr(mixer, _FORWARD_BEFORE, mixer.__dict__["forward"])
                mixer.forward = MethodType(forward, mixer)  # type: ignore[method-assign]

    def remove(self) -> None:
        """Undo this installation. Idempotent."""
        mixers, self._mixers = self._mixers, []
        for mixer in mixers:
            _INSTALLED[mixer] -= 1
            if not _INSTALLED[mixer] and _is_patched(mixer):
                del mixer.forward
                if hasattr(mixer, _FORWARD_BEFORE):
                    mixer.forward = mixer.__dict__.pop(_FORWARD_BEFORE)


def stateful_mixers(decoder: nn.Module) -> list[nn.Module]:
    """The stateful modules of a decoder that can run segment by segment."""
    return [module for module in decoder.modules() if _continues_from_cache(module)]


def has_bias(mixer: nn.Module) -> bool:
    """Whether left padding changes a mixer's state: without a bias, zeros stay zeros."""
    return any(isinstance(getattr(part, "bias", None), Tensor) for part in mixer.modules())


def unsupported_mixers(decoder: nn.Module) -> list[str]:
    """Sorted class names of modules that are, or seem, stateful and cannot run segment by segment."""
    found: set[str] = set()
    pending = [decoder]
    while pending:
        module = pending.pop()
        name = type(module).__name__
        if not _continues_from_cache(module) and not _NOT_IN_SEQUENCE.search(name):
            if _seems_stateful(module):
                found.add(name)
            pending += module.children()
    return sorted(found)


def _continues_from_cache(module: nn.Module) -> bool:
    """Whether a module's forward needs only hidden states, and continues from both kinds of cached state.

    Several mixers (such as Mamba) use the recurrent state for single tokens only, and restart if given more. Those
    that ask the cache whether it `has_previous_state` (transformers before 5.21) read states from it in another way.
    """
    code = _forward_code(module)
    if "has_previous_state" in code.co_names or "update_conv_state" not in code.co_names:
        return False
    arguments = set(code.co_varnames[1 : code.co_argcount + code.co_kwonlyargcount])
    if arguments - {internals.cache_argument(type(module).forward)} != {"hidden_states", "attention_mask"}:
        return False
    keywords = {name for names in code.co_consts if isinstance(names, tuple) for name in names}
    return "update_recurrent_state" not in code.co_names or bool(keywords & {"initial_state", "initial_states"})


def _seems_stateful(module: nn.Module) -> bool:
    code = _forward_code(module)
    has_state = (
        bool(_CACHE_METHODS.intersection(code.co_names))
        or any(name in module.__dict__ or name in module._parameters for name in ("A_log", "dt_bias"))
        or any(isinstance(child, nn.Conv1d) and child.kernel_size != (1,) for child in module.children())
    )
    # Kimi-Linear calls its full attention KimiLinearAttention.
    if has_state or "ALL_ATTENTION_FUNCTIONS" in code.co_names or stateful_mixers(module):
        return has_state
    return bool(_NAMES.search(type(module).__name__)) or "cache_params" in code.co_varnames[: code.co_argcount]


def _forward_code(module: nn.Module) -> CodeType:
    code: CodeType = getattr(inspect.unwrap(type(module).forward), "__code__", (lambda: None).__code__)
    return code


def _is_patched(mixer: nn.Module) -> bool:
    return getattr(mixer.__dict__.get("forward"), "__func__", None) is forward


def forward(  # a pickled mixer looks up its class's forward by this name
    self: nn.Module, hidden_states: Tensor, *args: Any, prefix_layout: LayoutCall | None = None, **kwargs: Any
) -> Tensor:
    """Forward of a patched mixer: runs segment by segment if given a layout, otherwise as before."""
    own_forward = getattr(self, _FORWARD_BEFORE, None) or MethodType(type(self).forward, self)
    if prefix_layout is None:
        return own_forward(hidden_states, *args, **kwargs)
    return _run_packed(self, own_forward, hidden_states, prefix_layout, *args, **kwargs)


@torch.compiler.disable(reason="batches of segments follow the layout; the layers around the mixer compile")
def _run_packed(mixer: nn.Module, own_forward: Any, hidden_states: Tensor, call: LayoutCall, **kwargs: Any) -> Tensor:
    """Run a mixer over a packed row, hidden states [1, T, D] to [1, T, D]."""
    cache_argument = internals.cache_argument(type(mixer).forward)
    assert cache_argument is not None
    options = {name: value for name, value in kwargs.items() if name not in ("attention_mask", cache_argument)}
    tensors = [name for name, value in options.items() if isinstance(value, Tensor)]
    if tensors:
        raise NotImplementedError(
            f"{type(mixer).__name__} is passed {', '.join(tensors)} for the packed row, which do not fit its segments; "
            "train this model with sharing='repeated'."
        )
    call.note(mixer, type(mixer).__name__, STATEFUL)
    layout, pad_roots, device = call.layout, not has_bias(mixer), hidden_states.device
    plan = layout.memo(("plan_runs", pad_roots, device), lambda: plan_runs(layout, pad_roots=pad_roots, device=device))
    # Final states of runs by kind, concatenated in run order, after that of prefilled tokens.
    kept: dict[Name, Tensor] = {}
    if call.states is not None and layout.num_prefilled:
        kept = call.states.last(mixer)
    outputs: list[Tensor] = []
    for batch in plan.batches:
        rows, length = batch.size
        tokens = hidden_states[0][batch.tokens]
        padded = tokens.new_zeros(rows * length, tokens.shape[-1]).index_copy(0, batch.slots, tokens)
        starts = {} if batch.starts is None else {kind: states[batch.starts] for kind, states in kept.items()}
        cache = _StateCache(starts)
        output = own_forward(hidden_states=padded.view(rows, length, -1), **{cache_argument: cache}, **options)
        if batch.keeps_state:
            for kind, states in cache.final.items():
                kept[kind] = torch.cat([kept[kind], states]) if kind in kept else states
        outputs.append(output.reshape(rows * length, -1)[batch.slots])
    if call.states is not None and call.states.records:  # a prompt or branch that runs alone
        for kind, states in kept.items():
            call.states.keep(mixer, kind, states[-1:])
    return torch.cat(outputs)[plan.outputs][None]


class _StateCache:
    """Replaces transformers' cache in one call of a mixer; writes nothing in place, so gradients flow.

    Attributes:
        final: States after the call, by kind and index: convolution [R, C, K], recurrent in the mixer's shape.
    """

    def __init__(self, initial: dict[Name, Tensor]) -> None:
        self._initial = initial
        self.final: dict[Name, Tensor] = {}

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """None: only single-token calls read this, and change it in place. Others use `update_conv_state`."""

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, *, conv_kernel_size: int
    ) -> Tensor:
        """Take a convolution's inputs [R, C, L]; return them with the last K earlier inputs in front, if any."""
        before = self._initial.get(("conv", state_idx))
        inputs = conv_states if before is None else torch.cat([before, conv_states], dim=-1)
        missing = max(conv_kernel_size - inputs.shape[-1], 0)
        self.final["conv", state_idx] = nn.functional.pad(inputs, (missing, 0))[..., -conv_kernel_size:]
        return inputs

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self._initial.get(("recurrent", state_idx))

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0) -> Tensor:
        self.final["recurrent", state_idx] = recurrent_states
        return recurrent_states

    def is_recording_past(self, layer_idx: int) -> bool:
        """True: a single token then takes the path for many, which changes no state in place."""
        return True


# The batches in which a stateful layer runs the segments of a packed row.

_MIN_FILLED = 0.75
"""Minimum fraction of a batch that is tokens, not padding."""


@dataclass(frozen=True)
class Batch:
    """Runs that start together: R rows of length L.

    Attributes:
        size: R and L.
        slots: Index of each token in the flattened batch [R * L], int64.
        tokens: Index of each of these tokens among the tokens that run, int64.
        starts: Index of the final state that each row starts from, shape [R], int64; None if all start from zero.
        keeps_state: Whether other runs start from the final states. These are numbered in batch order; the final state
            of prefilled tokens, if any, comes first.
    """

    size: tuple[int, int]
    slots: Tensor
    tokens: Tensor
    starts: Tensor | None
    keeps_state: bool


@dataclass(frozen=True)
class RunPlan:
    """How a packed row runs.

    Attributes:
        batches: In this order.
        outputs: Index of each token that runs among the tokens of all batches, shape [T], int64.
    """

    batches: tuple[Batch, ...]
    outputs: Tensor


@dataclass
class _Run:
    """Consecutive tokens that start from the final state of the run `start`, or from zero if None."""

    tokens: list[int]
    start: _Run | None
    level: int
    keeps_state: bool = False
    num_outputs: int = 0  # tokens at the end that belong to its segment; earlier ones are recomputed
    state: int = field(default=-1)  # index of its final state


def plan_runs(layout: SharedPrefixLayout, *, pad_roots: bool, device: torch.device) -> RunPlan:
    """Batch the segments of a layout.

    A one-token segment that starts from a state does not run for its final state: that would select decoding kernels,
    which have no gradient. Its children recompute the token instead, and its own output is computed with padding.

    Args:
        layout: The forest.
        pad_roots: Whether left-padding a root with zeros leaves its output and final state unchanged.
        device: Device of the indices.
    """
    runs = _runs(layout)
    # Runs may share a batch if their final state is needed, by level, or if it is not.
    kept = sorted((run for run in runs if run.keeps_state), key=lambda run: run.level)
    groups: list[list[_Run]] = []
    for level, same_level in groupby(kept, key=lambda run: run.level):
        groups += _by_length(same_level, 1.0 if level or not pad_roots else _MIN_FILLED)
    for from_nothing in (True, False):
        last = (run for run in runs if not run.keeps_state and (run.start is None) == from_nothing)
        groups += _by_length(last, _MIN_FILLED)
    batches: list[Batch] = []
    outputs = torch.empty(layout.num_queries, dtype=torch.long)
    num_states, num_tokens = int(layout.num_prefilled > 0), 0
    for group in groups:
        length = max(len(run.tokens) for run in group)
        keeps_state, starts = group[0].keeps_state, None
        if group[0].start is not None:
            length = max(length, 2)
            starts = torch.tensor([run.start.state for run in group if run.start is not None], device=device)
        slots: list[int] = []
        tokens: list[int] = []
        for row, run in enumerate(group):
            first = row * length + (length - len(run.tokens) if keeps_state else 0)
            slots += range(first, first + len(run.tokens))
            tokens += run.tokens
            output_tokens = run.tokens[len(run.tokens) - run.num_outputs :]
            outputs[output_tokens] = torch.arange(num_tokens + len(tokens) - run.num_outputs, num_tokens + len(tokens))
            if keeps_state:
                run.state, num_states = num_states, num_states + 1
        num_tokens += len(tokens)
        slot_index, token_index = (torch.tensor(index, device=device) for index in (slots, tokens))
        batches.append(Batch((len(group), length), slot_index, token_index, starts, keeps_state))
    return RunPlan(tuple(batches), outputs.to(device))


def _runs(layout: SharedPrefixLayout) -> list[_Run]:
    """The runs, parents before children."""
    leaves = set(layout.leaves)
    runs: list[_Run] = []
    continuations: list[_Run] = []  # per segment, the start and first tokens of its children's runs
    for index, segment in enumerate(layout.segments):
        above = _Run([], None, 0) if segment.parent is None else continuations[segment.parent]
        if segment.start < layout.num_prefilled:
            continuations.append(_Run([], _Run([], None, 0, keeps_state=True, state=0), 1))
            continue
        tokens = [*above.tokens, *range(segment.start - layout.num_prefilled, segment.stop - layout.num_prefilled)]
        run = _Run(tokens, above.start, above.level, num_outputs=segment.length)
        continuations.append(run)
        if index not in leaves and len(tokens) > (0 if run.start is None else 1):
            run.keeps_state = True
            continuations[-1] = _Run([], run, run.level + 1)
        if run.keeps_state or run.num_outputs:
            runs.append(run)
    return runs


def _by_length(runs: Iterable[_Run], min_filled: float) -> Iterator[list[_Run]]:
    """Group runs of similar length, so at least `min_filled` of each batch is tokens."""
    batch: list[_Run] = []
    filled = 0
    for run in sorted(runs, key=lambda run: len(run.tokens), reverse=True):
        if batch and filled + len(run.tokens) < min_filled * (len(batch) + 1) * len(batch[0].tokens):
            yield batch
            batch, filled = [], 0
        batch.append(run)
        filled += len(run.tokens)
    if batch:
        yield batch

"""Replays decoding steps as a CUDA graph, which costs the host one launch instead of one or two thousand.

A step of `StaticBatch` asks the host for nothing and keeps its tensors where they are, so it can be captured: after one
step that runs eagerly, because kernels are compiled and handles made at their first call. Graphs live within one batch.
Between two batches weights may change or move, and nothing is held for the update.

A graph has a fixed number of rows. When many have ended, the others are moved together and captured anew. Numbers of
rows are rounded up to `bucket`, so that few shapes occur; rows that have ended fill the rest.

Not run on a GPU yet. On CPUs the tests put a recorder of operators in the place of CUDA.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from pl_grouprl.utilities.modes import is_whole

MIN_STEPS = 16
"""Steps below which a capture, which takes as long as a few eager steps, does not pay off."""

MAX_ROWS_KEPT = 3 / 4
"""Rows are moved together only if at most this share of them stays."""

_CAPTURED_HOOKS = ("pl_grouprl.", "transformers.modeling_utils", "transformers.utils.output_capturing")
"""Forward hooks from these modules do nothing that a replay would have to repeat."""

_CAN_CAPTURE: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()
"""Whether a model's steps can be captured, once that was tried."""

_LOGGED_REASONS: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
"""The last reason that was logged for a model."""

_STATE = "a state"


def bucket(count: int) -> int:
    """The number of rows to decode `count` in: powers of two up to 32, multiples of 32 up to 256, then of 64."""
    if count <= 32:
        return 1 << (count - 1).bit_length()
    multiple = 32 if count <= 256 else 64
    return -(-count // multiple) * multiple


def why_not_captured(model: nn.Module) -> str | None:
    """Why a step of a model cannot be captured as a graph; None if nothing is known against it."""
    if threading.current_thread() is not threading.main_thread():
        return "they run during updates, whose memory the allocator could not free during a capture"
    if not is_whole(model):
        return "the model's weights are sharded or quantized, and may be at other addresses in each step"
    if len({weight.device for weight in model.parameters()}) > 1:
        return "the model's weights are on several devices"
    for name, module in model.named_modules():
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
            if not str(getattr(hook, "__module__", None)).startswith(_CAPTURED_HOOKS):
                return f"{name or type(model).__name__} has a forward hook, which a graph would not call"
    return None


def make_graph(
    model: nn.Module, device: torch.device, steps: int, states: Callable[[], Sequence[Tensor]]
) -> StepGraph | None:
    """What runs the steps of a batch; None if they have to run eagerly. The log says why, once per model.

    Args:
        model: The model.
        device: Its device.
        steps: Maximum number of steps of the batch.
        states: Returns what the model changes in a step, besides its buffers.
    """
    if device.type not in CAPTURES or steps < MIN_STEPS or not _CAN_CAPTURE.get(model, True):
        return None
    reason = why_not_captured(model)
    if reason is None:
        return StepGraph(model, CAPTURES[device.type](device), states)
    if _LOGGED_REASONS.get(model) != reason:
        _LOGGED_REASONS[model] = reason
        rank_zero_info(f"Rollouts run without a CUDA graph, which would be faster: {reason}.")
    return None


class StepGraph:
    """Runs the steps of one batch: the first of each number of rows eagerly, further ones as replays.

    For a model's first graph, two steps run eagerly. Their states must have the same addresses, and the capture must
    run the operators of the second step with the same shapes and host values. Otherwise a replay would repeat a stale
    number, such as a position, or read a state that has moved.

    Args:
        model: The model.
        capture: Captures on the model's device.
        states: See `make_graph`.
    """

    def __init__(self, model: nn.Module, capture: CUDACapture, states: Callable[[], Sequence[Tensor]]) -> None:
        self._model, self._capture, self._states = model, capture, states
        self._compares = model not in _CAN_CAPTURE
        self._before: list[tuple[str, Any]]
        self._failed = False
        self.restart()

    def restart(self) -> None:
        """Start over, after tensors have moved or changed their shapes."""
        self._captured, self._eager_steps = False, 2 if self._compares else 1
        self._before = []

    def rows_to_keep(self, rows: int, live: int, steps_left: int) -> int:
        """How many of a batch's rows to continue with; `live` of them have not ended."""
        if self._failed:
            return live
        size = bucket(live)
        return size if size <= MAX_ROWS_KEPT * rows and steps_left >= MIN_STEPS else rows

    def run(self, step: Callable[[], None]) -> None:
        """Run a step, or its replay."""
        if self._eager_steps and not self._failed:
            self._eager_steps -= 1
            before, self._before = self._before, self._traced(self._capture.warm_up, step)
            # Checked before capturing: a capture runs no kernels, so a state that it allocated would hold garbage.
            if before and [e for e in before if e[0] == _STATE] != [e for e in self._before if e[0] == _STATE]:
                self._give_up(RuntimeError(f"{_STATE} gets another address in each step"))
            return
        if not (self._captured or self._failed):
            self._try_capture(step)
        if self._captured:
            self._capture.replay()
        else:
            step()

    def _try_capture(self, step: Callable[[], None]) -> None:
        """Capture a step; if that fails, steps of this model run eagerly from now on."""
        try:
            now = self._traced(self._capture.capture, step)
            if now != self._before:
                changed = next((one[0] for one, other in zip(now, self._before, strict=False) if one != other), _STATE)
                raise RuntimeError(f"{changed} gets other shapes, addresses or numbers from the host in each step")
        except Exception as error:
            self._give_up(error)
        else:
            self._captured, self._compares, _CAN_CAPTURE[self._model] = True, False, True

    def _give_up(self, error: Exception) -> None:
        """Run steps eagerly from now on."""
        self._failed = True
        if not isinstance(error, torch.OutOfMemoryError):  # which another batch may not meet
            _CAN_CAPTURE[self._model] = False
        rank_zero_warn(f"Rollouts go on without a CUDA graph, which would be faster, because capture failed: {error}")

    def _traced(self, run: Callable[[Callable[[], None]], None], step: Callable[[], None]) -> list[tuple[str, Any]]:
        """Warm up or capture; returns what has to be the same in both, if steps are to be compared."""
        trace = Trace()
        if not self._compares:
            run(step)
            return []

        def traced() -> None:
            trace.entries.clear()  # of a capture that ran out of memory
            with trace:
                step()

        run(traced)
        held = (*self._model.buffers(), *self._states())
        return [*trace.entries, *((_STATE, tensor.data_ptr()) for tensor in held)]


class Trace(TorchDispatchMode):
    """Records every operator with shapes, strides and numbers.

    Attributes:
        entries: One per operator.
    """

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[tuple[str, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator."""
        out = func(*args, **(kwargs or {}))
        if func is not torch.ops.aten.detach.default:  # which factories add where another mode is active
            self.entries.append((str(func), _described((args, kwargs, out))))
        return out


def _described(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype
    if isinstance(value, list | tuple):
        return [_described(one) for one in value]
    if isinstance(value, dict):
        return {name: _described(one) for name, one in value.items()}
    return repr(value)


class CUDACapture:
    """Captures steps of one batch as CUDA graphs, all in memory that is freed with this object.

    One stream of the process captures: cuBLAS has a workspace per stream, which graphs go on to use. The graphs stay
    until the batch ends, because dropping one could free the workspace that others use (pytorch#193402). Other threads
    may use the device meanwhile (`thread_local`). `torch.cuda.graph` would empty the allocator's cache each time.

    Args:
        device: The model's device.
    """

    def __init__(self, device: torch.device) -> None:
        self._graphs: list[torch.cuda.CUDAGraph] = []  # before the pool, whose memory is freed if no graph is left
        self._pool: torch.cuda.MemPool | None = None
        self._stream = _stream(device)

    def warm_up(self, step: Callable[[], None]) -> None:
        """Run a step on the stream that captures, after all work so far and before all that follows."""
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            step()
        current.wait_stream(self._stream)

    def capture(self, step: Callable[[], None]) -> None:
        """Capture a step without running it."""
        try:
            self._capture(step)
        except torch.OutOfMemoryError:  # a capture needs new memory, and cannot take what the allocator has cached
            torch.cuda.empty_cache()
            self._capture(step)

    def _capture(self, step: Callable[[], None]) -> None:
        with torch.cuda.device(self._stream.device):
            pool = self._pool = self._pool or torch.cuda.MemPool()  # which not every allocator has
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            try:
                graph.capture_begin(pool.id, capture_error_mode="thread_local")  # type: ignore[arg-type]
                step()
                graph.capture_end()
            except BaseException:
                with suppress(RuntimeError):  # says only that the capture failed
                    graph.capture_end()
                with suppress(RuntimeError):  # the allocator would go on to ask the dead graph about its stream
                    torch._C._cuda_endAllocateToPool(self._stream.device_index, pool.id)
                try:
                    graph.pool()
                except RuntimeError:  # it did not end, so it would never give up its share of the pool
                    torch._C._cuda_releasePool(self._stream.device_index, pool.id)
                generator = torch.cuda.default_generators[self._stream.device_index]
                generator.graphsafe_set_state(generator.clone_state())  # else torch 2.11's would go on capturing
                raise
        self._graphs.append(graph)

    def replay(self) -> None:
        """Run the step that was captured last."""
        self._graphs[-1].replay()


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


CAPTURES: dict[str, Callable[[torch.device], Any]] = {"cuda": CUDACapture}
"""What captures steps, by type of device."""

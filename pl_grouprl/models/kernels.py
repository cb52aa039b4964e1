"""The option `kernels` of policies: which kernels run RMSNorm, rotary positions and gated MLPs of a decoder's layers.

liger-kernel's Triton kernels replace `forward` of the modules, on the instance: weights, names in `state_dict` and
other models of the family stay as they are, and adapters, DDP, FSDP and DeepSpeed see the same modules. Copies of the
model run the same kernels. `compile` lets `torch.compile` make kernels for whole layers.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType, MethodType
from typing import Any, Literal

import torch
from torch import Tensor

from pl_grouprl.attention.support import base_of, decoder_layers, find_decoder
from pl_grouprl.checks.parity import Results, comparable_mode, compared_weights, token_logprobs, weighted_sum
from pl_grouprl.utilities import optional
from pl_grouprl.utilities.modes import is_out_of_memory
from pl_grouprl.utilities.tolerances import compare, computing_dtype, gradient_difference, tolerance_of

Kernels = Literal["none", "liger", "compile"]

COMPILER_BACKEND = "inductor"
"""Compiler backend for a layer's graph; torch.compile's default."""


def apply_kernels(model: Any, kernels: Kernels | None) -> None:
    """Let a loaded model run the kernels that its source asks for; by default, leave them as they are.

    Raises:
        ModuleNotFoundError: If liger-kernel is not installed.
        ValueError: If the model or the machine does not support them.
    """
    if kernels == "compile":
        compile_layers(model)
    elif kernels == "liger":
        fuse_layers(model)


def compile_layers(model: Any) -> None:
    """Compile each decoder layer of a transformers model, in place, for sequences of any length.

    Names in its `state_dict` do not change. Everything around the layers (embeddings, head, a vision tower) and deep
    copies of the model stay uncompiled.

    Raises:
        ValueError: If the decoder has no list of `num_hidden_layers` layers.
    """
    from lightning.pytorch.utilities.rank_zero import rank_zero_info

    rank_zero_info("kernels='compile': the first forward and backward passes compile, which may take a minute each.")
    for layer in decoder_layers(model):
        layer.compile(backend=COMPILER_BACKEND, dynamic=True)


# liger-kernel's layers. What is replaced on an instance is recognized by the module of its function, so deep copies can
# be unfused, too.


def fuse_layers(model: Any) -> None:
    """Let a decoder's RMSNorm, rotary positions and gated MLPs run liger-kernel's Triton kernels, in place.

    liger-kernel decides which of them to replace, and how a family rounds. Its loss functions are not used.

    Args:
        model: A transformers model, or a wrapper that PEFT made.

    Raises:
        ModuleNotFoundError: If liger-kernel is not installed.
        ValueError: If there is no GPU, or liger-kernel has no such layers for the model's family.
    """
    optional.require(optional.LIGER_AVAILABLE, "kernels 'liger'", "liger")
    if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError("kernels is 'liger', which needs a GPU; omit it.")
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    decoder = find_decoder(model)
    patch = MODEL_TYPE_TO_APPLY_LIGER_FN.get(decoder.config.model_type)
    options = {} if patch is None else inspect.signature(patch).parameters
    files = [kind.__module__ for kind in type(decoder).__mro__ if kind.__module__.startswith("transformers.models.")]
    if "rms_norm" not in options or not files:
        raise ValueError(f"kernels is 'liger', which has no layers for {decoder.config.model_type!r}; omit it.")
    unused = ("cross_entropy", "fused_linear_cross_entropy", "layer_norm")
    names = vars(sys.modules[files[0]])  # classes and functions of the family's file
    before = dict(names)
    try:
        patch(model=decoder, **{name: False for name in unused if name in options})
        rotary = {name: new for name, new in names.items() if new is not before.get(name) and inspect.isfunction(new)}
    finally:  # undo what liger replaced in the family's file, which other models use
        names.update(before)
    for module in decoder.modules():
        forward: Any = type(module).forward
        for name in ("_get_name", "extra_repr"):  # liger's cannot be pickled
            vars(module).pop(name, None)
        if type(module).__name__.endswith("Experts"):  # liger's time several block sizes, so results are not repeatable
            unfuse_layers(module)
        # Attention calls the rotary function by its global name, which is restored above. So its forward is rebuilt
        # with liger's function among its globals; `__module__` lets `_replaced` find it.
        if rotary.keys() & set(getattr(getattr(forward, "__code__", None), "co_names", ())):
            defined = forward.__name__, forward.__defaults__, forward.__closure__
            rotating = FunctionType(forward.__code__, forward.__globals__ | rotary, *defined)
            rotating.__kwdefaults__ = forward.__kwdefaults__
            rotating.__module__ = next(iter(rotary.values())).__module__
            vars(module)["forward"] = MethodType(rotating, module)


def is_fused(model: Any) -> bool:
    """Whether some of a model's modules run liger-kernel's kernels."""
    return any(True for _ in _replaced(model))


def unfuse_layers(model: Any) -> None:
    """Let a model run its own layers again."""
    for attributes, name in list(_replaced(model)):
        del attributes[name]


@contextmanager
def unfused(model: Any) -> Iterator[None]:
    """Run a model's own layers inside this context."""
    replaced = [(attributes, name, attributes[name]) for attributes, name in _replaced(model)]
    unfuse_layers(model)
    try:
        yield
    finally:
        for attributes, name, method in replaced:
            attributes[name] = method


def _replaced(model: Any) -> Iterator[tuple[dict[str, Any], str]]:
    """Attributes of modules, and the name of liger's method among them."""
    for module in base_of(model).modules():
        for name, value in vars(module).items():
            if isinstance(value, MethodType) and str(value.__func__.__module__).startswith("liger_kernel."):
                yield vars(module), name


def fuse_if_exact(model: Any) -> str | None:
    """Fuse a model's layers, unless the fused layers compute something different.

    Args:
        model: A transformers model with whole weights on its device; one without a head is compared by hidden states.

    Returns:
        Why its layers are not fused; None if they are.
    """
    if not optional.LIGER_AVAILABLE:
        return "it is not installed (pip install 'pl-grouprl[liger]')"
    try:
        if not is_fused(model):
            fuse_layers(model)
        reason = why_not_exact(model)
    except Exception as error:  # of liger-kernel or Triton: the model's own layers work without them
        if is_out_of_memory(error):
            raise
        reason = f"{type(error).__name__}: {error}".rstrip(".")
    if reason is not None:
        unfuse_layers(model)
    return reason


def why_not_exact(model: Any) -> str | None:
    """Compare log-probabilities and gradients of fused layers with the model's own layers.

    For a decoder without a head, its hidden states along one direction are compared.

    Returns:
        The differences; None if rounding explains them.
    """
    generator = torch.Generator().manual_seed(0)
    vocabulary = find_decoder(model).config.vocab_size  # Mllama embeds more tokens than it predicts
    tokens_BT = torch.randint(vocabulary, (2, 24), generator=generator, device="cpu").to(model.device)
    weights = compared_weights(model) if any(weight.requires_grad for weight in model.parameters()) else []

    def run() -> Results:
        output = model(input_ids=tokens_BT, use_cache=False, return_dict=True)
        if "logits" in output:
            values: Tensor = token_logprobs(output.logits[:, :-1], tokens_BT[:, 1:]).flatten()
        else:
            values = output.last_hidden_state.float().mean(dim=-1).flatten() * output.last_hidden_state.shape[-1] ** 0.5
        gradients = torch.autograd.grad(weighted_sum(values), weights, allow_unused=True) if weights else ()
        return values.detach(), gradients

    with comparable_mode(model), torch.set_grad_enabled(bool(weights)):
        found = run()
        with unfused(model):
            expected = run()
    dtype = computing_dtype(model)
    tolerance, difference = tolerance_of(dtype), compare(found[0], expected[0])
    values = difference.largest if dtype in (torch.float32, torch.float64) else difference.mean
    gradient = gradient_difference(found[1], expected[1])
    if values <= tolerance.logprob and gradient <= tolerance.gradient:
        return None
    return (
        f"its log-probabilities differ by {values:.1e} and its gradients by {gradient:.1e} from those of the model's "
        f"own layers (allowed in {dtype}: {tolerance.logprob:.0e} and {tolerance.gradient:.0e})"
    )

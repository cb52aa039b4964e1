"""Activation checkpointing that saves attention: gradients of plain checkpointing, bit for bit; no attention twice."""

import pytest
import torch
from helpers.flash_attention import flash_attention_on_cpu
from helpers.tiny_models import gradients, random_groups, tiny_model, worst_gradient_error
from helpers.versions import needs
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from pl_grouprl.attention import shared_prefix
from pl_grouprl.attention.backends import cascade
from pl_grouprl.attention.backends.kernels import CPUKernel, CUDAKernel, EagerKernel
from pl_grouprl.attention.backends.saved import SAVED, checkpointing_of, once, save_attention
from pl_grouprl.attention.call import PACKED_ROW, LayoutCall
from pl_grouprl.models import kernels as compiling
from pl_grouprl.models.score import score
from pl_grouprl.packing import SharedPrefixLayout, pack

OPTIONS = {
    "off": None,
    "plain": {"use_reentrant": False},
    "attention": {"use_reentrant": False, "context_fn": save_attention},
}
SDPA = {name for name in SAVED if name.startswith("aten")}
SHAPES = [(70, [9, 30, 4]), (20, [40, 2])]


class Calls(TorchDispatchMode):
    """Counts attention: calls of the cascade's kernels, and PyTorch's operators outside them."""

    count, in_kernel = 0, False

    @classmethod
    def ignore_compile_internals(cls):
        return True

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.count += operator.name() in SDPA and not self.in_kernel
        return operator(*args, **kwargs or {})

    def take(self):
        count, self.count = self.count, 0
        return count


@pytest.fixture
def calls(monkeypatch):
    calls = Calls()

    def counted(forward):
        def run(*args):
            calls.count, calls.in_kernel = calls.count + 1, True
            parts = list(forward(*args))
            calls.in_kernel = False
            return parts

        return run

    for kernel in (CPUKernel, CUDAKernel, EagerKernel):
        monkeypatch.setattr(kernel, "forward", counted(kernel.forward))
    return calls


def run(model, options, sharing, backend, calls):
    """Log-probs, gradients, and the number of attention calls in the forward and the backward pass."""
    model.train().zero_grad()
    if options is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    batch = pack(random_groups(0, SHAPES), sharing)
    with shared_prefix(model, backend):
        calls.take()
        with calls:
            logprobs_N = score(model, batch).logprobs_N
            forward = calls.take()
            logprobs_N.sum().backward()
    return logprobs_N.detach(), gradients(model), forward, calls.take()


def check(make, sharing, calls, backend="auto"):
    off, plain, saved = (run(make(), options, sharing, backend, calls) for options in OPTIONS.values())
    assert torch.equal(saved[0], plain[0])
    assert all(torch.equal(saved[1][name], gradient) for name, gradient in plain[1].items())
    assert worst_gradient_error(saved[1], off[1]) < 1e-6
    assert saved[2] == plain[2] == off[2] > 0
    assert (off[3], plain[3], saved[3]) == (0, plain[2], 0)


@pytest.mark.parametrize(
    ("family", "sharing"), [("qwen3", "shared"), ("qwen3", "repeated"), ("gpt2", "shared"), ("mistral", "shared")]
)
def test_gradients_are_those_of_plain_checkpointing(family, sharing, calls):
    options = {"sliding_window": 6} if family == "mistral" else {}
    check(lambda: tiny_model(family, **options), sharing, calls)


@pytest.mark.parametrize("kernel", ["matrix products", "FlashAttention"])
def test_with_the_kernels_of_a_gpu(kernel, calls, monkeypatch):
    """A Triton merge writes without telling autograd, as numpy does."""
    merge = cascade.merge

    def merge_unseen(out, lse, *part):
        merge(torch.from_numpy(out.detach().numpy()), torch.from_numpy(lse.detach().numpy()), *part)

    monkeypatch.setattr(cascade, "merge", merge_unseen)
    if kernel == "FlashAttention":
        monkeypatch.setattr(cascade, "CPUKernel", CUDAKernel)
        monkeypatch.setitem(cascade.LONG_RUN, "cpu", 1)
        monkeypatch.setitem(cascade.CHAIN, "cpu", 0)
        with flash_attention_on_cpu():
            check(lambda: tiny_model("qwen3"), "shared", calls)
    else:
        check(lambda: tiny_model("gemma2"), "shared", calls, "cascade")


@needs("transformers", "5.21")
def test_layers_with_a_state_run_again(calls):
    layers = {"layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2}
    sizes = {"linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
    check(lambda: tiny_model("qwen3_5_text", **layers, **sizes), "shared", calls)


def test_compiled_layers(calls, monkeypatch):
    torch._dynamo.reset()
    monkeypatch.setattr(compiling, "COMPILER_BACKEND", "aot_eager")

    def make():
        model = tiny_model("qwen3", num_hidden_layers=1)
        compiling.compile_layers(model)
        return model

    plain, saved = (run(make(), OPTIONS[name], "shared", "auto", calls) for name in ("plain", "attention"))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    torch._dynamo.reset()
    assert all(torch.equal(saved[1][name], gradient) for name, gradient in plain[1].items())
    assert (plain[3], saved[3]) == (plain[2], 0)


def test_an_output_that_the_model_changes_is_refused():
    def layer(query, changes):
        (out,) = once(lambda: (query.detach() * 2,))
        return query * (out.mul_(3) if changes else out)

    query = torch.ones(4, requires_grad=True)
    PACKED_ROW.set(LayoutCall(SharedPrefixLayout([4], [None])))
    try:
        kept, changed = (checkpoint(layer, query, changes, **OPTIONS["attention"]).sum() for changes in (False, True))
    finally:
        PACKED_ROW.set(None)
    for _ in range(2):
        assert torch.equal(torch.autograd.grad(kept, query, retain_graph=True)[0], torch.full((4,), 2.0))
    with pytest.raises(RuntimeError, match="in place"):
        changed.backward()


# PyTorch's attention on a GPU, and that of packages: the operators on CPU, as stubs that count.

DENSE = ["flash_attention", "efficient_attention", "cudnn_attention", "fused_attention_overrideable"]


@pytest.mark.parametrize("name", DENSE)
def test_operators_of_a_gpu_run_once(name):
    operator, runs = f"_scaled_dot_product_{name}", []
    library = torch.library.Library("aten", "IMPL")

    def forward(query, key, value, *rest, **options):
        runs.append(name)
        empty = query.new_empty(0)
        out, lse = query + key + value, query[..., 0].float()
        return (out, lse, empty, empty) if "efficient" in name else (out, lse, empty, empty, 1, 1, empty, empty, empty)

    def backward(grad, *rest, **options):
        out = next(t for t in rest[3:] if isinstance(t, torch.Tensor) and t.shape == grad.shape)
        assert torch.equal(out, rest[0] + rest[1] + rest[2])
        return (grad, grad, grad, *[None] * ("efficient" in name or "override" in name))

    library.impl(operator, forward, "CPU")
    library.impl(f"{operator}_backward", backward, "CPU")
    tensors = [torch.randn(1, 2, 5, 8, requires_grad=True) for _ in range(3)]
    more = [None, True] if name in ("efficient_attention", "cudnn_attention") else []

    def layer(*tensors):
        return getattr(torch.ops.aten, operator)(*(tensor * 2 for tensor in tensors), *more)[0].sin()

    try:
        checkpoint(layer, *tensors, **OPTIONS["attention"]).sum().backward()
        assert runs == [name]
        checkpoint(layer, *tensors, **OPTIONS["plain"]).sum().backward()
        assert runs == [name] * 3
    finally:
        library._destroy()


@pytest.mark.parametrize("name", ["flash_attn::_flash_attn_varlen_forward", "flash_attn_3::_flash_attn_forward"])
def test_operators_of_packages_run_once(name):
    runs = []
    namespace, operator = name.split("::")
    library = torch.library.Library(namespace, "FRAGMENT")
    library.define(f"{operator}(Tensor query) -> (Tensor, Tensor)")
    library.impl(operator, lambda query: (runs.append(name), query.exp(), query[..., 0] + 0)[1:], "CPU")

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx, query):
            out, lse = getattr(getattr(torch.ops, namespace), operator)(query)
            ctx.save_for_backward(out, lse)
            return out

        @staticmethod
        def backward(ctx, grad):
            return grad * ctx.saved_tensors[0]

    query = torch.randn(3, 4, requires_grad=True)
    try:
        checkpoint(lambda query: Attention.apply(query * 1).sin(), query, **OPTIONS["attention"]).sum().backward()
    finally:
        library._destroy()
    assert runs == [name]
    torch.testing.assert_close(query.grad, query.exp().cos() * query.exp())


def test_the_names_are_pytorchs():
    import torch.nn.attention.varlen

    for name in SAVED:
        namespace, operator = name.split("::")
        assert namespace.startswith("flash_attn") or hasattr(getattr(torch.ops, namespace), operator)


def test_how_a_model_was_set():
    model = tiny_model("qwen3")
    for name, mode in [("off", False), ("plain", True), ("attention", "attention")]:
        if OPTIONS[name]:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=OPTIONS[name])
        assert checkpointing_of(model) == mode

"""Each kernel against attention by its definition: a dense mask over the packed tokens, and autograd.

Legend: Q query tokens of a call, M key tokens of a call, H query heads, K key/value heads, D head size of queries and
keys, E head size of values.
"""

import random
from functools import cache
from math import sqrt

import pytest
import torch
from helpers.flash_attention import flash_attention_on_cpu

from pl_grouprl.attention.backends import kernels as eager
from pl_grouprl.attention.backends import kernels as runs
from pl_grouprl.attention.backends.cascade import CascadePlan, cascade_backward, cascade_forward
from pl_grouprl.attention.backends.kernels import CPUKernel, CUDAKernel, EagerKernel, VarlenCall

SCALE = 0.5
CPU = torch.device("cpu")
CAP = 1.5  # small enough to bend most scores of these tests
HEADS = [(4, 4), (4, 2), (4, 1)]
TOLERANCE = {torch.float64: 1e-11, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


# The oracle ---------------------------------------------------------------------------------------------------------


@cache
def visible(call):
    """Which keys each query sees, shape [Q, M], from the words of `VarlenCall`."""
    seen = torch.zeros(sum(call.query_lens), sum(call.key_lens), dtype=torch.bool)
    query, first_key = 0, 0
    for n, m in zip(call.query_lens, call.key_lens, strict=True):
        for i in range(n):
            stop = i + m - n + 1 if call.causal else m
            start = 0 if call.window is None else max(0, stop - call.window)
            seen[query, first_key + start : first_key + stop] = True
            query += 1
        first_key += m
    return seen


def dense(query, key, value, seen, softcap=None):
    """Output [Q, H, E] and log-sum-exp [H, Q], differentiable."""
    heads = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(heads, dim=1), value.repeat_interleave(heads, dim=1)
    scores = torch.einsum("qhd,khd->hqk", query, key) * SCALE
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen.to(scores.device), float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), value), scores.logsumexp(-1)


def dense_with_gradients(tensors, grad, seen, softcap=None):
    wide = [tensor.detach().double().requires_grad_() for tensor in tensors]
    out, lse = dense(*wide, seen, softcap)
    return [out.detach(), lse.detach(), *torch.autograd.grad(out, wide, grad.double())]


def relative_error(actual, expected):
    """Norm of the difference over that of what is expected, which counts as at least 0.1 for each element."""
    expected = expected.double()
    return ((actual.double() - expected).norm() / max(expected.norm(), 0.1 * sqrt(expected.numel()))).item()


@pytest.fixture
def kernel(request):
    if not isinstance(request.param, CUDAKernel):
        yield request.param
        return
    with flash_attention_on_cpu():
        yield request.param


every_kernel = pytest.mark.parametrize(
    "kernel",
    [CPUKernel(SCALE), EagerKernel(SCALE), EagerKernel(SCALE, softcap=CAP), CUDAKernel(SCALE)],
    ids=["cpu", "eager", "softcap", "flash"],
    indirect=True,
)


cpu_kernels = pytest.mark.parametrize(
    "kernel", [CPUKernel(SCALE), EagerKernel(SCALE), EagerKernel(SCALE, softcap=CAP)], ids=["cpu", "eager", "softcap"]
)


# Calls and tensors --------------------------------------------------------------------------------------------------


def random_call(seed):
    """A few runs; every third call is not causal, every other causal one has a tail of keys, most have a window."""
    rng = random.Random(seed)
    query_lens = [rng.choice((1, 2, 3, 5, 9, 20, 33)) for _ in range(rng.randint(1, 7))]
    if seed % 3 == 2:
        return VarlenCall(tuple(query_lens), tuple(rng.choice((1, 4, 30)) for _ in query_lens), causal=False)
    tails = [0 if seed % 2 else rng.choice((0, 1, 3, 30)) for _ in query_lens]
    key_lens = tuple(n + tail for n, tail in zip(query_lens, tails, strict=True))
    return VarlenCall(tuple(query_lens), key_lens, causal=True, window=rng.choice((None, 1, 2, 5, 31, 1000)))


LONG = [
    VarlenCall((700, 3), (700, 3), causal=True, window=40),
    VarlenCall((5, 300), (5, 1500), causal=True, window=900),  # whole tiles of keys are hidden from a query
    VarlenCall((1, 257, 256), (60, 257, 800), causal=True),
    VarlenCall((300, 200, 30), (300, 600, 30), causal=True, window=257),
    VarlenCall((3, 400), (2500, 70), causal=False),
]


def tensors_of(call, heads, dtype=torch.float64, device=CPU, size=8, value_size=8):
    generator = torch.Generator().manual_seed(sum(call.query_lens))
    queries, keys = sum(call.query_lens), sum(call.key_lens)
    shapes = [(queries, heads[0], size), (keys, heads[1], size), (keys, heads[1], value_size)]
    shapes.append((queries, heads[0], value_size))
    *tensors, grad = (torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes)
    return tensors, grad


def run(kernel, tensors, grad, call):
    plan = CascadePlan(call, (), parts_of_query=1, parts_of_key=1)
    out, lse = cascade_forward(*tensors, None, plan, kernel)
    return [out, lse, *gradients(kernel, tensors, grad, out, lse, call)]


def gradients(kernel, tensors, grad, out, lse, call):
    plan = CascadePlan(call, (), parts_of_query=1, parts_of_key=1)
    return cascade_backward(grad, *tensors, None, out, lse, plan, kernel)[:3]


def check(kernel, call, heads, dtype=torch.float64, device=CPU, **sizes):
    tensors, grad = tensors_of(call, heads, dtype, device, **sizes)
    actual = run(kernel, tensors, grad, call)
    expected = dense_with_gradients(tensors, grad, visible(call), getattr(kernel, "softcap", None))
    assert actual[1].dtype == torch.promote_types(dtype, torch.float32)
    for one, other in zip(actual, expected, strict=True):
        assert one.shape == other.shape
        assert relative_error(one, other) < TOLERANCE[dtype]
    for one, tensor in zip(actual[2:], tensors, strict=True):
        assert one.dtype == tensor.dtype == actual[0].dtype


# On CPU -------------------------------------------------------------------------------------------------------------


@every_kernel
@pytest.mark.parametrize("seed", range(12))
def test_random_runs(kernel, seed):
    check(kernel, random_call(seed), HEADS[seed % len(HEADS)])


@every_kernel
@pytest.mark.parametrize("call", LONG, ids=range(len(LONG)))
def test_long_runs(kernel, call):
    check(kernel, call, (2, 1))


@every_kernel
def test_every_window_up_to_beyond_the_length(kernel):
    for window in (1, 2, 7, 8, 9, 50):
        check(kernel, VarlenCall((8, 3, 1, 8), (8, 8, 8, 40), causal=True, window=window), (4, 2))


@cpu_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("call", [random_call(0), random_call(3), random_call(5), *LONG[:2]], ids=range(5))
def test_dtypes(kernel, dtype, call):
    check(kernel, call, (4, 2), dtype)


@pytest.mark.parametrize("softcap", [None, CAP])
@pytest.mark.parametrize("value_size", [3, 16])
def test_values_of_another_head_size(softcap, value_size):
    for seed in range(6):
        check(EagerKernel(SCALE, softcap), random_call(seed), HEADS[seed % 3], value_size=value_size)
    check(EagerKernel(SCALE, softcap), LONG[0], (2, 2), torch.float16, value_size=value_size)


@every_kernel
@pytest.mark.parametrize(("window", "heads"), [(None, (4, 4)), (1, (4, 2)), (4, (4, 1)), (12, (4, 2))], ids=str)
def test_shares_of_two_calls_add_up(kernel, heads, window):
    """Each call is given the output and log-sum-exp over the keys of both, as the cascade gives them."""
    own = VarlenCall((5, 1, 9), (5, 3, 20), causal=True, window=window)
    more = VarlenCall((5, 1, 9), (4, 2, 11), causal=False)
    tensors, grad = tensors_of(own, heads)
    (_, more_key, more_value), _ = tensors_of(more, heads)
    query, key, value = tensors
    both = query, torch.cat([key, more_key]), torch.cat([value, more_value])
    seen = torch.cat([visible(own), visible(more)], dim=1)
    out, lse, *expected = dense_with_gradients(both, grad, seen, getattr(kernel, "softcap", None))

    first = gradients(kernel, (query, key, value), grad, out, lse, own)
    second = gradients(kernel, (query, more_key, more_value), grad, out, lse, more)
    actual = first[0] + second[0], torch.cat([first[1], second[1]]), torch.cat([first[2], second[2]])
    for one, other in zip(actual, expected, strict=True):
        assert relative_error(one, other) < 1e-11


@cpu_kernels
@pytest.mark.parametrize("window", [None, 6])
def test_a_run_with_nan_does_not_affect_others(kernel, window):
    call = VarlenCall((5, 6, 7), (5, 9, 12), causal=True, window=window)
    tensors, grad = tensors_of(call, (4, 2))
    before = run(kernel, tensors, grad, call)
    for tensor, place in zip((*tensors, grad), (slice(5, 11), slice(5, 14), slice(5, 14), slice(5, 11)), strict=True):
        tensor[place] = float("nan")
    after = run(kernel, tensors, grad, call)
    for number, (one, other) in enumerate(zip(before, after, strict=True)):
        one, other = (tensor.t() if number == 1 else tensor for tensor in (one, other))
        stop = 11 if number < 3 else 14
        assert torch.equal(one[:5], other[:5])
        assert torch.equal(one[stop:], other[stop:])


@cpu_kernels
def test_unseen_keys_have_zero_gradient(kernel):
    call = VarlenCall((2, 3), (50, 70), causal=True, window=4)
    tensors, grad = tensors_of(call, (2, 1))
    unseen = ~visible(call).any(0)
    assert unseen.sum() == 50 - 5 + 70 - 6
    for gradient in run(kernel, tensors, grad, call)[3:]:
        assert (gradient[unseen] == 0).all()


@cpu_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_changes_nothing(kernel, dtype):
    call = random_call(0)
    tensors, grad = tensors_of(call, (4, 2), dtype)
    expected = run(kernel, tensors, grad, call)
    with torch.autocast("cpu", torch.bfloat16):
        actual = run(kernel, tensors, grad, call)
    assert all(map(torch.equal, actual, expected))


def test_the_limit_of_scores_in_memory_holds(monkeypatch):
    call = VarlenCall((3, 300, 200), (3, 300, 600), causal=True, window=257)
    tensors, grad = tensors_of(call, (4, 2))
    whole = run(EagerKernel(SCALE), tensors, grad, call)
    monkeypatch.setattr(eager, "MAX_SCORES", 2**12)
    sizes = [
        block.queries.length * block.keys.length * 4
        for block in EagerKernel(SCALE).blocks(tensors[0], call)
        if isinstance(block.queries.index, slice)
    ]
    assert len(sizes) > 100
    assert max(sizes) <= 2**12
    for one, other in zip(run(EagerKernel(SCALE), tensors, grad, call), whole, strict=True):
        torch.testing.assert_close(one, other)


# The plan of dense batches ------------------------------------------------------------------------------------------


def pairs_of(blocks):
    return sum(
        block.queries.length * block.keys.length * (1 if isinstance(block.keys.index, slice) else len(block.keys.index))
        for block in blocks
    )


def test_rollouts_with_tails_share_few_batches():
    same = VarlenCall((20,) * 64, (50,) * 64, causal=True, window=31)
    assert len(runs.dense_blocks(same, CPU, plain_causal=True)) == 1
    rng = random.Random(0)
    lengths = [rng.randint(10, 60) for _ in range(64)]
    uneven = VarlenCall(tuple(lengths), tuple(n + 30 for n in lengths), causal=True, window=31)
    blocks = runs.dense_blocks(uneven, CPU, plain_causal=True)
    assert len(blocks) <= 12
    assert pairs_of(blocks) < 3 * sum(n * (n + 30) for n in lengths)


def test_a_batch_holds_no_more_pairs_than_allowed():
    call = VarlenCall((100,) * 50, (1000,) * 50, causal=True)
    for block in runs.dense_blocks(call, CPU, plain_causal=True):
        assert pairs_of([block]) <= runs.BATCH


@pytest.mark.parametrize("window", [1, 64, 1024])
def test_work_under_a_window_grows_with_length_times_window(window):
    call = VarlenCall((8192,), (8192,), causal=True, window=window)
    assert pairs_of(runs.dense_blocks(call, CPU, plain_causal=True)) <= 8192 * (window + runs.PIECE)


def test_a_window_that_hides_nothing_needs_no_mask():
    call = VarlenCall((7, 200), (7, 200), causal=True, window=200)
    assert call.effective_window is None
    assert all(block.hidden() is None for block in runs.dense_blocks(call, CPU, plain_causal=True))
    assert all(block.plain_causal for block in runs.dense_blocks(call, CPU, plain_causal=True))


# On a GPU -----------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("call", [*map(random_call, range(6)), *LONG], ids=range(6 + len(LONG)))
def test_flash_attention_on_gpu(call, dtype):
    for heads in HEADS:
        check(CUDAKernel(SCALE), call, heads, dtype, torch.device("cuda"), size=64, value_size=64)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("softcap", [None, CAP])
@pytest.mark.parametrize("call", [*map(random_call, range(6)), *LONG], ids=range(6 + len(LONG)))
def test_eager_on_gpu(call, softcap, dtype):
    for heads in HEADS:
        check(EagerKernel(SCALE, softcap), call, heads, dtype, torch.device("cuda"), value_size=16)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "kernel",
    [CUDAKernel(SCALE), EagerKernel(SCALE), EagerKernel(SCALE, softcap=CAP)],
    ids=["flash", "eager", "softcap"],
)
def test_no_host_synchronization_once_a_call_is_planned(kernel):
    call = VarlenCall((5, 1, 300), (9, 3, 400), causal=True, window=40)
    tensors, grad = tensors_of(call, (4, 2), torch.bfloat16, torch.device("cuda"), size=64, value_size=64)
    run(kernel, tensors, grad, call)
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(kernel, tensors, grad, call)
    finally:
        torch.cuda.set_sync_debug_mode("default")

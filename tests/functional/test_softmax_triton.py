"""The Triton kernels, in Triton's interpreter, against PyTorch's passes and a float64 oracle; launches per block."""

import os
import subprocess
import sys
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pl_grouprl.functional import logprobs
from pl_grouprl.functional.logprobs import DEVICE_LOGITS, block_width, token_scores

COMPARE = """
import torch
from pl_grouprl.functional import logprobs, softmax, softmax_triton
from pl_grouprl.functional.logprobs import token_scores
from pl_grouprl.functional.softmax import LogitsScores, ScoreOptions

torch.manual_seed(0)
softmax_triton._WIDTH = 32
N = 4


def values_and_gradients(kernels, leaves, score, options, upstream):
    softmax.fused = lambda block: kernels
    leaves = [leaf.clone().requires_grad_() for leaf in leaves]
    scores = score(*leaves)
    loss = (scores[0] * upstream).sum()
    if options.entropy_grad:
        loss = loss + (scores[1] * upstream.flip(0)).sum()
    return [score for score in scores[:3] if score is not None], torch.autograd.grad(loss, leaves)


# Any head: its logits are one block.
for dtype in (torch.float32, torch.bfloat16):
    tolerance = {"atol": 1e-6, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 1e-5, "rtol": 1e-2}
    for width in (1, 32, 77):
        for temperature in (1.0, 0.7):
            logits = (4 * torch.randn(N, width)).to(dtype)
            targets = torch.randint(width, (N,))
            if width == 77:
                logits[:, 40] = -torch.inf
                targets[targets == 40] += 1
            upstream = torch.randn(N)
            for entropy, entropy_grad in ((False, False), (True, False), (True, True)):
                options = ScoreOptions(temperature, entropy, entropy_grad, entropy)
                score = lambda leaf: LogitsScores.apply(leaf, targets, torch.zeros(N, 1), options)
                ours = values_and_gradients(softmax_triton, [logits], score, options, upstream)
                theirs = values_and_gradients(None, [logits], score, options, upstream)
                torch.testing.assert_close(ours[0], theirs[0], atol=1e-5, rtol=1e-5)
                torch.testing.assert_close(ours[1], theirs[1], **tolerance)

# A plain head: blocks of 20, 40 and all 77 token ids.
targets = torch.randint(77, (N,))
hidden, weight, upstream = torch.randn(N, 8), 2 * torch.randn(77, 8), torch.randn(N)
for block in (20, 40, 128):
    logprobs.BLOCK = block
    for temperature, entropy, entropy_grad in ((1.0, False, False), (0.7, True, False), (2.5, True, True)):
        options = ScoreOptions(temperature, entropy, entropy_grad, entropy)
        for frozen in (False,) if entropy_grad else (False, True):

            def score(hidden, *weights):
                (matrix,) = weights or (weight.to(hidden.dtype),)
                asked = options._asdict()
                return token_scores(hidden, targets, None, weight_VD=matrix, chunk_size=2, **asked)

            leaves = [hidden] if frozen else [hidden, weight]
            ours = values_and_gradients(softmax_triton, leaves, score, options, upstream)
            theirs = values_and_gradients(None, leaves, score, options, upstream)
            oracle = values_and_gradients(None, [leaf.double() for leaf in leaves], score, options, upstream.double())
            for other in (theirs, oracle):
                other = [[tensor.float() for tensor in tensors] for tensors in other]
                torch.testing.assert_close([*map(list, ours)], other, atol=2e-5, rtol=2e-5)
"""


def test_the_kernels_in_the_interpreter():
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", COMPARE], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


class _Operators(TorchDispatchMode):
    """Counts operators that launch a kernel, by name."""

    def __init__(self):
        super().__init__()
        self.names = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view and "empty" not in func.name():
            self.names[func.name()] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("frozen", [False, True])
def test_a_block_is_one_matrix_product_and_one_launch(frozen, monkeypatch):
    """The other operators, of the beginning and the end, are as many for 4 blocks as for 40."""
    launches = Counter()
    kernels = SimpleNamespace(
        add_rows=lambda *args: launches.update(["add"]), write_rows=lambda *args: launches.update(["write"])
    )
    monkeypatch.setattr("pl_grouprl.functional.softmax.fused", lambda block: kernels)
    hidden, weight = torch.randn(8, 4, requires_grad=True), torch.randn(400, 4, requires_grad=not frozen)
    counts = []
    for width in (100, 10):
        monkeypatch.setattr(logprobs, "BLOCK", width)
        for grad in (False, True):
            launches.clear()
            options = {"chunk_size": 2, "entropy": True, "score_norm": True}
            with _Operators() as forward, torch.set_grad_enabled(grad):
                scores = token_scores(hidden, torch.arange(8), None, weight_VD=weight, **options)
            with _Operators() as backward:
                if grad:
                    torch.autograd.grad(scores.logprobs_N, hidden if frozen else (hidden, weight), torch.ones(8))
            counts.append((forward.names, backward.names, launches.copy()))
    (inference, _, few), (train, back, few_all), (inference_40, _, many), (train_40, back_40, many_all) = counts
    assert (few["add"], many["add"], few_all["add"], many_all["add"]) == (4, 40, 4, 40)
    assert inference_40 - inference == Counter({"aten::mm.out": 36})
    if frozen:
        names = ("aten::mm.out", "aten::mm", "aten::mul_.Tensor", "aten::add_.Tensor")  # the rows are summed, too
        assert train_40 - train == Counter(dict.fromkeys(names, 36))
    else:
        assert train_40 - train == Counter({"aten::mm.out": 36})
        assert (few_all["write"], many_all["write"]) == (4, 40)
        # products for hidden states, and for the weight with those for logits of which 3 and 30 blocks were not kept
        assert back_40 - back == Counter({"aten::addmm_": 36, "aten::mm.out": 36 + 27})


def test_blocks_on_a_gpu_are_wider_for_fewer_tokens():
    limit = 512 * 151_936
    assert block_width("cpu", 1, limit) == logprobs.BLOCK
    widths = [block_width("cuda", tokens, limit) for tokens in (0, 100, 1024, 8192, 100_000)]
    assert widths == [DEVICE_LOGITS, 331_776, 32_768, 4096, 4096]
    assert block_width("cuda", 64, 4 * 151_936) == 8192  # 64 * 8192 logits, of 607,744 that may exist

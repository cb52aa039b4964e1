"""The Triton kernels against PyTorch's passes, in Triton's interpreter."""

import os
import subprocess
import sys

import pytest

COMPARE = """
import torch
from pl_grouprl.functional import softmax as running_softmax
from pl_grouprl.functional import softmax as softmax_scores
from pl_grouprl.functional import softmax_triton
from pl_grouprl.functional.softmax import LogitsScores, ScoreOptions

torch.manual_seed(0)
softmax_triton._WIDTH = 32
N = 6


def by(kernels, logits, targets, options, upstream):
    for module in (running_softmax, softmax_scores):
        module.fused = lambda block: kernels
    leaf = logits.clone().requires_grad_()
    scores = LogitsScores.apply(leaf, targets, torch.zeros(N, 1), options)
    loss = (scores[0] * upstream).sum()
    if options.entropy_grad:
        loss = loss + (scores[1] * upstream.flip(0)).sum()
    return scores[:3], torch.autograd.grad(loss, leaf)[0]


for dtype in (torch.float32, torch.bfloat16):
    tolerance = {"atol": 1e-6, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 1e-5, "rtol": 1e-2}
    for width in (1, 7, 32, 77):
        for temperature in (1.0, 0.7):
            logits = (4 * torch.randn(N, width)).to(dtype)
            targets = torch.randint(width, (N,))
            if width > 7:
                logits[:, 40 % width] = -torch.inf
                targets[targets == 40 % width] += 1
            upstream = torch.randn(N)
            for entropy, entropy_grad in ((False, False), (True, False), (True, True)):
                options = ScoreOptions(temperature, entropy, entropy_grad, entropy)
                ours = by(softmax_triton, logits, targets, options, upstream)
                theirs = by(None, logits, targets, options, upstream)
                torch.testing.assert_close(ours[0], theirs[0], atol=1e-5, rtol=1e-5)
                torch.testing.assert_close(ours[1], theirs[1], **tolerance)

            for start in (0, 5):  # targets of other blocks
                where = running_softmax.Targets(targets, start, width)
                both = []
                for kernels in (softmax_triton, None):
                    running_softmax.fused = lambda block: kernels
                    block = logits.clone()
                    sums, own = running_softmax.sum_block(block, where, ScoreOptions(temperature), keep_exp=True)
                    both.append((sums.max_N, sums.exp_N, own, block))
                torch.testing.assert_close(both[0], both[1], atol=1e-6, rtol=1e-2 if dtype != torch.float32 else 1e-5)
"""


def test_the_kernels_in_the_interpreter():
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", COMPARE], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

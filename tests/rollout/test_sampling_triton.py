"""The Triton sampler against PyTorch's passes, in Triton's interpreter."""

import os
import subprocess
import sys

import pytest
import torch

from pl_grouprl.rollout.hf.sampling import sample_tokens, uniforms
from pl_grouprl.types import SamplingConfig

COMPARE = """
import math
import torch
from unittest import mock
from pl_grouprl.rollout.hf import sampling, sampling_triton
from pl_grouprl.rollout.hf.sampling import sample_tokens, uniforms
from pl_grouprl.types import SamplingConfig

torch.manual_seed(0)
sampling_triton._WIDTH = 32
rows = [(number, 0) for number in range(6)]


def compare(logits, temperature, numbers):
    expected = sample_tokens(logits, SamplingConfig(temperature=temperature), numbers)
    found = sampling_triton.sample_triton(logits, temperature or 1.0, None if temperature == 0 else numbers)
    assert found[0].dtype == torch.int64 and found[1].dtype == torch.float32
    assert found[0].tolist() == expected[0].tolist()
    torch.testing.assert_close(found[1], expected[1], atol=1e-6, rtol=1e-6)
    return found


for dtype in (torch.float32, torch.bfloat16):
    for width in (1, 32, 77):
        for temperature in (1.0, 0.7, 0.0):
            logits = (3 * torch.randn(6, width)).to(dtype)
            if width > 32:
                logits[:, :33] = -math.inf  # a whole block is never drawn
                logits[:, 40] = logits[:, 60] = 6.0  # ties
            compare(logits, temperature, uniforms(width, rows, 0, 1)[:, 0])

# Filters and a penalty, on the path that a GPU takes.
for dtype in (torch.float32, torch.bfloat16):
    for options in ({"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1, "top_k": 20}, {"temperature": 0.7, "top_p": 0.6}):
        for penalty in (1.0, 1.3):
            own = SamplingConfig(**options, repetition_penalty=penalty)
            logits, numbers = (3 * torch.randn(6, 77)).to(dtype), uniforms(7, rows, 0, 1)[:, 0]
            seen = torch.rand(6, 77) < 0.3
            expected = sample_tokens(logits, own, numbers, seen)
            with mock.patch.object(sampling, "_TRITON_DEVICE", "cpu"):
                found = sample_tokens(logits, own, numbers, seen)
            assert found[0].tolist() == expected[0].tolist()
            torch.testing.assert_close(found[1], expected[1], atol=1e-6, rtol=1e-6)

# The ends of the distribution: the first and the last token that has a probability.
logits = torch.randn(2, 77)
logits[:, 0] = logits[:, 76] = -math.inf
found = compare(logits, 1.0, torch.tensor([0.0, 1 - 2.0**-53], dtype=torch.float64))
assert found[0].tolist() == [1, 75]

# Every other column of wider rows; logits that are not numbers.
compare(torch.randn(6, 154)[:, ::2], 1.0, uniforms(9, rows, 0, 1)[:, 0])
for wrong in (math.nan, math.inf):
    logits[0, 50] = wrong
    for numbers in (None, torch.tensor([0.5, 0.5], dtype=torch.float64)):
        tokens, logprobs = sampling_triton.sample_triton(logits, 1.0, numbers)
        assert 0 <= tokens.min() and tokens.max() < 77
        assert logprobs.isfinite().tolist() == [False, True]

# Frequencies of tokens are their probabilities.
logits = torch.tensor([[0.5, 0.25, 0.125, 0.125]]).log().expand(16, 4)
numbers = (torch.arange(16, dtype=torch.float64) + 0.5) / 16
assert sampling_triton.sample_triton(logits, 1.0, numbers)[0].bincount().tolist() == [8, 4, 2, 2]
"""


def test_the_kernel_in_the_interpreter():
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", COMPARE], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_kernel_on_gpu(dtype, temperature):
    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(64, 151_936, generator=generator)).to(dtype)
    numbers = uniforms(0, [(number, 0) for number in range(64)], 0, 1)[:, 0]
    sampling = SamplingConfig(temperature=temperature)
    tokens, logprobs = sample_tokens(logits, sampling, numbers)
    found = [one.cpu() for one in sample_tokens(logits.cuda(), sampling, numbers.cuda())]
    same = found[0] == tokens
    assert same.sum() >= 63  # a number may lie within a rounding error of a boundary
    torch.testing.assert_close(found[1][same], logprobs[same], atol=1e-5, rtol=1e-5)

"""Merging partial attention outputs: against softmax over all keys at once, and the Triton kernel against PyTorch.

Triton runs in its interpreter here, on CPU tensors. That is decided when it is imported, hence a process of its own.

Legend: S tokens, N of them that are merged, H heads, E head size.
"""

import os
import subprocess
import sys

import pytest
import torch

from pl_grouprl.attention.backends.cascade import merge

WHERE = {"all": slice(0, 9), "a slice": slice(3, 8), "an index": torch.tensor([7, 0, 4]), "one": slice(8, 9)}


def softmax_over(scores_HSM, values_HME):
    return (scores_HSM.softmax(-1) @ values_HME).transpose(0, 1), scores_HSM.logsumexp(-1)


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_two_halves_of_the_keys_are_one_softmax(dtype, where):
    torch.manual_seed(0)
    scores, values = 5 * torch.randn(3, 9, 20, dtype=torch.float64), torch.randn(3, 20, 6, dtype=torch.float64)
    out, lse = softmax_over(scores[..., :8], values[:, :8])
    more, more_lse = softmax_over(scores[..., 8:], values[:, 8:])
    expected_out, expected_lse = out.clone(), lse.clone()
    both = softmax_over(scores, values)
    at = WHERE[where]
    expected_out[at], expected_lse[:, at] = both[0][at], both[1][:, at]
    wide = torch.promote_types(dtype, torch.float32)
    out, lse = out.to(dtype), lse.to(wide)
    merge(out, lse, more[at].to(dtype), more_lse[:, at].to(wide), at)
    tolerance = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(out.double(), expected_out, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(lse.double(), expected_lse, atol=1e-5 if wide != dtype else tolerance, rtol=1e-6)


COMPARE = """
import torch
from pl_grouprl.attention.backends.cascade import merge
from pl_grouprl.attention.backends.merge_triton import merge_triton

torch.manual_seed(0)
for dtype, wide_out in ((torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)):
    for heads, size in ((1, 1), (3, 5), (4, 8), (5, 40), (2, 256)):
        for where in (slice(0, 21), slice(4, 11), torch.tensor([20, 0, 7, 5])):
            count = len(range(21)[where]) if isinstance(where, slice) else len(where)
            out = torch.randn(21, heads, size).to(dtype)
            out = out.float() if wide_out else out
            lse = 9 * torch.randn(heads, 21)
            part = torch.randn(heads, count, size).to(dtype).transpose(0, 1)  # not contiguous, as on a strided query
            part_lse = 9 * torch.randn(count, heads).t()
            expected_out, expected_lse = out.clone(), lse.clone()
            merge(expected_out, expected_lse, part, part_lse, where)
            merge_triton(out, lse, part, part_lse, where)
            tolerance = {"atol": 1e-6, "rtol": 1e-6} if out.dtype == torch.float32 else {"atol": 1e-2, "rtol": 1e-2}
            torch.testing.assert_close(out, expected_out, **tolerance)
            torch.testing.assert_close(lse, expected_lse, atol=1e-5, rtol=1e-6)
"""


def test_the_triton_kernel_in_its_interpreter():
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", COMPARE], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

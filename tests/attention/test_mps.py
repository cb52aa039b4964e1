"""Apple's GPUs (mps): the tests marked `mps` run where there is one; the others check what can be checked elsewhere."""

from types import SimpleNamespace

import pytest
import torch
from helpers.forests import attention_by_sequence, random_forest, relative_error
from helpers.tiny_models import repeated_rows, tiny_model
from lightning.pytorch import LightningModule, Trainer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from pl_grouprl import SharedPrefixCallback
from pl_grouprl.attention import shared_prefix
from pl_grouprl.attention.backends import cascade
from pl_grouprl.attention.backends.choice import choose, get_backend
from pl_grouprl.attention.backends.interface import AttentionRule
from pl_grouprl.checks import check_parity
from pl_grouprl.packing import SharedPrefixLayout
from pl_grouprl.utilities.modes import widest_dtype

mps = [pytest.mark.mps, pytest.mark.skipif(not torch.backends.mps.is_available(), reason="needs a GPU of Apple")]
SCALE = 0.3


class Supervised(LightningModule):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def training_step(self, ids, batch_idx):
        return self.model(input_ids=ids, labels=ids).loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class NoFloat64(TorchDispatchMode):
    """Fails at the first operation that reads or makes a float64 tensor, as mps does."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        wide = [own for own in tree_leaves((args, kwargs, out)) if getattr(own, "dtype", None) == torch.float64]
        assert not wide, f"{function} with {[tuple(own.shape) for own in wide]} in float64"
        return out


def parity_on(device, backend, dtype, tolerance):
    """Output and gradients of a random forest on a device, against each sequence alone in float64 on the CPU."""
    forest = random_forest(0, 2)
    generator = torch.Generator().manual_seed(0)
    wide = [torch.randn(1, heads, sum(forest.lengths), 8, generator=generator).to(dtype) for heads in (4, 2, 2)]
    own = [tensor.detach().clone().to(device).requires_grad_() for tensor in wide]
    wide = [tensor.double().requires_grad_() for tensor in wide]
    layout, rule = SharedPrefixLayout(*forest), AttentionRule(SCALE)
    out, expected = get_backend(backend)(*own, layout, rule), attention_by_sequence(*wide, forest, SCALE)
    found = [out, *torch.autograd.grad(out.sum(), own)]
    for one, other in zip(found, [expected, *torch.autograd.grad(expected.sum(), wide)], strict=True):
        assert relative_error(one.cpu(), other) < tolerance


DTYPES = [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)]


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES, ids=["float32", "bfloat16"])
@pytest.mark.parametrize("backend", ["cascade", "reference", "auto"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("mps", marks=mps)])
def test_backends(device, backend, dtype, tolerance, monkeypatch):
    """On the CPU with the same matrix products as on mps."""
    monkeypatch.setattr(cascade, "has_fused_kernel", lambda *tensors: False)
    parity_on(device, backend, dtype, tolerance)


@pytest.mark.parametrize("device", ["cpu", pytest.param("mps", marks=mps)])
def test_whole_model(device, monkeypatch):
    monkeypatch.setattr(cascade, "has_fused_kernel", lambda *tensors: False)
    report = check_parity(tiny_model("qwen3").to(device), backend="auto")
    report.raise_if_failed()


@pytest.mark.parametrize("accelerator", ["cpu", pytest.param("mps", marks=mps)])
def test_callback(accelerator, tmp_path):
    trainer = Trainer(
        max_steps=1, accelerator=accelerator, default_root_dir=tmp_path, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[SharedPrefixCallback()],
    )  # fmt: skip
    trainer.fit(Supervised(tiny_model("qwen3")), DataLoader(repeated_rows(0, [32], 4, 8), batch_size=4))
    assert float(trainer.callback_metrics["prefix/token_ratio"]) == 160 / 64


def test_auto_runs_matrix_products_on_devices_without_a_fused_kernel():
    """As on mps: neither the kernel of the CPU nor FlashAttention, and no FlexAttention."""
    query, key, value = (torch.empty(1, heads, 8, 16, device="meta") for heads in (4, 2, 2))
    assert choose(query, key, value, AttentionRule(SCALE)).name == "cascade"
    assert not cascade.has_fast_kernel(query, key, value, AttentionRule(SCALE))


def test_nothing_on_the_way_of_a_model_is_float64(monkeypatch):
    monkeypatch.setattr(cascade, "has_fused_kernel", lambda *tensors: False)
    model, ids = tiny_model("qwen3"), repeated_rows(0, [32], 4, 8)
    with shared_prefix(model), NoFloat64():
        model(input_ids=ids, labels=ids).loss.backward()
    with pytest.raises(AssertionError, match="in float64"), NoFloat64():
        torch.zeros(2).double()


def test_refusals():
    on_mps = SimpleNamespace(device=torch.device("mps"), requires_grad=False)
    refusal = get_backend("flex").refusal(on_mps, on_mps, on_mps, AttentionRule(SCALE))
    assert refusal == "FlexAttention has neither gradients nor log-sum-exps on mps; use backend 'cascade'."
    assert widest_dtype(on_mps.device) == torch.float32
    assert widest_dtype(torch.device("cpu")) == torch.float64

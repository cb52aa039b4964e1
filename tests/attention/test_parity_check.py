"""The guard itself: it passes where it should, fails where something is broken, and leaves no trace."""

import dataclasses
import math

import pytest
import torch
from helpers.tiny_models import FAMILIES, random_groups, tiny_model

from pl_grouprl.attention import ParityError, cascade, check_parity, choice, patch
from pl_grouprl.attention.parity import TOLERANCES, Tolerance
from pl_grouprl.packing import SharedPrefixLayout
from pl_grouprl.types import Rollout, RolloutGroup

BF16_OR_WIDER = [torch.float64, torch.float32, torch.bfloat16]


@pytest.mark.parametrize("family", FAMILIES)
def test_good_models_pass(family):
    report = check_parity(tiny_model(family))
    report.raise_if_failed()
    assert report.passed
    assert report.max_logprob_difference < 1e-5
    assert report.gradient_difference < 1e-4
    assert report.compared_weights == sum(p.numel() for p in tiny_model(family).parameters())


@pytest.mark.parametrize("dtype", BF16_OR_WIDER, ids=str)
@pytest.mark.parametrize("backend", ["auto", "cascade", "prefix_grouper", "reference"])
def test_dtypes_and_backends(backend, dtype):
    report = check_parity(tiny_model("qwen3", dtype=dtype), backend=backend)
    report.raise_if_failed()
    assert (report.backend, report.dtype, report.tolerance) == (backend, dtype, TOLERANCES[dtype])


def without_prefix(attend):
    """Each rollout sees itself alone."""

    def broken(query, key, value, layout, scale):
        alone = SharedPrefixLayout([segment.length for segment in layout.segments], [None] * len(layout.segments))
        return attend(query, key, value, alone, scale)

    return broken


def with_wrong_scale(attend):
    return lambda query, key, value, layout, scale: attend(query, key, value, layout, scale * 1.05)


def without_gradient_of_the_prefix(attend):
    """Right forward, wrong backward: only gradients can show it."""

    def broken(query, key, value, layout, scale):
        detached = [tensor.clone() for tensor in (key, value)]
        for tensor, source in zip(detached, (key, value), strict=True):
            stop = layout.segments[0].stop
            tensor[:, :, :stop] = source[:, :, :stop].detach()
        return attend(query, *detached, layout, scale)

    return broken


def seeing_the_sibling(attend):
    """Rollouts as a chain: each sees the one before it."""

    def broken(query, key, value, layout, scale):
        parents = [None if s.parent is None else i - 1 for i, s in enumerate(layout.segments)]
        return attend(query, key, value, SharedPrefixLayout([s.length for s in layout.segments], parents), scale)

    return broken


BROKEN = [without_prefix, with_wrong_scale, without_gradient_of_the_prefix, seeing_the_sibling]


@pytest.mark.parametrize(
    ("breakage", "dtype"),
    [
        (breakage, dtype)
        for breakage in BROKEN
        for dtype in BF16_OR_WIDER
        if breakage is not with_wrong_scale or dtype != torch.bfloat16  # 5 % of the scores is rounding in bfloat16
    ],
)
def test_a_broken_backend_fails(monkeypatch, breakage, dtype):
    broken = dataclasses.replace(cascade.CASCADE, attend=breakage(cascade.CASCADE.attend))
    model = tiny_model("qwen3", dtype=dtype)
    with monkeypatch.context() as patched:
        patched.setitem(choice.BACKENDS, "cascade", broken)
        report = check_parity(model, backend="cascade")
    assert not report.passed
    if breakage is without_gradient_of_the_prefix:
        assert report.mean_logprob_difference <= report.tolerance.logprob  # the forward is right
    with pytest.raises(ParityError, match=r"(?s)FAILED.*largest difference.*Train this model with sharing='repeated'"):
        report.raise_if_failed()
    check_parity(model, backend="cascade").raise_if_failed()


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_wrong_positions_fail(monkeypatch, family):
    """Positions that count through the row, as a decoder that ignores `position_ids` would."""
    original = patch.SharedPrefix._packed_row

    def broken(self, kwargs, layout, rows=None):
        return original(self, kwargs, layout, rows) | {"position_ids": torch.arange(layout.num_tokens)[None]}

    monkeypatch.setattr(patch.SharedPrefix, "_packed_row", broken)
    report = check_parity(tiny_model(family))
    assert not report.passed
    assert report.max_logprob_difference > 1e-3


def test_a_nan_is_not_a_pass():
    report = check_parity(tiny_model())
    assert not dataclasses.replace(report, max_logprob_difference=math.nan).passed
    assert not dataclasses.replace(report, gradient_difference=math.nan).passed
    model = tiny_model()
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[0, 0] = math.nan
    assert not check_parity(model).passed


@pytest.mark.parametrize("training", [True, False])
def test_it_leaves_no_trace(training):
    model = tiny_model("gpt2", resid_pdrop=0.3).train(training)
    model.transformer.h[0].eval()
    modes = [module.training for module in model.modules()]
    model.transformer.wte.weight.grad = torch.full_like(model.transformer.wte.weight, 3.0)
    weights = [parameter.clone() for parameter in model.parameters()]
    check_parity(model).raise_if_failed()
    assert [module.training for module in model.modules()] == modes
    assert (model.transformer.wte.weight.grad == 3.0).all()
    assert all(p.grad is None for p in model.parameters() if p is not model.transformer.wte.weight)
    assert all(torch.equal(*pair) for pair in zip(weights, model.parameters(), strict=True))
    assert not model.transformer._forward_pre_hooks
    assert model.config._attn_implementation == "sdpa"


def test_modes_are_restored_after_an_error(monkeypatch):
    model = tiny_model("gpt2", resid_pdrop=0.3).train()
    monkeypatch.setattr(type(model), "forward", lambda *args, **kwargs: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        check_parity(model)
    assert all(module.training for module in model.modules())


def test_no_gradient_is_needed_around_it():
    with torch.no_grad():
        report = check_parity(tiny_model())
        assert not torch.is_grad_enabled()
    assert report.gradient_difference > 0
    report.raise_if_failed()


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_activation_checkpointing(use_reentrant):
    model = tiny_model("llama").train()
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    check_parity(model).raise_if_failed()
    assert model.training


def test_groups_of_ones_own():
    report = check_parity(tiny_model(), random_groups(0, [(50, [10] * 4)]))
    assert report.token_ratio == 240 / 90
    check_parity(tiny_model(), [RolloutGroup([1, 2, 3], [Rollout([])])]).raise_if_failed()


def test_nothing_to_compare_is_refused():
    with pytest.raises(ValueError, match="groups holds no rollout"):
        check_parity(tiny_model(), [])
    with pytest.raises(ValueError, match=r"no parameter that requires a gradient.*unfreeze some"):
        check_parity(tiny_model().requires_grad_(False))


def test_adapters_alone_are_compared():
    model = tiny_model().requires_grad_(False)
    model.model.layers[0].self_attn.v_proj.requires_grad_(True)
    report = check_parity(model)
    report.raise_if_failed()
    assert report.compared_weights == model.model.layers[0].self_attn.v_proj.weight.numel()
    assert report.gradient_difference > 0


def test_the_report_reads_well():
    report = dataclasses.replace(
        check_parity(tiny_model()),
        max_logprob_difference=2e-6,
        mean_logprob_difference=1e-7,
        gradient_difference=3e-6,
        token_ratio=2.5,
        tolerance=Tolerance(1e-4, 1e-3),
    )
    assert str(report) == (
        "parity of shared and repeated prefix: passed (LlamaForCausalLM, backend auto, torch.float32, cpu, "
        "token ratio 2.50)\n"
        "  log-probabilities: largest difference 2.00e-06, mean 1.00e-07 (allowed 1e-04)\n"
        f"  gradients: relative difference 3.00e-06 over {report.compared_weights:,} weights (allowed 1e-03)"
    )
    failed = dataclasses.replace(report, gradient_difference=2e-3)
    assert not failed.passed
    assert ": FAILED (" in str(failed)

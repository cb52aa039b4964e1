"""The parity check itself: it passes where it should, fails where something is broken, and leaves no trace."""

import dataclasses
import math

import pytest
import torch
from helpers.tiny_models import FAMILIES, random_groups, tiny_model

from pl_grouprl.attention import ParityError, UnsupportedModelError, check_parity, patch, shared_prefix
from pl_grouprl.attention.backends import cascade, choice
from pl_grouprl.checks.parity import PaddedParity
from pl_grouprl.packing import SharedPrefixLayout
from pl_grouprl.rollout import HFRolloutEngine
from pl_grouprl.types import Rollout, RolloutGroup, SamplingConfig
from pl_grouprl.utilities.tolerances import TOLERANCES, Tolerance

BF16_OR_WIDER = [torch.float64, torch.float32, torch.bfloat16]


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_the_checks_before_the_first_step_read_few_tokens(family):
    calls = []
    model = tiny_model(family).eval()
    model.get_input_embeddings().register_forward_hook(lambda module, args, output: calls.append(args[0].numel()))
    check_parity(model, padded_rows=False)
    engine = HFRolloutEngine(model)
    with torch.no_grad():
        engine.generate([[3, 4]], SamplingConfig(max_new_tokens=1), num_generations=1, seed=0)
    assert sum(calls) < 800  # whatever the data are; on a GPU, a second
    assert len(calls) < 60


@pytest.mark.parametrize("family", FAMILIES)
def test_good_models_pass(family):
    report = check_parity(tiny_model(family))
    report.raise_if_failed()
    assert report.passed
    assert report.max_logprob_difference < 1e-5
    assert report.gradient_difference < 1e-4
    assert report.compared_weights == sum(p.numel() for p in tiny_model(family).parameters())


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [
        ("auto", torch.float64),
        ("cascade", torch.float32),
        ("prefix_grouper", torch.bfloat16),
        ("reference", torch.float64),
    ],
    ids=str,
)
def test_dtypes_and_backends(backend, dtype):
    report = check_parity(tiny_model("qwen3", dtype=dtype), backend=backend)
    report.raise_if_failed()
    assert (report.backend, report.dtype, report.tolerance) == (backend, dtype, TOLERANCES[dtype])


def test_a_backend_for_prompts_alone_takes_rollouts_that_begin_alike():
    groups = [RolloutGroup([1, 2], [Rollout([*range(2, 40), end]) for end in (5, 6)])]
    check_parity(tiny_model("qwen3"), groups, backend="prefix_grouper").raise_if_failed()


def looked_at(model, backend="auto"):
    """A model that passed the layer check before anything broke."""
    with shared_prefix(model, backend):
        return model


def without_prefix(attend):
    """Each rollout sees itself alone."""

    def broken(query, key, value, layout, rule):
        alone = SharedPrefixLayout([segment.length for segment in layout.segments], [None] * len(layout.segments))
        return attend(query, key, value, alone, rule)

    return broken


def with_wrong_scale(attend):
    def broken(query, key, value, layout, rule):
        return attend(query, key, value, layout, dataclasses.replace(rule, scale=rule.scale * 1.05))

    return broken


def without_gradient_of_the_prefix(attend):
    """Right forward, wrong backward: only gradients can show it."""

    def broken(query, key, value, layout, rule):
        detached = [tensor.clone() for tensor in (key, value)]
        for tensor, source in zip(detached, (key, value), strict=True):
            stop = layout.segments[0].stop
            tensor[:, :, :stop] = source[:, :, :stop].detach()
        return attend(query, *detached, layout, rule)

    return broken


def seeing_the_sibling(attend):
    """Rollouts as a chain: each sees the one before it."""

    def broken(query, key, value, layout, rule):
        parents = [None if s.parent is None else i - 1 for i, s in enumerate(layout.segments)]
        return attend(query, key, value, SharedPrefixLayout([s.length for s in layout.segments], parents), rule)

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
    model = looked_at(tiny_model("qwen3", dtype=dtype), "cascade")
    with monkeypatch.context() as patched:
        patched.setitem(choice.BACKENDS, "cascade", broken)
        report = check_parity(model, backend="cascade")
        if breakage is not without_gradient_of_the_prefix and dtype != torch.bfloat16:
            with pytest.raises(UnsupportedModelError, match=r"states of a few tokens differ .* by a relative \d"):
                check_parity(tiny_model("qwen3", dtype=dtype), backend="cascade")
    assert not report.passed
    if breakage is without_gradient_of_the_prefix:
        assert report.mean_logprob_difference <= report.tolerance.logprob  # the forward is right
    with pytest.raises(
        ParityError, match=r"(?s)FAILED.*log-probabilities.*Train this model with sharing.mode='repeated'"
    ):
        report.raise_if_failed()
    check_parity(model, backend="cascade").raise_if_failed()


@pytest.mark.parametrize("family", ["gpt2"])
def test_wrong_positions_fail(monkeypatch, family):
    """Positions that count through the row, as a decoder that ignores `position_ids` would."""
    original = patch.SharedPrefix._as_packed_row

    def broken(self, kwargs, layout, rows=None):
        return original(self, kwargs, layout, rows) | {"position_ids": torch.arange(layout.num_tokens)[None]}

    model = looked_at(tiny_model(family))
    monkeypatch.setattr(patch.SharedPrefix, "_as_packed_row", broken)
    report = check_parity(model)
    assert not report.passed
    assert report.max_logprob_difference > 1e-3
    with pytest.raises(UnsupportedModelError, match="hidden states of a few tokens differ"):
        check_parity(tiny_model(family))


def test_nan_fails():
    report = check_parity(tiny_model())
    assert not dataclasses.replace(report, max_logprob_difference=math.nan).passed
    assert not dataclasses.replace(report, gradient_difference=math.nan).passed
    model, other = looked_at(tiny_model()), tiny_model()
    with torch.no_grad():
        for one in (model, other):
            one.model.layers[1].mlp.down_proj.weight[0, 0] = math.nan
    assert not check_parity(model).passed
    with pytest.raises(UnsupportedModelError, match="the model itself gives NaN or infinity"):
        check_parity(other)


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


def test_custom_groups():
    report = check_parity(tiny_model(), random_groups(0, [(50, [10] * 4)]))
    assert report.token_ratio == 240 / 90
    check_parity(tiny_model(), [RolloutGroup([1, 2, 3], [Rollout([])])]).raise_if_failed()


def test_nothing_to_compare_is_refused():
    with pytest.raises(ValueError, match="groups"):
        check_parity(tiny_model(), [])
    with pytest.raises(ValueError, match="requires a gradient"):
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
    first, allowed, *_, whole, padded = str(report).splitlines()
    assert "passed (LlamaForCausalLM, torch.float32, cpu" in first
    assert allowed.endswith("; allowed: 1e-04 and 1e-03")
    assert whole.split() == ["whole", "model", "2", "auto", "2.0e-06", "1.0e-07", "3.0e-06", "2.50"]
    assert "padded batch" in padded
    failed = dataclasses.replace(report, gradient_difference=2e-3)
    assert not failed.passed
    assert ": FAILED (" in str(failed)
    assert str(failed).splitlines()[-2].endswith("FAILED")
    assert str(dataclasses.replace(report, padded=None)).splitlines()[-1].split() == whole.split()


def test_a_padded_batch_is_compared_too():
    report = check_parity(tiny_model())
    assert report.padded.reason is None
    assert max(report.padded.differences) < 1e-4
    wrong = dataclasses.replace(report, padded=dataclasses.replace(report.padded, gradient_difference=2e-3))
    assert not wrong.passed
    assert str(wrong).splitlines()[-1].endswith("gradients by 2.0e-03  FAILED")
    left = dataclasses.replace(report, padded=PaddedParity(0.0, 0.0, 0.0, reason="it has one row"))
    assert str(left).splitlines()[-1].endswith("it has one row")
    assert check_parity(tiny_model(), padded_rows=False).padded is None

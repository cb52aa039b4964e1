"""User-defined backends: registered by name, chosen by their capabilities."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from helpers.tiny_models import tiny_model

from pl_grouprl.attention import Backend, check_parity, register_backend, shared_prefix
from pl_grouprl.attention.backends import choice
from pl_grouprl.attention.backends.interface import AttentionRule, attend
from pl_grouprl.packing import SharedPrefixLayout

TENSORS = torch.zeros(1, 4, 3, 8), torch.zeros(1, 2, 3, 8), torch.zeros(1, 2, 3, 8)
OWN = Backend("own", attend)


@pytest.fixture(autouse=True)
def registry(monkeypatch):
    """Whatever a test registers is forgotten after it."""
    monkeypatch.setattr(choice, "BACKENDS", dict(choice.BACKENDS))


def test_a_registered_backend_runs_a_model():
    register_backend(OWN)
    report = check_parity(tiny_model("qwen3"), backend="own")
    report.raise_if_failed()
    assert {layer.backend for layer in report.layers} == {"own"}


def test_a_name_cannot_be_registered_twice():
    register_backend(OWN)
    for name in ("own", "cascade", "auto"):
        with pytest.raises(ValueError, match=name):
            register_backend(replace(OWN, name=name))
    with pytest.raises(ValueError, match="own"):
        shared_prefix(tiny_model(), "other")


def test_auto_takes_the_highest_preference_of_those_that_do_not_refuse():
    capped = AttentionRule(0.3, softcap=5.0)
    assert choice.choose(*TENSORS, AttentionRule(0.3)).name == choice.choose(*TENSORS, capped).name == "cascade"
    register_backend(OWN)  # with no preference
    assert choice.choose(*TENSORS, capped).name == "cascade"
    refusal = lambda query, key, value, rule: "no caps" if rule.softcap else None  # noqa: E731
    register_backend(replace(OWN, name="fast", preference=lambda *_: 9, refusal=refusal))
    assert choice.choose(*TENSORS, AttentionRule(0.3)).name == "fast"
    assert choice.choose(*TENSORS, capped).name == "cascade"


@pytest.mark.parametrize(
    ("dtype", "rule", "name"),
    [
        (torch.bfloat16, AttentionRule(0.3), "cascade"),
        (torch.bfloat16, AttentionRule(0.3, window=4), "cascade"),
        (torch.float32, AttentionRule(0.3), "cascade"),  # the default run of `grpo_pg` once compiled 40 s for this
        (torch.float32, AttentionRule(0.3, softcap=5.0), "cascade"),
        (torch.bfloat16, AttentionRule(0.3, softcap=5.0), "flex"),
    ],
    ids=str,
)
def test_on_a_gpu_nothing_is_compiled_where_another_backend_serves(dtype, rule, name, monkeypatch):
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda *args, **options: compiled.append(args))

    def stub(heads):
        device = torch.device("cuda")
        return SimpleNamespace(is_cuda=True, device=device, dtype=dtype, shape=(1, heads, 3, 64), requires_grad=True)

    assert choice.choose(stub(4), stub(2), stub(2), rule).name == name
    assert not compiled


def test_auto_in_compiled_layers_takes_what_runs_there():
    register_backend(replace(OWN, name="fast", preference=lambda *_: 9, in_compiled_layers=False))
    auto, rule = choice.get_backend("auto"), AttentionRule(0.3)
    row = *TENSORS, SharedPrefixLayout([2, 1], [None, 0])
    assert auto.resolve(*row, rule).name == "fast"
    assert auto.resolve(*row, rule, compiled=True).name == "cascade"
    chunks_and_window = AttentionRule(0.3, window=2, chunk=2)  # which cascade refuses
    assert auto.resolve(*row, chunks_and_window, compiled=True).name == "reference"
    assert OWN.resolve(*row, rule, compiled=True) is OWN


def test_the_cascades_explicit_gradient_is_that_of_autograd():
    torch.manual_seed(0)
    layout = SharedPrefixLayout([5, 3, 2], [None, 0, 0])
    shapes = (4, 8), (2, 8), (2, 6)  # values of another head size
    tensors = [torch.randn(1, heads, 10, size, requires_grad=True) for heads, size in shapes]
    sinks = torch.randn(4, requires_grad=True)
    rule, cascade = AttentionRule(0.3, sinks_H=sinks), choice.CASCADE
    grad = torch.randn(1, 10, 4, 6)
    expected_out = cascade(*tensors, layout, rule)
    expected = torch.autograd.grad(expected_out, [*tensors, sinks], grad)
    with torch.no_grad():
        out, lse = cascade.explicit.forward(*tensors, layout, rule)
        found = cascade.explicit.backward(grad, out, lse, *tensors, layout, rule)
    torch.testing.assert_close(out, expected_out)
    torch.testing.assert_close(found, expected)


def test_auto_passes_over_a_backend_that_cannot_run_the_layout():
    forest = SharedPrefixLayout([1, 1, 1], [None, 0, 1])
    register_backend(replace(OWN, name="flat", max_depth=1, preference=lambda *_: 99))
    assert choice.choose(*TENSORS, AttentionRule(0.3), layout=forest).name == "cascade"
    shallow = SharedPrefixLayout([2, 1], [None, 0])
    assert choice.choose(*TENSORS, AttentionRule(0.3), layout=shallow).name == "flat"
    register_backend(replace(OWN, name="whole", takes_prefilled=False, preference=lambda *_: 100))
    given = SharedPrefixLayout([2, 1], [None, 0], num_prefilled=2)
    assert choice.choose(*TENSORS, AttentionRule(0.3), layout=given).name == "flat"
    assert choice.choose(*TENSORS, AttentionRule(0.3), layout=shallow).name == "whole"

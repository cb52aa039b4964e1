"""Hybrids with `fla` and `causal-conv1d` installed: transformers then calls their functions, and states pass through.

Neither package is needed: functions with their signatures and limits stand in for theirs, written as the recurrence.

Legend: B rows, T tokens, H query and key heads, N value heads, K size of a key, V of a value, C channels.
"""

from __future__ import annotations

import importlib.util
import sys
from collections import Counter
from types import ModuleType
from typing import Any

import pytest
import torch
from helpers.forests import Forest, relative_error, sequences
from helpers.versions import needs
from torch import Tensor
from torch.nn import functional

from pl_grouprl.attention.call import LayoutCall
from pl_grouprl.attention.stateful import StatefulHandle, stateful_mixers
from pl_grouprl.models.score import rollout_logprobs
from pl_grouprl.packing import SharedPrefixLayout
from pl_grouprl.types import Rollout, RolloutGroup

installed = importlib.util.find_spec("fla") is not None
pytestmark = [
    needs("transformers", "5.21"),
    pytest.mark.skipif(installed, reason="transformers' own functions are the reference"),
]

FAMILIES = {
    "qwen3_5": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM"),
    "qwen3_next": ("Qwen3NextConfig", "Qwen3NextForCausalLM"),
}
CALLS: Counter[str] = Counter()


def chunk_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Shapes [B, T, H, K], [B, T, H, K], [B, T, N, V], [B, T, N], [B, T, N]; a state has [B, N, K, V] in float32."""
    CALLS["from a state" if initial_state is not None else "from zero"] += 1
    assert cu_seqlens is None  # several sequences in one row, which then must be the only one
    heads, groups, length = q.shape[2], v.shape[2] // q.shape[2], q.shape[1]
    assert q.shape == k.shape
    assert v.shape[2] == heads * groups
    state = q.new_zeros(len(q), v.shape[2], q.shape[3], v.shape[3], dtype=torch.float32)
    if initial_state is not None:
        assert initial_state.shape == state.shape
        assert initial_state.dtype == torch.float32
        state = initial_state
    if use_qk_l2norm_in_kernel:
        q, k = (x / (x.float().square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    q, k = (x.float().repeat_interleave(groups, dim=2) for x in (q, k))
    outputs = []
    for t in range(length):
        state = state * g[:, t, :, None, None].float().exp()
        remembered = torch.einsum("bnkv,bnk->bnv", state, k[:, t])
        change = (v[:, t].float() - remembered) * beta[:, t, :, None].float()
        state = state + k[:, t, ..., None] * change[:, :, None]
        outputs.append(torch.einsum("bnkv,bnk->bnv", state, q[:, t]) * (scale or q.shape[-1] ** -0.5))
    return torch.stack(outputs, 1).to(v.dtype), state if output_final_state else None


def fused_recurrent_gated_delta_rule(*args: Any, **kwargs: Any) -> None:
    raise NotImplementedError("it has no backward pass")


def causal_conv1d_fn(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None, return_final_states: bool = False, activation: str | None = None,
) -> Tensor:  # fmt: skip
    """Shapes [B, C, T] and [C, width]."""
    CALLS["convolution"] += 1
    width = weight.shape[1]
    assert 2 <= width <= 4
    assert seq_idx is None
    assert activation in (None, "silu", "swish")
    if x.stride(2) != 1 and x.stride(1) == 1:  # channels last
        assert x.shape[1] % 8 == x.stride(0) % 8 == x.stride(2) % 8 == 0
    out = functional.conv1d(functional.pad(x, (width - 1, 0)), weight[:, None], bias, groups=len(weight))
    return out if activation is None else functional.silu(out)


def causal_conv1d_update(*args: Any, **kwargs: Any) -> None:
    raise NotImplementedError("it changes a state in place")


@pytest.fixture
def modeling(request: Any, monkeypatch: Any) -> ModuleType:
    """A second copy of a family's module, imported with both packages in place."""
    family, ops = request.param, ModuleType("fla.ops.gated_delta_rule")
    name = f"transformers.models.{family}.modeling_{family}"
    original = importlib.import_module(name)  # before they are in place
    ops.chunk_gated_delta_rule = chunk_gated_delta_rule  # type: ignore[attr-defined]
    ops.fused_recurrent_gated_delta_rule = fused_recurrent_gated_delta_rule  # type: ignore[attr-defined]
    convolution = ModuleType("causal_conv1d")
    convolution.causal_conv1d_fn, convolution.causal_conv1d_update = causal_conv1d_fn, causal_conv1d_update  # type: ignore[attr-defined]
    for module in (ModuleType("fla"), ModuleType("fla.ops"), ops, convolution):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    spec = importlib.util.spec_from_file_location(f"{name}_with_fla", original.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    CALLS.clear()
    return module


def models(modeling: ModuleType) -> tuple[Any, Any]:
    """The same small model with the packages' functions, and with transformers' own."""
    family = modeling.__package__.rsplit(".", 1)[1]
    config_name, model_name = FAMILIES[family]
    config = getattr(modeling, config_name)(
        vocab_size=31, hidden_size=16, intermediate_size=24, num_hidden_layers=2, head_dim=8, num_attention_heads=2,
        num_key_value_heads=1, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8,
        linear_value_head_dim=4, linear_conv_kernel_dim=4, layer_types=["linear_attention", "full_attention"],
        initializer_range=0.3, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=8,
        shared_expert_intermediate_size=8, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    ours = getattr(modeling, model_name)(config)
    plain = getattr(importlib.import_module(modeling.__name__.removesuffix("_with_fla")), model_name)(config)
    plain.load_state_dict(ours.state_dict())
    return ours, plain


FOREST = Forest([3, 1, 2, 0, 1, 4, 70, 5, 1, 66, 6, 1], [None, 0, 1, 1, 1, 4, 0, 0, 7, None, 9, 9])


@pytest.mark.parametrize("modeling", FAMILIES, indirect=True)
def test_states_reach_the_packages_functions_and_gradients_come_back(modeling: ModuleType) -> None:
    """Against transformers' own functions on each sequence alone."""
    mixer, plain = (stateful_mixers(model)[0] for model in models(modeling))
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(1, sum(FOREST.lengths), 16, generator=generator).requires_grad_()
    weights = torch.randn(hidden.shape, generator=generator)
    rows: dict[int, Tensor] = {}
    for sequence in sequences(FOREST):
        for place, row in zip(sequence, plain(hidden_states=hidden[:, sequence])[0], strict=True):
            rows.setdefault(place, row)
    expected = torch.stack([rows[token] for token in range(hidden.shape[1])])[None]
    assert not CALLS
    handle = StatefulHandle(mixer)
    found = mixer(hidden_states=hidden, prefix_layout=LayoutCall(SharedPrefixLayout(*FOREST)))
    handle.remove()
    assert CALLS["from zero"] >= 1
    assert CALLS["from a state"] >= 2
    assert CALLS["convolution"] == CALLS["from zero"] + CALLS["from a state"]
    assert relative_error(found, expected) < 1e-4
    gradients = [
        torch.autograd.grad((output * weights).sum(), [hidden, *module.parameters()])
        for output, module in ((found, mixer), (expected, plain))
    ]
    for one, other in zip(*gradients, strict=True):
        assert relative_error(one, other) < 1e-4


@pytest.mark.parametrize("modeling", FAMILIES, indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_model_scores_shared_prompts_like_repeated_ones(modeling: ModuleType, dtype: torch.dtype) -> None:
    ours, plain = (model.to(dtype) for model in models(modeling))
    groups = [
        RolloutGroup([1, 2, 3, 4, 5], [Rollout([6, 7]), Rollout([8]), Rollout([6, 9, 10])], 0),
        RolloutGroup([11, 12], [Rollout([13, 14, 15]), Rollout([])], 1),
    ]
    shared, repeated = rollout_logprobs(ours, groups), rollout_logprobs(plain, groups, sharing="repeated")
    assert CALLS["from a state"] >= 1
    for one, other in zip(shared, repeated, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5 if dtype == torch.float32 else 0.1, rtol=0)

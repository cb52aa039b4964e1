"""Stateful layers on a packed row, against each sequence run separately."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from helpers.forests import Forest, random_forest, relative_error, sequences
from helpers.versions import needs
from torch import Tensor, nn

from pl_grouprl.attention.call import LayoutCall
from pl_grouprl.attention.stateful import Batch, RunPlan, StatefulHandle, plan_runs, stateful_mixers, unsupported_mixers
from pl_grouprl.packing import SharedPrefixLayout

pytestmark = needs("transformers", "5.21")  # earlier ones are refused

HIDDEN = 16
_COMMON = {
    **{"vocab_size": 31, "hidden_size": HIDDEN, "intermediate_size": 24, "num_hidden_layers": 2, "head_dim": 8},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "pad_token_id": 0, "initializer_range": 0.3},
}
_LINEAR = {
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 4},
    **{"linear_conv_kernel_dim": 4, "layer_types": ["linear_attention", "full_attention"]},
}
_EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8}
_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 4, "mamba_n_groups": 1, "mamba_chunk_size": 8}
_CONV = {"layer_types": ["conv", "full_attention"], "conv_L_cache": 3, "block_auto_adjust_ff_dim": False}
_KIMI = {
    **{"linear_num_heads": 2, "linear_head_dim": 8, "linear_conv_kernel_dim": 4, "kv_lora_rank": 8},
    **{"num_key_value_heads": 2, "layer_types": ["linear_attention", "full_attention"]},
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_5_text": _LINEAR,
    "qwen3_next": {**_LINEAR, **_EXPERTS, "shared_expert_intermediate_size": 8},
    "qwen3_5_moe_text": {**_LINEAR, **_EXPERTS, "shared_expert_intermediate_size": 8},
    "olmo_hybrid": {**_LINEAR, "linear_num_value_heads": 2},
    "lfm2": _CONV,
    "lfm2_moe": {**_CONV, **_EXPERTS, "num_dense_layers": 2},
    "lfm2_with_bias": {**_CONV, "conv_bias": True},
    "lfm3": _CONV,
    "kimi_linear": _KIMI,
    "bailing_hybrid": {**_KIMI, **_EXPERTS, "q_lora_rank": 8},
    "bamba": {**_MAMBA, "mamba_expand": 2, "attn_layer_indices": [1]},
    "granitemoehybrid": {**_MAMBA, "mamba_expand": 2, "layer_types": ["mamba", "attention"]},
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 32, "mamba_expand": 2},
    "nemotron_h": {"mamba_num_heads": 4, "mamba_head_dim": 8, "ssm_state_size": 4, "n_groups": 1, "chunk_size": 8},
    "zamba2": {
        **{"mamba_d_state": 4, "mamba_headdim": 8, "n_mamba_heads": 4, "mamba_ngroups": 1, "chunk_size": 8},
        **{"layer_types": ["mamba", "hybrid"], "num_mem_blocks": 1, "adapter_rank": 4},
    },
}


@contextmanager
def install(mixer: nn.Module) -> Iterator[None]:
    handle = StatefulHandle(mixer)
    try:
        yield
    finally:
        handle.remove()


def tiny(family: str, dtype: torch.dtype = torch.float32) -> Any:
    """A model of two layers, the first of which carries a state."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family.removesuffix("_with_bias"), **{**_COMMON, **FAMILIES[family]})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
        for name, parameter in model.named_parameters():
            if name.endswith(("bias", "conv.weight", "conv1d.weight")):  # biases are zero, convolutions small at first
                nn.init.normal_(parameter, std=0.5)
    return model


def mixer_of(family: str, dtype: torch.dtype = torch.float32) -> Any:
    return stateful_mixers(tiny(family, dtype))[0]


def each_sequence_alone(mixer: Any, hidden: Tensor, forest: Forest) -> Tensor:
    """Each sequence from the root, without a cache; a token of several sequences takes its output from the first."""
    rows: dict[int, Tensor] = {}
    for sequence in sequences(forest):
        for place, row in zip(sequence, mixer(hidden_states=hidden[:, sequence])[0] if sequence else (), strict=True):
            rows.setdefault(place, row)
    return torch.stack([rows[token] for token in range(hidden.shape[1])])[None]


def packed(mixer: nn.Module, hidden: Tensor, forest: Forest) -> Tensor:
    call = LayoutCall(SharedPrefixLayout(*forest))
    with install(mixer):
        output = mixer(hidden_states=hidden, prefix_layout=call)
    assert set(call.ran) == {id(mixer)}
    return output


def with_gradients(run: Any, mixer: nn.Module, forest: Forest, dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(1, sum(forest.lengths), HIDDEN, generator=generator).to(dtype).requires_grad_()
    weights = torch.randn(hidden.shape, generator=generator).to(dtype)
    output = run(mixer, hidden, forest)
    named = {"hidden": hidden, **{name: p for name, p in mixer.named_parameters() if p.requires_grad}}
    gradients = torch.autograd.grad((output * weights).sum(), list(named.values()), allow_unused=True)
    unused = {name for name, gradient in zip(named, gradients, strict=True) if gradient is None}
    assert not unused, unused
    return {"output": output.detach(), **dict(zip(named, gradients, strict=True))}


def check(mixer: nn.Module, forest: Forest, dtype: torch.dtype = torch.float32) -> None:
    expected = with_gradients(each_sequence_alone, mixer, forest, dtype)
    actual = with_gradients(packed, mixer, forest, dtype)
    for name, value in expected.items():
        assert relative_error(actual[name], value) < 1e-4, name  # processors round differently: 6e-5 on some


# Root, inner segments and leaves of no token, of one, of fewer than the kernel and of more than a chunk; a lone root.
UNEVEN = Forest(
    [3, 1, 2, 0, 1, 4, 1, 70, 0, 5, 1, 1, 0, 1, 70, 2, 66, 6, 1, 9, 0],
    [None, 0, 1, 1, 1, 4, 4, 0, 0, 8, 8, None, 11, 12, None, 14, 14, None, 17, 17, None],
)


@pytest.mark.parametrize(
    ("family", "training"), [*((family, False) for family in FAMILIES), ("qwen3_5_text", True), ("bamba", True)]
)
def test_every_family_runs_an_uneven_forest_like_separate_sequences(family: str, training: bool) -> None:
    check(mixer_of(family).train(training), UNEVEN)


@pytest.mark.parametrize("family", ["qwen3_5_text", "lfm2", "lfm2_with_bias", "bamba"])
def test_random_forests(family: str) -> None:
    mixer = mixer_of(family)
    for depth in (1, 2, 3):
        check(mixer, random_forest(depth, depth, roots=3))


def test_double_precision() -> None:
    """Gated delta rules compute in float32 whatever comes in."""
    check(mixer_of("qwen3_5_text", torch.float64), UNEVEN, torch.float64)


def test_a_convolution_in_double_precision_is_exact() -> None:
    mixer = mixer_of("lfm2", torch.float64)
    results = [with_gradients(run, mixer, UNEVEN, torch.float64) for run in (each_sequence_alone, packed)]
    for name, value in results[0].items():
        torch.testing.assert_close(results[1][name], value, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("family", ["qwen3_5_text", "lfm2"])
def test_weights_in_bfloat16(family: str) -> None:
    mixer = mixer_of(family, torch.bfloat16)
    results = [with_gradients(run, mixer, UNEVEN, torch.bfloat16) for run in (each_sequence_alone, packed)]
    for name, value in results[0].items():
        assert relative_error(results[1][name], value) < 2e-2, name


@pytest.mark.parametrize(("family", "reentrant"), [("qwen3_5_text", True), ("lfm2", False)])
def test_activation_checkpointing(family: str, reentrant: bool) -> None:
    from torch.utils.checkpoint import checkpoint

    def run(mixer: nn.Module, hidden: Tensor, forest: Forest) -> Tensor:
        call = LayoutCall(SharedPrefixLayout(*forest))

        def layer(hidden: Tensor) -> Tensor:
            return mixer(hidden_states=hidden, prefix_layout=call)

        return checkpoint(layer, hidden, use_reentrant=reentrant)

    def gradients(run: Any) -> list[Any]:
        hidden = torch.linspace(-1, 1, sum(UNEVEN.lengths) * HIDDEN).reshape(1, -1, HIDDEN).requires_grad_()
        mixer.zero_grad()
        run(mixer, hidden, UNEVEN).square().sum().backward()
        return [hidden.grad, *(parameter.grad for parameter in mixer.parameters())]

    mixer = mixer_of(family)
    expected = gradients(packed)
    with install(mixer):
        for actual, value in zip(gradients(run), expected, strict=True):
            torch.testing.assert_close(actual, value)


@pytest.mark.parametrize("family", ["qwen3_5_text", "olmo_hybrid", "lfm2", "granitemoehybrid", "kimi_linear"])
def test_the_decoder_layer_passes_the_layout_on(family: str) -> None:
    """Its keywords reach the mixer, and its output is that of each sequence alone."""
    model = tiny(family)
    layer = next(part for part in model.modules() if hasattr(part, "layers")).layers[0]
    hidden = torch.randn(1, sum(UNEVEN.lengths), HIDDEN, generator=torch.Generator().manual_seed(3))

    def alone(hidden_states: Tensor) -> Tensor:
        return _tensor(layer(hidden_states, position_embeddings=None))

    call = LayoutCall(SharedPrefixLayout(*UNEVEN))
    with install(model):
        actual = _tensor(layer(hidden, position_embeddings=None, prefix_layout=call, use_cache=False))
    assert relative_error(actual, each_sequence_alone(alone, hidden, UNEVEN)) < 5e-5
    assert set(call.ran) == {id(mixer) for mixer in stateful_mixers(layer)}


@pytest.mark.parametrize(("family", "checkpointing"), [("qwen3_5_text", False), ("lfm2", True)])
def test_a_whole_model_gives_each_sequence_its_logits_and_gradients(family: str, checkpointing: bool) -> None:
    """Attention and stateful layers in one decoder, through the public context."""
    from pl_grouprl.attention import shared_prefix

    model = tiny(family)
    tokens = torch.randint(1, 31, (1, sum(UNEVEN.lengths)), generator=torch.Generator().manual_seed(5))
    weights = torch.randn(1, tokens.shape[1], 31, generator=torch.Generator().manual_seed(6))

    def gradients(logits: Tensor) -> dict[str, Tensor]:
        model.zero_grad()
        (logits * weights).sum().backward()
        return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}

    expected = each_sequence_alone(lambda hidden_states: model(hidden_states).logits, tokens, UNEVEN)
    expected_gradients = gradients(expected)
    if checkpointing:
        model.train()
        model.gradient_checkpointing_enable()
    with shared_prefix(model, "reference"):
        actual = model(tokens, prefix_layout=SharedPrefixLayout(*UNEVEN)).logits
        actual_gradients = gradients(actual)
    assert relative_error(actual, expected) < 5e-5
    for name, value in expected_gradients.items():
        assert relative_error(actual_gradients[name], value) < 2e-4, name


def _tensor(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output[0]


def test_calls_without_a_layout_are_untouched() -> None:
    mixer = mixer_of("lfm2")
    hidden = torch.randn(2, 5, HIDDEN, generator=torch.Generator().manual_seed(0))
    expected = mixer(hidden)
    with install(mixer):
        assert torch.equal(mixer(hidden), expected)


def test_removal_in_any_order_restores_the_mixer() -> None:
    mixer = mixer_of("qwen3_5_text")
    first, second = StatefulHandle(mixer), StatefulHandle(mixer)
    first.remove()
    first.remove()
    assert "forward" in mixer.__dict__
    third = StatefulHandle(mixer)
    second.remove()
    assert "forward" in mixer.__dict__
    third.remove()
    assert "forward" not in mixer.__dict__


def test_a_forward_that_was_patched_before_is_called_and_restored() -> None:
    mixer, calls = mixer_of("lfm2"), []

    def offloaded(*args: Any, **kwargs: Any) -> Tensor:
        calls.append(kwargs)
        return type(mixer).forward(mixer, *args, **kwargs)

    mixer.forward = offloaded
    check(mixer, UNEVEN)
    assert calls
    assert mixer.forward is offloaded


def test_a_copy_of_a_patched_mixer_runs_its_own_weights() -> None:
    mixer = mixer_of("lfm2")
    hidden = torch.randn(1, sum(UNEVEN.lengths), HIDDEN, generator=torch.Generator().manual_seed(0))
    with install(mixer):
        twin = copy.deepcopy(mixer)
        loaded = pickle.loads(pickle.dumps(mixer))
        nn.init.zeros_(mixer.out_proj.weight)
    for copied in (twin, loaded):
        check(copied, UNEVEN)
        assert packed(copied, hidden, UNEVEN).abs().max() > 0
        assert copied(hidden).abs().max() > 0


def test_arguments_that_do_not_fit_the_segments_are_refused() -> None:
    mixer = mixer_of("qwen3_5_text")
    call = LayoutCall(SharedPrefixLayout([2, 1], [None, 0]))
    hidden = torch.zeros(1, 3, HIDDEN)
    with install(mixer), pytest.raises(NotImplementedError, match="cu_seq_lens_q"):
        mixer(hidden_states=hidden, prefix_layout=call, cu_seq_lens_q=torch.tensor([0, 3]))


class OwnState(nn.Module):
    """An unknown layer."""

    def __init__(self, **kept: Any) -> None:
        super().__init__()
        for name, value in kept.items():
            setattr(self, name, value)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return hidden_states


class OwnCache(nn.Module):
    def forward(self, hidden_states: Tensor, cache_params: Any = None) -> Tensor:
        return hidden_states


class FormerMixer(nn.Module):
    """As in transformers 5.20."""

    def forward(self, hidden_states: Tensor, cache_params: Any = None) -> Tensor:
        if cache_params is not None and cache_params.has_previous_state(0):
            return cache_params.update_conv_state(hidden_states, 0)
        return hidden_states


class OwnLightningAttention(nn.Module):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return hidden_states


@pytest.mark.parametrize(
    "module",
    [
        OwnState(A_log=nn.Parameter(torch.zeros(1))),
        OwnState(conv=nn.Conv1d(4, 4, 3, groups=4)),
        OwnCache(),
        FormerMixer(),
        OwnLightningAttention(),
    ],
    ids=lambda module: type(module).__name__,
)
def test_an_unknown_stateful_layer_is_unsupported(module: nn.Module) -> None:
    assert unsupported_mixers(nn.Sequential(nn.Linear(2, 2), module)) == [type(module).__name__]
    assert stateful_mixers(module) == []


def test_stateless_layers_are_not_patched() -> None:
    for module in (OwnState(), OwnState(conv=nn.Conv1d(4, 4, 1)), nn.MultiheadAttention(4, 2)):
        assert stateful_mixers(module) == []
        assert unsupported_mixers(module) == []


@pytest.mark.parametrize(
    ("family", "unsupported"),
    [
        ("mamba", "MambaMixer"),
        ("falcon_mamba", "FalconMambaMixer"),
        ("jamba", "JambaMambaMixer"),
        ("zamba", "ZambaMambaMixer"),
        ("rwkv", "RwkvSelfAttention"),
        ("recurrent_gemma", "RecurrentGemmaRecurrentBlock"),
        ("minimax", "MiniMaxLightningAttention"),
        ("xlstm", "xLSTMLayer"),
        ("zaya", "ZayaCCAProjection"),
        ("inkling_text", "InklingShortConvolution"),
    ],
)
def test_families_whose_state_cannot_be_passed_on(family: str, unsupported: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family))
    assert stateful_mixers(model) == []
    assert unsupported in unsupported_mixers(model)


@pytest.mark.parametrize("family", FAMILIES)
def test_supported_families_have_no_other_state(family: str) -> None:
    assert unsupported_mixers(tiny(family)) == []


CPU = torch.device("cpu")


def runs_of(lengths: list[int], parents: list[int | None], *, pad_roots: bool = True) -> RunPlan:
    return plan_runs(SharedPrefixLayout(lengths, parents), pad_roots=pad_roots, device=CPU)


def rows_of(batch: Batch) -> list[list[int]]:
    """The packed token at each place of a batch; -1 for padding."""
    slots = torch.full((batch.size[0] * batch.size[1],), -1).index_copy(0, batch.slots, batch.tokens)
    return slots.reshape(batch.size).tolist()


def test_a_group_is_its_prompt_and_its_rollouts_padded_on_the_right() -> None:
    prompt, rollouts = runs_of([2, 3, 4, 3], [None, 0, 0, 0]).batches
    assert rows_of(prompt) == [[0, 1]]
    assert prompt.starts is None
    assert rows_of(rollouts) == [[5, 6, 7, 8], [2, 3, 4, -1], [9, 10, 11, -1]]
    assert rollouts.starts is not None
    assert rollouts.starts.tolist() == [0, 0, 0]


def test_prompts_are_padded_on_the_left_where_that_is_exact() -> None:
    lengths, parents = [4, 2, 3, 2], [None, 0, None, 2]
    prompts, _ = runs_of(lengths, parents).batches
    assert rows_of(prompts) == [[0, 1, 2, 3], [-1, 6, 7, 8]]
    first, second, _ = runs_of(lengths, parents, pad_roots=False).batches
    assert (rows_of(first), rows_of(second)) == ([[0, 1, 2, 3]], [[6, 7, 8]])


def test_a_single_inner_token_is_recomputed_before_its_children() -> None:
    built = runs_of([2, 1, 2, 3], [None, 0, 1, 1])
    root, longest, alone = built.batches
    assert rows_of(root) == [[0, 1]]
    assert rows_of(longest) == [[2, 5, 6, 7], [2, 3, 4, -1]]
    assert rows_of(alone) == [[2, -1]]
    every = torch.cat([batch.tokens for batch in built.batches])
    assert built.outputs.tolist() == [0, 1, 9, 7, 8, 3, 4, 5]
    assert every[built.outputs].tolist() == list(range(8))


def test_an_empty_segment_passes_on_its_parents_state() -> None:
    root, leaves = runs_of([3, 0, 2, 0], [None, 0, 1, 0]).batches
    assert rows_of(root) == [[0, 1, 2]]
    assert rows_of(leaves) == [[3, 4]]
    assert leaves.starts is not None
    assert leaves.starts.tolist() == [0]


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
@pytest.mark.parametrize("pad_roots", [False, True])
def test_invariants_of_every_plan(depth: int, pad_roots: bool) -> None:
    for seed in range(10):
        lengths, parents = random_forest(seed, depth, roots=4)
        built = runs_of(lengths, parents, pad_roots=pad_roots)
        tokens = torch.cat([batch.tokens for batch in built.batches])
        assert tokens[built.outputs].tolist() == list(range(sum(lengths)))
        states = 0
        for batch in built.batches:
            filled = len(batch.tokens) / (batch.size[0] * batch.size[1])
            assert filled >= (0.75 if batch.size[1] > 2 else 0.5)
            if batch.starts is not None:
                assert batch.size[1] > 1  # single tokens on a state would be decoded
                assert int(batch.starts.max()) < states  # parents come first
            if batch.keeps_state and (batch.starts is not None or not pad_roots):
                assert filled == 1
            states += batch.size[0] * batch.keeps_state

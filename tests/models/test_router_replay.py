"""Experts that are recorded and replayed: against routers written out by hand, and repeated prefixes, in float64."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from helpers.sweeps import sweep
from helpers.tiny_models import VOCAB, gradients, random_groups, tiny_model, worst_gradient_error
from torch import Tensor
from torch.nn.functional import linear, softmax

from pl_grouprl.attention import find_decoder, shared_prefix
from pl_grouprl.models.adapters import LoRAAdapter, adapters_off
from pl_grouprl.models.router_replay import NOT_RECORDED, RouterReplay, mixtures_of
from pl_grouprl.models.score import PrefixPass, rollout_logprobs, score
from pl_grouprl.packing import pack
from pl_grouprl.packing.batch import pack_slice
from pl_grouprl.rollout import HFRolloutEngine
from pl_grouprl.types import Rollout, RolloutGroup, SamplingConfig

pytestmark = pytest.mark.usefixtures("layers_checked_once")

EXPERTS, CHOSEN = 8, 2
_MLA = {
    **{"kv_lora_rank": 8, "q_lora_rank": 8, "num_key_value_heads": 4, "head_dim": 8, "moe_intermediate_size": 16},
    **{"qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 12, "first_k_dense_replace": 0},
    **{"n_routed_experts": EXPERTS, "num_experts_per_tok": CHOSEN, "n_group": 4, "topk_group": 2},
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": EXPERTS, "norm_topk_prob": True},
    "qwen2_moe": {"num_experts": EXPERTS, "shared_expert_intermediate_size": 16},
    "mixtral": {"num_local_experts": EXPERTS},
    "olmoe": {"num_experts": EXPERTS, "num_experts_per_tok": CHOSEN},
    "gpt_oss": {"num_local_experts": EXPERTS, "num_experts_per_tok": CHOSEN, "sliding_window": 8},
    "deepseek_v2": {**_MLA, "topk_method": "group_limited_greedy", "routed_scaling_factor": 2.0},
    "deepseek_v3": {**_MLA, "routed_scaling_factor": 2.0},
    "llama4_text": {"num_local_experts": EXPERTS, "num_experts_per_tok": 2, "interleave_moe_layer_step": 1},
}


def mixture(family: str, dtype: torch.dtype = torch.float64, **options: Any) -> Any:
    model = tiny_model(family, dtype=dtype, **FAMILIES[family], **options)
    generator = torch.Generator().manual_seed(1)
    for parameter in (p for p in model.parameters() if p.dim() == 1):
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator, dtype=dtype)
    model.set_experts_implementation("eager")  # the others have no float64
    return model


def forced(groups: list[RolloutGroup], seed: int = 0, layers: int = 2) -> list[RolloutGroup]:
    """Experts of two groups of experts at most, at random, for all tokens."""
    generator = torch.Generator().manual_seed(seed)

    def record(count: int) -> Tensor:
        return torch.rand(count, layers, EXPERTS, generator=generator).argsort(-1)[..., :CHOSEN].to(torch.int16)

    for group in groups:
        group.routed_experts = record(len(group.prompt_ids))
        for rollout in group.rollouts:
            rollout.routed_experts = record(len(rollout.token_ids))
    return groups


def groups_of(seed: int = 0) -> list[RolloutGroup]:
    return forced(random_groups(seed, [(20, [7, 0, 1, 12, 3]), (5, [3, 4])]))


def scored(model: Any, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probabilities, and gradients of a loss that weighs every token differently."""
    model.zero_grad()
    logprobs = score(model, batch).logprobs_N
    (logprobs * torch.linspace(0.5, 1.5, len(logprobs), dtype=logprobs.dtype)).sum().backward()
    return logprobs.detach(), gradients(model)


def assert_same(found: Any, expected: Any, tolerance: float = 1e-6) -> None:
    torch.testing.assert_close(found[0], expected[0], atol=tolerance, rtol=0)
    assert worst_gradient_error(found[1], expected[1]) < tolerance


# Routers by hand: hidden states [T, D] and forced experts [T, K] to weights [T, K].


def _softmax_of_all(gate: Any, hidden: Tensor, experts: Tensor) -> Tensor:
    return softmax(linear(hidden, gate.weight), -1).gather(1, experts)


def _renormalized(gate: Any, hidden: Tensor, experts: Tensor) -> Tensor:
    weights = _softmax_of_all(gate, hidden, experts)
    return weights / weights.sum(-1, keepdim=True)


def _softmax_of_chosen(gate: Any, hidden: Tensor, experts: Tensor) -> Tensor:
    return softmax(linear(hidden, gate.weight, gate.bias).gather(1, experts), -1)


def _scaled(gate: Any, hidden: Tensor, experts: Tensor) -> Tensor:
    return 2 * _softmax_of_all(gate, hidden, experts)


def _sigmoids(gate: Any, hidden: Tensor, experts: Tensor) -> Tensor:
    weights = linear(hidden, gate.weight).sigmoid().gather(1, experts)
    return 2 * weights / weights.sum(-1, keepdim=True)


BY_HAND = {
    "qwen3_moe": _renormalized,
    "mixtral": _renormalized,
    "olmoe": _softmax_of_all,
    "gpt_oss": _softmax_of_chosen,
    "deepseek_v2": _scaled,
    "deepseek_v3": _sigmoids,
}


@pytest.mark.parametrize("family", BY_HAND)
def test_replay_is_routing_that_is_forced_by_hand(family):
    model = mixture(family)
    batch = pack(groups_of())
    with shared_prefix(model):
        own = scored(model, batch)
        with RouterReplay(model):
            found = scored(model, batch)
        for number, block in enumerate(mixtures_of(find_decoder(model))):
            gate, experts = getattr(block, "gate", None) or block.router, batch.routed_experts[:, number].long()

            def by_hand(hidden: Tensor, gate: Any = gate, experts: Tensor = experts) -> tuple[Tensor, ...]:
                hidden = hidden.reshape(-1, hidden.shape[-1])
                return linear(hidden, gate.weight), BY_HAND[family](gate, hidden, experts), experts

            gate.forward = by_hand
        expected = scored(model, batch)
    assert_same(found, expected, 1e-5)  # some families' routers compute in float32
    assert (found[0] - own[0]).abs().max() > 0.1
    assert all(grad.norm() > 0 for name, grad in found[1].items() if "gate.weight" in name or "router.weight" in name)


@pytest.mark.parametrize("family", FAMILIES)
def test_shared_prefixes_and_checkpointed_layers_have_the_gradients_of_repeated_ones(family):
    model, groups = mixture(family), groups_of()
    with shared_prefix(model), RouterReplay(model):
        expected = scored(model, pack(groups, "repeated"))
        assert_same(scored(model, pack(groups)), expected, 2e-6)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    with shared_prefix(model), RouterReplay(model):
        assert_same(scored(model, pack(groups)), expected, 2e-6)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", sweep(["qwen3_moe", "deepseek_v3", "gpt_oss"], quick=["qwen3_moe"]))
def test_split_groups_have_the_gradients_of_whole_ones(family, checkpointing):
    """Slices of the prompt and of a branch; other calls run between a layer's forward and its recomputation."""
    model = mixture(family)
    (group,) = random_groups(1, [(9, [4, 3, 6, 5])])
    stem = group.rollouts[2].token_ids
    group.rollouts += [Rollout(stem), Rollout([*stem, 5, 6, 7]), Rollout([*stem, 9])]
    forced([group])
    for rollout in group.rollouts[4:]:
        rollout.routed_experts[: len(stem)] = group.rollouts[2].routed_experts
    for index in (2, 4):  # as a sampler's record of a rollout's last token
        group.rollouts[index].routed_experts[-1] = NOT_RECORDED
    filled = group.rollouts[5].routed_experts[len(stem) - 1]
    group.rollouts[6].routed_experts[len(stem) - 1] = filled
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()
    with shared_prefix(model), RouterReplay(model):
        expected = scored(model, pack([group], min_saved_tokens=1))
        weights = torch.linspace(0.5, 1.5, len(expected[0]), dtype=expected[0].dtype)
        starts = list(itertools.accumulate((len(r.token_ids) for r in group.rollouts), initial=0))
        model.zero_grad()
        found = torch.zeros_like(expected[0])
        prompt = PrefixPass(group, "cpu")
        branch = prompt.branch(stem, group.rollouts[5].routed_experts[: len(stem)])
        for prefix, rollouts in ((branch, [5, 2]), (branch, [4, 6]), (prompt, [0, 1]), (prompt, [3])):
            places = [place for n in rollouts for place in range(starts[n], starts[n + 1])]
            logprobs = score(model, pack_slice(group, rollouts, prefix)).logprobs_N
            (logprobs * weights[places]).sum().backward()
            found[places] = logprobs.detach()
            if rollouts == [4, 6]:
                branch.loss().backward()
        prompt.loss(model.parameters()).backward()
    assert_same((found, gradients(model)), expected, 1e-5)


def sampled(model: Any, engine: HFRolloutEngine, count: int = 4) -> list[RolloutGroup]:
    prompts = [[1 + n % (VOCAB - 1) for n in range(start, start + length)] for start, length in ((0, 30), (7, 4))]
    rollouts = engine.generate(prompts, SamplingConfig(max_new_tokens=30), num_generations=count, seed=3)
    return [RolloutGroup(prompt, own) for prompt, own in zip(prompts, rollouts, strict=True)]


def differences(model: Any, groups: list[RolloutGroup]) -> Tensor:
    """Of each token's log-probability by the policy to the sampler's."""
    with torch.no_grad():
        found = torch.cat(rollout_logprobs(model, groups))
    return (found - torch.tensor([p for group in groups for r in group.rollouts for p in r.logprobs])).abs()


def test_old_logprobs_are_those_of_a_bfloat16_sampler():
    """Where routing agrees, rounding is all that differs; where it does not, only replay leaves it at that."""
    model = mixture("qwen3_moe", torch.float32, num_hidden_layers=3)
    for block in mixtures_of(find_decoder(model)):
        block.gate.weight.data *= 0.05  # near ties, which rounding decides, among experts that differ
        block.experts.down_proj.data *= 4
    groups = sampled(model, HFRolloutEngine(model, router_replay=True, dtype="bfloat16"))
    batch = pack(groups)
    plain = differences(model, groups)
    with shared_prefix(model), RouterReplay(model) as routers:
        replayed = differences(model, groups)
        score(model, batch)
        differing, tokens = routers.take_differing()
    assert tokens == (batch.routed_experts >= 0).all(-1).any(-1).sum()
    assert 0 < differing < tokens
    assert replayed.max() < 0.15 < 2 * replayed.max() < plain.max()


@pytest.mark.parametrize("min_saved", [0, float("inf")], ids=["shared prompts", "copied prompts"])
def test_the_engine_records_what_one_pass_over_the_sequence_chooses(min_saved, monkeypatch):
    import pl_grouprl.rollout.hf.static_batch as static_batch

    monkeypatch.setattr(static_batch, "MIN_SAVED_TOKENS", min_saved)
    model = mixture("qwen3_moe", torch.float32)
    for group in sampled(model, HFRolloutEngine(model, router_replay=True, max_sequences=3)):
        for rollout in group.rollouts:
            tokens = torch.tensor([[*group.prompt_ids, *rollout.token_ids[:-1]]])
            with torch.no_grad(), RouterReplay(model) as routers, routers.recording() as recorded:
                model(input_ids=tokens)
            record = torch.cat([group.routed_experts, rollout.routed_experts])
            assert torch.equal(record[:-1].sort(-1).values, recorded().sort(-1).values)
            assert (record[-1] == NOT_RECORDED).all()


def test_the_engine_records_sequences_that_continue_kept_caches():
    model = mixture("qwen3_moe", torch.float32)
    engine, prompt = HFRolloutEngine(model, router_replay=True), [*range(1, 25)]
    with engine.keep_caches():
        sampling = SamplingConfig(max_new_tokens=5)
        (first,) = engine.generate([prompt], sampling, num_generations=2, seed=0)
        longer = [[*prompt, *rollout.token_ids, 7, 8, 9] for rollout in first]
        second = engine.generate(longer, sampling, num_generations=1, seed=1)
    for tokens, (rollout,) in zip(longer, second, strict=True):
        with torch.no_grad(), RouterReplay(model) as routers, routers.recording() as recorded:
            model(input_ids=torch.tensor([[*tokens, *rollout.token_ids[:-1]]]))
        assert torch.equal(rollout.routed_experts[:-1].sort(-1).values, recorded().sort(-1).values)


def test_the_metric_counts_tokens_whose_experts_differ_by_hand():
    model = mixture("qwen3_moe")
    (group,) = random_groups(0, [(4, [3, 2])])
    with shared_prefix(model), RouterReplay(model) as routers:
        batch = pack([group])
        with torch.no_grad(), routers.recording() as recorded:
            score(model, batch)
        own = recorded()  # the row: 4 tokens of the prompt, 3 and 2 of the rollouts
        group.routed_experts = own[:4].flip(-1)  # the same experts in another order
        group.rollouts[0].routed_experts, group.rollouts[1].routed_experts = own[4:7].clone(), own[7:].clone()
        group.rollouts[0].routed_experts[2] = NOT_RECORDED
        group.rollouts[1].routed_experts[1, 1, 0] = next(e for e in range(EXPERTS) if e not in own[8, 1])
        score(model, pack([group]))
        assert [int(count) for count in routers.take_differing()] == [1, 8]
        assert [int(count) for count in routers.take_differing()] == [0, 0]


def test_the_reference_under_an_adapter_chooses_its_own_experts():
    model = LoRAAdapter(r=2).add_to(mixture("qwen3_moe", torch.float32))
    groups = groups_of()
    with torch.no_grad(), shared_prefix(model):
        plain = score(model, pack(groups)).logprobs_N
        with RouterReplay(model):
            assert (score(model, pack(groups)).logprobs_N - plain).abs().max() > 0.1
            with adapters_off(model):
                assert torch.equal(score(model, pack(groups)).logprobs_N, plain)


def test_a_token_that_rollouts_share_has_the_record_of_the_first_that_has_one():
    stem = [*range(1, 21)]
    group = RolloutGroup([3, 4], [Rollout(stem), Rollout([*stem, 5])])
    group.routed_experts = torch.zeros(2, 1, 1, dtype=torch.int16)
    group.rollouts[0].routed_experts = torch.full((20, 1, 1), 1, dtype=torch.int16)
    group.rollouts[0].routed_experts[-1] = NOT_RECORDED
    group.rollouts[1].routed_experts = torch.full((21, 1, 1), 2, dtype=torch.int16)
    assert pack([group]).routed_experts.flatten().tolist() == [0, 0, *[1] * 19, 2, 2]
    rows = pack([group], "repeated").routed_experts.view(2, 23).tolist()
    assert rows == [[0, 0, *[1] * 19, -1, -1], [0, 0, *[2] * 21]]


def test_a_group_takes_the_prompts_record_from_its_rollouts():
    record = torch.arange(5, dtype=torch.int16).view(5, 1, 1)
    group = RolloutGroup([1, 2], [Rollout([3, 4, 5], routed_experts=record), Rollout([])])
    assert group.routed_experts.flatten().tolist() == [0, 1]
    assert group.rollouts[0].routed_experts.flatten().tolist() == [2, 3, 4]
    with pytest.raises(ValueError, match="5 tokens for 3 of the prompt"):
        RolloutGroup([1, 2, 3], [Rollout([3, 4, 5], routed_experts=record)])


def test_what_cannot_be_replayed_is_refused():
    with pytest.raises(ValueError, match="LlamaModel has no experts"):
        RouterReplay(tiny_model("llama"))
    phimoe = tiny_model("phimoe", num_local_experts=4, num_experts_per_tok=2)
    with RouterReplay(phimoe) as replay, replay.recording() as recorded:
        phimoe(input_ids=torch.tensor([[1, 2]]))
    with pytest.raises(NotImplementedError, match="PhimoeSparseMoeBlock does not choose"):
        recorded()
    model, groups = mixture("qwen3_moe"), forced(random_groups(0, [(4, [3])]), layers=3)
    with shared_prefix(model), RouterReplay(model), pytest.raises(ValueError, match="3 mixtures, but the model has 2"):
        score(model, pack(groups))

"""A group in slices against the same group in one call: hidden states and gradients, in float64."""

from __future__ import annotations

import gc
import itertools
import weakref
from typing import Any

import pytest
import torch
from helpers.peak_memory import Peak
from helpers.sweeps import sweep, sweep_pairs
from helpers.tiny_models import gradients, random_groups, tiny_model, worst_gradient_error
from helpers.tiny_vision import FAMILIES as VISION_FAMILIES
from helpers.tiny_vision import tiny_image, tiny_processor, tiny_vision_model, vision_group
from helpers.variants import VARIANTS, variant
from torch import Tensor

from pl_grouprl.attention import find_decoder, shared_prefix
from pl_grouprl.attention.call import Leaf, Prefilled
from pl_grouprl.media.inputs import placeholder_ids
from pl_grouprl.models import Critic, LoRAAdapter, ValueHead, hidden_states, score
from pl_grouprl.models.adapters import adapters_off
from pl_grouprl.models.score import PrefixPass
from pl_grouprl.packing import pack
from pl_grouprl.packing.batch import pack_slice
from pl_grouprl.types import Rollout, RolloutGroup

pytestmark = pytest.mark.usefixtures("layers_checked_once")

LENGTHS = [7, 0, 1, 12, 3, 0, 9]
SLICES = {
    "whole": [[0, 1, 2, 3, 4, 5, 6]],
    "uneven": [[0, 1], [2, 3], [4, 5, 6]],
    "single": [[0], [1], [2], [3], [4], [5], [6]],
    "another order": [[6, 0, 3], [5, 1], [4, 2]],
}
_QWEN3_NEXT = {
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 4},
    **{"layer_types": ["linear_attention", "full_attention"], "num_experts": 2, "num_experts_per_tok": 1},
    **{"moe_intermediate_size": 8, "shared_expert_intermediate_size": 8},
}
FAMILIES = ("llama", "qwen3", "gpt2", "qwen3_next", *VARIANTS)


def model_of(family: str, dtype: torch.dtype = torch.float64) -> Any:
    if family in VARIANTS:
        model = variant(family, dtype=dtype)
    else:
        model = tiny_model(family, dtype=dtype, **(_QWEN3_NEXT if family == "qwen3_next" else {}))
    model.set_experts_implementation("eager")  # the others have no float64
    return model


def group_of(prompt: int = 20) -> Any:
    (group,) = random_groups(0, [(prompt, LENGTHS)])
    return group


def weights(count: int) -> Tensor:
    return torch.linspace(0.5, 1.5, count, dtype=torch.float64)


def rollout_slices(index: list[int]) -> list[int]:
    """Places of the tokens of some rollouts among those of all."""
    starts = [sum(LENGTHS[:number]) for number in range(len(LENGTHS))]
    return [token for number in index for token in range(starts[number], starts[number] + LENGTHS[number])]


def in_one_call(model: Any, group: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probabilities, and the gradients of a loss that weighs every token differently."""
    model.zero_grad()
    logprobs = score(model, pack([group])).logprobs_N
    (logprobs * weights(len(logprobs))).sum().backward()
    return logprobs.detach(), gradients(model)


def in_slices(model: Any, group: Any, slices: list[list[int]], scale: float = 1) -> tuple[Tensor, dict[str, Tensor]]:
    """The same, slice by slice; the loss is scaled as a gradient scaler does."""
    model.zero_grad()
    prefix = PrefixPass(group, "cpu")
    found = torch.zeros(sum(LENGTHS), dtype=torch.float64)
    for index in slices:
        places = rollout_slices(index)
        logprobs = score(model, pack_slice(group, index, prefix)).logprobs_N
        (scale * (logprobs * weights(len(found))[places]).sum()).backward()
        found[places] = logprobs.detach().double()
    (scale * prefix.loss(model.parameters(), **({} if scale == 1 else {"loss_scale": scale}))).backward()
    return found, gradients(model)


def assert_same(model: Any, slices: list[list[int]], prompt: int = 20, tolerance: float = 1e-6) -> None:
    group = group_of(prompt)
    expected, found = in_one_call(model, group), in_slices(model, group, slices)
    torch.testing.assert_close(found[0], expected[0].double(), atol=tolerance, rtol=0)
    assert worst_gradient_error(found[1], expected[1]) < tolerance


@pytest.mark.parametrize("family", FAMILIES)
def test_slices_have_the_gradients_of_the_whole_group(family):
    model = model_of(family)
    with shared_prefix(model):
        assert_same(model, SLICES["uneven"])


@pytest.mark.parametrize("slices", SLICES.values(), ids=SLICES)
@pytest.mark.parametrize("family", sweep(["qwen3", "mistral", "qwen3_next"], quick=["mistral", "qwen3_next"]))
def test_any_slices(family, slices):
    model = model_of(family)
    with shared_prefix(model):
        assert_same(model, slices)


@pytest.mark.parametrize(
    ("family", "prompt"),
    sweep_pairs(
        itertools.product(["llama", "mistral", "llama4", "qwen3_next", "lfm2"], [1, 2, 8, 9]),
        quick=[("llama", 1), ("mistral", 8), ("mistral", 9), ("llama4", 9), ("qwen3_next", 2), ("lfm2", 1)],
    ),
)
def test_prompts_as_long_as_windows_and_chunks_and_shorter(family, prompt):
    model = model_of(family)
    with shared_prefix(model):
        assert_same(model, SLICES["uneven"], prompt)


@pytest.mark.parametrize("backend", ["reference"])  # the others run cascade
@pytest.mark.parametrize("family", ["qwen3", "gemma2, windows", "gpt_oss, windows", "llama4"])
def test_backends(family, backend):
    model = model_of(family)
    with shared_prefix(model, backend):
        assert_same(model, SLICES["uneven"])


@pytest.mark.parametrize("family", ["gpt2", "gemma2, windows", "qwen3_next", "llama4"])
def test_activation_checkpointing(family):
    model = model_of(family).train()
    with shared_prefix(model):
        expected = in_one_call(model, group_of())
        model.gradient_checkpointing_enable({"use_reentrant": False})
        found = in_slices(model, group_of(), SLICES["uneven"])
    assert worst_gradient_error(found[1], expected[1]) < 1e-6


def test_reentrant_checkpointing_is_refused():
    model = model_of("llama").train()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()
    with shared_prefix(model), pytest.raises(NotImplementedError, match="use_reentrant=False"):
        in_slices(model, group_of(), SLICES["uneven"])


@pytest.mark.parametrize(
    ("family", "backend"),
    [
        *(("llama", "auto"), ("gemma2, windows", "cascade"), ("gpt_oss, windows", "reference"), ("llama4", "auto")),
        *(("qwen3_next", "auto"), ("gpt_oss, windows", "flex")),
    ],
)
def test_scoring_without_gradient(family, backend):
    model, group = model_of(family, torch.float32), group_of()
    prefix = PrefixPass(group, "cpu")
    with shared_prefix(model, backend), torch.no_grad():
        expected = score(model, pack([group])).logprobs_N
        for index in SLICES["uneven"]:
            found = score(model, pack_slice(group, index, prefix)).logprobs_N
            torch.testing.assert_close(found, expected[rollout_slices(index)], atol=1e-5, rtol=0)
        assert prefix.loss() == 0


def test_autocast_rounds_no_more_than_in_one_call():
    """Both against float32; in slices the gradients of a prompt's tensors are rounded once per slice."""
    model, group = model_of("qwen3", torch.float32), group_of()
    with shared_prefix(model):
        exact = in_one_call(model, group)[1]
        with torch.autocast("cpu", torch.bfloat16):
            whole, split = in_one_call(model, group)[1], in_slices(model, group, SLICES["uneven"])[1]
    assert worst_gradient_error(split, exact) < 1.5 * worst_gradient_error(whole, exact)


@pytest.mark.slow
def test_compiled_layers():
    """Layers are compiled except for the attention of slices."""
    torch._dynamo.reset()
    model, group = model_of("llama", torch.float32).train(), group_of()
    with shared_prefix(model):
        expected = in_one_call(model, group)
        for layer in find_decoder(model).layers:
            layer.compile(backend="aot_eager", dynamic=True)
        found = in_slices(model, group, SLICES["uneven"])
    torch._dynamo.reset()
    torch.testing.assert_close(found[0], expected[0].double(), atol=1e-5, rtol=0)
    assert worst_gradient_error(found[1], expected[1]) < 1e-4


def test_the_prompt_runs_once():
    model, group, lengths = model_of("llama"), group_of(), []
    with shared_prefix(model):
        handle = find_decoder(model).embed_tokens.register_forward_hook(lambda *a: lengths.append(a[2].shape[1]))
        in_slices(model, group, SLICES["uneven"])
        handle.remove()
    assert lengths == [20, 7, 13, 12]


def test_two_models_and_a_value_head():
    """A policy and a critic in one pass; the critic reads the states before each token and after the last."""
    policy, group = model_of("llama"), group_of()
    head = ValueHead.near_zero(32, std=0.5).double()
    critic = Critic(tiny_model("qwen3", dtype=torch.float64, seed=1).model, head)

    def loss(batch: Any, places: Any, rollouts: Any) -> Tensor:
        logprobs = score(policy, batch).logprobs_N
        values, final = critic.values(batch), critic.values(batch, batch.final_index_B)
        count, number = weights(sum(LENGTHS))[places], weights(len(LENGTHS))[rollouts]
        return ((logprobs + values.square()) * count).sum() + (final.square() * number).sum()

    both = torch.nn.ModuleDict({"policy": policy, "critic": critic})
    with shared_prefix(policy), shared_prefix(critic.trunk):
        loss(pack([group]), slice(None), slice(None)).backward()
        expected = gradients(both)
        both.zero_grad()
        prefix = PrefixPass(group, "cpu")
        for index in SLICES["another order"]:
            loss(pack_slice(group, index, prefix), rollout_slices(index), index).backward()
        prefix.loss(both.parameters()).backward()
    assert worst_gradient_error(gradients(both), expected) < 1e-6


def test_a_model_with_and_without_gradient_in_one_pass():
    """Old log-probabilities of the same pass do not take the place of what is trained."""
    model, group = model_of("llama"), group_of()
    with shared_prefix(model):
        expected = in_one_call(model, group)[1]
        model.zero_grad()
        prefix = PrefixPass(group, "cpu")
        batch = pack_slice(group, range(len(LENGTHS)), prefix)
        with torch.no_grad():
            old = score(model, batch).logprobs_N
        logprobs = score(model, batch).logprobs_N
        torch.testing.assert_close(logprobs, old, atol=0, rtol=0)
        (logprobs * weights(len(logprobs))).sum().backward()
        prefix.loss().backward()
    assert worst_gradient_error(gradients(model), {name: expected[name] for name in gradients(model)}) < 1e-6


def test_an_adapter_switched_off_is_another_run():
    pytest.importorskip("peft")
    model, group = model_of("llama", torch.float32), group_of()
    LoRAAdapter(r=2, target_modules=["q_proj", "v_proj"]).put_on(model, "policy")
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    with shared_prefix(model):
        trained = in_one_call(model, group), in_slices(model, group, SLICES["uneven"])
        prefix = PrefixPass(group, "cpu")
        batch = pack_slice(group, range(len(LENGTHS)), prefix)
        with adapters_off(model):
            base, base_in_slices = score(model, pack([group])).logprobs_N, score(model, batch).logprobs_N
        with torch.no_grad():
            policy_in_slices = score(model, batch).logprobs_N
    assert worst_gradient_error(trained[1][1], trained[0][1]) < 1e-4
    torch.testing.assert_close(policy_in_slices, trained[0][0], atol=1e-5, rtol=0)
    torch.testing.assert_close(base_in_slices, base, atol=1e-5, rtol=0)
    assert (base - policy_in_slices).abs().max() > 0.1


def test_frozen_layers_get_no_gradient():
    model, group = model_of("llama"), group_of()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.1.self_attn.v_proj" in name)
    with shared_prefix(model):
        expected, found = in_one_call(model, group), in_slices(model, group, SLICES["uneven"])
    assert len(found[1]) == 1
    assert worst_gradient_error(found[1], expected[1]) < 1e-6


def test_slices_without_a_backward_get_zero_gradients():
    model, group = model_of("llama"), group_of()
    with shared_prefix(model):
        prefix = PrefixPass(group, "cpu")
        score(model, pack_slice(group, [0], prefix))
        loss = prefix.loss(model.parameters())
        loss.backward()
    assert loss == 0
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in model.parameters())
    frozen = model_of("llama").requires_grad_(False)
    with shared_prefix(frozen):
        prefix = PrefixPass(group, "cpu")
        score(frozen, pack_slice(group, [0], prefix))
        prefix.loss().backward()
    assert all(parameter.grad is None for parameter in frozen.parameters())


def test_a_scaled_loss_is_not_scaled_twice():
    model, group = model_of("llama"), group_of()
    scale = 1024.0
    with shared_prefix(model):
        expected = in_one_call(model, group)[1]
        in_slices(model, group, SLICES["uneven"], scale)
    assert worst_gradient_error({name: g / scale for name, g in gradients(model).items()}, expected) < 1e-6


def test_gradients_of_many_slices_are_added_in_float32():
    """In bfloat16 a sum of ones stops growing at 256."""
    leaf = Leaf(torch.zeros(3, dtype=torch.bfloat16, requires_grad=True))
    layer = torch.nn.Identity()
    given = Prefilled([{layer: {("key",): leaf}}], layer, ("key",))
    for _ in range(600):
        given.join(torch.zeros(2, dtype=torch.bfloat16)).sum().backward()
    torch.testing.assert_close(leaf.gradient, torch.full((3,), 600.0), atol=0, rtol=0)


def test_only_empty_rollouts_run_one_unused_token():
    model, group = model_of("llama"), group_of()
    with shared_prefix(model):
        prefix = PrefixPass(group, "cpu")
        batch = pack_slice(group, [1, 5], prefix)
        states = hidden_states(model, batch)
    assert batch.rollout_lengths == (0, 0)
    assert batch.targets_N.numel() == 0
    assert batch.final_index_B.tolist() == [0, 0]
    assert states.shape == (2, 32)
    assert batch.num_tokens_repeated == 2 * prefix.num_tokens + 1  # not a sequence of its own


def test_a_branch_is_reported_as_a_prompt_is():
    model = model_of("llama")
    with shared_prefix(model) as patch:
        branch = PrefixPass(RolloutGroup([1, 2, 3], []), "cpu").branch([4, 5])
        branch.states(model)
        assert (patch.last_call.part, patch.last_call.layout.num_prefilled) == ("prompt", 3)
        hidden_states(model, pack_slice(RolloutGroup([1, 2, 3], [Rollout([4, 5, 6])]), [0], branch))
        assert patch.last_call.part == "slice"


def test_indices_of_a_slice_by_hand():
    (group,) = random_groups(0, [(4, [2, 0, 3])])
    batch = pack_slice(group, [2, 1, 0], PrefixPass(group, "cpu"))
    tokens = [rollout.token_ids for rollout in group.rollouts]
    assert batch.model_inputs["input_ids"].tolist() == [tokens[2] + tokens[0]]
    assert batch.model_inputs["position_ids"].tolist() == [[4, 5, 6, 4, 5]]
    assert batch.predict_index_N.tolist() == [0, 1, 2, 0, 4]
    assert batch.final_index_B.tolist() == [3, 0, 5]
    assert batch.layout.num_prefilled == 4
    assert batch.num_tokens_run == 5
    assert batch.padding_fraction == 0


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
def test_no_states_are_left(family, checkpointing):
    """Tensors of a pass go when it is done, without the garbage collector: a cycle through a graph would stay."""
    model, group = model_of(family).train(), group_of()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    with shared_prefix(model):
        in_slices(model, group, SLICES["uneven"])
        gc.collect()
        gc.disable()
        try:
            prefix = PrefixPass(group, "cpu")
            score(model, pack_slice(group, [0, 3], prefix)).logprobs_N.sum().backward()
            kept = [weakref.ref(leaf.recorded) for leaf in prefix.states(model).leaves]
            prefix.loss().backward()
            assert len(kept) > 3
            assert not [one for one in kept if one() is not None]
        finally:
            gc.enable()


def test_a_model_with_dynamic_rope_is_refused():
    rope = {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 2.0}
    model, group = tiny_model("llama", rope_parameters=rope, max_position_embeddings=16), group_of()
    with shared_prefix(model), pytest.raises(NotImplementedError, match="larger token budget"):
        hidden_states(model, pack_slice(group, [0], PrefixPass(group, "cpu")))


WITH_IMAGES = [3, 9, 0, 5]
IMAGE_SLICES = [([0, 1], slice(0, 12)), ([2], slice(12, 12)), ([3], slice(12, 17))]


def image_group(family: str, images: int = 2) -> Any:
    pictures = [tiny_image(0, 24, 16), tiny_image(1)][:images]
    return vision_group(tiny_processor(family), "what is it?", pictures, WITH_IMAGES)


def assert_same_with_images(model: Any, group: Any) -> dict[str, torch.Tensor]:
    weights = torch.linspace(-1, 1, sum(WITH_IMAGES))
    with shared_prefix(model):
        expected = score(model, pack([group])).logprobs_N
        (expected * weights).sum().backward()
        theirs = gradients(model)
        model.zero_grad()
        prefix = PrefixPass(group, "cpu")
        for index, places in IMAGE_SLICES:
            found = score(model, pack_slice(group, index, prefix)).logprobs_N
            torch.testing.assert_close(found, expected[places], atol=1e-5, rtol=0)
            (found * weights[places]).sum().backward()
        prefix.loss(parameter for parameter in model.parameters() if parameter.requires_grad).backward()
    ours = {name: grad for name, grad in gradients(model).items() if name in theirs}
    assert worst_gradient_error(ours, theirs) < 1e-4
    return ours


def moves_the_tower(found: dict[str, torch.Tensor]) -> bool:
    return sum(g.norm() for name, g in found.items() if ".visual." in name or ".vision_tower." in name) > 0


@pytest.mark.parametrize(
    ("family", "checkpointing"), [*((f, False) for f in VISION_FAMILIES), (VISION_FAMILIES[0], True)]
)
def test_images(family, checkpointing):
    model = tiny_vision_model(family)
    if checkpointing:
        model.train().gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert moves_the_tower(assert_same_with_images(model, image_group(family)))


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_training_mode_and_prompts_of_text(family):
    assert_same_with_images(tiny_vision_model(family).train(), image_group(family, images=0))


def test_images_longer_than_the_window():
    assert moves_the_tower(
        assert_same_with_images(tiny_vision_model("gemma3", sliding_window=3), image_group("gemma3"))
    )


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_an_image_token_in_a_rollout_is_refused(family):
    model, group = tiny_vision_model(family), image_group(family)
    group.rollouts[1] = Rollout([5, placeholder_ids(model)["image_token_id"]])
    with shared_prefix(model), pytest.raises(ValueError, match="rollout"):
        hidden_states(model, pack_slice(group, [0, 1], PrefixPass(group, "cpu")))


PROMPT, RESPONSE, SLICE = 96, 128, 4


def checkpointed(checkpointing: bool) -> Any:
    model = tiny_model("llama").train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def peak_in_slices(model: Any, num_rollouts: int) -> int:
    (group,) = random_groups(0, [(PROMPT, [RESPONSE] * num_rollouts)])
    model.zero_grad()
    with shared_prefix(model), Peak() as peak:
        prefix = PrefixPass(group, "cpu")
        for start in range(0, num_rollouts, SLICE):
            score(model, pack_slice(group, range(start, start + SLICE), prefix)).logprobs_N.sum().backward()
        prefix.loss(model.parameters()).backward()
    return peak.peak


def peak_in_one_call(model: Any, num_rollouts: int) -> int:
    (group,) = random_groups(0, [(PROMPT, [RESPONSE] * num_rollouts)])
    model.zero_grad()
    with shared_prefix(model), Peak() as peak:
        score(model, pack([group])).logprobs_N.sum().backward()
    return peak.peak


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_larger_group_takes_no_more_memory(checkpointing):
    model = checkpointed(checkpointing)
    small, large = peak_in_slices(model, 4), peak_in_slices(model, 32)
    assert large < 1.3 * small
    assert peak_in_one_call(model, 32) > 2 * large


def test_slices_take_little_more_memory_than_one_call():
    """Of four rollouts: a prompt's tensors are there twice at most, with their gradients."""
    model = checkpointed(False)
    assert peak_in_slices(model, 4) < 1.3 * peak_in_one_call(model, 4)


def test_retained_memory_is_counted():
    with Peak() as peak:
        kept = [torch.zeros(1000) + 1 for _ in range(3)]
        assert peak.live == 12_000
        del kept
        assert peak.live == 0
    assert 12_000 <= peak.peak <= 16_000

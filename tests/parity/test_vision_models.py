"""Shared against repeated visual prefixes: log-probabilities, and gradients down to the vision tower."""

from contextlib import nullcontext

import pytest
import torch
from helpers.tiny_models import gradients, worst_gradient_error
from helpers.tiny_vision import FAMILIES, tiny_image, tiny_processor, tiny_vision_model, vision_group

from pl_grouprl.attention import shared_prefix
from pl_grouprl.models.score import score
from pl_grouprl.packing import pack
from pl_grouprl.types import Rollout, RolloutGroup


def groups_of(family):
    """Two images of different sizes (beyond a window of 6), no image, and one image."""
    processor = tiny_processor(family)
    return [
        vision_group(processor, "what is it?", [tiny_image(0, 24, 16), tiny_image(1)], [3, 9]),
        vision_group(processor, "how many?", [], [4, 2], seed=1),
        vision_group(processor, "b", [tiny_image(2, 16, 32)], [4, 0, 7], seed=2),
    ]


def run(model, groups, sharing, backend="auto"):
    """Log-probabilities and the gradients of a weighted sum of them."""
    model.zero_grad(set_to_none=True)
    batch = pack(groups, sharing)
    with shared_prefix(model, backend) if sharing == "shared" else nullcontext():
        logprobs_N = score(model, batch).logprobs_N
        (logprobs_N * torch.linspace(-1, 1, len(logprobs_N))).sum().backward()
    return logprobs_N.detach(), gradients(model)


def assert_equal(model, groups, backend):
    expected, theirs = run(model, groups, "repeated")
    actual, ours = run(model, groups, "shared", backend)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=0)
    assert worst_gradient_error(ours, theirs) < 1e-4
    if any(group.media for group in groups):
        assert sum(ours[name].norm() for name in ours if ".visual." in name or ".vision_tower." in name) > 0


@pytest.mark.parametrize(("family", "backend"), [*((family, "auto") for family in FAMILIES), ("gemma3", "reference")])
def test_images(family, backend):
    assert_equal(tiny_vision_model(family), groups_of(family), backend)


@pytest.mark.parametrize("family", FAMILIES)
def test_activation_checkpointing(family):
    model = tiny_vision_model(family)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert_equal(model.train(), groups_of(family), "auto")


@pytest.mark.parametrize("family", FAMILIES)
def test_low_rank_layers_on_tower_and_language_model(family):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules="all-linear", init_lora_weights=False)
    assert_equal(peft.get_peft_model(tiny_vision_model(family), config).eval(), groups_of(family), "auto")


def test_images_longer_than_the_window():
    """Gemma's image of 4 tokens is seen both ways, but on sliding layers each token sees only 2 of those before it."""
    assert_equal(tiny_vision_model("gemma3", sliding_window=3), groups_of("gemma3"), "auto")


@pytest.mark.parametrize("family", FAMILIES)
def test_one_call_of_the_vision_tower_with_each_image_once(family):
    model, groups = tiny_vision_model(family), groups_of(family)
    tower = model.model.vision_tower if family == "gemma3" else model.model.visual
    seen = []
    handle = tower.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(len(args[0] if args else kwargs["pixel_values"])), with_kwargs=True
    )
    with shared_prefix(model), torch.no_grad():
        score(model, pack(groups))
    handle.remove()
    assert seen == [sum(len(group.media.get("pixel_values", ())) for group in groups)]


@pytest.mark.parametrize("family", FAMILIES)
def test_text_only(family):
    assert_equal(tiny_vision_model(family), groups_of(family)[1:2], "auto")


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_videos(family):
    """Made by hand: the processors of videos need torchvision."""
    model = tiny_vision_model(family)
    video = model.config.video_token_id
    generator = torch.Generator().manual_seed(0)

    def group(frames, rollouts):
        # Qwen3 writes each frame apart, between tokens of text; Qwen2.5 writes all frames at once.
        run = [video] * 4
        shown = [t for _ in range(frames) for t in (9, *run)] if family == "qwen3_vl" else [9, *run * frames]
        prompt = [5, *shown, 6, 7]
        media = {
            "pixel_values_videos": torch.randn(frames * 16, 96, generator=generator),
            "video_grid_thw": torch.tensor([[frames, 4, 4]]),
            "mm_token_type_ids": torch.tensor([2 * (token == video) for token in prompt]),
        }
        if family == "qwen2_5_vl":
            media["second_per_grid_ts"] = torch.tensor([1.5])
        return RolloutGroup(prompt, [Rollout(own) for own in rollouts], media=media)

    assert_equal(model, [group(3, [[4, 8], [10]]), group(2, [[11, 12, 13], [14]])], "auto")


@pytest.mark.parametrize("family", FAMILIES)
def test_another_groups_image_changes_nothing(family):
    """Bit for bit in the same layout."""
    processor, model = tiny_processor(family), tiny_vision_model(family)
    first = vision_group(processor, "what?", [tiny_image(0)], [3, 5])

    def logprobs(seed):
        second = vision_group(processor, "why?", [tiny_image(seed)], [4, 2], seed=1)
        with shared_prefix(model), torch.no_grad():
            return score(model, pack([first, second])).logprobs_N

    one, other = logprobs(1), logprobs(2)
    assert torch.equal(one[:8], other[:8])
    assert not torch.equal(one[8:], other[8:])

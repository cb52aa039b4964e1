"""Models that read images: their backbone, their positions, what they are not given."""

import pytest
import torch
from helpers.tiny_models import random_groups, tiny_model
from helpers.tiny_vision import FAMILIES, saw_image, tiny_image, tiny_processor, tiny_vision_model, vision_group

from pl_grouprl.attention import find_backbone, shared_prefix
from pl_grouprl.media.inputs import media_position_ids, placeholder_ids
from pl_grouprl.media.rows import language_model_class, load_processor
from pl_grouprl.models.score import PrefixPass, hidden_states, rollout_logprobs, score
from pl_grouprl.packing import pack
from pl_grouprl.packing.batch import pack_slice
from pl_grouprl.types import Rollout, RolloutGroup


def mixed_groups(family):
    """Two images, none, and one of another size."""
    processor = tiny_processor(family)
    return [
        vision_group(processor, "what?", [tiny_image(0, 24, 16), tiny_image(1)], [3, 5]),
        vision_group(processor, "how many?", [], [4, 2], seed=1),
        vision_group(processor, "b", [tiny_image(2, 16, 32)], [4, 0], seed=2),
    ]


def groups_that_saw_images(family):
    """Rollouts that read images, after prompts with images and without, among others that do not."""
    processor, groups = tiny_processor(family), mixed_groups(family)
    for number, group in enumerate(groups[:2]):
        group.rollouts.insert(1, saw_image(processor, tiny_image(5 + number, 24, 16), 3, 4, seed=number))
        group.rollouts.append(saw_image(processor, tiny_image(8, 16, 24), 3, 2, seed=number))
    return groups


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", [*FAMILIES, "llama", "gpt2"])
def test_the_backbone_is_what_takes_images_or_the_decoder(family):
    reads_images = family in FAMILIES
    model = tiny_vision_model(family) if reads_images else tiny_model(family)
    assert find_backbone(model) is model.base_model
    assert ("image_token_id" in placeholder_ids(model)) == reads_images


@pytest.mark.parametrize("sharing", ["shared", "repeated"])
@pytest.mark.parametrize("make", [mixed_groups, groups_that_saw_images])
@pytest.mark.parametrize("family", FAMILIES)
def test_scores_are_those_of_a_plain_call_for_each_sequence(family, make, sharing):
    """The oracle is the whole model on prompt and rollout with all that the processor returned."""
    model = tiny_vision_model(family)
    groups = make(family)
    actual = rollout_logprobs(model, groups, sharing=sharing)
    rollouts = [(group, rollout) for group in groups for rollout in group.rollouts]
    for (group, rollout), logprobs in zip(rollouts, actual, strict=True):
        tokens, media = rollout.token_ids, {}
        for name in group.media | rollout.media:
            both = [(group.media.get(name), group.prompt_ids), (rollout.media.get(name), tokens)]
            if name.endswith("token_type_ids"):
                media[name] = torch.cat([torch.zeros(len(ids)).long() if v is None else v for v, ids in both])[None]
            else:
                media[name] = torch.cat([value for value, _ in both if value is not None])
        logits = model(input_ids=torch.tensor([group.prompt_ids + tokens]), **media).logits[0]
        logits = logits[len(group.prompt_ids) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None].long())
        torch.testing.assert_close(logprobs, expected.flatten(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_positions_go_on_behind_the_largest_of_the_prompt(family):
    """An image of 2 x 3 tokens at place 2 takes the positions 2 to 4; the text behind it begins at 5."""
    model = tiny_vision_model(family)
    image = model.config.image_token_id
    grid = torch.tensor([[1, 4, 6]])
    types = torch.tensor([0, 0, 1, 1, 1, 1, 1, 1, 0])
    media = {"pixel_values": torch.zeros(24, 96), "image_grid_thw": grid, "mm_token_type_ids": types}
    prompt = [5, 6, *[image] * 6, 7]
    groups = [RolloutGroup(prompt, [Rollout([8, 9]), Rollout([4])], media=media), RolloutGroup([5, 6], [Rollout([7])])]
    time = [0, 1, 2, 2, 2, 2, 2, 2, 5]
    height = [0, 1, 2, 2, 2, 3, 3, 3, 5]
    width = [0, 1, 2, 3, 4, 2, 3, 4, 5]
    packed = media_position_ids(model, pack(groups))
    assert packed.shape == (3, 1, 15)
    assert packed[:, 0].tolist() == [[*axis, 6, 7, 6, 0, 1, 2] for axis in (time, height, width)]
    rows = media_position_ids(model, pack(groups, "repeated"))
    assert rows.shape == (3, 3, 11)
    assert rows[:, 0].tolist() == [[*axis, 6, 7] for axis in (time, height, width)]
    assert rows[:, 1, :10].tolist() == [[*axis, 6] for axis in (time, height, width)]
    assert rows[:, 2, :3].tolist() == [[0, 1, 2]] * 3


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_with_images_in_rollouts_are_those_of_repeated_prompts(family):
    model, groups = tiny_vision_model(family), groups_that_saw_images(family)
    found = []
    for sharing in ("shared", "repeated"):
        model.zero_grad()
        logprobs_N = torch.cat(rollout_logprobs(model, groups, sharing=sharing))
        weights_N = torch.linspace(-1, 1, len(logprobs_N)) * pack(groups).loss_mask_N
        (logprobs_N * weights_N).sum().backward()
        found.append(gradients(model))
    ours, theirs = found
    assert ours.keys() == theirs.keys()
    assert any(".visual." in name or ".vision_tower." in name for name in ours)
    for name, gradient in ours.items():
        torch.testing.assert_close(gradient, theirs[name], atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_another_image_in_one_rollout_changes_only_that_rollout(family):
    model, groups = tiny_vision_model(family), groups_that_saw_images(family)
    before = rollout_logprobs(model, groups)
    other = saw_image(tiny_processor(family), tiny_image(9, 24, 16), 3, 4)
    assert other.token_ids == groups[0].rollouts[1].token_ids
    groups[0].rollouts[1] = other
    changed = [
        not torch.allclose(a, b, atol=1e-5) for a, b in zip(before, rollout_logprobs(model, groups), strict=True)
    ]
    assert changed == [False, True] + [False] * (len(changed) - 2)


def test_equal_rollouts_with_different_images_share_no_token():
    model, processor = tiny_vision_model("qwen2_5_vl"), tiny_processor("qwen2_5_vl")
    twins = [saw_image(processor, tiny_image(seed), 20, 20) for seed in (1, 2)]
    assert twins[0].token_ids == twins[1].token_ids
    group = vision_group(processor, "what?", [], [])
    group.rollouts = twins
    assert pack([group]).shared_tokens is None
    shared, repeated = (rollout_logprobs(model, [group], sharing=sharing) for sharing in ("shared", "repeated"))
    torch.testing.assert_close(shared, repeated, atol=1e-5, rtol=0)
    assert (shared[0] - shared[1])[-20:].abs().max() > 1e-3


@pytest.mark.parametrize("images", [0, 1])
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_slices_of_a_group_with_images_in_its_rollouts(family, images):
    """Slices that continue a prompt, with and without images of their own, give the whole group's results."""
    model, processor = tiny_vision_model(family), tiny_processor(family)
    group = vision_group(processor, "what is it?", [tiny_image(0, 24, 16)][:images], [5])
    group.rollouts += [saw_image(processor, tiny_image(n, 16, 24), 2, 3, seed=n) for n in (1, 2)]
    weights = [torch.linspace(-1, 1, len(rollout.token_ids)) for rollout in group.rollouts]
    with shared_prefix(model):
        expected = rollout_logprobs(model, [group])
        sum((one * weight).sum() for one, weight in zip(expected, weights, strict=True)).backward()
        theirs = gradients(model)
        model.zero_grad()
        prefix = PrefixPass(group, "cpu")
        for indices in ([2], [0, 1]):
            found = score(model, pack_slice(group, indices, prefix)).logprobs_N
            torch.testing.assert_close(found, torch.cat([expected[i] for i in indices]), atol=1e-5, rtol=0)
            (found * torch.cat([weights[i] for i in indices])).sum().backward()
        prefix.loss(model.parameters()).backward()
    ours = gradients(model)
    for name, gradient in theirs.items():
        torch.testing.assert_close(ours[name], gradient, atol=2e-4, rtol=1e-3)


def test_rollouts_behind_a_long_video_are_placed_as_in_one_forward():
    """Ten seconds of video reach further in time than the one token behind it; text goes on from that token."""
    model = tiny_vision_model("qwen2_5_vl")
    media = {
        "pixel_values_videos": torch.zeros(5 * 16, 96),
        "video_grid_thw": torch.tensor([[5, 4, 4]]),
        "second_per_grid_ts": torch.tensor([2.0]),
        "mm_token_type_ids": torch.tensor([0] + [2] * 20 + [0]),
    }
    prompt = [5, *[model.config.video_token_id] * 20, 6]
    group = RolloutGroup(prompt, [Rollout([7, 8]), Rollout([9])], media=media)
    # The last of the five frames is at 1 + 4 * (2 tokens per second) * (2 seconds) = 17; the text behind it at 1 + 2.
    tokens = torch.tensor([[*prompt, 7, 8]])
    types = torch.nn.functional.pad(media["mm_token_type_ids"], (0, 2))[None]
    grids = {name: media[name] for name in ("video_grid_thw", "second_per_grid_ts")}
    expected, _ = model.model.get_rope_index(tokens, mm_token_type_ids=types, **grids)
    packed = media_position_ids(model, pack([group]))
    assert packed[:, 0, :24].tolist() == expected[:, 0].tolist()
    assert packed[:, 0, 20:].tolist() == [[17, 3, 4, 5, 4], [2, 3, 4, 5, 4], [2, 3, 4, 5, 4]]


def test_text_and_gemma_have_positions_of_text():
    assert media_position_ids(tiny_vision_model("qwen3_vl"), pack(mixed_groups("qwen3_vl")[1:2])) is None
    assert media_position_ids(tiny_vision_model("gemma3"), pack(mixed_groups("gemma3"))) is None


@pytest.mark.parametrize("family", FAMILIES)
def test_a_rollout_with_a_placeholder_is_refused_by_its_number(family):
    model = tiny_vision_model(family)
    groups = mixed_groups(family)
    groups[1].rollouts[1].token_ids[0] = placeholder_ids(model)["image_token_id"]
    with pytest.raises(ValueError, match=r"rollout 3 .* image_token_id"):
        score(model, pack(groups, "repeated"))
    assert score(model, pack(groups[1:2], "repeated")).logprobs_N.isfinite().all()  # text alone: a token like any other


def test_a_text_model_is_given_no_images():
    groups = random_groups(0, [(4, [2])])
    groups[0].media = {"pixel_values": torch.zeros(1, 3)}
    with pytest.raises(ValueError, match="pixel_values"):
        hidden_states(tiny_model("llama"), pack(groups, "repeated"))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_class_that_loads_a_model_keeps_its_vision_tower(family, tmp_path):
    import transformers

    model = tiny_vision_model(family)
    model.save_pretrained(tmp_path)
    name = language_model_class(model.config)
    assert type(getattr(transformers, name).from_pretrained(tmp_path)) is type(model)
    assert language_model_class(tiny_model("qwen3").config) == "AutoModelForCausalLM"


def test_processors_are_loaded_where_a_policy_is_from(tmp_path):
    class Source:
        def load_processor(self):
            return "mine"

    assert load_processor(Source()) == "mine"
    processor = tiny_processor("gemma3")
    processor.save_pretrained(tmp_path / "gemma")
    assert type(load_processor(str(tmp_path / "gemma"))) is type(processor)
    processor.tokenizer.save_pretrained(tmp_path / "text")
    with pytest.raises((ValueError, OSError), match="text"):
        load_processor(str(tmp_path / "text"))
    with pytest.raises(ValueError, match="processor"):
        load_processor(object())

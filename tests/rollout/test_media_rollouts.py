"""Rollouts of prompts with images, against forwards of single sequences without a cache."""

import math

import pytest
import torch
from helpers.continued import counted_tokens
from helpers.rollouts import assert_same
from helpers.sampling_oracle import assert_sampled, tiny_decoder
from helpers.tiny_vision import FAMILIES, prompts_and_media, tiny_vision_model
from helpers.versions import needs

from pl_grouprl.media.inputs import media_key, placeholder_ids
from pl_grouprl.rollout import HFRolloutEngine
from pl_grouprl.types import SamplingConfig


def count_calls(module, kind):
    calls = []
    module.register_forward_pre_hook(lambda *args: calls.append(kind))
    return calls


@pytest.mark.parametrize("temperature", [0.0, 2.0])
@pytest.mark.parametrize("family", FAMILIES)
def test_sampling_equals_a_full_forward(family, temperature):
    model, (prompts, media) = tiny_vision_model(family), prompts_and_media(family)
    never = tuple(placeholder_ids(model).values())
    sampling = SamplingConfig(max_new_tokens=12, temperature=temperature, stop_token_ids=(1, 8, 16, 24, 32))
    engine = HFRolloutEngine(model, max_sequences=5)
    towers = [m for name, m in model.named_modules() if name.endswith(("visual", "vision_tower"))]
    (tower,) = [m for m in towers if not any(m is not other and m in other.modules() for other in towers)]
    encoded = count_calls(tower, "tower")
    groups = engine.generate(prompts, sampling, num_generations=2, seed=3, media=media)
    assert len(encoded) == 3  # one for each distinct prompt with images
    for index, (prompt, own, group) in enumerate(zip(prompts, media, groups, strict=True)):
        for generation, rollout in enumerate(group):
            names = {"name": (index, generation), "seed": 3, "media": own, "never": never}
            assert_sampled(model, prompt, rollout, sampling, **names)
    assert prompts[0] == prompts[1]
    assert groups[0][0].logprobs != groups[1][0].logprobs


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_text_continues_its_cache_next_to_prompts_with_images(family):
    model, (prompts, media) = tiny_vision_model(family), prompts_and_media(family)
    engine, sampling = HFRolloutEngine(model), SamplingConfig(max_new_tokens=6)
    first = engine.generate(prompts, sampling, num_generations=1, seed=3, media=media)
    text = [[*prompts[index], *first[index][0].token_ids, 5, 6, 7] for index in (2, 5)]
    again, images = [prompts[3], *text, prompts[0]], [media[3], {}, {}, media[0]]
    expected = engine.generate(again, sampling, num_generations=2, seed=4, media=images)
    with engine.keep_caches():
        assert_same(first, engine.generate(prompts, sampling, num_generations=1, seed=3, media=media))
        with counted_tokens(model) as counts:
            assert_same(expected, engine.generate(again, sampling, num_generations=2, seed=4, media=images))
    sampled = sum(len(rollout.token_ids) - 1 for group in expected for rollout in group)
    assert sum(counts) == len(prompts[3]) + len(prompts[0]) + 2 * 4 + sampled


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_stale_positions_in_the_model_are_not_read(family):
    model, (prompts, media) = tiny_vision_model(family), prompts_and_media(family)
    engine, sampling = HFRolloutEngine(model), SamplingConfig(max_new_tokens=6)
    text = {"prompts": [prompts[2], prompts[5]], "sampling": sampling, "num_generations": 2, "seed": 3}
    first, second = engine.generate(prompts, sampling, num_generations=2, seed=3, media=media), engine.generate(**text)
    assert model.model.rope_deltas is None
    model.model.rope_deltas = torch.tensor([[50]])  # of a forward by others
    assert first == engine.generate(prompts, sampling, num_generations=2, seed=3, media=media)
    assert second == engine.generate(**text)


@needs("transformers", "5.21")
def test_a_video_and_its_speed():
    model = tiny_vision_model("qwen2_5_vl")
    tokens = placeholder_ids(model)
    prompt = [5, *8 * [tokens["video_token_id"]], 6, 7]  # two frames of 4 by 4 patches, merged two by two
    video = {
        "pixel_values_videos": torch.randn(32, 96, generator=torch.Generator().manual_seed(0)),
        "video_grid_thw": torch.tensor([[2, 4, 4]]),
        "mm_token_type_ids": torch.tensor([0, *8 * [2], 0, 0]),
    }
    sampling = SamplingConfig(max_new_tokens=8, stop_token_ids=(1,))
    results = []
    for seconds in (0.5, 0.0):
        media = [{**video, "second_per_grid_ts": torch.tensor([seconds])}]
        (group,) = HFRolloutEngine(model).generate([prompt], sampling, num_generations=3, seed=3, media=media)
        for generation, rollout in enumerate(group):
            options = {"name": (0, generation), "seed": 3, "media": media[0], "never": tuple(tokens.values())}
            assert_sampled(model, prompt, rollout, sampling, **options)
        results.append([rollout.logprobs for rollout in group])
    assert results[0] != results[1]


@pytest.mark.parametrize("family", FAMILIES)
def test_placeholders_are_never_sampled(family):
    model, (prompts, media) = tiny_vision_model(family), prompts_and_media(family)
    tokens = placeholder_ids(model)
    assert tokens
    model.lm_head.register_forward_hook(lambda module, args, logits: logits.index_fill(-1, wanted, 9.0))
    wanted = torch.tensor(list(tokens.values()))
    engine = HFRolloutEngine(model)
    for temperature in (0.0, 1.0):
        sampling = SamplingConfig(max_new_tokens=8, temperature=temperature)
        groups = engine.generate(prompts, sampling, num_generations=4, seed=0, media=media)
        drawn = [rollout for group in groups for rollout in group]
        assert not {token for rollout in drawn for token in rollout.token_ids} & set(tokens.values())
        assert all(math.isfinite(value) for rollout in drawn for value in rollout.logprobs)


def test_media_of_equal_content_are_the_same():
    first = {"pixel_values": torch.arange(4.0), "image_grid_thw": torch.tensor([[1, 2, 2]])}
    copy = {"image_grid_thw": torch.tensor([[1, 2, 2]]), "pixel_values": torch.arange(4.0)}
    assert media_key(first) == media_key(copy)
    others = [
        {**first, "pixel_values": torch.arange(4.0) + 1},
        {**first, "pixel_values": torch.arange(4.0)[None]},
        {**first, "pixel_values": torch.arange(4.0).double()},
        {"image_grid_thw": first["image_grid_thw"]},
        {"pixel_values": first["pixel_values"].bfloat16(), "image_grid_thw": first["image_grid_thw"]},
        {},
    ]
    assert len({media_key(media) for media in [first, *others]}) == 7


def test_media_that_cannot_be_served_are_refused():
    model, (prompts, media) = tiny_vision_model("qwen2_5_vl"), prompts_and_media("qwen2_5_vl")
    text = tiny_decoder("mistral", vocab_size=64)
    for policy, own, named in (
        (model, media[:2], "longer"),
        (model, [{"audio": torch.zeros(1)}], r"\['audio'\]"),
        (model, [{**media[0], "mm_token_type_ids": torch.zeros(1)}], r"\['mm_token_type_ids'\]"),
        (text, [{"pixel_values": torch.zeros(1)}], r"\['pixel_values'\]"),
    ):
        with pytest.raises(ValueError, match=named):
            HFRolloutEngine(policy).generate(
                prompts[:1], SamplingConfig(max_new_tokens=2), num_generations=1, seed=0, media=own
            )

"""Rollouts of prompts with images by `VLLMRolloutEngine`, which gets its weights from the trainer."""

import pytest
import torch
from helpers.tiny_vision import tiny_image, tiny_processor, vision_group

from pl_grouprl.distributed.weight_stream import checkpoint_weights
from pl_grouprl.media.inputs import placeholder_ids
from pl_grouprl.types import SamplingConfig

pytestmark = pytest.mark.vllm
pytest.importorskip("vllm")

from helpers.vllm_vision import fresh_logprobs, import_vllm_models, tiny_model  # noqa: E402

from pl_grouprl.rollout.vllm.colocate import VLLMRolloutEngine  # noqa: E402


@pytest.fixture(scope="module", autouse=True)
def models():
    import_vllm_models()


@pytest.fixture
def engine():
    engine = VLLMRolloutEngine(max_model_len=256, max_num_seqs=8, enforce_eager=True, kv_cache_gib=0.1)
    yield engine
    engine.close()


def send(engine, model, version):
    engine.update_weights(checkpoint_weights(model, model.named_parameters()), version=version)


def assert_equal_forwards(model, prompts, media, groups):
    for prompt, own, group in zip(prompts, media, groups, strict=True):
        for rollout in group:
            assert not {*rollout.token_ids} & {*placeholder_ids(model).values()}
            expected = fresh_logprobs(model, prompt, own, rollout)
            torch.testing.assert_close(torch.tensor(rollout.logprobs), expected, atol=1e-3, rtol=0)


@pytest.mark.parametrize(("family", "tied"), [("qwen2_5_vl", True), ("qwen3_vl", True), ("qwen3_vl", False)])
def test_images_under_weights_that_change(family, tied, engine):
    """Before and behind an update of the vision tower, of which vLLM has kept what the old one made of the images."""
    model, processor = tiny_model(family, tied=tied), tiny_processor(family)
    groups = [vision_group(processor, "cat?", [tiny_image(seed)], []) for seed in (0, 1)]
    groups.append(vision_group(processor, "text", [], []))
    groups.append(vision_group(processor, "two", [tiny_image(0), tiny_image(2)], []))
    prompts, media = [group.prompt_ids for group in groups], [group.media for group in groups]
    engine.bind(model)
    sampling, sampled = SamplingConfig(max_new_tokens=8), []
    for version in range(2):
        send(engine, model, version)
        sampled.append(engine.generate(prompts, sampling, num_generations=2, seed=3, media=media))
        assert_equal_forwards(model, prompts, media, sampled[-1])
        with torch.no_grad():
            model.model.visual.patch_embed.proj.weight += 0.1
    assert sampled[0][0][0].logprobs != sampled[1][0][0].logprobs
    assert sampled[0][2] == sampled[1][2]


@pytest.mark.parametrize("tied", [False, True])
def test_a_family_of_which_only_text_is_served(tied, engine):
    model, processor = tiny_model("gemma3", tied=tied), tiny_processor("gemma3")
    group, text = vision_group(processor, "cat?", [tiny_image(0)], []), vision_group(processor, "text", [], [])
    engine.bind(model)
    send(engine, model, 0)
    rollouts = engine.generate([text.prompt_ids], SamplingConfig(max_new_tokens=8), num_generations=2, seed=3)
    assert_equal_forwards(model, [text.prompt_ids], [{}], rollouts)
    prompts, media = [text.prompt_ids, group.prompt_ids], [{}, group.media]
    with pytest.raises(ValueError, match="family gemma3"):
        engine.generate(prompts, SamplingConfig(max_new_tokens=8), num_generations=1, seed=3, media=media)
    assert engine.generate(prompts[:1], SamplingConfig(max_new_tokens=8), num_generations=2, seed=3) == rollouts

"""Images in vLLM: what it is given for them, and its log-probabilities against fresh forwards of transformers."""

from __future__ import annotations

import gc
import importlib
import logging
import os
from collections import Counter
from unittest.mock import patch

import pytest
import torch
from helpers.tiny_models import tiny_model as text_model
from helpers.tiny_vision import (
    prompts_and_media,
    tiny_image,
    tiny_processor,
    tiny_tokenizer,
    tiny_vision_model,
    vision_group,
)

from pl_grouprl.media.inputs import placeholder_ids
from pl_grouprl.types import SamplingConfig

pytestmark = pytest.mark.vllm
pytest.importorskip("vllm")

from helpers.vllm_vision import fresh_logprobs, import_vllm_models, tiny_model  # noqa: E402

from pl_grouprl.rollout.engine import StopStrings  # noqa: E402
from pl_grouprl.rollout.vllm.image_models import image_items  # noqa: E402
from pl_grouprl.rollout.vllm.images import engine_prompt, media_engine_args  # noqa: E402
from pl_grouprl.rollout.vllm.requests import Completion, new_tokens, sampling_params  # noqa: E402

SAMPLING = SamplingConfig(max_new_tokens=10)


@pytest.fixture(autouse=True)
def environment():
    """Starting vLLM in this process sets variables and a log level."""
    logger = logging.getLogger("httpx2")
    with patch.dict(os.environ), patch.object(logger, "level", logger.level):
        yield


import_vllm_models()  # here, because imports set variables and log levels for good
importlib.import_module("vllm.v1.engine.llm_engine")


class Engine:
    """vLLM with the weights of a model, without its tokenizer and processor."""

    def __init__(self, model, folder, monkeypatch, **options):
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        model.save_pretrained(folder)
        defaults = {"max_model_len": 256, "max_num_seqs": 8, "kv_cache_memory_bytes": 1 << 26, "enforce_eager": True}
        arguments = EngineArgs(
            model=str(folder),
            skip_tokenizer_init=True,
            dtype="float32",
            logprobs_mode="processed_logprobs",
            **{**defaults, **media_engine_args(model), **options},
        )
        self.model, self.llm = model, LLMEngine.from_engine_args(arguments, enable_multiprocessing=False)
        self.runner = self.llm.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
        self.encoded = Counter()
        if hasattr(self.runner.model, "visual"):
            self.runner.model.visual.register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, module, args, kwargs):
        self.encoded["images"] += len(kwargs.get("grid_thw", args[1:] and args[1]))

    def sample(self, prompts, media, num_generations=2, sampling=SAMPLING):
        asked = {}
        for place, (prompt, own) in enumerate(zip(prompts, media, strict=True)):
            for number in range(num_generations):
                asked[f"{place}.{number}"] = Completion(StopStrings(None, ()))
                never = placeholder_ids(self.model).values()
                parameters = sampling_params(sampling, end_ids=[1], never=list(never), seed=10 * place + number)
                self.llm.add_request(f"{place}.{number}", engine_prompt(self.model, prompt, own), parameters)
        while self.llm.has_unfinished_requests():
            for output in self.llm.step():
                asked[output.request_id].add(*new_tokens(output.outputs[0]))
        rollouts = [completion.rollout() for completion in asked.values()]
        return [rollouts[first : first + num_generations] for first in range(0, len(rollouts), num_generations)]

    def close(self):
        self.llm.engine_core.shutdown()


@pytest.fixture
def start(tmp_path, monkeypatch):
    engines = []

    def start(model, **options):
        engines.append(Engine(model, tmp_path, monkeypatch, **options))
        return engines[-1]

    yield start
    for engine in engines:
        engine.close()
    gc.collect()


def assert_equal_forwards(model, prompts, media, groups):
    for prompt, own, group in zip(prompts, media, groups, strict=True):
        for rollout in group:
            expected = fresh_logprobs(model, prompt, own, rollout)
            torch.testing.assert_close(torch.tensor(rollout.logprobs), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_logprobs_are_those_of_transformers(family, start):
    model, (prompts, media) = tiny_model(family), prompts_and_media(family)
    engine = start(model)
    engine.encoded.clear()
    groups = engine.sample(prompts, media)
    assert engine.encoded["images"] == 4  # each distinct one once
    assert_equal_forwards(model, prompts, media, groups)
    assert prompts[0] == prompts[1]
    assert groups[0][0].logprobs != groups[1][0].logprobs


def test_a_long_prompt_in_pieces_and_from_the_prefix_cache(start):
    """Images are cut by the pieces; of prompts with equal tokens, only those with equal images share blocks."""
    family = "qwen2_5_vl"
    model, processor = tiny_model(family), tiny_processor(family)
    seeds = [[0, 1, 2], [0, 1, 2], [0, 3, 2]]
    groups = [
        vision_group(processor, "what?", [tiny_image(s, width=32, height=32) for s in own], [], 0) for own in seeds
    ]
    prompts, media = [group.prompt_ids for group in groups], [group.media for group in groups]
    engine = start(model, max_num_batched_tokens=40, block_size=32, enable_prefix_caching=True)
    greedy = SamplingConfig(max_new_tokens=6, temperature=0.0)  # vLLM on CPUs cannot draw behind a piece of a prompt
    for _ in range(2):
        assert_equal_forwards(model, prompts, media, engine.sample(prompts, media, sampling=greedy))
    assert prompts[0] == prompts[2]


def test_memory_reserved_for_an_image(start):
    from vllm.multimodal import MULTIMODAL_REGISTRY

    model, (prompts, media) = tiny_model("qwen2_5_vl"), prompts_and_media("qwen2_5_vl")
    limits = {"image": {"count": 1, "width": 24, "height": 16}}
    engine = start(model, limit_mm_per_prompt=limits, max_num_batched_tokens=256, mm_processor_kwargs={})
    processor = MULTIMODAL_REGISTRY.create_processor(engine.llm.model_config)
    (item,) = processor.get_dummy_mm_inputs({"image": 1})["mm_kwargs"]["image"]
    assert item["image_grid_thw"].data.tolist() == [1, 4, 6]
    assert processor.info.get_mm_max_tokens_per_item(256, {"image": 1}) == {"image": 6}
    assert_equal_forwards(model, prompts[3:4], media[3:4], engine.sample(prompts[3:4], media[3:4]))


def test_each_image_has_a_unique_name():
    model = tiny_vision_model("qwen3_vl")
    prompts, media = prompts_and_media("qwen3_vl")
    first, other, text, two, again = (engine_prompt(model, p, m) for p, m in zip(prompts, media, strict=True))
    assert text == {"type": "token", "prompt_token_ids": prompts[2]}
    assert first["mm_hashes"] == again["mm_hashes"] != other["mm_hashes"]
    assert len({*first["mm_hashes"]["image"], *other["mm_hashes"]["image"], *two["mm_hashes"]["image"]}) == 4
    marker = tiny_tokenizer("qwen3_vl").get_vocab()["<|image_pad|>"]
    places = [place for place, token in enumerate(prompts[3]) if token == marker]
    ranges = [(r.offset, r.length) for r in two["mm_placeholders"]["image"]]
    assert ranges == [(places[0], 6), (places[6], 4)]
    pixels = torch.cat([item["pixel_values"].data for item in two["mm_kwargs"]["image"]])
    assert torch.equal(pixels, media[3]["pixel_values"])


def test_what_cannot_be_served_is_refused(monkeypatch):
    model = tiny_vision_model("qwen2_5_vl")
    prompts, media = prompts_and_media("qwen2_5_vl")
    prompt, own = prompts[3], media[3]

    def refused(match, prompt=prompt, **changed):
        with pytest.raises(ValueError, match=match):
            engine_prompt(model, prompt, {**own, **changed})

    refused("video", pixel_values_videos=torch.zeros(1), video_grid_thw=torch.zeros(1, 3))
    refused("image_grid_thw.*for 40 patches", image_grid_thw=own["image_grid_thw"][:1])
    refused("40 patches", image_grid_thw=torch.tensor([[2, 4, 3], [1, 4, 4]]))
    refused(r"4 placeholders", prompts[0])
    refused("from the same call", image_grid_thw=own["image_grid_thw"].flip(0))
    for types in (torch.zeros(len(prompt)), torch.zeros(2)):
        refused("mm_token_type_ids", mm_token_type_ids=types)
    with pytest.raises(ValueError, match="patches"):
        image_items({"pixel_values": torch.zeros(3, 4), "image_grid_thw": torch.tensor([[1, 2, 2]])})
    monkeypatch.setattr(model.config, "model_type", "llava", raising=False)
    with pytest.raises(ValueError, match="family llava"):
        media_engine_args(model)
    assert media_engine_args(text_model("qwen3")) == {}

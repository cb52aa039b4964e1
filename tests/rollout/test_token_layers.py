"""Caches that keep more for each token than keys and values: an indexer's keys."""

import sys
from pathlib import Path

import pytest
import torch
from helpers.continued import counted_tokens, play
from helpers.rollouts import PROMPTS, assert_same, greedily
from helpers.sampling_oracle import assert_sampled, tiny_decoder
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from pl_grouprl.media.inputs import placeholder_ids
from pl_grouprl.rollout import HFRolloutEngine
from pl_grouprl.rollout.hf.kept import token_axes
from pl_grouprl.rollout.hf.prefill import allows_padding
from pl_grouprl.types import SamplingConfig

sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))

from models_table import select
from tiny_families import build

LONG = [1 + place % 23 for place in range(60)]


class PlacedLayer(DynamicLayer):
    """Keeps places, [3, B, S], beside keys and values."""

    def __init__(self):
        super().__init__()
        self.places = None

    def reorder_cache(self, beam_idx):
        super().reorder_cache(beam_idx)
        self.places = self.places.index_select(1, beam_idx.to(self.places.device))

    def crop(self, tokens_to_remove):
        super().crop(tokens_to_remove)
        self.places = self.places[..., :tokens_to_remove]


def filled(layer, rows, length, base=0.0):
    states = base + 10.0 * torch.arange(rows)[:, None] + torch.arange(1.0, 1 + length)
    layer.update(states[:, None, :, None], -states[:, None, :, None])
    if isinstance(layer, PlacedLayer):
        layer.places = states.expand(3, -1, -1)
    return layer


def test_layers_that_keep_anything_else_are_not_of_tokens():
    class Counting(PlacedLayer):
        counts = None

    class Uncropped(PlacedLayer):
        def crop(self, tokens_to_remove):
            DynamicLayer.crop(self, tokens_to_remove)

    class Unordered(PlacedLayer):
        def reorder_cache(self, beam_idx):
            raise NotImplementedError

    assert token_axes(filled(PlacedLayer(), 2, 3)) is not None
    counting = filled(Counting(), 2, 3)
    counting.counts = {"first": torch.ones(2)}
    pooled = filled(PlacedLayer(), 2, 4)
    pooled.places = pooled.places[..., :2]  # one for two tokens
    window = filled(DynamicSlidingWindowLayer(sliding_window=9), 2, 3)
    for layer in (counting, pooled, window, filled(Uncropped(), 2, 3), filled(Unordered(), 2, 3), DynamicLayer()):
        assert token_axes(layer) is None


@pytest.mark.parametrize(("family", "padding"), [("deepseek_v32", True), ("minimax_m3_vl_text", False)])
def test_prompts_are_encoded_once_and_padded_only_if_the_index_heeds_the_mask(family, padding):
    model = tiny_decoder(family)
    engine, sampling = HFRolloutEngine(model), SamplingConfig(max_new_tokens=1)
    engine.generate([[1]], sampling, num_generations=1, seed=0)  # checks the model
    assert allows_padding(model, 20) == padding
    with counted_tokens(model) as counts:
        engine.generate([LONG[:20], LONG[:19]], sampling, num_generations=8, seed=0)
    assert counts == ([40] if padding else [19, 20])


@pytest.mark.parametrize("family", ["deepseek_v32", "minimax_m3_vl_text"])
def test_greedy_rollouts_are_what_transformers_generates(family):
    model, prompts = tiny_decoder(family), [LONG[:20], LONG[3:9], LONG[:19]]
    groups = HFRolloutEngine(model).generate(
        prompts, SamplingConfig(max_new_tokens=15, temperature=0.0), num_generations=1, seed=0
    )
    assert [rollout.token_ids for (rollout,) in groups] == [greedily(model, prompt, 15) for prompt in prompts]


@pytest.mark.parametrize("family", ["deepseek_v32", "minimax_m3_vl_text", "qwen4_exp_text"])
def test_turns_continue_as_if_encoded_from_the_start(family):
    engine = HFRolloutEngine(tiny_decoder(family), max_sequences=5)
    options = {"turns": 3, "new_tokens": lambda numbers: numbers.choice([1, 2, 12])}
    played = [play(engine, PROMPTS, SamplingConfig(max_new_tokens=6), keep=keep, **options) for keep in (False, True)]
    assert played[0][0] == played[1][0]
    for expected, found in zip(played[0][1], played[1][1], strict=True):
        assert_same(expected, found, 1e-4)


def test_branches_reuse_the_beginning_of_a_sequence():
    model, sampling = tiny_decoder("deepseek_v32"), SamplingConfig(max_new_tokens=8)
    engine = HFRolloutEngine(model)
    play(engine, [LONG], sampling, turns=2, keep=True)  # checks the model
    with engine.keep_caches():
        groups = engine.generate([LONG], sampling, num_generations=4, seed=1)
        branches = [[*LONG, *rollout.token_ids[:3]] for rollout in groups[0]]
        with counted_tokens(model) as counts:
            groups = engine.generate(branches, sampling, num_generations=2, seed=2)
    assert counts == [4] + [8] * 7  # one token of each of 4 branches, then those of 8 rollouts
    for index, (branch, group) in enumerate(zip(branches, groups, strict=True)):
        for generation, rollout in enumerate(group):
            assert_sampled(model, branch, rollout, sampling, name=(index, generation), seed=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["axk2", "dots3_note_text", "glm5_next", "glm_moe_dsa", "hy_v4", "mistral_large4", "qwen4_exp"]
)
def test_every_family_with_an_indexer(name):
    """They select 8 tokens, or blocks of 2."""
    model = build(select([name])[-1], fill=name.startswith("qwen4"))
    model.generation_config.eos_token_id = None
    sampling = SamplingConfig(max_new_tokens=6)
    never = tuple(token for token in placeholder_ids(model).values() if token < 64)
    prompts = [*PROMPTS, LONG[:40], LONG[:38]]
    groups = HFRolloutEngine(model, max_sequences=7).generate(prompts, sampling, num_generations=2, seed=3)
    for index, (prompt, group) in enumerate(zip(prompts, groups, strict=True)):
        for generation, rollout in enumerate(group):
            assert_sampled(model, prompt, rollout, sampling, name=(index, generation), seed=3, never=never)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("deepseek_v4", "layer 0 of the model caches its state as DeepseekV4HCACache"),
        ("unlimited_ocr", "layer 0 of the model caches its state as UnlimitedOcr"),
        ("doge", "with its cache a log-probability differs by"),
        ("xlstm", r"with transformers' cache it fails \(AttributeError"),
    ],
)
def test_families_that_keep_anything_else_or_decode_differently_are_refused(name, reason):
    engine = HFRolloutEngine(build(select([name])[-1]))
    with pytest.raises(ValueError, match=reason):
        engine.generate([LONG[:9]], SamplingConfig(max_new_tokens=2), num_generations=1, seed=0)

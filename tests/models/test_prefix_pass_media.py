"""Prompts with images whose rollouts run in slices: the tower runs once, and positions continue after the images."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.tiny_models import gradients, worst_gradient_error
from helpers.tiny_vision import FAMILIES, tiny_image, tiny_processor, tiny_vision_model, vision_group

from pl_grouprl.attention import shared_prefix
from pl_grouprl.media.inputs import placeholder_ids
from pl_grouprl.models import hidden_states, score
from pl_grouprl.models.score import PrefixPass
from pl_grouprl.packing import pack
from pl_grouprl.packing.batch import pack_slice
from pl_grouprl.types import Rollout

ROLLOUTS = [3, 9, 0, 5]
SLICES = [([0, 1], slice(0, 12)), ([2], slice(12, 12)), ([3], slice(12, 17))]


def group_of(family: str, images: int = 2) -> Any:
    pictures = [tiny_image(0, 24, 16), tiny_image(1)][:images]
    return vision_group(tiny_processor(family), "what is it?", pictures, ROLLOUTS)


def assert_same(model: Any, group: Any) -> dict[str, torch.Tensor]:
    weights = torch.linspace(-1, 1, sum(ROLLOUTS))
    with shared_prefix(model):
        expected = score(model, pack([group])).logprobs_N
        (expected * weights).sum().backward()
        theirs = gradients(model)
        model.zero_grad()
        prefix = PrefixPass(group, "cpu")
        for index, places in SLICES:
            found = score(model, pack_slice(group, index, prefix)).logprobs_N
            torch.testing.assert_close(found, expected[places], atol=1e-5, rtol=0)
            (found * weights[places]).sum().backward()
        prefix.loss(parameter for parameter in model.parameters() if parameter.requires_grad).backward()
    ours = {name: grad for name, grad in gradients(model).items() if name in theirs}
    assert worst_gradient_error(ours, theirs) < 1e-4
    return ours


def moves_the_tower(found: dict[str, torch.Tensor]) -> bool:
    return sum(g.norm() for name, g in found.items() if ".visual." in name or ".vision_tower." in name) > 0


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_images(family, checkpointing):
    model = tiny_vision_model(family)
    if checkpointing:
        model.train().gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert moves_the_tower(assert_same(model, group_of(family)))


@pytest.mark.parametrize("family", FAMILIES)
def test_training_mode_and_prompts_of_text(family):
    assert_same(tiny_vision_model(family).train(), group_of(family, images=0))


def test_images_longer_than_the_window():
    assert moves_the_tower(assert_same(tiny_vision_model("gemma3", sliding_window=3), group_of("gemma3")))


@pytest.mark.parametrize("family", FAMILIES)
def test_an_image_token_in_a_rollout_is_refused(family):
    model, group = tiny_vision_model(family), group_of(family)
    group.rollouts[1] = Rollout([5, placeholder_ids(model)["image_token_id"]])
    with shared_prefix(model), pytest.raises(ValueError, match="exclude it from sampling"):
        hidden_states(model, pack_slice(group, [0, 1], PrefixPass(group, "cpu")))

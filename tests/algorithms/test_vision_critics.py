"""PPO on prompts with images: every critic sees them, once per group where prefixes are shared."""

from __future__ import annotations

import pytest
import torch
from helpers.tiny_vision import tiny_image, tiny_processor, tiny_vision_model, vision_group

from pl_grouprl.attention import shared_prefix
from pl_grouprl.models import LoRACritic, PolicyCopyCritic, SharedTrunkCritic
from pl_grouprl.packing import pack

SOURCES = {
    "copy": PolicyCopyCritic(head_std=0.3),
    "lora": LoRACritic(r=4, head_std=0.3),
    "shared trunk": SharedTrunkCritic(head_std=0.3),
}


def groups_with_images(family):
    processor = tiny_processor(family)
    place = "<image>"
    return [
        vision_group(processor, f"{place}what", [tiny_image(0, 24, 16)], [3, 1, 4], seed=0),
        vision_group(processor, "why is that", [], [2, 2], seed=1),
        vision_group(processor, f"{place} or {place}", [tiny_image(1), tiny_image(2)], [5, 2], seed=2),
    ]


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "gemma3"])
def test_values_and_gradients_are_those_of_the_repeated_images(family, source):
    groups, found, towers = groups_with_images(family), {}, []
    for sharing in ("shared", "repeated"):
        critic = SOURCES[source].load(tiny_vision_model(family).train())
        for parameter in critic.parameters():
            if parameter.requires_grad:
                parameter.data += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
        tower = next(module for name, module in critic.trunk.named_modules() if name in ("visual", "vision_tower"))
        pixels = []
        tower.register_forward_pre_hook(
            lambda _, args, kwargs, pixels=pixels: pixels.append(
                (args[0] if args else kwargs.get("pixel_values", kwargs.get("hidden_states"))).shape[0]
            ),
            with_kwargs=True,
        )
        batch = pack(groups, sharing)
        with shared_prefix(critic.trunk):
            values = critic.values(batch)
            (values * torch.linspace(0.5, 1.5, len(values))).sum().backward()
        grads = {name: p.grad for name, p in critic.named_parameters() if p.grad is not None}
        found[sharing] = values.detach(), grads
        towers.append(sum(pixels))
    assert towers[0] < towers[1]  # an image once for its group
    torch.testing.assert_close(found["shared"][0], found["repeated"][0], atol=1e-4, rtol=1e-4)
    assert found["shared"][1].keys() == found["repeated"][1].keys()
    total = lambda grads: torch.cat([grad.flatten() for grad in grads.values()])  # noqa: E731
    one, other = total(found["shared"][1]), total(found["repeated"][1])
    assert (one - other).norm() < 1e-3 * other.norm()

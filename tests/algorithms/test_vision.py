"""Prompts with images: from rows to optimizer steps, resumed amid the updates, and critics that see the images."""

from __future__ import annotations

import pytest
import torch
from helpers.chance_episodes import register_chance_calls
from helpers.sweeps import sweep
from helpers.tiny_runs import merged, same
from helpers.tiny_vision import (
    FAMILIES,
    TOOL_TEMPLATE,
    tiny_image,
    tiny_processor,
    tiny_vision_model,
    vision_group,
)

from pl_grouprl.algorithms import OptimizerConfig
from pl_grouprl.attention import shared_prefix
from pl_grouprl.data import PromptDataModule
from pl_grouprl.media.inputs import placeholder_ids
from pl_grouprl.models import LoRACritic, PolicyCopyCritic, SharedTrunkCritic
from pl_grouprl.models.score import PrefixPass, hidden_states
from pl_grouprl.packing import pack
from pl_grouprl.types import Rollout, SamplingConfig


class VisionPolicy:
    """The same random weights each time."""

    def __init__(self, family):
        self.family = family

    def load(self):
        return tiny_vision_model(self.family)

    def load_tokenizer(self):
        return tiny_processor(self.family).tokenizer

    def load_processor(self):
        return tiny_processor(self.family)


class GivenRollouts:
    """Completions of 1 to 4 letters decided by the prompt's length; keeps what it was given."""

    def __init__(self):
        self.media = []

    def bind(self, model, tokenizer=None):
        pass

    def generate(self, prompts, sampling, *, num_generations, seed, media=None):
        self.media.append(media)
        return [
            [Rollout([3 + (len(prompt) + g + i) % 20 for i in range(1 + g)]) for g in range(num_generations)]
            for prompt in prompts
        ]


def letters(completion_ids, **columns):
    """Differs within every group."""
    return [float(len(ids) + ids[-1] % 3) if ids else 0.0 for ids in completion_ids]


def rows():
    """Images of two sizes, two in one prompt, and a prompt of text alone."""
    return [
        {"prompt": [{"role": "user", "content": "<image>what?"}], "images": [tiny_image(0, 24, 16)]},
        {"prompt": [{"role": "user", "content": "why?"}], "images": []},
        {"prompt": [{"role": "user", "content": "<image> or <image>?"}], "images": [tiny_image(1), tiny_image(2)]},
        {"prompt": [{"role": "user", "content": "<image>how?"}], "images": [tiny_image(3, 16, 32)]},
    ]


@pytest.fixture
def fit_images(fit):
    def run(family, engine=None, **options):
        own = {"policy": VisionPolicy(family), "rewards": letters, "engine": engine, "seed": 1}
        own |= {"sampling": SamplingConfig(max_new_tokens=4), "optimizer": OptimizerConfig(1e-3)}
        own |= {"sharing": {"verify": True}, "data": PromptDataModule(rows(), batch_size=2)}
        return fit(**merged(own, options))

    return run


def test_prompts_with_images_share_nothing_across_groups(fit_images):
    engine = GivenRollouts()
    with pytest.raises(ValueError, match="across_groups is True, but prompts of the training data have images"):
        fit_images("gemma3", engine, sharing={"across_groups": True})
    assert not engine.media  # nothing was sampled


@pytest.mark.parametrize("family", sweep(FAMILIES, quick=["gemma3", "qwen3_vl"]))
def test_sharing_on_and_off_give_the_same_trajectory(family, fit_images):
    before = {f"policy.{name}": p.detach().clone() for name, p in tiny_vision_model(family).named_parameters()}
    shared, repeated = (
        fit_images(family, GivenRollouts(), sharing={"mode": mode}, num_iterations=2, steps=8)
        for mode in ("shared", "repeated")
    )
    assert shared.steps[-1]["prefix/token_ratio"] > 2
    assert repeated.steps[-1]["prefix/token_ratio"] > 0.5
    losses = [[step["loss"] for step in run.steps] for run in (shared, repeated)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-4, rel=0)
    media = repeated.module.engine.media
    assert len(media) == 4  # two batches of rollouts in each epoch, each for two updates
    assert sum("pixel_values" in own for group in media for own in group) == 6
    tower = [name for name in before if ".visual." in name or ".vision_tower." in name]
    assert any(not torch.equal(shared.weights[-1][name], before[name]) for name in tower)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3"])
def test_resume_between_updates_of_rollouts_with_images_is_exact(family, fit_images, tmp_path):
    options = {"num_iterations": 2, "num_mini_batches": 2, "steps": 6}
    whole = fit_images(family, GivenRollouts(), save=True, **options)
    resumed = fit_images(family, GivenRollouts(), resume=3, **options)
    assert same(whole.weights[-1], resumed.weights[-1])
    assert resumed.module.engine.media  # the second batch of rollouts was sampled after the resume
    saved = torch.load(tmp_path / "step=3.ckpt", weights_only=True)["pl_grouprl"]["rollouts"][0]["groups"]
    assert any("pixel_values" in group["media"] for group in saved)


@pytest.mark.parametrize("family", FAMILIES)
def test_steps_with_rollouts_of_its_own(family, fit_images):
    """What the engine reports of its samples is what the scoring pass finds, among the tokens that it may draw."""
    run = fit_images(family)
    module, prompts = run.module, run.trainer.datamodule.prompts["train"]
    groups = module.generate(prompts, module.sampling, 4, seed=("again",))
    assert [bool(group.media) for group in groups] == [True, False, True, True]
    sampled = [rollout for group in groups for rollout in group.rollouts]
    forbidden = list(placeholder_ids(module.policy).values())
    assert not any(set(forbidden) & set(rollout.token_ids) for rollout in sampled)
    batch = pack(groups, "repeated")
    with torch.no_grad():
        states = hidden_states(module.policy.eval(), batch)
        logits_NV = module.policy.lm_head(states[batch.predict_index_N])
    logits_NV[:, forbidden] = -torch.inf
    scored_N = logits_NV.log_softmax(-1).gather(1, batch.targets_N[:, None]).flatten()
    reported_N = torch.tensor([logprob for rollout in sampled for logprob in rollout.logprobs])
    torch.testing.assert_close(reported_N, scored_N, atol=1e-4, rtol=0)


def show(number: int) -> list:
    """Show the image of a number.

    Args:
        number: Refused if negative.
    """
    if number < 0:
        raise ValueError("no such image")
    if number < 3:
        return [{"type": "text", "text": "none"}]
    return [{"type": "image", "image": tiny_image(number, 16 + 8 * (number % 2), 16)}, {"type": "text", "text": "see"}]


EPISODES = {
    "tools": [show],
    "sampling": SamplingConfig(max_new_tokens=24, stop_token_ids=tuple(range(3, 9))),
    "episodes": {
        "chat_template": TOOL_TEMPLATE,
        "max_tool_calling_iterations": 2,
        "max_turn_tokens": 8,
        "max_tokens": 120,
    },
}


@pytest.fixture
def chance_calls(monkeypatch):
    monkeypatch.setattr("pl_grouprl.chat.parsing._PARSERS", [])
    register_chance_calls(name_of=lambda number: "show")


@pytest.mark.usefixtures("chance_calls")
@pytest.mark.parametrize("family", FAMILIES)
def test_episodes_read_the_images_of_tools(family, fit_images):
    """The images belong to the rollouts, are not trained, and are scored as they were sampled."""
    template = TOOL_TEMPLATE
    if family == "gemma3":
        template = template.replace("<|vision_start|><|image_pad|><|vision_end|>", "<start_of_image>")
    run = fit_images(family, **{**EPISODES, "episodes": {**EPISODES["episodes"], "chat_template": template}})
    module, prompts = run.module, run.trainer.datamodule.prompts["train"]
    groups = module.generate(prompts, module.sampling, 4, seed=("again",))
    image = module.policy.config.image_token_id
    assert [bool(group.media) for group in groups] == [True, False, True, True]
    seen = 0
    for rollout in (rollout for group in groups for rollout in group.rollouts):
        places = [place for place, token in enumerate(rollout.token_ids) if token == image]
        parts = [part["type"] for m in rollout.messages if isinstance(m["content"], list) for part in m["content"]]
        images = rollout.media.get("image_grid_thw", rollout.media.get("pixel_values", ()))  # Qwen's have patches
        assert parts.count("image") == len(images)
        assert parts == ["image", "text"] * (len(parts) // 2)
        assert not any(rollout.loss_mask[place] for place in places)
        if rollout.media:
            types = rollout.media["token_type_ids" if family == "gemma3" else "mm_token_type_ids"]
            assert types.nonzero().flatten().tolist() == places
            seen += 1
    assert 4 <= seen < 16
    batch = pack(groups, "repeated")
    forbidden = list(placeholder_ids(module.policy).values())
    with torch.no_grad():
        states = hidden_states(module.policy.eval(), batch)
        logits_NV = module.policy.lm_head(states[batch.predict_index_N])
    logits_NV[:, forbidden] = -torch.inf
    scored_N = logits_NV.log_softmax(-1).gather(1, batch.targets_N[:, None]).flatten()
    reported_N = torch.tensor([logprob for group in groups for own in group.rollouts for logprob in own.logprobs])
    mask_N = batch.loss_mask_N
    torch.testing.assert_close(reported_N[mask_N], scored_N[mask_N], atol=1e-4, rtol=0)


@pytest.mark.usefixtures("chance_calls")
@pytest.mark.parametrize("family", sweep(FAMILIES[:2], quick=["qwen2_5_vl"]))
def test_episodes_with_images_train_alike_shared_and_repeated(family, fit_images, monkeypatch):
    """Also in slices of groups that are larger than the budget."""
    sliced, continue_prompt = [], PrefixPass.hidden_states
    monkeypatch.setattr(
        PrefixPass,
        "hidden_states",
        lambda own, model, batch: sliced.append("pixel_values" in batch.media) or continue_prompt(own, model, batch),
    )
    options = {**EPISODES, "num_iterations": 2, "steps": 4}
    budget = {"max_tokens_per_micro_batch": 130}
    shared, repeated, split = (
        fit_images(family, sharing={"mode": mode}, **options, **more)
        for mode, more in (("shared", {}), ("repeated", {}), ("shared", budget))
    )
    losses = [[step["loss"] for step in run.steps] for run in (shared, repeated, split)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-4, rel=0)
    assert losses[0] == pytest.approx(losses[2], abs=1e-4, rel=0)
    assert any(sliced)


@pytest.mark.usefixtures("chance_calls")
def test_episodes_with_images_resume_exactly_between_updates(fit_images):
    options = {**EPISODES, "num_iterations": 2, "num_mini_batches": 2, "steps": 6}
    whole = fit_images("qwen2_5_vl", save=True, **options)
    resumed = fit_images("qwen2_5_vl", resume=3, **options)
    assert same(whole.weights[-1], resumed.weights[-1])


@pytest.mark.usefixtures("chance_calls")
def test_a_template_without_places_for_images_ends_the_run(fit_images):
    of_users = TOOL_TEMPLATE.replace("== 'image'", "== 'image' and m.role == 'user'")
    episodes = {**EPISODES["episodes"], "chat_template": of_users}
    with pytest.raises(ValueError, match=r"tools returned . images in a turn, .* '<\|image_pad\|>' 0 times"):
        fit_images("qwen2_5_vl", steps=4, **{**EPISODES, "episodes": episodes})


def test_the_greedy_baseline_of_remax_sees_the_images(fit_images):
    """Rollouts, and then their baselines, of the same prompts."""
    sampled, greedy = fit_images("qwen2_5_vl", GivenRollouts(), advantage_estimator="remax").module.engine.media
    assert any("pixel_values" in own for own in sampled)
    for seen, expected in zip(greedy, sampled, strict=True):
        assert seen.keys() == expected.keys()
        assert all(torch.equal(seen[name], expected[name]) for name in expected)


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


@pytest.mark.parametrize(
    ("family", "source"),
    [*(("qwen3_vl", source) for source in SOURCES), ("qwen2_5_vl", "lora"), ("gemma3", "lora"), ("gemma3", "copy")],
)
def test_values_and_gradients_are_those_of_the_repeated_images(family, source):
    groups, found, towers = groups_with_images(family), [], []
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
        with shared_prefix(critic.trunk):
            values = critic.values(pack(groups, sharing))
            (values * torch.linspace(0.5, 1.5, len(values))).sum().backward()
        found.append((values.detach(), {name: p.grad for name, p in critic.named_parameters() if p.grad is not None}))
        towers.append(sum(pixels))
    assert towers[0] < towers[1]  # an image once for its group
    (values, grads), (expected, other_grads) = found
    torch.testing.assert_close(values, expected, atol=1e-4, rtol=1e-4)
    assert grads.keys() == other_grads.keys()
    one, other = (torch.cat([grad.flatten() for grad in own.values()]) for own in (grads, other_grads))
    assert (one - other).norm() < 1e-3 * other.norm()

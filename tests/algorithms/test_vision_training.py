"""GRPO on prompts with images: from rows to optimizer steps, resumed amid the updates of its rollouts."""

from __future__ import annotations

import pytest
import torch
from helpers.sweeps import sweep
from helpers.tiny_vision import FAMILIES, tiny_image, tiny_processor, tiny_vision_model
from lightning.pytorch.callbacks import ModelCheckpoint

from pl_grouprl.algorithms import GRPO, OptimizerConfig
from pl_grouprl.data import PromptDataModule
from pl_grouprl.media.inputs import placeholder_ids
from pl_grouprl.models.score import hidden_states
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


def make(family, engine=None, mode="shared", across_groups=False, **options):
    module = GRPO(
        VisionPolicy(family), letters, engine=engine, num_generations=4, seed=1,
        sharing={"mode": mode, "across_groups": across_groups},
        sampling=SamplingConfig(max_new_tokens=4), optimizer=OptimizerConfig(learning_rate=1e-3), **options,
    )  # fmt: skip
    return module, PromptDataModule(rows(), batch_size=2)


def test_prompts_with_images_share_nothing_across_groups(make_trainer):
    engine = GivenRollouts()
    module, data = make("gemma3", engine, across_groups=True)
    with pytest.raises(
        ValueError, match=r"sharing.across_groups is True, but prompts of the training data have images"
    ):
        make_trainer(max_steps=1).fit(module, data)
    assert not engine.media  # nothing was sampled


@pytest.mark.parametrize("family", sweep(FAMILIES, quick=["gemma3", "qwen3_vl"]))
def test_sharing_on_and_off_give_the_same_trajectory(family, make_trainer, history):
    losses = {}
    for sharing in ("shared", "repeated"):
        steps, engine = history(), GivenRollouts()
        module, data = make(family, engine, sharing, num_iterations=2)
        before = {name: p.detach().clone() for name, p in tiny_vision_model(family).named_parameters()}
        make_trainer(max_steps=8, callbacks=[steps]).fit(module, data)
        losses[sharing] = [step["loss"] for step in steps.steps]
        assert steps.steps[-1]["prefix/token_ratio"] > (2 if sharing == "shared" else 0.5)
    assert len(losses["shared"]) == 8
    assert max(abs(a - b) for a, b in zip(losses["shared"], losses["repeated"], strict=True)) < 1e-4
    assert len(engine.media) == 4  # two batches of rollouts in each epoch, each for two updates
    assert sum("pixel_values" in own for media in engine.media for own in media) == 6
    after = dict(module.policy.named_parameters())
    tower = [name for name in before if ".visual." in name or ".vision_tower." in name]
    assert any(not torch.equal(after[name], before[name]) for name in tower)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3"])
def test_resume_between_updates_of_rollouts_with_images_is_exact(family, make_trainer, parameters, tmp_path):
    def fit(checkpoint=None, callbacks=()):
        module, data = make(family, GivenRollouts(), num_iterations=2, num_mini_batches=2)
        make_trainer(max_steps=6, callbacks=list(callbacks)).fit(module, data, ckpt_path=checkpoint)
        return module

    saver = ModelCheckpoint(dirpath=tmp_path, filename="{step}", save_top_k=-1, every_n_train_steps=3)
    whole = parameters(fit(callbacks=[saver]))
    resumed = fit(str(tmp_path / "step=3.ckpt"))
    assert all(torch.equal(a, b) for a, b in zip(parameters(resumed), whole, strict=True))
    assert resumed.engine.media  # the second batch of rollouts was sampled after the resume
    saved = torch.load(tmp_path / "step=3.ckpt", weights_only=True)["pl_grouprl"]["rollouts"][0]["groups"]
    assert any("pixel_values" in group["media"] for group in saved)


@pytest.mark.parametrize("family", FAMILIES)
def test_steps_with_rollouts_of_its_own(family, make_trainer):
    """What the engine reports of its samples is what the scoring pass finds, among the tokens that it may draw."""
    module, data = make(family)
    make_trainer(max_steps=2).fit(module, data)
    prompts = data.prompts["train"]
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


def test_the_greedy_baseline_of_remax_sees_the_images(make_trainer):
    """Rollouts, and then their baselines, of the same prompts."""
    engine = GivenRollouts()
    module, data = make("qwen2_5_vl", engine, advantage_estimator="remax")
    make_trainer(max_steps=1).fit(module, data)
    sampled, greedy = engine.media
    assert any("pixel_values" in own for own in sampled)
    for seen, expected in zip(greedy, sampled, strict=True):
        assert seen.keys() == expected.keys()
        assert all(torch.equal(seen[name], expected[name]) for name in expected)

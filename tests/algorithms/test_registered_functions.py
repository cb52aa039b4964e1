"""A loss and an estimator that are registered outside the package train, from Python and by the command line."""

from __future__ import annotations

import sys

import pytest
import torch

from pl_grouprl.algorithms import PPO
from pl_grouprl.cli import main
from pl_grouprl.functional import policy_loss as loss_registry
from pl_grouprl.functional.advantages import base as estimator_registry
from pl_grouprl.functional.advantages import register_advantage_estimator
from pl_grouprl.functional.policy_loss import PolicyLoss, register_policy_loss


def quadratic(policy_logprobs_N, old_logprobs_N, advantages_N, *, mask_N, epsilon: float = 0.2, power: int = 2):
    """-r A with a penalty that grows with the distance of r from 1."""
    ratio_N = (policy_logprobs_N - old_logprobs_N).masked_fill(~mask_N, 0).exp()
    distance_N = (ratio_N - 1).abs()
    loss_N = advantages_N.abs() * distance_N**power / (2 * epsilon) - advantages_N * ratio_N
    metrics = {"clip_ratio/distance_mean": distance_N.detach().masked_fill(~mask_N, 0).sum()}
    return PolicyLoss(loss_N.masked_fill(~mask_N, 0), metrics, mask_N.sum())


def against_median(rewards, group_ids, *, shift: float = 0.0):
    advantages = torch.zeros_like(rewards)
    for group in group_ids.unique():
        own = group_ids == group
        advantages[own] = rewards[own] - rewards[own].nanmedian() + shift
    return advantages.nan_to_num(nan=0.0)


def spread_out(rewards, mask, group_ids, *, reduce):
    """The reward's difference from the mean of all ranks, over a rollout's tokens."""
    sums = torch.stack([torch.ones_like(rewards).sum(), rewards.sum()])
    count, total = sums if reduce is None else reduce(sums)
    return ((rewards - total / count) / mask.sum(dim=1).clamp(min=1))[:, None] * mask


@pytest.fixture(autouse=True)
def registries(monkeypatch):
    monkeypatch.setattr(loss_registry, "POLICY_LOSSES", dict(loss_registry.POLICY_LOSSES))
    monkeypatch.setattr(estimator_registry, "ADVANTAGE_ESTIMATORS", dict(estimator_registry.ADVANTAGE_ESTIMATORS))
    register_policy_loss("quadratic")(quadratic)
    register_advantage_estimator("against_median")(against_median)
    register_advantage_estimator("spread_out", per_token=True)(spread_out)


@pytest.fixture
def fit(make_module, make_data, make_trainer):
    """Two steps; each metric of the last one."""

    def run(*args, checkpoint=None, max_steps=2, **options):
        module, trainer = make_module(*args, **options), make_trainer(max_steps=max_steps)
        trainer.fit(module, make_data(), ckpt_path=checkpoint, weights_only=True)
        return module, trainer

    return run


def rewards_of(buffer):
    return torch.tensor([rollout.reward for group in buffer.groups for rollout in group.rollouts])


def test_a_loss_trains(fit):
    options = {"policy_loss": {"name": "quadratic", "power": 4}}
    module, trainer = fit(**options, epsilon=0.1, num_iterations=2)
    assert repr(module.objective.policy_loss) == "quadratic(epsilon=0.1, power=4)"
    assert trainer.global_step == 2
    assert trainer.callback_metrics["grad_norm"] > 1e-4
    assert trainer.callback_metrics["clip_ratio/distance_mean"] > 1e-4  # the second step is off-policy
    assert fit(PPO, **options)[1].callback_metrics["grad_norm"] > 1e-4


def test_an_estimator_trains(fit):
    module, trainer = fit(advantage_estimator="against_median", advantage_options={"shift": 0.5})
    buffer = module.last_rollouts
    group_ids = torch.arange(len(buffer.groups)).repeat_interleave(4)
    expected_B = against_median(rewards_of(buffer), group_ids, shift=0.5)
    expected_N = expected_B.repeat_interleave(buffer.rollout_lengths)
    torch.testing.assert_close(buffer.joined("advantages"), expected_N)
    assert trainer.callback_metrics["grad_norm"] > 1e-4


def test_an_estimator_per_token_trains(fit):
    module, trainer = fit(advantage_estimator="spread_out")
    buffer = module.last_rollouts
    centred_B = rewards_of(buffer) - rewards_of(buffer).mean()
    expected_N = (centred_B / buffer.rollout_lengths.clamp(min=1)).repeat_interleave(buffer.rollout_lengths)
    torch.testing.assert_close(buffer.joined("advantages"), expected_N, rtol=0, atol=1e-6)
    assert trainer.callback_metrics["grad_norm"] > 1e-4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy_loss": "quadratik"}, "policy_loss is 'quadratik'; it must be one of .*, ppo, quadratic, sapo"),
        (
            {"policy_loss": {"name": "quadratic", "delta": 3.0}},
            "policy_loss='quadratic' does not use delta; it takes epsilon, p",
        ),
        ({"advantage_estimator": "median"}, "advantage_estimator is 'median'; it must be one of against_median, gpg"),
        ({"advantage_estimator": "against_median", "scale_rewards": "none"}, "does not use scale; it takes shift"),
        ({"advantage_estimator": "against_median", "num_generations": 1}, "against_median compares the rollouts"),
        (
            {"advantage_estimator": "spread_out", "multi_objective_aggregation": "normalize_then_sum"},
            "advantage_estimator='spread_out' takes one reward",
        ),
    ],
)
def test_refused(make_module, options, message):
    with pytest.raises(ValueError, match=message):
        make_module(**options)


def test_a_checkpoint_knows_them(fit, tmp_path):
    options = {"policy_loss": "quadratic", "advantage_estimator": "against_median", "num_iterations": 2}
    _, trainer = fit(**options, max_steps=1)
    trainer.save_checkpoint(tmp_path / "state.ckpt")
    recorded = torch.load(tmp_path / "state.ckpt", weights_only=True)["pl_grouprl"]["run_options"]
    assert recorded["policy_loss.name"] == "quadratic"
    assert recorded["advantage_estimator"] == "against_median"
    fit(**options, checkpoint=tmp_path / "state.ckpt")
    with pytest.warns(UserWarning, match=r"advantage_estimator +'against_median"):
        fit(**options | {"advantage_estimator": "grpo"}, checkpoint=tmp_path / "state.ckpt")


MODULE = """
from pl_grouprl.functional.advantages import register_advantage_estimator
from pl_grouprl.functional.policy_loss import PolicyLoss, register_policy_loss


def brevity(completions, **columns):
    return [-float(len(text)) for text in completions]


@register_policy_loss("plain")
def plain(policy_logprobs_N, old_logprobs_N, advantages_N, *, mask_N, weight: float = 1.0):
    return PolicyLoss((-weight * advantages_N * policy_logprobs_N).masked_fill(~mask_N, 0), {}, mask_N.sum())


@register_advantage_estimator("as_is")
def as_is(rewards, group_ids, *, shift: float = 0.0):
    return rewards.nan_to_num() + shift
"""
CONFIG = """
model:
  class_path: pl_grouprl.GRPO
  init_args:
    policy:
      class_path: pl_grouprl.demo.WarmStartedPolicy
      init_args:
        demonstrations: {{class_path: pl_grouprl.demo.MostFrequentDigit, init_args: {{prompt_length: 16}}}}
        architecture: {{model_type: qwen3, hidden_size: 16, intermediate_size: 32, num_hidden_layers: 1,
          num_attention_heads: 2, num_key_value_heads: 1, head_dim: 8}}
        steps: 0
        cache_dir: {folder}
    rewards: [{{function: own_functions.brevity}}]
    num_generations: 2
    sharing: {{verify: false}}
    sampling: {{max_new_tokens: 4}}
    policy_loss: {{name: plain, weight: {weight}}}
    advantage_estimator: as_is
    advantage_options: {{shift: 2}}
data:
  class_path: pl_grouprl.PromptDataModule
  init_args:
    train: {{class_path: pl_grouprl.demo.MostFrequentDigit, init_args: {{prompt_length: 16, train_size: 4}}}}
    batch_size: 2
trainer: {{accelerator: cpu, max_steps: 2, logger: false, enable_checkpointing: false, enable_progress_bar: false}}
"""


@pytest.fixture
def config(tmp_path, monkeypatch):
    (tmp_path / "own_functions.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)

    def write(weight):
        (tmp_path / "own.yaml").write_text(CONFIG.format(folder=tmp_path, weight=weight))
        return str(tmp_path / "own.yaml")

    yield write
    sys.modules.pop("own_functions", None)


def test_functions_of_a_module_that_a_configuration_names(config):
    main(["fit", "--config", config(0.5)])

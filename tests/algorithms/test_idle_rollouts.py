"""Rollouts that no loss trains are not encoded in updates, which changes neither loss nor gradients."""

import pytest
import torch
from lightning.pytorch import Callback

from pl_grouprl.algorithms import GRPO, PPO
from pl_grouprl.models import PolicyCopyCritic
from pl_grouprl.types import SamplingConfig

VINE = {
    "advantage_estimator": "vine",
    "episodes": {"branching": {"points": "every_n", "width": 3, "depth": 2, "every_n": 4}},
    "num_generations": 2,
}
TRUNCATED = {"mask_truncated_completions": True, "beta": 0.1, "kl": {"type": "k3"}, "entropy_coef": 0.05}


class Custom(GRPO):
    """A loss that is not ours may train any rollout."""

    def compute_loss(self, batch):
        return super().compute_loss(batch)


class CountTokens(Callback):
    """Counts the tokens that the policy runs on with gradient."""

    def on_train_start(self, trainer, module):
        self.tokens = 0
        module.policy.get_input_embeddings().register_forward_hook(self._count)

    def _count(self, embedding, args, out):
        self.tokens += args[0].numel() if torch.is_grad_enabled() else 0


@pytest.fixture
def step(make_module, make_trainer, make_data, history):
    def step(cls=GRPO, *, divides=True, **options):
        """One step: its gradients, its metrics, and the tokens that the policy ran on with gradient."""
        module = make_module(cls, sampling=SamplingConfig(max_new_tokens=24), **options)
        if not divides:
            update = module.updater.update
            module.updater.update = lambda *args, **kwargs: update(*args, **kwargs | {"skips_idle": False})

        record, counter = history(), CountTokens()
        record.keep_tensors = True
        trainer = make_trainer(
            callbacks=[record, counter], max_steps=1, precision="64-true", enable_checkpointing=False
        )
        trainer.fit(module, make_data(batch_size=2))
        return record.gradients[0], record.steps[0], counter.tokens

    return step


def assert_same_gradients(found, expected):
    scale = max(gradient.abs().max() for gradient in expected.values())
    assert scale > 1e-5
    assert max((found[name] - expected[name]).abs().max() for name in expected) < 1e-7 * scale  # norms are in float32


@pytest.mark.parametrize(("mode", "budget"), [("token-mean", None), ("token-mean", 30), ("seq-mean-token-mean", None)])
def test_off_the_trunk(step, mode, budget):
    options = VINE | {"loss_agg_mode": mode, "max_tokens_per_micro_batch": budget}
    found, metrics, tokens = step(**options)
    expected, whole, all_tokens = step(divides=False, **options)
    assert_same_gradients(found, expected)
    assert metrics["loss"] == pytest.approx(whole["loss"], rel=1e-5)
    assert tokens < 0.6 * all_tokens


@pytest.mark.parametrize(
    "options", [{"beta": 0.1, "entropy_coef": 0.01}, {"advantage_estimator": "tree"}, {"cls": Custom}], ids=str
)
def test_what_another_loss_trains_is_encoded(step, options):
    options = VINE | options
    assert step(**options)[2] == step(divides=False, **options)[2]


@pytest.mark.parametrize("cls", [GRPO, PPO])
def test_truncated_rollouts_that_are_not_trained(step, cls):
    options = TRUNCATED | ({"critic": PolicyCopyCritic(head_std=0.3)} if cls is PPO else {})
    found, metrics, tokens = step(cls, **options)
    expected, whole, all_tokens = step(cls, divides=False, **options)
    assert_same_gradients(found, expected)
    assert tokens < all_tokens
    assert metrics.keys() == whole.keys()
    kept = {name for name in metrics if not name.startswith(("time/", "prefix/", "memory/", "throughput/"))}
    assert {name: metrics[name] for name in kept} == pytest.approx({name: whole[name] for name in kept}, rel=1e-5)


def test_a_batch_in_which_nothing_is_trained(step):
    gradients, metrics, _ = step(rewards=lambda completions, **columns: [None] * len(completions))
    assert all(gradient is None for gradient in gradients.values())
    assert metrics["loss"] == 0
    assert "prefix/token_ratio" not in metrics  # no rollout was run with prefixes shared or repeated


def test_a_loss_that_is_not_ours_finds_its_rollouts_by_number(make_module, make_trainer, make_data):
    found = []

    class ByNumber(GRPO):
        def compute_loss(self, batch):
            rollouts = self.last_rollouts.rollouts
            own = [rollout for group in batch.groups for rollout in group.rollouts]
            found.extend(rollouts[n] is rollout for n, rollout in zip(batch.rollout_numbers, own, strict=True))
            return super().compute_loss(batch)

    module = make_module(ByNumber, num_mini_batches=2, sampling=SamplingConfig(max_new_tokens=4))
    make_trainer(max_steps=2, enable_checkpointing=False).fit(module, make_data(batch_size=4))
    assert found == [True] * 4 * module.collector._num_generations

"""GRPO, PPO and GROUP PPO on branching rollouts: groups of different sizes, also resumed, replaced or sampled ahead."""

import pytest
import torch
from helpers.chance_episodes import STOPS, ChancePolicy, chance_rows, double, register_chance_calls
from helpers.in_flight_engine import InFlightCopy
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint

from pl_grouprl.algorithms import GRPO, PPO, GroupPPO
from pl_grouprl.data import PromptDataModule
from pl_grouprl.types import SamplingConfig

EVERY_2 = {"points": "every_n", "width": 2, "depth": 2, "every_n": 2}
AHEAD = {"max_staleness": 1, "importance_sampling": {"mode": "token_truncate"}}


class Record(Callback):
    """The rollouts and metrics of each step, and the groups of validation."""

    def __init__(self):
        self.groups, self.metrics, self.validated = [], [], []

    def on_train_batch_end(self, trainer, module, *_):
        self.groups.append([list(group.rollouts) for group in module.last_rollouts.groups])
        self.metrics.append({name: float(value) for name, value in trainer.callback_metrics.items()})

    def on_validation_batch_end(self, trainer, module, outputs, *_):
        self.validated += outputs["groups"]


@pytest.fixture
def make(make_module):
    def make(cls=GRPO, branching=EVERY_2, **options):
        defaults = {"num_generations": 2, "sampling": SamplingConfig(max_new_tokens=6), "num_mini_batches": 2}
        episodes = {"branching": branching} | options.pop("episodes", {})
        return make_module(cls, episodes=episodes, **(defaults | options))

    return make


@pytest.fixture
def fit(make_trainer, make_data):
    def fit(module, *callbacks, data=None, ckpt_path=None, max_steps=2):
        record = Record()
        trainer = make_trainer(
            callbacks=[record, *callbacks], max_steps=max_steps, enable_checkpointing=bool(callbacks)
        )
        trainer.fit(module, data or make_data(), ckpt_path=ckpt_path, weights_only=True if ckpt_path else None)
        return record

    return fit


def saving(folder):
    return ModelCheckpoint(dirpath=folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)


@pytest.mark.parametrize("cls", [GRPO, PPO, pytest.param(GroupPPO, marks=pytest.mark.slow)])
def test_two_steps(make, fit, parameters, tiny_policy, cls):
    module = make(cls)
    record = fit(module)
    groups, metrics = record.groups[0], record.metrics[0]
    sizes = [len(rollouts) for rollouts in groups]
    assert len(set(sizes)) > 1
    assert metrics["branching/leaves"] == sum(sizes) / len(sizes)
    lengths = sum(len(rollout.token_ids) for rollouts in groups for rollout in rollouts)
    assert metrics["completions/mean_length"] == pytest.approx(lengths / sum(sizes))
    sampled = metrics["branching/sampled_tokens"] * len(sizes)
    assert metrics["branching/token_ratio"] == pytest.approx(lengths / sampled)
    assert lengths > sampled
    changed = zip(parameters(module), tiny_policy().load().parameters(), strict=True)
    assert not all(torch.equal(trained, initial) for trained, initial in changed)


def test_options_that_change_the_number_of_rollouts(make, fit, make_data):
    """One root, prompts replaced, sampling ahead, a token budget; and validation, which does not branch."""
    one_root = {"num_generations": 1, "dynamic_sampling": True, "max_tokens_per_micro_batch": 60, "num_mini_batches": 1}
    module = make(
        branching={"points": "entropy", "width": 3, "depth": 2}, evaluation={"num_generations": 2}, **one_root, **AHEAD
    )
    assert module.max_rollouts == 5
    record = fit(module, data=make_data(val=True), max_steps=3)
    assert all(len(rollouts) > 1 for rollouts in record.groups[0])  # the others have nothing to compare
    assert {len(group.rollouts) for group in record.validated} == {2}
    assert all(rollout.branch_path == () for group in record.validated for rollout in group.rollouts)


@pytest.mark.parametrize("options", [AHEAD, pytest.param({}, marks=pytest.mark.slow)], ids=["ahead", "plain"])
def test_a_resumed_run_continues_to_the_bit(make, fit, parameters, tmp_path, options):
    module = make(**options)
    groups = fit(module, saving(tmp_path), max_steps=4).groups
    resumed = make(**options)
    more = fit(resumed, ckpt_path=tmp_path / "step=1.ckpt", max_steps=4).groups  # between two updates of a batch
    assert all(torch.equal(a, b) for a, b in zip(parameters(module), parameters(resumed), strict=True))
    assert more == groups[1:]
    assert any(rollout.branch_points for rollouts in more[0] for rollout in rollouts)
    with pytest.warns(UserWarning, match="episodes.branching.width"):
        fit(make(branching=EVERY_2 | {"width": 3}, **options), ckpt_path=tmp_path / "step=2.ckpt")


def test_episodes(make, fit, monkeypatch):
    monkeypatch.setattr("pl_grouprl.chat.parsing._PARSERS", [])
    register_chance_calls()
    module = make(
        policy=ChancePolicy(eos_token_id=1),
        rewards=lambda completions, **columns: [float(len(own)) for own in completions],
        tools=[double],
        branching={"points": "turn", "width": 2},
        sampling=SamplingConfig(max_new_tokens=40, stop_token_ids=STOPS),
        num_generations=4,
        num_mini_batches=1,
        episodes={"max_turn_tokens": 20, "max_tokens": 100},
    )
    record = fit(module, data=PromptDataModule(chance_rows(4), batch_size=4), max_steps=1)
    assert {len(rollout.branch_points) for rollouts in record.groups[0] for rollout in rollouts} == {0, 1}
    assert record.metrics[0]["branching/token_ratio"] > 1
    assert record.metrics[0]["episode/turns"] > 1


def test_refused(make):
    with pytest.raises(ValueError, match=r"Branching.budget is 3, but the 2 roots alone may take 12 tokens"):
        make(branching=EVERY_2 | {"budget": 3})
    with pytest.raises(ValueError, match="every_n is None with points='every_n'"):
        make(branching={"points": "every_n"})
    with pytest.raises(TypeError, match="branching is 'turn'"):
        make(branching="turn")
    with pytest.raises(ValueError, match=r"num_generations is 1; .*compares the rollouts"):
        make(branching=None, num_generations=1)


def test_branches_know_the_versions_of_their_tokens(make, fit):
    record = fit(make(engine=InFlightCopy(), num_mini_batches=1, **AHEAD), max_steps=3)
    for number, groups in enumerate(record.groups):
        rollouts = [rollout for group in groups for rollout in group]
        assert any(rollout.branch_points for rollout in rollouts)
        ages = [number - version for rollout in rollouts for version in rollout.weight_versions]
        assert min(ages) >= 0
        assert max(ages) == record.metrics[number]["rollout/staleness/max"] <= 1

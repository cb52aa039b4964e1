"""Rollouts from a copy of the policy: those of the weights before, the same when resumed, refused where impossible."""

import threading
from pathlib import Path

import pytest
import torch
from helpers.scripts import run_script
from helpers.sweeps import sweep
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from pl_grouprl.algorithms import PPO
from pl_grouprl.rollout import HFRolloutEngine
from pl_grouprl.utilities.distributed import derive_seed

AHEAD = {"max_staleness": 1, "importance_sampling": {"mode": "token_truncate"}}


class Rollouts(Callback):
    """What was trained in each rollout, and the weights before and after its updates."""

    def __init__(self):
        self.groups, self.before, self.ages = [], [], []

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        # The module's hook, which samples, comes behind those of callbacks.
        if batch.update_index == 0:
            self.before.append({name: value.clone() for name, value in module.policy.state_dict().items()})

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if batch.update_index == 0:
            self.groups.append(module.last_rollouts.groups)
            metrics = module.last_rollouts.metrics
            assert metrics["rollout/staleness/mean"] == metrics["rollout/staleness/max"]
            assert metrics["rollout/dropped_stale"] == 0
            self.ages.append(metrics["rollout/staleness/mean"])


def same(left, right):
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("updates", [1, 2])
def test_rollouts_are_those_of_the_policy_before_the_last_updates(
    make_module, make_data, make_trainer, tiny_policy, updates
):
    record, module, data = Rollouts(), make_module(num_iterations=updates, **AHEAD), make_data()
    make_trainer(max_steps=4 * updates, callbacks=[record]).fit(module, data)
    assert record.ages == [0.0, 1.0, 1.0, 1.0]
    model = tiny_policy().load()
    for number, groups in enumerate(record.groups):
        model.load_state_dict(record.before[max(number - 1, 0)])
        prompts = data.peek(number)
        expected = HFRolloutEngine(model, module.tokenizer).generate(
            [prompt.token_ids for prompt in prompts],
            module.sampling,
            num_generations=4,
            seed=derive_seed("rollout", number, module.seed, 0),
        )
        assert [group.prompt_ids for group in groups] == [prompt.token_ids for prompt in prompts]
        assert [[r.token_ids for r in group.rollouts] for group in groups] == [
            [r.token_ids for r in own] for own in expected
        ]
        for group, own in zip(groups, expected, strict=True):
            for rollout, other in zip(group.rollouts, own, strict=True):
                assert rollout.logprobs == pytest.approx(other.logprobs, abs=1e-6)
    # Without the lag the third rollout would be another one.
    assert not same(record.before[1].values(), record.before[2].values())


@pytest.mark.parametrize("cls", sweep([None, PPO], quick=[PPO]))
def test_resume_at_every_step_is_exact(make_module, make_data, make_trainer, parameters, tmp_path, cls):
    def fit(checkpoint=None, callbacks=()):
        kwargs = AHEAD if cls is None else {"cls": cls, **AHEAD}
        module = make_module(num_mini_batches=2, **kwargs)
        make_trainer(max_steps=6, callbacks=list(callbacks)).fit(
            module, make_data(train_size=8), ckpt_path=checkpoint, weights_only=True
        )
        return module

    saving = ModelCheckpoint(dirpath=tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    undisturbed = parameters(fit(callbacks=[saving]))
    for step in range(1, 6):
        assert same(undisturbed, parameters(fit(tmp_path / f"step={step}.ckpt"))), f"resumed after step {step}"


def test_two_batches_ahead(make_module, make_data, make_trainer):
    record = Rollouts()
    module = make_module(**{**AHEAD, "max_staleness": 2})
    make_trainer(max_steps=6, callbacks=[record]).fit(module, data := make_data())
    assert record.ages[0] == 0
    assert set(record.ages[1:]) <= {1.0, 2.0}  # depends on timing
    for number, groups in enumerate(record.groups):
        assert [group.prompt_ids for group in groups] == [prompt.token_ids for prompt in data.peek(number)]


def test_sampling_runs_during_the_update_and_ends_with_the_fit(make_module, make_data, make_trainer, monkeypatch):
    names, module = [], make_module(**AHEAD)
    generate = HFRolloutEngine.generate

    def noted(self, *args, **kwargs):
        names.append(threading.current_thread().name)
        return generate(self, *args, **kwargs)

    monkeypatch.setattr(HFRolloutEngine, "generate", noted)
    make_trainer(max_steps=3).fit(module, make_data())
    assert names == ["MainThread", *["rollouts-ahead-0"] * 3]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("rollouts-ahead")]


def test_a_rollout_that_is_not_next_is_dropped(make_module, make_data, make_trainer):
    # Three batches make an epoch, of which Lightning uses two: the third was sampled ahead and does not come.
    record = Rollouts()
    make_trainer(max_steps=4, limit_train_batches=2, callbacks=[record]).fit(make_module(**AHEAD), make_data())
    assert record.ages == [0.0, 1.0, 0.0, 1.0]


def test_errors_of_the_thread_end_the_run(make_module, make_data, make_trainer, monkeypatch):
    module, generate = make_module(**AHEAD), HFRolloutEngine.generate

    def breaks(self, *args, **kwargs):
        if threading.current_thread() is not threading.main_thread():
            raise FloatingPointError("the logits are not finite")
        return generate(self, *args, **kwargs)

    monkeypatch.setattr(HFRolloutEngine, "generate", breaks)
    with pytest.raises(FloatingPointError, match="the logits are not finite"):
        make_trainer(max_steps=3).fit(module, make_data())


@pytest.mark.parametrize(
    ("options", "trainer_options", "message"),
    [
        ({"max_staleness": 1}, {}, "importance_sampling"),
        (
            {**AHEAD, "engine": True},
            {},
            "engine is ScriptedEngine",
        ),
        (AHEAD, {"precision": "bf16-true"}, "precision=bf16-true"),
    ],
)
def test_incompatible_options_are_refused(
    make_module, make_data, make_trainer, scripted_engine, options, trainer_options, message
):
    if options.get("engine"):
        options = {**options, "engine": scripted_engine}
    with pytest.raises(ValueError, match=rf"max_staleness is 1, but .*{message}.* set max_staleness to 0"):
        make_trainer(max_steps=1, **trainer_options).fit(make_module(**options), make_data())


def test_a_negative_staleness_is_refused(make_module):
    with pytest.raises(ValueError, match="max_staleness is -1; it must be 0 or larger"):
        make_module(max_staleness=-1, importance_sampling={"mode": "token_truncate"})


def run_ranks(devices, folder, checkpoint="", strategy="ddp"):
    folder.mkdir()
    script = Path(__file__).with_name("rollouts_ahead_ranks.py")
    run_script(script, devices, folder / "weights.pt", strategy, checkpoint, ranks=devices, cwd=folder, timeout=180)
    return torch.load(folder / "weights.pt", weights_only=True)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_two_ranks_do_what_one_does_and_resume_exactly(tmp_path, strategy):
    one, two = run_ranks(1, tmp_path / "one"), run_ranks(2, tmp_path / "two", strategy=strategy)
    for left, right in zip(one, two, strict=True):
        torch.testing.assert_close(right, left, rtol=0, atol=1e-5)
    assert same(two, run_ranks(2, tmp_path / "resumed", tmp_path / "two" / "step=1.ckpt", strategy))

"""Rollouts of an engine that takes weights while it samples: bounded staleness, each prompt once, errors, resume."""

from __future__ import annotations

import threading

import pytest
import torch
from helpers.in_flight_engine import InFlightEngine
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint

from pl_grouprl.algorithms import OptimizerConfig
from pl_grouprl.distributed.checksum import SamplerLostError, WeightsMismatchError
from pl_grouprl.rollout.engine import SyncedRolloutEngine
from pl_grouprl.training.ahead import NAME

AHEAD = {"importance_sampling": {"mode": "token_truncate"}}


class Trained(Callback):
    """The groups and metrics of each step."""

    def __init__(self, at_end=lambda module: None):
        self.groups, self.steps, self.at_end = [], [], at_end

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.groups.append(module.last_rollouts.groups)
        self.steps.append(dict(module.last_rollouts.metrics))
        self.at_end(module)

    @property
    def prompts(self):
        return [tuple(group.prompt_ids) for groups in self.groups for group in groups]


@pytest.fixture
def fit(make_module, make_data, make_trainer):
    def run(engine, k=1, callbacks=(), at_end=lambda module: None, ckpt_path=None, max_steps=3, **options):
        trained, data = Trained(at_end), make_data(train_size=16)
        module = make_module(engine=engine, max_staleness=k, **AHEAD, **options)
        trainer = make_trainer(
            max_steps=max_steps, callbacks=[trained, *callbacks], enable_checkpointing=bool(callbacks)
        )
        trainer.fit(module, data, ckpt_path=ckpt_path, weights_only=True)
        return trained, module, data

    yield run
    assert not [thread for thread in threading.enumerate() if thread.name.startswith(NAME)]


def prompts_of(data, numbers):
    return [tuple(prompt.token_ids) for number in numbers for prompt in data.peek(number)]


def test_the_test_engine_is_a_synced_engine():
    assert isinstance(InFlightEngine(), SyncedRolloutEngine)


@pytest.mark.parametrize("k", [1, 2])
def test_every_prompt_is_trained_once_and_no_token_is_too_old(fit, k):
    engine = InFlightEngine()
    trained, module, data = fit(engine, k, max_steps=4)
    assert len(trained.prompts) == 16
    ahead = prompts_of(data, range(4 + k))
    assert all(prompt in ahead for prompt in trained.prompts)
    assert {name.startswith(NAME) for name in engine.names} == {True}
    for number, (groups, step) in enumerate(zip(trained.groups, trained.steps, strict=True)):
        ages = [number - v for group in groups for r in group.rollouts for v in r.weight_versions]
        assert step["rollout/staleness/max"] == max(ages) <= min(k, number)
        assert step["rollout/staleness/mean"] == pytest.approx(sum(ages) / len(ages))
        assert step["rollout/dropped_stale"] == 0
        assert step["sync/count"] == 1
        assert [group.group_id for group in groups] == [0, 1, 2, 3]
    assert module.timer.seconds["wait_for_rollouts"] > 0


def test_tokens_do_not_depend_on_timing(fit):
    # Once as fast as possible, once with the second batch held until the trainer waits for it.
    def hold(engine, call, token):
        if 4 <= call < 8:
            engine.wait(lambda: (engine.version or 0) >= 2)

    fast, _, _ = fit(InFlightEngine())
    slow, _, _ = fit(InFlightEngine(hold))
    tokens = [
        {tuple(g.prompt_ids): [r.token_ids for r in g.rollouts] for groups in one.groups for g in groups}
        for one in (fast, slow)
    ]
    assert tokens[0] == tokens[1]


def test_weights_change_within_a_rollout(fit):
    def hold(engine, call, token):
        if call == 4 and token == 2:  # a group of the second batch, while the first is trained
            engine.wait(lambda: (engine.version or 0) >= 2)

    trained, _, _ = fit(InFlightEngine(hold, length=4), max_steps=2, num_generations=2)
    versions = [r.weight_versions for group in trained.groups[1] for r in group.rollouts]
    # Its second rollout is sampled after the first; each has its own versions.
    assert sorted(versions)[:1] == [[0, 0, 0, 0]]
    assert [0, 0, 1, 1] in versions
    assert trained.steps[1]["rollout/staleness/max"] == 1
    assert 0 < trained.steps[1]["rollout/staleness/mean"] < 1


def test_an_engine_that_reports_no_versions_has_those_of_the_start(fit):
    trained, _, _ = fit(InFlightEngine(reports=False), max_steps=2)
    assert {v for group in trained.groups[0] for r in group.rollouts for v in r.weight_versions} == {0}
    assert trained.steps[1]["rollout/staleness/max"] <= 1


def test_errors_of_a_thread_end_the_run(fit):
    def fail(engine, call, token):
        if call == 5:
            raise FloatingPointError("the logits are not finite")

    with pytest.raises(FloatingPointError, match="the logits are not finite"):
        fit(InFlightEngine(fail))


def test_a_lost_sampler_gets_the_weights_again(fit):
    lost = []

    def lose(engine, call, token):
        if call in (5, 6) and not lost:
            lost.append(call)
            engine.version = None
            raise SamplerLostError("it was restarted")

    with pytest.warns(UserWarning, match="the sampler was lost .* it was restarted"):
        trained, *_ = fit(InFlightEngine(lose), k=2, max_steps=3)
    assert len(lost) == 1
    assert len(set(trained.prompts)) == 12
    assert sum(step["sync/restarts"] for step in trained.steps) <= 1


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_an_exception_ends_requests_in_flight(fit, error):
    def hold(engine, call, token):
        if call >= 4:
            engine.wait(lambda: False)

    def fail(module):
        raise error

    engine = InFlightEngine(hold)
    with pytest.raises((SystemExit, OSError)):
        fit(engine, at_end=fail)
    assert engine.closed


def test_a_resumed_run_has_what_was_sampled_and_samples_the_rest(fit, tmp_path, caplog):
    saving = ModelCheckpoint(dirpath=tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)

    def hold(engine, call, token):
        if call == 4:  # of the second batch: in flight when the first checkpoint is saved
            engine.wait(lambda: engine.version >= 2)

    def wait_for_others(module):
        if module.global_step == 1:
            module.collector.ahead._queue.wait(7)

    fit(InFlightEngine(hold), k=2, callbacks=[saving], at_end=wait_for_others)
    state = torch.load(tmp_path / "step=1.ckpt", weights_only=True)["pl_grouprl"]["rollout_queue"][0]
    sampled = [entry for entry in state["entries"] if "rollouts" in entry]
    assert (state["version"], len(state["entries"]), len(sampled)) == (0, 8, 7)
    with caplog.at_level("INFO"):
        after, *_ = fit(InFlightEngine(), k=2, ckpt_path=tmp_path / "step=1.ckpt")
    assert "1 groups of rollouts were not finished when the checkpoint was saved: they start again" in caplog.text
    kept = {tuple(entry["prompt_ids"]): [r["token_ids"] for r in entry["rollouts"]] for entry in sampled}
    found = {tuple(g.prompt_ids): [r.token_ids for r in g.rollouts] for groups in after.groups for g in groups}
    assert {prompt: found[prompt] for prompt in kept} == kept
    assert after.steps[0]["rollout/staleness/max"] == 1
    assert after.steps[1]["rollout/staleness/max"] == 2


def test_a_resumed_run_that_samples_nothing_ahead_says_so(fit, tmp_path, caplog):
    saving = ModelCheckpoint(dirpath=tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    fit(InFlightEngine(), callbacks=[saving], max_steps=2)
    with caplog.at_level("INFO"):
        fit(
            InFlightEngine(),
            k=0,
            ckpt_path=tmp_path / "step=1.ckpt",
            max_steps=2,
            guards={"allow_changed": ["max_staleness"]},
        )
    assert "4 groups of rollouts that were sampled ahead. They are left out, because max_staleness is 0" in caplog.text


def test_replacements_have_the_version_of_the_current_weights(fit):
    """The engine has numbers of its own, from 1."""
    calls = []

    def first_are_equal(completions, **columns):
        calls.append(len(completions))
        return [0.0 if sum(calls) <= 16 else float(place) for place in range(len(completions))]

    trained, *_ = fit(InFlightEngine(), max_steps=2, dynamic_sampling=True, rewards=[first_are_equal])
    assert trained.steps[0]["dynamic_sampling/generation_batches"] == 2
    assert {v for group in trained.groups[0] for r in group.rollouts for v in r.weight_versions} == {0}


def test_a_module_can_be_fitted_twice(fit, make_module, make_data, make_trainer):
    def hold(engine, call, token):
        if engine.version == 2:  # in flight at the end of the first fit
            engine.wait(lambda: engine.version != 2)

    engine = InFlightEngine(hold)
    still = OptimizerConfig(learning_rate=1e-6)  # else the made-up log-probabilities are not the policy's any more
    module = make_module(engine=engine, max_staleness=1, optimizer=still, **AHEAD)
    for _ in range(2):
        trained = Trained()
        make_trainer(max_steps=2, callbacks=[trained], enable_checkpointing=False).fit(module, make_data())
        assert len(trained.prompts) == 8
        engine.hook = None


def test_validation_samples_beside_the_threads(fit, make_module, make_data, make_trainer):
    engine = InFlightEngine()
    module = make_module(engine=engine, max_staleness=1, **AHEAD)
    make_trainer(max_steps=3, val_check_interval=1).fit(module, make_data(val=True))
    assert "MainThread" in engine.names
    assert {version for _, _, version in engine.calls} == {1, 2, 3, 4}


@pytest.mark.parametrize(
    ("lacks", "message"),
    [
        ("takes_prompt_indices", "engine is Partial, which lacks"),
        ("updates_in_flight", "engine is Partial, which cannot sample while the policy is updated"),
    ],
)
def test_engines_that_cannot_are_refused(fit, lacks, message):
    engine = type("Partial", (InFlightEngine,), {lacks: False})()
    with pytest.raises(ValueError, match=rf"max_staleness is 1, but .*{message}.* Or set max_staleness to 0"):
        fit(engine)


class Wrong(InFlightEngine):
    """Reports other log-probabilities than the policy's; writes nothing in its first calls."""

    def __init__(self, silent_calls=0):
        super().__init__()
        self.silent_calls = silent_calls

    def generate(self, *args, **kwargs):
        groups = super().generate(*args, **kwargs)
        silent = len(self.calls) <= self.silent_calls
        for rollout in (rollout for group in groups for rollout in group):
            rollout.token_ids = [] if silent else rollout.token_ids
            rollout.logprobs = [-9.0] * len(rollout.token_ids)
            rollout.weight_versions = rollout.weight_versions[: len(rollout.token_ids)]
        return groups


def test_log_probabilities_are_compared_with_the_policy(fit):
    with pytest.raises(WeightsMismatchError, match="its log-probabilities differ from the policy's"):
        fit(Wrong())


def test_they_are_compared_once_there_are_tokens(fit):
    engine = Wrong(silent_calls=8)
    with pytest.raises(WeightsMismatchError, match="its log-probabilities differ from the policy's"):
        fit(engine)
    assert len(engine.calls) > 8


@pytest.fixture
def saved(fit, tmp_path):
    """A checkpoint after the first step, when all groups of the second batch were sampled."""
    saving = ModelCheckpoint(dirpath=tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    fit(InFlightEngine(), callbacks=[saving], max_steps=1, at_end=lambda module: module.collector.ahead._queue.wait(4))
    return tmp_path / "step=1.ckpt"


def test_they_are_compared_after_a_resume_from_groups_of_older_weights(fit, saved):
    with pytest.raises(WeightsMismatchError, match="its log-probabilities differ from the policy's"):
        fit(Wrong(), ckpt_path=saved)


def test_groups_of_other_options_are_sampled_again_after_a_resume(fit, saved, caplog):
    with caplog.at_level("INFO"):
        trained, *_ = fit(
            InFlightEngine(), ckpt_path=saved, num_generations=2, guards={"allow_changed": ["num_generations"]}
        )
    assert "4 groups of rollouts sampled ahead are sampled again, because num_generations changed" in caplog.text
    assert {len(group.rollouts) for groups in trained.groups for group in groups} == {2}
    assert trained.steps[0]["rollout/staleness/max"] == 0


def test_staleness_is_that_of_the_groups_that_are_trained(fit):
    calls = []

    def first_are_equal(completions, **columns):  # those of the second batch, all sampled ahead, are replaced
        calls.append(len(completions))
        return [0.0 if 16 < sum(calls) <= 32 else float(place) for place in range(len(completions))]

    trained, *_ = fit(InFlightEngine(), max_steps=2, dynamic_sampling=True, rewards=[first_are_equal])
    assert trained.steps[1]["dynamic_sampling/generation_batches"] == 2
    assert trained.steps[1]["rollout/staleness/max"] == 0

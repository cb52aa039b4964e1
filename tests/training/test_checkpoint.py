"""What a checkpoint holds, runs that resume to the bit, other options at a resume, and checkpoints that are refused."""

from __future__ import annotations

import functools
import itertools
import json
import random
import re
import shutil
import warnings
from enum import Enum

import numpy as np
import pytest
import torch
from helpers import tiny_runs
from helpers.sweeps import sweep, sweep_pairs
from helpers.tiny_runs import (
    TinyPolicy,
    largest_difference,
    make_data,
    make_module,
    make_trainer,
    merged,
    same,
    share_of_letters,
)
from helpers.worker_rewards import length
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from pl_grouprl.algorithms import GRPO, PPO, GroupPPO, OptimizerConfig
from pl_grouprl.callbacks import SafeCheckpoint
from pl_grouprl.data import PromptDataModule
from pl_grouprl.demo import MostFrequentDigit
from pl_grouprl.functional.entropy import EntropyOptions
from pl_grouprl.models import PolicyCopyCritic, SharedTrunkCritic
from pl_grouprl.models.critic import LoRACritic
from pl_grouprl.rewards import FunctionFromFile, ModelReward, Weighted
from pl_grouprl.training.buffer import RolloutBuffer
from pl_grouprl.training.checkpoint import (
    Attributes,
    ConsistencyCheck,
    RandomNumbers,
    load_parts,
    redistribute,
    save_parts,
)
from pl_grouprl.training.run import PlainRun
from pl_grouprl.types import Rollout, RolloutGroup, SamplingConfig
from pl_grouprl.utilities import checkpoint_files
from pl_grouprl.utilities.checkpoint_files import manifest_of
from pl_grouprl.utilities.describe import describe
from pl_grouprl.utilities.modes import random_state, set_random_state

CPU = torch.device("cpu")

# Runs that are resumed, at whatever step, end where the undisturbed one did. Other files have those of their parts.

KL = {"beta": 0.1, "kl": {"target": 0.01, "horizon": 100}}
PASSES = {  # an epoch has 2 batches of rollouts; each serves 2 passes of 2 mini-batches
    "steps": 9, "data": {"train_size": 8}, "num_iterations": 2, "num_mini_batches": 2,
    "optimizer": OptimizerConfig(1e-2, weight_decay=0.1), "critic_optimizer": OptimizerConfig(3e-2, schedule="cosine"),
}  # fmt: skip
RUNS = {
    "grpo": (GRPO, {**PASSES, "beta": 0.1}),
    "ppo, copy, KL in the reward": (
        PPO,
        merged(PASSES, KL, {"critic": PolicyCopyCritic(head_std=0.1), "kl": {"place": "reward"}}),
    ),
    "ppo, shared trunk, KL in the loss": (PPO, {**PASSES, **KL, "critic": SharedTrunkCritic(head_std=0.1)}),
    "group_ppo, lora": (
        GroupPPO,
        merged(PASSES, KL, {"critic": LoRACritic(r=4, head_std=0.1), "kl": {"place": "reward"}}),
    ),
    "group_ppo, sketch, warm-up": (GroupPPO, {**PASSES, "score_norm": "sketch", "critic_warmup_steps": 3}),
}
RUNS["grpo"][1].pop("critic_optimizer")


def state_of(module):
    threshold = module.threshold_controller.threshold if isinstance(module, GroupPPO) else None
    return module.beta, module.num_tokens, module.optimization.nonfinite_steps, threshold


# Amid the first pass; between the passes over the second batch; at the end of the epoch, with no updates left.
@pytest.mark.parametrize("resumed_at", [(1, 6, 8), pytest.param((2, 3, 4, 5, 7), marks=pytest.mark.slow)])
@pytest.mark.parametrize("run", sweep(RUNS, quick=["grpo", "ppo, copy, KL in the reward", "group_ppo, lora"]))
def test_resume_at_every_step_is_exact(fit, tmp_path, run, resumed_at):
    cls, options = RUNS[run]
    whole = fit(cls, save=True, **options)
    assert not same(whole.weights[0], whole.weights[-1], "policy")
    for step in resumed_at:
        resumed = fit(cls, resume=step, **options)
        assert state_of(resumed.module) == state_of(whole.module), step
        assert [own["kl_coef"] for own in resumed.steps if "kl_coef" in own] == [
            own["kl_coef"] for own in whole.steps[step:] if "kl_coef" in own
        ]
        assert same(resumed.module.state_dict(), whole.module.state_dict()), step
        assert same(resumed.moments[-1], whole.moments[-1]), step
    first, second = (torch.load(tmp_path / f"step={step}.ckpt", weights_only=True) for step in (1, 4))
    assert not any(name.startswith("reference") for name in first["state_dict"])
    assert first["pl_grouprl"]["rollouts"][0]["updates_done"] == 1
    assert second["pl_grouprl"]["rollouts"] == [None]  # no updates remain
    if run == "group_ppo, lora":
        # What the policy's storage holds is saved once.
        tied = {f"critic.own_trunk.{name}" for name in whole.module.critic.tied}
        assert tied
        assert not tied & first["state_dict"].keys()


def test_a_fixed_coefficient_and_a_fixed_threshold_are_the_options(fit):
    """Token groups survive a checkpoint; what adapts does not where it is fixed."""
    options = {"num_iterations": 2, "num_mini_batches": 2, "beta": 0.1}
    first = fit(GroupPPO, steps=1, save=True, **options)
    assert same(first.module.token_groups, fit(GroupPPO, steps=2, resume=1, **options).module.token_groups)
    fit(GroupPPO, steps=4, save=True, **options)
    other = {"beta": 0.3, "adaptive_threshold": False, "group_variance_threshold": 2.5}
    module = fit(GroupPPO, steps=5, resume=4, **options | other, guards={"allow_changed": list(other)}).module
    assert (module.beta, module.token_group_threshold) == (0.3, 2.5)


@pytest.mark.parametrize(
    "options", [{"every_n_train_steps": 60}, {}, {"every_n_epochs": 1, "save_on_train_epoch_end": True}]
)
def test_a_run_that_stopped_mid_epoch_continues_there(fit, tmp_path, undisturbed, options):
    """Lightning saves the last checkpoint of a run after it has counted the epoch as processed, or as completed."""
    callback = ModelCheckpoint(dirpath=tmp_path, save_last=True, **options)
    fit(trainer={"max_steps": 1, "max_epochs": 2}, callbacks=[callback])
    resumed = fit(trainer={"max_steps": -1, "max_epochs": 2}, resume=tmp_path / "last.ckpt")
    assert resumed.trainer.global_step == 6
    assert same(resumed.weights[-1], undisturbed.weights[-1])


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Two epochs of three batches."""
    return tiny_runs.fit(tmp_path_factory.mktemp("undisturbed"), trainer={"max_steps": -1, "max_epochs": 2})


def test_runs_of_one_epoch_or_saved_before_the_first_step_continue(fit, tmp_path):
    class SaveAtOnce(Callback):
        def on_train_start(self, trainer, pl_module):
            trainer.save_checkpoint(tmp_path / "start.ckpt")

    last = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=60, save_last=True)
    epoch = {"data": {"train_size": 24}, "trainer": {"max_epochs": 1}}
    fit(steps=3, callbacks=[last, SaveAtOnce()], **epoch)
    for name in ("last", "start"):
        assert fit(steps=5, resume=tmp_path / f"{name}.ckpt", **epoch).trainer.global_step == 5


LIMITS = [{"max_epochs": 2}, {"max_epochs": 2, "max_steps": 100}, {"max_steps": 6}]


def draws():
    return random.random(), np.random.random(), float(torch.rand(())), float(torch.randn(())), random.gauss(0, 1)


class Draws(Callback):
    """What each rollout's reward could draw."""

    def __init__(self):
        self.seen = []

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.seen.append((batch.rollout_number, draws()))

    def on_validation_batch_start(self, *args):
        draws()


@pytest.mark.parametrize(
    ("save", "limits"),
    sweep_pairs(
        itertools.product(["batch", "epoch", "end"], LIMITS),
        quick=[("batch", LIMITS[0]), ("epoch", LIMITS[1]), ("end", LIMITS[2]), ("end", LIMITS[0])],
    ),
)
def test_a_run_that_stopped_at_the_end_of_an_epoch_continues_with_the_next(fit, tmp_path, save, limits):
    class Save(Callback):
        def __init__(self):
            self.hook = {"batch": "on_train_batch_end", "epoch": "on_train_epoch_end", "end": "on_train_end"}[save]
            setattr(self, self.hook, self.store)

        def store(self, trainer, *args):
            if trainer.global_step == 3:
                trainer.save_checkpoint(tmp_path / "stopped.ckpt")

    limits = {"max_steps": -1, **limits}
    whole, resumed = Draws(), Draws()
    fit(callbacks=[whole] if save == "end" else [whole, Save()], trainer=limits)
    if save == "end":
        fit(callbacks=[Save()], steps=3)
    run = fit(callbacks=[resumed], trainer=limits, resume=tmp_path / "stopped.ckpt")
    assert [number for number, _ in resumed.seen] == [number for number, _ in whole.seen][3:]
    assert (run.trainer.global_step, run.trainer.current_epoch) == (6, 2)


# Random numbers and parts of the state.


def test_random_numbers_continue_from_their_state(tmp_path):
    random.gauss(0, 1)
    np.random.standard_normal()
    torch.save(random_state(CPU), tmp_path / "state.pt")
    expected = [draws() for _ in range(3)]
    set_random_state(torch.load(tmp_path / "state.pt", weights_only=True), CPU)
    assert [draws() for _ in range(3)] == expected
    numbers = RandomNumbers(PlainRun(torch.nn.Linear(1, 1)))
    numbers.set_aside()
    draws()  # a validation
    state = numbers.state_dict()
    numbers.continue_training()
    expected = draws()
    numbers.load_state_dict(state)
    numbers.restore()
    assert draws() == expected


def test_validations_do_not_change_the_random_numbers_of_a_resumed_run(fit):
    options = {
        "data": {"val": True}, "optimizer": OptimizerConfig(1e-2, schedule="cosine"),  # asks for the number of steps
        "trainer": {"max_steps": -1, "max_epochs": 2, "check_val_every_n_epoch": None, "val_check_interval": 2,
                    "num_sanity_val_steps": 0},
    }  # fmt: skip
    whole = Draws()
    fit(callbacks=[whole], save=True, **options)
    assert len(whole.seen) == 6
    for step in (1, 2, 4):
        draws()
        resumed = Draws()
        fit(callbacks=[resumed], resume=step, **options)
        assert resumed.seen == whole.seen[step:], step


def test_run_state_saves_loads_and_compares():
    class Owner:
        level = 1

    owner, seen = Owner(), []
    parts = {
        "own": Attributes(owner, "level"),
        "fact": ConsistencyCheck(lambda: owner.level, lambda then, now: seen.append((then, now))),
        "new": Attributes(owner, "level"),
    }
    state = save_parts(parts)
    del state["new"]  # an older checkpoint
    owner.level = 9
    load_parts(parts, state, leave_out={"own"})
    assert (owner.level, seen) == (9, [(1, 9)])
    load_parts(parts, state, leave_out=())
    assert owner.level == 1


class Leveled(GRPO):
    """A user's module with state of its own, which saves some of its arguments."""

    level = 0

    def __init__(self, policy, rewards, scale=1.0, names=("scale",), **options):
        super().__init__(policy, rewards, **options)
        self.save_hyperparameters(*names)

    def saved_state(self):
        return super().saved_state() | {"curriculum": Attributes(self, "level")}

    def on_train_batch_end(self, *args):
        self.level += 1
        super().on_train_batch_end(*args)


@pytest.mark.parametrize("cls", [Leveled, PPO, GroupPPO])
def test_the_state_is_what_is_listed(fit, tmp_path, cls):
    run = fit(cls, save=True)
    module = run.module
    saved = torch.load(tmp_path / "step=1.ckpt", weights_only=True)["pl_grouprl"]
    assert saved.keys() == module.saved_state().keys()
    always = {"random_numbers", "reference_fingerprint", "adapters", "run_options", "steps", "tokens", "rollouts"}
    assert always < saved.keys()
    assert ("threshold_controller" in saved) == (cls is GroupPPO)
    if cls is Leveled:
        run.trainer.save_checkpoint(tmp_path / "end.ckpt")
        assert fit(cls, steps=3, resume=tmp_path / "end.ckpt").module.level == 3


def ranks_of(numbers_per_rank):
    """Buffers whose groups have the given numbers, each in the mini-batch number % 2."""
    states = []
    for numbers in numbers_per_rank:
        groups = [RolloutGroup(prompt_ids=[n], rollouts=[Rollout([n, n], reward=1.0)], group_id=n) for n in numbers]
        buffer = RolloutBuffer(groups, 3, 2, mini_batches=[n % 2 for n in numbers], updates_done=1)
        buffer.put("advantages", torch.tensor([float(n) for n in numbers for _ in range(2)]))
        states.append(buffer.state_dict())
    return states


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_rollouts_are_redistributed_within_their_mini_batches(num_ranks):
    per_rank = ranks_of([[0, 3, 4], [1, 2]])
    buffers = [RolloutBuffer.from_state_dict(redistribute(per_rank, rank, num_ranks)) for rank in range(num_ranks)]
    found = sorted(group.group_id for buffer in buffers for group in buffer.groups)
    assert found == [0, 1, 2, 3, 4]
    for buffer in buffers:
        assert buffer.mini_batches == [group.group_id % 2 for group in buffer.groups]
        assert buffer.joined("advantages").tolist() == [float(g.group_id) for g in buffer.groups for _ in range(2)]
        assert (buffer.rollout_number, buffer.updates_done) == (3, 1)
    nothing_left = RolloutBuffer.from_state_dict(redistribute(ranks_of([[0], [1]]), 2, 3))
    assert nothing_left.mini_batches == [-1]
    assert not nothing_left.joined("loss_mask").any()


# What would not load again is found at the first save.


class NumPyRate(GRPO):
    def configure_optimizers(self):
        return torch.optim.AdamW(self.policy.parameters(), lr=np.float64(1e-3) * np.ones(1)[0])


class ExtraState(GRPO):
    def get_extra_state(self):
        return SamplingConfig()

    def set_extra_state(self, state):
        pass


class Saves(Callback):
    """Puts something into each checkpoint, as a part of its state or of the checkpoint."""

    def __init__(self, value, place):
        self.value, self.place = value, place

    def state_dict(self):
        return {"numbers": [1, self.value]} if self.place == "state" else {}

    def on_save_checkpoint(self, trainer, module, checkpoint):
        if self.place == "checkpoint":
            checkpoint["mine"] = {"value": self.value}


@pytest.mark.parametrize(
    ("kind", "cls", "options", "callbacks", "named"),
    [
        (SafeCheckpoint, NumPyRate, {}, [], "['optimizer_states']"),
        (SafeCheckpoint, ExtraState, {}, [], "['state_dict']"),
        (SafeCheckpoint, Leveled, {"names": ()}, [], "['hyper_parameters']"),
        (SafeCheckpoint, GRPO, {}, [Saves(SamplingConfig(), "state")], "['callbacks']['Saves']"),
        (ModelCheckpoint, GRPO, {}, [Saves(lambda: None, "state")], "['callbacks']['Saves']"),
        (SafeCheckpoint, GRPO, {}, [Saves({1: object()}, "checkpoint")], "['mine']"),
        (ModelCheckpoint, GRPO, {}, [Saves(SamplingConfig(), "checkpoint")], "['mine']"),
    ],
)
def test_what_would_not_load_is_found_at_the_first_save(fit, tmp_path, kind, cls, options, callbacks, named):
    with pytest.raises(TypeError, match=re.escape(f"checkpoint{named}")):
        fit(cls, steps=2, callbacks=[*callbacks, kind(dirpath=tmp_path, every_n_train_steps=1)], **options)
    assert not list(tmp_path.rglob("*.ckpt"))


def test_plain_values_of_callbacks_load(fit, tmp_path):
    for value in (torch.ones(2, requires_grad=True), (1, "a", None, {"b": 2.0})):
        for place in ("state", "checkpoint"):
            fit(Leveled, scale=2.0, callbacks=[Saves(value, place)], save=True)
            assert fit(Leveled, scale=2.0, steps=2, callbacks=[Saves(value, place)], resume=1).trainer.global_step == 2


# Other options at a resume.


def share_of_digits(completions, **columns):
    return [sum(c.isdigit() for c in text) / max(len(text), 1) for text in completions]


class Near:
    """A reward whose constructor keeps its argument under another name."""

    def __init__(self, length, scale=1.0):
        self.wanted = length
        self.scale = scale

    def __call__(self, completions, **columns):
        return [-self.scale * abs(len(text) - self.wanted) for text in completions]


class Missing:
    def __init__(self, value=float("nan")):
        self.value = value

    def __call__(self, completions, **columns):
        return [0.0 for _ in completions]


class NewOption(GRPO):
    """A user's subclass with an option of its own."""

    def __init__(self, *args, level=1, **kwargs):
        super().__init__(*args, entropy_coef=0.1 * level, **kwargs)


def reward_file(tmp_path, folder, text):
    path = tmp_path / folder / "reward.py"
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"def score(completions, **columns):\n    return [{text} for text in completions]\n")
    return FunctionFromFile(str(path), "score")


@pytest.fixture
def saved(fit, tmp_path):
    """Save after a step; gives the path."""

    def save(cls=GRPO, **options):
        fit(cls, save=True, **options)
        return (tmp_path / "step=1.ckpt").rename(tmp_path / "saved.ckpt")

    return save


@pytest.fixture
def resume(fit, tmp_path):
    return lambda cls=GRPO, **options: fit(cls, steps=2, resume=tmp_path / "saved.ckpt", **options)


CHANGES = {
    "function": ({}, {"rewards": share_of_digits}, "rewards", "['share_of_digits']"),
    "function of that name": (
        {"rewards": Weighted(share_of_letters, name="score")}, {"rewards": Weighted(share_of_digits, name="score")},
        "rewards.score", "share_of_digits'",
    ),
    "weight": (
        {"rewards": Weighted(share_of_letters)}, {"rewards": Weighted(share_of_letters, 2.0)},
        "rewards.share_of_letters.weight", "2.0",
    ),
    "argument under another name": ({"rewards": Near(3)}, {"rewards": Near(4)}, "rewards.Near.wanted", "4"),
    "kl.target": (KL, merged(KL, {"kl": {"target": 0.02}}), "kl.target", "0.02"),
    "policy_loss": (
        {"policy_loss": "clip_cov"}, {"policy_loss": {"name": "clip_cov", "clip_cov_lb": 2.0}},
        "policy_loss", "['clip_cov_lb', 'name']",
    ),
    "top_p": ({}, {"sampling": SamplingConfig(max_new_tokens=5, top_p=0.9)}, "sampling.top_p", "0.9"),
    "clipping": (
        {"trainer": {"gradient_clip_val": 1.0}}, {"trainer": {"gradient_clip_val": 0.5}},
        "trainer.gradient_clip_val", "0.5",
    ),
    "clipping of a part": ({}, {"optimizer": OptimizerConfig(1e-2, max_grad_norm=1)}, "optimizer.max_grad_norm", "1"),
    "accumulation": ({}, {"trainer": {"accumulate_grad_batches": 2}}, "trainer.accumulate_grad_batches", "2"),
    "critic": (
        {"cls": PPO, "critic": SharedTrunkCritic()}, {"cls": PPO, "critic": SharedTrunkCritic(detach=True)},
        "critic.detach", "True",
    ),
    "algorithm": ({}, {"cls": NewOption}, "model", "'NewOption'"),
    "option of a subclass": ({"cls": NewOption}, {"cls": NewOption, "level": 2}, "level", "2"),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_a_resumed_run_warns_of_another_objective(saved, resume, change):
    then, now, name, value = CHANGES[change]
    saved(**then)
    with pytest.warns(UserWarning, match=rf"other options [\s\S]*\n  {re.escape(name)} .*{re.escape(value)}"):
        run = resume(**now)
    assert run.module.global_step == 2


def test_a_reward_file_is_known_by_its_text_not_its_path(saved, resume, make_module, tmp_path):
    saved(rewards=reward_file(tmp_path, "here", "len(text)"))
    resume(rewards=reward_file(tmp_path, "there", "len(text)"))
    then = make_module(rewards=reward_file(tmp_path, "here", "len(text)"))
    before = then.run_options()
    with pytest.warns(UserWarning, match=r"rewards.score.sha256 +'[0-9a-f]{64}'"):
        resume(rewards=reward_file(tmp_path, "here", "-len(text)"))
    assert then.run_options() == before  # the text is that which was run


def test_other_rows_are_warned_of_unless_allowed(saved, resume):
    def rows(seed=0, **options):
        task = MostFrequentDigit(prompt_length=20, majority_share=0.4, train_size=12, val_size=4, seed=seed)
        return PromptDataModule(task, batch_size=4, **options)

    saved(data=rows())
    with pytest.warns(UserWarning, match=r"data.train +'\w+' +'\w+'"):
        resume(data=rows(seed=1))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="The run continues")
        resume(data=rows())
        resume(data=rows(seed=1), guards={"allow_changed": ["data"]})
    resume(data=rows(max_prompt_length=500))


def test_a_checkpoint_of_a_validation_knows_no_training_data(make_module, make_trainer, make_data, tmp_path):
    trainer, data = make_trainer(), make_data(val=True)
    trainer.validate(make_module(), data)
    trainer.save_checkpoint(tmp_path / "state.ckpt")
    assert "data.train" not in torch.load(tmp_path / "state.ckpt", weights_only=True)["pl_grouprl"]["run_options"]


FREE = {
    "reward_calls": {"workers": 1, "max_failed_share": 0.9},
    "max_tokens_per_micro_batch": 64,
    "sharing": {"backend": "reference", "mode": "repeated"},
    "evaluation": {"num_generations": 2},
    "guards": {"max_nonfinite_steps": 3},
}


def test_options_that_decide_nothing_may_differ(saved, resume):
    saved(rewards=length)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="The run continues")
        assert resume(rewards=length, **FREE).module.global_step == 2
        saved(rewards=Missing())
        resume(rewards=Missing())  # NaN is no change


SAME = [
    ({"policy_loss": "gspo"}, {"policy_loss": {"name": "gspo"}}),
    ({"entropy_coef": 0.1}, {"entropy_coef": {"coef": 0.1}}),
    ({"entropy_coef": 0.0}, {"entropy_coef": EntropyOptions()}),
    ({"entropy_coef": {"coef": 0.1, "target": 0.5}}, {"entropy_coef": EntropyOptions(0.1, target=0.5)}),
]


@pytest.mark.parametrize(("one", "other"), SAME, ids=str)
def test_options_that_mean_the_same_are_the_same(one, other, make_module):
    assert make_module(**one).run_options() == make_module(**other).run_options()
    assert make_module(**one).run_options() != make_module(policy_loss="cispo", entropy_coef=0.2).run_options()


def test_allowed_changes_are_logged_once_with_both_values(saved, resume, caplog):
    saved(**KL)
    sampling = SamplingConfig(max_new_tokens=4, temperature=0.7)
    with pytest.warns(UserWarning, match="sampling.max_new_tokens"):
        resume(**KL, sampling=sampling, guards={"allow_changed": ["sampling.temperature"]})
    changes = {**KL, "beta": 10.0, "entropy_coef": 0.1, "sampling": sampling}
    caplog.clear()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="The run continues")
        run = resume(**changes, guards={"allow_changed": ["beta", "entropy_coef", "sampling"]})
    # An allowed start of what adapts takes effect: the coefficient of the checkpoint was near 0.1.
    assert run.module.beta == pytest.approx(10.0, rel=0.05)
    (told,) = (record.message for record in caplog.records if "other options" in record.message)
    rows = [line.split() for line in told.splitlines()[1:]]
    assert rows[0] == ["option", "checkpoint", "this", "run"]
    assert sorted(rows[1:]) == [
        ["beta", "0.1", "10.0"], ["entropy_coef", "0.0", "0.1"],
        ["sampling.max_new_tokens", "5", "4"], ["sampling.temperature", "1.0", "0.7"],
    ]  # fmt: skip
    saved(GroupPPO)
    module = resume(
        GroupPPO, group_variance_threshold=9.0, guards={"allow_changed": ["group_variance_threshold"]}
    ).module
    assert module.threshold_controller.threshold == pytest.approx(9.0, rel=0.05)  # by default it begins at 4


def test_what_continuing_would_be_wrong_with_is_refused(saved, resume, fit):
    saved(beta=0.1)
    with pytest.raises(ValueError, match=r"optimizer.learning_rate is 0.001 \(was 0.01\)"):
        resume(beta=0.1, optimizer=OptimizerConfig(1e-3), guards={"allow_changed": ["optimizer"]})
    with pytest.raises(ValueError, match="is a different model"):
        resume(beta=0.1, policy=TinyPolicy(seed=5))


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"num_generations": 3}, "num_generations is 3"),
        ({"seed": 5}, "seed is 5"),
        ({"sampling": SamplingConfig(max_new_tokens=5, temperature=0.5)}, "sampling.temperature is 0.5"),
        ({"beta": 0.1}, "beta is 0.1"),
        ({"num_mini_batches": 3}, "num_mini_batches is 3"),
    ],
)
def test_other_rollouts_between_updates_are_refused(fit, caplog, change, name):
    """After step 1 rollouts are unfinished, after step 2 they are done."""
    fit(steps=2, save=True, num_mini_batches=2)
    for step in (1, 2):
        fit(steps=3, resume=step, num_mini_batches=2)
    assert "other options" not in caplog.text
    options = {"num_mini_batches": 2} | change
    with pytest.raises(ValueError, match=name):
        fit(steps=3, resume=1, **options)
    if "num_mini_batches" not in change:
        with pytest.warns(UserWarning, match=f"other options[^;]*{name.partition(' ')[0]} "):
            assert fit(steps=3, resume=2, **options).trainer.global_step == 3


def test_what_applies_from_the_next_rollouts_on_is_warned_of(fit):
    fit(PPO, save=True, num_mini_batches=2)
    with pytest.warns(UserWarning, match="gamma +1.0 +0.5"):
        fit(PPO, steps=2, resume=1, num_mini_batches=2, gamma=0.5)


def test_a_checkpoint_holds_plain_values(saved):
    checkpoint = saved(PPO, critic=PolicyCopyCritic(), rewards=[Near(3), Weighted(share_of_letters, 0.5)])
    options = torch.load(checkpoint, weights_only=True)["pl_grouprl"]["run_options"]
    assert json.loads(json.dumps(options)) == options
    assert options["rewards.share_of_letters.weight"] == 0.5


def test_what_a_reward_model_costs_is_not_compared(make_module):
    def options(**own):
        return make_module(rewards=ModelReward("name-on-the-hub", **own)).run_options()

    assert options(max_tokens_per_pass=99, sharing="repeated", device="cpu") == options()
    assert options(label=1) != options()


def test_a_folder_with_checkpoints_of_another_objective_is_refused(fit, tmp_path):
    def save(**options):
        fit(callbacks=[SafeCheckpoint(dirpath=tmp_path / "run", every_n_train_steps=1)], **options)

    save(rewards=Weighted(share_of_letters))
    changed = Weighted(share_of_letters, 2.0)
    with pytest.raises(ValueError, match=r"rewards.share_of_letters.weight is 2.0 \(was 1.0\)"):
        save(rewards=changed)
    save(rewards=changed, guards={"allow_changed": ["rewards"]})


def weighted(weight):
    def reward(completions, **columns):
        return [weight * len(text) for text in completions]

    return reward


class Proxy:
    """Answers to every name, as clients of remote services do, and shows itself to nobody."""

    def __getattr__(self, name):
        return lambda *args: 1

    def __repr__(self):
        raise RuntimeError("nothing to show")

    def __call__(self, completions, **columns):
        return [0.0 for _ in completions]


def test_values_of_every_kind_become_plain(tmp_path):
    class Kind(Enum):
        FIRST = "first"

    values = {
        "numbers": [np.float64(0.5), np.int64(2), np.bool_(True), True],
        "kind": Kind.FIRST,
        "names": {"b", "a"},
        "dtype": torch.bfloat16,
        "folder": tmp_path,
        "partial": functools.partial(share_of_letters, bonus=2.0),
        "method": Near(3).__call__,
        "table": {"one": [Near(1)], "two": list(range(1000))},
    }
    described = {}
    for name, value in values.items():
        described |= describe(name, value)
    torch.save(described, tmp_path / "described.pt")
    assert torch.load(tmp_path / "described.pt", weights_only=True) == described
    assert json.loads(json.dumps(described)) == described
    assert described["numbers"] == [0.5, 2, True, True]
    assert described["kind"] == "first"
    assert described["names"] == ["a", "b"]
    assert described["dtype"] == "torch.bfloat16"
    assert described["partial.bonus"] == 2.0
    assert described["method.of.wanted"] == 3
    assert described["table.one.0.wanted"] == 1
    assert described["table.two"].startswith("[0, 1, 2, ")
    assert "sha256" in described["table.two"]


def test_secrets_are_hidden():
    given = {"token": "s", "openai_api_key": "s", "headers": {"Authorization": "s"}, "env": {"KEY": "s"}}
    kept = {"eos_token": "</s>", "api_key_env": "KEY", "env": Near(3), "token": None}
    assert describe("a", given) == {
        "a": ["env", "headers", "openai_api_key", "token"],
        "a.token": "(hidden)",
        "a.openai_api_key": "(hidden)",
        "a.headers": ["Authorization"],
        "a.env": ["KEY"],
    }
    described = describe("a", kept)
    assert described["a.eos_token"] == "</s>"
    assert described["a.api_key_env"] == "KEY"
    assert described["a.env.wanted"] == 3
    assert described["a.token"] is None


def test_what_is_the_same_and_what_is_not():
    assert describe("r", weighted(1.0)) != describe("r", weighted(-1.0))
    assert describe("r", weighted(1.0)) == describe("r", weighted(1.0))
    assert repr(frozenset([0, 8])) != repr(frozenset([8, 0]))
    for hold in (set, lambda values: {frozenset(values), frozenset({1})}):  # the order of a set counts for nothing
        assert describe("r", hold([0, 8])) == describe("r", hold([8, 0]))
    assert describe("r", {share_of_letters, share_of_digits})["r.0"].endswith("share_of_letters")
    assert describe("r", {"a": 1, "b": Proxy()})["r.a"] == 1  # a part that cannot be described hides no other
    one, same_, other = ({"a": {"b": {"c": {"d": {"e": [Near(value)]}}}}} for value in (1, 1, 2))
    assert describe("r", one) == describe("r", same_) != describe("r", other)


@pytest.mark.parametrize(
    "make",
    [
        lambda n: torch.full((2000,), float(n)),
        lambda n: torch.tensor([n + 1e-6], dtype=torch.float64),
        lambda n: np.eye(100)[n:],
        lambda n: np.array([Near(n)], dtype=object),
        lambda n: re.compile("a" * 300 + str(n)),
    ],
)
def test_arrays_and_patterns_count_by_all_that_they_hold(make):
    one, same, other = (describe("r", functools.partial(share_of_letters, table=make(n))) for n in (1, 1, 2))
    assert one == same != other
    assert json.loads(json.dumps(one)) == one


def test_large_arguments_are_digests(record_property):
    table = {str(number): {"answer": number} for number in range(20_000)}
    described = describe("r", functools.partial(share_of_letters, table=table, numbers=list(range(100_000))))
    assert len(json.dumps(described)) < 1000
    table["7"]["answer"] = 8
    changed = describe("r", functools.partial(share_of_letters, table=table, numbers=list(range(100_000))))
    assert changed["r.sha256"] != described["r.sha256"]
    record_property("figure", f"a table of 20,000 entries: {len(json.dumps(described))} bytes in the checkpoint")


def test_what_cannot_be_read_is_described_by_its_class():
    cyclic = [1]
    cyclic.append(cyclic)
    huge = 10**5000
    for value in (Proxy(), cyclic, huge, {"self": Proxy()}):
        assert json.dumps(describe("r", value))
    assert describe("r", Proxy()) == {"r": f"{__name__}.Proxy"}


# Checkpoints that are loaded, or refused.


class Other(LightningModule):
    """A module of another package."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).sum()

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.ones(4, 2))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def flip(path):
    """Change one byte in the middle of a file, where weights are."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x40
    path.write_bytes(content)


def load(stage, module, data, trainer, path):
    if stage == "fit":
        trainer.fit(module, data, ckpt_path=path)
    else:
        getattr(trainer, stage)(module, datamodule=data, ckpt_path=path)


def refuses(completions, **columns):
    raise AssertionError("predictions need no rewards")


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A copy of a checkpoint of a run of one step, with a manifest or without; each is trained once."""

    @functools.cache
    def train(cls):
        folder = tmp_path_factory.mktemp("written")
        module, data = (Other(), None) if cls is Other else (make_module(cls), make_data())
        callback = SafeCheckpoint(dirpath=folder, filename="own", every_n_train_steps=1)
        make_trainer(folder, max_steps=1, callbacks=[callback]).fit(module, data)
        return folder

    def copy_of(cls, manifest=True):
        folder = tmp_path_factory.mktemp("copy") / "saved"
        shutil.copytree(train(cls), folder)
        if not manifest:
            manifest_of(folder / "own.ckpt").unlink()
        return folder / "own.ckpt"

    return copy_of


@pytest.mark.parametrize("stage", ["fit", "validate", "test", "predict"])
def test_a_flipped_byte_is_refused_in_every_stage(written, make_module, make_data, make_trainer, stage):
    for manifest in (True, False):
        path = written(GRPO, manifest)
        flip(path)
        data, module = make_data(val=True), make_module()
        data.sources["test"] = data.sources["val"]
        text = "are not what was saved" if manifest else "is torn"
        with pytest.raises(ValueError, match=rf"checkpoint {re.escape(str(path))} is damaged: .*{text}"):
            load(stage, module, data, make_trainer(max_steps=2), path)
        assert module.global_step == 0


@pytest.mark.parametrize("stage", ["validate", "fit"])
def test_a_whole_checkpoint_of_lightning_alone_is_accepted(written, make_module, make_data, make_trainer, stage):
    """A validation compares no options."""
    path = written(GRPO, manifest=False)
    module = make_module(rewards=share_of_digits)
    load(stage, module, make_data(val=True), make_trainer(max_steps=2), path)
    expected = torch.load(path, weights_only=True)["state_dict"]
    assert same(module.state_dict(), expected) == (stage == "validate")


def test_a_checkpoint_is_read_once_to_verify_it(fit, written, monkeypatch):
    path, hashed, describe_file = written(GRPO), [], checkpoint_files._describe
    monkeypatch.setattr(checkpoint_files, "_describe", lambda file: hashed.append(file) or describe_file(file))
    callback = SafeCheckpoint(dirpath=path.parent, every_n_train_steps=100, save_top_k=0)
    fit(steps=2, callbacks=[callback], resume="last")
    assert hashed == [path.resolve()]  # found by the search, verified for the load, by module and callback


@pytest.mark.parametrize("callbacks", [(), (ModelCheckpoint,), (SafeCheckpoint,)], ids=["none", "Lightning's", "ours"])
def test_last_is_found_or_refused_whatever_saves(fit, tmp_path, callbacks):
    """Lightning alone starts anew, with a warning."""

    def train(steps, resume=None, folder=None, **options):
        own = [callback(dirpath=folder, every_n_train_steps=1) for callback in callbacks]
        return fit(steps=steps, callbacks=own, resume=resume, **options).trainer

    with pytest.raises(ValueError, match=rf"ckpt_path is 'last' and there is no complete checkpoint below {tmp_path}"):
        train(2, "last")
    first = train(1)
    if callbacks:
        expected = first.checkpoint_callback.best_model_path
    else:
        expected = str(tmp_path / "checkpoints" / "own.ckpt")
        first.save_checkpoint(expected)
    second = train(2, "last")
    assert (second.ckpt_path, second.global_step) == (expected, 2)
    if callbacks == (SafeCheckpoint,):
        with pytest.raises(
            ValueError, match=r"ckpt_path is 'last', and .* is from a run with other options: seed is 3"
        ):
            train(3, "last", seed=3)
        train(1, folder=tmp_path / "elsewhere")
        assert train(2, "last", tmp_path / "elsewhere").ckpt_path.startswith(str(tmp_path / "elsewhere"))


@pytest.mark.parametrize(
    ("content", "cause"),
    [(None, "there is no such file"), (b"", "it is empty"), (b"not a checkpoint", "it cannot be read: cut short")],
    ids=["absent", "empty", "text"],
)
def test_torn_files_say_path_and_cause(make_module, make_data, make_trainer, tmp_path, content, cause):
    path, module = tmp_path / "torn.ckpt", make_module()
    if content is not None:
        path.write_bytes(content)
    errors, message = (ValueError, FileNotFoundError), rf"{re.escape(str(path))}.*: {cause}"
    for stage in ("fit", "validate", "test") if content is None else ("fit",):
        with pytest.raises(errors, match=message):
            load(stage, module, make_data(), make_trainer(max_steps=1), path)
        assert content is not None or module.policy is None  # a missing file is found before the policy is loaded
    with pytest.raises(errors, match=message):
        GRPO.load_from_checkpoint(path, policy="x", rewards=refuses)


def test_what_is_no_checkpoint_of_a_module(fit, tmp_path):
    (tmp_path / "shards.ckpt").mkdir()
    (tmp_path / "shards.ckpt" / "__0_0.distcp").write_bytes(b"shard")
    unfinished = checkpoint_files.unfinished_path(tmp_path / "shards.ckpt")
    (tmp_path / "shards.ckpt").rename(unfinished)
    checkpoint_files.commit(unfinished, tmp_path / "shards.ckpt", {})
    torch.save({"weight": torch.ones(2)}, tmp_path / "weights.ckpt")
    with pytest.raises(ValueError, match="is a folder, as FSDP and DeepSpeed write: SingleDeviceStrategy"):
        fit(resume=tmp_path / "shards.ckpt")
    with pytest.raises(ValueError, match="is a folder, as FSDP and DeepSpeed write"):
        GRPO.load_from_checkpoint(tmp_path / "shards.ckpt")
    with pytest.raises(ValueError, match="was not written by Lightning: it has no 'state_dict'"):
        fit(resume=tmp_path / "weights.ckpt")


@pytest.mark.parametrize(
    ("wrote", "reads", "stage", "manifest"),
    [
        (GRPO, PPO, "fit", True),
        (GRPO, GroupPPO, "fit", True),
        (PPO, GroupPPO, "fit", True),
        (GRPO, PPO, "fit", False),
        (PPO, GRPO, "validate", True),
        (PPO, GroupPPO, "validate", False),
        (Leveled, PPO, "fit", True),
    ],
)
def test_another_algorithm_is_refused_by_name(
    written, make_module, make_data, make_trainer, wrote, reads, stage, manifest
):
    text = rf"was written by {wrote.__name__}.*, and the module is {reads.__name__}"
    with pytest.raises(ValueError, match=text):
        load(stage, make_module(reads), make_data(val=True), make_trainer(max_steps=2), written(wrote, manifest))


def test_other_modules_and_models(fit, written):
    with pytest.raises(ValueError, match="was written by Other, and the module is GRPO"):
        fit(steps=2, resume=written(Other))
    with pytest.raises(ValueError, match="by a module that is not one of pl_grouprl's"):
        fit(steps=2, resume=written(Other, manifest=False))
    with pytest.warns(UserWarning, match=r"model +'Leveled' +'GRPO'"):  # a subclass counts as its algorithm
        assert fit(steps=2, resume=written(Leveled)).trainer.global_step == 2

    class Deeper(TinyPolicy):
        def load(self):
            model = super().load()
            model.model.layers.append(model.model.layers[0])
            return model

    with pytest.raises(ValueError, match=r"the checkpoint do not fit\. It was written by GRPO, (?s:.*)Missing key"):
        fit(policy=Deeper(), steps=2, resume=written(GRPO))


def test_load_from_checkpoint_builds_the_module(fit, tmp_path, written):
    saved = fit(PPO, save=True, critic=PolicyCopyCritic(head_std=0.1), num_mini_batches=2, beta=0.1)
    arguments = {"policy": TinyPolicy(), "rewards": refuses}
    module = PPO.load_from_checkpoint(
        tmp_path / "step=1.ckpt", critic=PolicyCopyCritic(), num_mini_batches=2, beta=0.1, **arguments
    )
    assert same(module.state_dict(), torch.load(tmp_path / "step=1.ckpt", weights_only=True)["state_dict"])
    assert largest_difference(saved.weights[-1], dict(module.named_parameters())) == 0
    assert module.last_rollouts.updates_done == 1
    path = written(GRPO)
    with pytest.raises(TypeError, match="policy"):
        GRPO.load_from_checkpoint(path)
    with pytest.raises(ValueError, match="rewards is None"):
        GRPO.load_from_checkpoint(path, policy=TinyPolicy())
    with pytest.raises(ValueError, match="weights_only is False"):
        GRPO.load_from_checkpoint(path, weights_only=False, **arguments)
    with pytest.raises(ValueError, match="the checkpoint was written by GRPO, and the module is PPO"):
        PPO.load_from_checkpoint(path, **arguments)
    flip(path)
    with pytest.raises(ValueError, match=r"own\.ckpt is damaged: the contents of own\.ckpt are not what was saved"):
        GRPO.load_from_checkpoint(path, **arguments)


@pytest.mark.parametrize("split", ["test", "val"])
def test_predictions_are_the_sampled_groups(make_module, make_trainer, make_data, split, written):
    path, task = written(GRPO), MostFrequentDigit(prompt_length=20, val_size=4, test_size=4)
    data = PromptDataModule(val=task, test=task if split == "test" else None)
    module = make_module(evaluation={"num_generations": 3}, rewards=refuses, reward_calls={"workers": 1})
    (groups,), (again,) = (make_trainer().predict(module, data, ckpt_path=path) for _ in range(2))
    assert [group.prompt_ids for group in groups] == [prompt.token_ids for prompt in data.prompts[split]]
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    assert len(rollouts) == 12
    assert all(rollout.reward is None and isinstance(rollout.text, str) for rollout in rollouts)
    assert [r.token_ids for g in again for r in g.rollouts] == [r.token_ids for r in rollouts]
    with pytest.raises(ValueError, match=r"PromptDataModule\(`val`\) is None"):
        make_trainer().predict(make_module(), make_data())

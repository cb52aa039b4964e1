"""A run that is resumed with other options names them in one table, or is refused where continuing would be wrong."""

from __future__ import annotations

import functools
import json
import re
import warnings
from enum import Enum
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.scripts import run_script
from helpers.sweeps import sweep
from helpers.worker_rewards import length

from pl_grouprl.algorithms import GRPO, PPO, GroupPPO, OptimizerConfig
from pl_grouprl.callbacks import SafeCheckpoint
from pl_grouprl.data import PromptDataModule
from pl_grouprl.demo import MostFrequentDigit
from pl_grouprl.models import PolicyCopyCritic, SharedTrunkCritic
from pl_grouprl.rewards import FunctionFromFile, ModelReward, Weighted
from pl_grouprl.types import SamplingConfig
from pl_grouprl.utilities.describe import describe

KL = {"beta": 0.1, "kl": {"target": 0.01, "horizon": 100}}


def share_of_letters(completions, **columns):
    return [sum(c.isalpha() for c in text) / max(len(text), 1) for text in completions]


def share_of_digits(completions, **columns):
    return [sum(c.isdigit() for c in text) / max(len(text), 1) for text in completions]


class Near:
    """A reward whose constructor keeps its argument under another name."""

    def __init__(self, length, scale=1.0):
        self.wanted = length
        self.scale = scale

    def __call__(self, completions, **columns):
        return [-self.scale * abs(len(text) - self.wanted) for text in completions]


class NewOption(GRPO):
    """A user's subclass with an option of its own."""

    def __init__(self, *args, level=1, **kwargs):
        super().__init__(*args, entropy_coef=0.1 * level, **kwargs)


@pytest.fixture
def fit(make_module, make_data, make_trainer):
    def run(cls=GRPO, checkpoint=None, trainer=None, data=None, **options):
        options.setdefault("rewards", share_of_letters)
        module = make_module(cls, **options)
        own = make_trainer(max_steps=1 if checkpoint is None else 2, **(trainer or {}))
        own.fit(module, data or make_data(), ckpt_path=checkpoint, weights_only=True)
        return own, module

    return run


@pytest.fixture
def saved(fit, tmp_path):
    def save(**options):
        trainer, _ = fit(**options)
        trainer.save_checkpoint(tmp_path / "state.ckpt")
        return tmp_path / "state.ckpt"

    return save


def reward_file(tmp_path, folder, text):
    path = tmp_path / folder / "reward.py"
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"def score(completions, **columns):\n    return [{text} for text in completions]\n")
    return FunctionFromFile(str(path), "score")


ADVANTAGE = {"advantage_estimator": "grpo_passk", "scale_rewards": "group"}
CHANGES = {
    "another function": ({"rewards": share_of_letters}, {"rewards": share_of_digits}, "rewards", "['share_of_digits']"),
    "one more function": ({}, {"rewards": [share_of_letters, share_of_digits]}, "rewards", "'share_of_digits']"),
    "the function under its name": (
        {"rewards": Weighted(share_of_letters, name="score")},
        {"rewards": Weighted(share_of_digits, name="score")},
        "rewards.score",
        "share_of_digits'",
    ),
    "weight": (
        {"rewards": Weighted(share_of_letters)},
        {"rewards": Weighted(share_of_letters, 2.0)},
        "rewards.share_of_letters.weight",
        "2.0",
    ),
    "argument under another name": ({"rewards": Near(3)}, {"rewards": Near(4)}, "rewards.Near.wanted", "4"),
    "argument": ({"rewards": Near(3)}, {"rewards": Near(3, 2.0)}, "rewards.Near.scale", "2.0"),
    "beta": ({"beta": 0.1}, {"beta": 0.2}, "beta", "0.2"),
    "kl.target": (KL, KL | {"kl": {"target": 0.02, "horizon": 100}}, "kl.target", "0.02"),
    "kl.type": ({"beta": 0.1}, {"beta": 0.1, "kl": {"type": "k2"}}, "kl.type", "'k2'"),
    "loss_type": ({}, {"loss_type": "cispo"}, "loss_type", "'cispo'"),
    "epsilon_high": ({}, {"epsilon_high": 0.28}, "epsilon_high", "0.28"),
    "policy_loss": (
        {"policy_loss": "clip_cov"},
        {"policy_loss": {"name": "clip_cov", "clip_cov_lb": 2.0}},
        "policy_loss",
        "['clip_cov_lb', 'name']",
    ),
    "advantage_estimator": ({}, ADVANTAGE, "advantage_estimator", "'grpo_passk'"),
    "entropy_coef": ({}, {"entropy_coef": 0.1}, "entropy_coef", "0.1"),
    "top_p": ({}, {"sampling": SamplingConfig(max_new_tokens=5, top_p=0.9)}, "sampling.top_p", "0.9"),
    "clipping": (
        {"trainer": {"gradient_clip_val": 1.0}},
        {"trainer": {"gradient_clip_val": 0.5}},
        "trainer.gradient_clip_val",
        "0.5",
    ),
    "clipping of a part": (
        {},
        {"optimizer": OptimizerConfig(1e-2, max_grad_norm=1.0)},
        "optimizer.max_grad_norm",
        "1.0",
    ),
    "accumulation": ({}, {"trainer": {"accumulate_grad_batches": 2}}, "trainer.accumulate_grad_batches", "2"),
    "gamma": ({"cls": PPO}, {"cls": PPO, "gamma": 0.9}, "gamma", "0.9"),
    "critic": (
        {"cls": PPO, "critic": SharedTrunkCritic()},
        {"cls": PPO, "critic": SharedTrunkCritic(detach=True)},
        "critic.detach",
        "True",
    ),
    "target_compression": (
        {"cls": GroupPPO},
        {"cls": GroupPPO, "target_compression": 0.5},
        "target_compression",
        "0.5",
    ),
    "algorithm": ({"cls": GRPO}, {"cls": NewOption}, "model", "'NewOption'"),
    "option of a subclass": ({"cls": NewOption}, {"cls": NewOption, "level": 2}, "level", "2"),
}


QUICK = [
    *("another function", "weight", "argument under another name", "kl.target", "policy_loss", "top_p"),
    *("clipping", "clipping of a part", "critic", "target_compression", "algorithm", "option of a subclass"),
]


@pytest.mark.parametrize("change", sweep(CHANGES, QUICK))
def test_a_resumed_run_warns_of_another_objective(saved, fit, change):
    then, now, name, value = CHANGES[change]
    checkpoint = saved(**then)
    with pytest.warns(UserWarning, match=rf"other options [\s\S]*\n  {re.escape(name)} .*{re.escape(value)}"):
        _, module = fit(checkpoint=checkpoint, **now)
    assert module.global_step == (1 if change == "accumulation" else 2)


def test_a_reward_file_is_known_by_its_text_not_its_path(saved, fit, tmp_path):
    checkpoint = saved(rewards=reward_file(tmp_path, "here", "len(text)"))
    fit(checkpoint=checkpoint, rewards=reward_file(tmp_path, "there", "len(text)"))
    with pytest.warns(UserWarning, match=r"rewards.score.sha256 +'[0-9a-f]{64}'"):
        fit(checkpoint=checkpoint, rewards=reward_file(tmp_path, "here", "-len(text)"))


def test_the_text_is_that_which_was_run(saved, fit, tmp_path, make_module):
    then = make_module(rewards=reward_file(tmp_path, "here", "len(text)"))
    before = then.run_options()
    reward_file(tmp_path, "here", "-len(text)")
    assert then.run_options() == before


def test_other_rows_are_warned_of_unless_allowed(saved, fit):
    def rows(seed=0, **options):
        task = MostFrequentDigit(prompt_length=20, majority_share=0.4, train_size=12, val_size=4, seed=seed)
        return PromptDataModule(task, batch_size=4, **options)

    checkpoint = saved(data=rows())
    fit(checkpoint=checkpoint, data=rows())
    with pytest.warns(UserWarning, match=r"data.train +'\w+' +'\w+'"):
        fit(checkpoint=checkpoint, data=rows(seed=1))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="The run continues")
        fit(checkpoint=checkpoint, data=rows(seed=1), guards={"allow_changed": ["data"]})
    fit(checkpoint=checkpoint, data=rows(max_prompt_length=500))


def test_a_checkpoint_without_training_data_can_be_saved(make_module, make_trainer, tmp_path):
    task = MostFrequentDigit(prompt_length=20, majority_share=0.4, train_size=12, val_size=4)
    trainer = make_trainer()
    trainer.validate(make_module(), PromptDataModule(task, task))
    trainer.save_checkpoint(tmp_path / "state.ckpt")
    assert "data.train" not in torch.load(tmp_path / "state.ckpt", weights_only=True)["pl_grouprl"]["run_options"]


FREE = {
    "reward_calls": {"workers": 1, "max_failed_share": 0.9},
    "max_tokens_per_micro_batch": 64,
    "sharing": {"backend": "reference", "mode": "repeated"},
    "evaluation": {"num_generations": 2},
    "guards": {"max_nonfinite_steps": 3},
}


def test_options_that_decide_nothing_may_differ(saved, fit):
    _, module = fit(checkpoint=saved(rewards=length), rewards=length, **FREE)
    assert module.global_step == 2


def test_an_allowed_change_is_logged_once_with_both_values(saved, fit, caplog):
    checkpoint = saved(beta=0.1)
    _, module = fit(
        checkpoint=checkpoint, beta=0.2, entropy_coef=0.1, guards={"allow_changed": ["beta", "entropy_coef"]}
    )
    assert module.beta == 0.2
    (told,) = (record.message for record in caplog.records if "other options" in record.message)
    rows = [line.split() for line in told.splitlines()[1:]]
    assert rows == [["option", "checkpoint", "this", "run"], ["beta", "0.1", "0.2"], ["entropy_coef", "0.0", "0.1"]]


def test_a_prefix_allows_all_its_options(saved, fit):
    sampling = SamplingConfig(max_new_tokens=4, temperature=0.7)
    checkpoint = saved()
    with pytest.warns(UserWarning, match="sampling.max_new_tokens"):
        fit(checkpoint=checkpoint, sampling=sampling, guards={"allow_changed": ["sampling.temperature"]})
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="The run continues")
        fit(checkpoint=checkpoint, sampling=sampling, guards={"allow_changed": ["sampling"]})


def test_an_allowed_start_of_what_adapts_takes_effect(saved, fit):
    _, module = fit(checkpoint=saved(**KL), **{**KL, "beta": 10.0}, guards={"allow_changed": ["beta"]})
    assert module.beta == pytest.approx(10.0, rel=0.05)  # the coefficient of the checkpoint was near 0.1
    _, module = fit(
        GroupPPO,
        saved(cls=GroupPPO),
        group_variance_threshold=9.0,
        guards={"allow_changed": ["group_variance_threshold"]},
    )
    assert module.threshold_controller.threshold == pytest.approx(9.0, rel=0.05)  # by default it begins at 4


def test_the_learning_rate_stays_the_checkpoints(saved, fit):
    with pytest.raises(ValueError, match=r"optimizer.learning_rate is 0.001 \(was 0.01\)"):
        fit(checkpoint=saved(), optimizer=OptimizerConfig(1e-3), guards={"allow_changed": ["optimizer"]})


def test_a_checkpoint_holds_plain_values(saved):
    checkpoint = saved(cls=PPO, critic=PolicyCopyCritic(), rewards=[Near(3), Weighted(share_of_letters, 0.5)])
    options = torch.load(checkpoint, weights_only=True)["pl_grouprl"]["run_options"]
    assert json.loads(json.dumps(options)) == options
    assert options["rewards.share_of_letters.weight"] == 0.5


def test_what_a_reward_model_costs_is_not_compared(make_module):
    def options(**own):
        return make_module(rewards=ModelReward("name-on-the-hub", **own)).run_options()

    assert options(max_tokens_per_pass=99, sharing="repeated", device="cpu") == options()
    assert options(label=1) != options()


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


def test_a_folder_with_checkpoints_of_another_objective_is_refused(fit, tmp_path):
    def callbacks():
        return {"callbacks": [SafeCheckpoint(dirpath=tmp_path / "run", every_n_train_steps=1)]}

    fit(rewards=Weighted(share_of_letters), trainer=callbacks())
    changed = Weighted(share_of_letters, 2.0)
    message = r"other options than this one .*rewards.share_of_letters.weight is 2.0 \(was 1.0\)"
    with pytest.raises(ValueError, match=message):
        fit(rewards=changed, trainer=callbacks())
    fit(rewards=changed, guards={"allow_changed": ["rewards"]}, trainer=callbacks())


def test_a_validation_compares_nothing(saved, make_module, make_data, make_trainer):
    checkpoint = saved()
    module = make_module(rewards=share_of_digits)
    make_trainer().validate(module, make_data(val=True), ckpt_path=checkpoint, weights_only=True)


def test_what_differs_on_another_rank_is_told(tmp_path):
    run_script(Path(__file__).with_name("other_reward_ranks.py"), tmp_path)
    assert "rewards.score.sha256" in (tmp_path / "warnings-0.txt").read_text()


def weighted(weight):
    def reward(completions, **columns):
        return [weight * len(text) for text in completions]

    return reward


class Missing:
    def __init__(self, value=float("nan")):
        self.value = value

    def __call__(self, completions, **columns):
        return [0.0 for _ in completions]


class Proxy:
    """Answers to every name, as clients of remote services do, and shows itself to nobody."""

    def __getattr__(self, name):
        return lambda *args: 1

    def __repr__(self):
        raise RuntimeError("nothing to show")

    def __call__(self, completions, **columns):
        return [0.0 for _ in completions]


def test_functions_of_one_name_are_told_apart():
    assert describe("r", weighted(1.0)) != describe("r", weighted(-1.0))
    assert describe("r", weighted(1.0)) == describe("r", weighted(1.0))


def test_the_order_of_a_set_is_no_property_of_an_option():
    assert repr(frozenset([0, 8])) != repr(frozenset([8, 0]))
    for hold in (set, lambda values: {frozenset(values), frozenset({1})}):
        assert describe("r", hold([0, 8])) == describe("r", hold([8, 0]))
    assert describe("r", {share_of_letters, share_of_digits})["r.0"].endswith("share_of_digits")


def test_a_part_that_cannot_be_described_hides_no_other():
    assert describe("r", {"a": 1, "b": Proxy()})["r.a"] == 1


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


def test_nested_values_are_told_apart():
    def nested(value):
        return {"a": {"b": {"c": {"d": {"e": [Near(value)]}}}}}

    assert describe("r", nested(1)) != describe("r", nested(2))
    assert describe("r", nested(1)) == describe("r", nested(1))


def test_nan_is_no_change(saved, fit):
    assert fit(checkpoint=saved(rewards=Missing()), rewards=Missing())[0].global_step == 2


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

"""NaN and infinity are refused by name in every numeric option of every public class, wherever they would enter."""

from __future__ import annotations

import inspect
import math
import re

import pytest
import torch

from pl_grouprl.algorithms import GRPO, PPO, GroupPPO, OptimizerConfig
from pl_grouprl.callbacks import CompletionsTable, RunSummary
from pl_grouprl.demo import MostFrequentDigit, WarmStartedPolicy
from pl_grouprl.functional.advantages import ADVANTAGE_ESTIMATORS, BranchPaths
from pl_grouprl.functional.kl import AdaptiveKLController, FixedKLController
from pl_grouprl.functional.policy_loss import POLICY_LOSSES, PolicyLossFunction
from pl_grouprl.functional.token_groups import ThresholdController
from pl_grouprl.models import LoRAAdapter, PolicyCopyCritic, PretrainedCritic, SharedTrunkCritic
from pl_grouprl.models.critic import LoRACritic
from pl_grouprl.rewards import CosineLengthReward, ExactMatch, OverlongPenalty, RepetitionPenalty, Weighted
from pl_grouprl.rollout import HFRolloutEngine, VLLMServerRolloutEngine
from pl_grouprl.training import (
    EpisodeOptions,
    EvaluationOptions,
    GuardOptions,
    ImportanceSampling,
    KLOptions,
    RewardCallOptions,
    SharingOptions,
)
from pl_grouprl.types import SamplingConfig
from pl_grouprl.utilities.options import check_options, is_finite


def reward(completions, **columns):
    return [0.0 for _ in completions]


class NoPolicy:
    def load(self):
        raise AssertionError("nothing is loaded by a constructor")

    def load_tokenizer(self):
        raise AssertionError("nothing is loaded by a constructor")


ARCHITECTURE = {"model_type": "qwen3"}
MAKERS = {
    **{cls: {"policy": NoPolicy(), "rewards": reward} for cls in (GRPO, PPO, GroupPPO)},
    SamplingConfig: {},
    OptimizerConfig: {},
    Weighted: {"function": reward},
    FixedKLController: {"coef": 0.1},
    AdaptiveKLController: {"coef": 0.1, "target": 0.1},
    ThresholdController: {},
    LoRAAdapter: {},
    PolicyCopyCritic: {},
    SharedTrunkCritic: {},
    LoRACritic: {},
    PretrainedCritic: {"path": "name-on-the-hub"},
    WarmStartedPolicy: {"demonstrations": MostFrequentDigit(), "architecture": ARCHITECTURE},
    CosineLengthReward: {"correct": ExactMatch(), "max_len": 10},
    OverlongPenalty: {"max_length": 10, "overlong_buffer": 2},
    RepetitionPenalty: {"ngram_size": 3, "max_penalty": -1.0},
    HFRolloutEngine: {},
    VLLMServerRolloutEngine: {"urls": "http://127.0.0.1:1"},
    CompletionsTable: {},
    RunSummary: {},
    **{cls: {} for cls in (EpisodeOptions, EvaluationOptions, GuardOptions, ImportanceSampling, KLOptions)},
    **{cls: {} for cls in (RewardCallOptions, SharingOptions)},
}


def numeric_options(cls):
    """Names of the constructor's numbers, those that it hands on by **kwargs included."""
    found = {}
    for owner in cls.__mro__:
        if owner.__module__.startswith("pl_grouprl") and "__init__" in owner.__dict__:
            found |= inspect.signature(owner.__init__).parameters
    return [name for name, parameter in found.items() if re.search(r"\b(float|int)\b", str(parameter.annotation))]


FUNCTIONS = [*POLICY_LOSSES.values(), *ADVANTAGE_ESTIMATORS.values()]
OPTIONS = [
    (function, name)
    for function in FUNCTIONS
    for name, parameter in function.known_options().items()
    if re.search(r"\b(float|int)\b", str(parameter.annotation))
]
CHECKED_WHEN_USED = {name for function in FUNCTIONS for name in function.known_options()} - {"gamma"}
"""Options that algorithms pass to their loss or estimator; PPO checks gamma itself."""
CASES = [
    (cls, name)
    for cls in MAKERS
    for name in numeric_options(cls)
    if name not in ("seed", "stop_token_ids") and not (cls in (GRPO, PPO, GroupPPO) and name in CHECKED_WHEN_USED)
]


@pytest.mark.parametrize(("cls", "name"), CASES, ids=lambda value: getattr(value, "__name__", value))
def test_a_number_that_is_not_finite_is_refused_by_name(cls, name):
    for value in (math.nan, math.inf, -math.inf):
        given = (value, 0.9) if name == "betas" else value
        with pytest.raises(ValueError, match=rf"{name}\b.* is \(?-?(nan|inf)"):
            cls(**{**MAKERS[cls], name: given})


@pytest.mark.parametrize(("function", "name"), OPTIONS, ids=lambda value: getattr(value, "name", value))
def test_an_option_of_a_function_that_is_not_finite_is_refused_by_name(function, name):
    zeros = torch.zeros(2)
    if isinstance(function, PolicyLossFunction):
        tensors, data = [zeros] * 3, {"mask_N": zeros == 0, "rollout_index_N": zeros.long(), "num_rollouts": 1}
    else:
        tensors, rows = [zeros, zeros.long()], zeros[:, None]
        data = {"lengths": zeros, "greedy_rewards": zeros, "mask": rows == 0, "score_norms": rows}
        data["branches"] = BranchPaths([(), ()], [(), ()])
        tensors[0] = rows if function.takes_token_rewards else zeros
    for value in (math.nan, math.inf, -math.inf):
        with pytest.raises(ValueError, match=rf"{name}\b.* is -?(nan|inf)"):
            function.with_options({name: value})(*tensors, **data)


def test_the_sweep_is_not_empty(record_property):
    floats = [name for cls, name in CASES if cls in (GroupPPO, OptimizerConfig)]
    assert {"beta", "gamma", "lam", "group_epsilon", "threshold_lr", "eps", "betas", "max_grad_norm"} <= set(floats)
    assert len(CASES) + len(OPTIONS) > 150
    figure = (
        f"{len(CASES)} options of {len(MAKERS)} classes, {len(OPTIONS)} of {len(FUNCTIONS)} functions, 3 values each"
    )
    record_property("figure", figure)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"eps": 0.0}, r"OptimizerConfig.eps is 0.0; it must be a finite number larger than 0"),
        ({"betas": (0.9, math.nan)}, r"OptimizerConfig.betas is \(0.9, nan\); it must be"),
        ({"betas": (1.0, 0.9)}, r"OptimizerConfig.betas is \(1.0, 0.9\); it must be"),
    ],
)
def test_the_optimizer_refuses_what_makes_nan(options, message):
    with pytest.raises(ValueError, match=message):
        OptimizerConfig(**options)


@pytest.mark.parametrize("value", [math.nan, -1.0])
def test_a_clip_that_is_nan_or_turns_gradients_around_is_refused(make_module, make_data, make_trainer, value):
    with pytest.raises(ValueError, match=f"trainer.gradient_clip_val is {value}"):
        make_trainer(max_steps=1, gradient_clip_val=value).fit(make_module(), make_data())


def test_the_shared_check_finds_what_comparisons_let_through():
    with pytest.raises(ValueError, match="lam is nan; it must be finite, and 0 or larger"):
        check_options({"lam": (math.nan, not math.nan < 0, "0 or larger")})
    assert not is_finite({"a": [1.0, (2.0, math.inf)]})
    assert is_finite({"a": [1.0, None, "nan", 3]})

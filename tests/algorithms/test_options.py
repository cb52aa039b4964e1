"""Options of the algorithms: refused by name where they cannot work, mappings for configs, the tables of the docs."""

from __future__ import annotations

import copy
import inspect
import json
import math
import re
from pathlib import Path

import pytest
import torch
from helpers.tiny_runs import TinyPolicy, constant
from lightning.pytorch import Trainer

import pl_grouprl
from pl_grouprl.algorithms import GRPO, PPO, Distillation, GroupPPO, OptimizerConfig
from pl_grouprl.callbacks import CompletionsTable, RunSummary
from pl_grouprl.data import PromptDataModule
from pl_grouprl.demo import MostFrequentDigit, WarmStartedPolicy
from pl_grouprl.functional.advantages import ADVANTAGE_ESTIMATORS, BranchPaths
from pl_grouprl.functional.kl import KLController
from pl_grouprl.functional.policy_loss import POLICY_LOSSES, PolicyLossFunction
from pl_grouprl.functional.token_groups import ThresholdController
from pl_grouprl.models import LoRAAdapter, PolicyCopyCritic, PretrainedCritic, PretrainedPolicy, SharedTrunkCritic
from pl_grouprl.models.critic import LoRACritic
from pl_grouprl.rewards import CosineLengthReward, ExactMatch, OverlongPenalty, RepetitionPenalty, Weighted
from pl_grouprl.rewards.base import as_weighted
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
from pl_grouprl.training.checkpoint import PASSED_ON
from pl_grouprl.types import SamplingConfig
from pl_grouprl.utilities.options import check_options, is_finite


def look_up(key: str) -> str:
    """Look a key up.

    Args:
        key: The key.
    """
    return key


def reward(completions, **columns):
    return [0.0 for _ in completions]


GROUP_PPO = [
    ({"group_variance_threshold": 0}, "group_variance_threshold"),
    ({"group_variance_threshold": math.inf}, "group_variance_threshold"),
    ({"group_variance_threshold": 50.0, "max_threshold": 10.0}, r"is 50.0, outside .* max_threshold"),
    ({"group_max_size": 0}, "group_max_size"),
    ({"group_max_size": 1}, "target_compression"),
    ({"group_epsilon": -1e-6}, "group_epsilon"),
    ({"group_epsilon": math.nan}, "group_epsilon"),
    ({"threshold_lr": -1}, "threshold_lr"),
    ({"adaptive_threshold": False, "threshold_lr": -5}, "threshold_lr"),
    ({"min_threshold": 0}, "min_threshold"),
    ({"max_threshold": 0.5}, "max_threshold"),
    ({"target_compression": 0.3}, "target_compression"),
    ({"target_compression": 0.8, "group_max_size": 4}, "target_compression is 0.8; .* 0.75"),
    ({"score_norm": "l2"}, "score_norm"),
    ({"score_norm": "sketch", "sketch_dim": 0}, "dim"),
    ({"sketch_dim": 7}, "sketch_dim is 7 and score_norm is 'logit'"),
    ({"score_norm": "log_ratio", "sketch_dim": 64}, "sketch_dim is 64 and score_norm is 'log_ratio'"),
    ({"boundary_signal": "mc"}, "boundary_signal"),
    ({"advantage_mode": "last"}, "advantage_mode"),
    ({"critic_positions": "ends"}, "critic_positions"),
    ({"group_rule": "entropy"}, "group_rule"),
    ({"group_rule": "improbable", "group_probability": 0.0}, "group_probability"),
    ({"group_rule": "improbable", "group_max_size": 0}, "group_max_size"),
    (
        {"group_rule": "improbable", "threshold_lr": 0.1, "score_norm": "sketch"},
        "threshold_lr, score_norm; omit these options",
    ),
    ({"group_probability": 0.3}, "group_probability is 0.3 with group_rule='variance'"),
    ({"advantage_level": "turn"}, "advantage_level"),
]
PPO_OPTIONS = [
    ({"gamma": 1.5}, "gamma"),
    ({"lam": -0.1}, "lam"),
    ({"critic_lam": 2}, "critic_lam"),
    ({"lam_alpha": 0}, "lam_alpha"),
    ({"advantage_level": "episode"}, "advantage_level"),
    ({"advantage_level": "turn", "lam_alpha": 0.05}, "lam_alpha is 0.05, for lengths in tokens"),
    ({"cliprange_value": 0}, "cliprange_value"),
    ({"vf_coef": 0}, "vf_coef"),
    ({"critic_warmup_steps": -1}, "critic_warmup_steps"),
    ({"bootstrap_truncated": True, "mask_truncated_completions": True}, "bootstrap_truncated"),
]
GRPO_OPTIONS = [
    ({"num_generations": 1}, "num_generations is 1; grpo compares"),
    *(
        ({"num_generations": 1, "advantage_estimator": name}, f"num_generations is 1; {name} compares")
        for name in ("rloo", "opo", "reinforce_plus_plus_baseline")
    ),
    ({"num_generations": 0}, "num_generations"),
    ({"num_iterations": 0}, "num_iterations"),
    ({"num_mini_batches": 0}, "num_mini_batches"),
    ({"beta": -0.1}, "beta"),
    ({"beta": math.inf}, "beta"),
    ({"beta": 0.1, "kl": {"type": "k9"}}, "kl.type"),
    ({"kl": {"place": "advantage"}}, "kl.place"),
    ({"kl": {"place": "reward"}}, "kl.place is 'reward' and beta is 0"),
    ({"kl": {"use_bias_correction": True}}, "kl.use_bias_correction is set and beta is 0"),
    ({"kl": {"ref_model_sync_steps": 1}}, "kl.ref_model_sync_steps is set and beta is 0"),
    ({"kl": {"ref_model_sync_steps": 0}}, "ref_model_sync_steps"),
    ({"kl": {"ref_model_mixup_alpha": 0}}, "ref_model_mixup_alpha"),
    ({"kl": {"ref_model_mixup_alpha": 0.5}}, "kl.ref_model_mixup_alpha is 0.5 .*ref_model_sync_steps"),
    ({"beta": 0.1, "kl": {"use_bias_correction": True, "type": "k3+"}}, r"kl.use_bias_correction is true.*'k3\+'"),
    ({"beta": 0.1, "kl": {"use_bias_correction": True, "place": "reward"}}, "kl.use_bias_correction is true.*'reward'"),
    ({"importance_sampling": {"off_policy_mask_threshold": math.inf}}, "off_policy_mask_threshold"),
    ({"importance_sampling": {"rollout_rs": "token_k4", "rollout_rs_threshold": 2.0}}, "rollout_rs is 'token_k4'"),
    ({"importance_sampling": {"rollout_rs": "token_k1"}}, "rollout_rs_threshold is None"),
    ({"importance_sampling": {"rollout_rs": "token_k1", "rollout_rs_threshold": 0.9}}, "larger than 1"),
    ({"importance_sampling": {"rollout_rs_threshold": 2.0}}, r"set importance_sampling\.rollout_rs"),
    ({"kl": {"target": 1.0}}, "kl.target is 1.0 and beta is 0"),
    ({"beta": 0.1, "kl": {"target": 0.0}}, "target"),
    ({"beta": 0.1, "kl": {"horizon": 100}}, "kl.horizon is 100 and kl.target is None"),
    ({"entropy_coef": -1.0}, "entropy_coef"),
    ({"entropy_coef": {"coef": 0.1, "coef_delta": 0.1}}, "entropy_coef has .* but no target"),
    ({"entropy_coef": {"top_quantile": 2}}, "entropy_coef.top_quantile"),
    ({"router_aux_loss_coef": -0.1}, "router_aux_loss_coef"),
    ({"loss_type": "dpo"}, "loss_type"),
    ({"policy_loss": "dpo"}, "policy_loss"),
    ({"loss_agg_mode": "mean"}, "loss_agg_mode"),
    ({"loss_type": "gspo", "policy_loss": {"name": "gspo", "delta": 3.0}}, "policy_loss='gspo' does not use delta"),
    ({"policy_loss": {"name": "ppo", "epsilon_max": 5.0}}, "policy_loss='ppo' does not use epsilon_max"),
    ({"policy_loss": {"name": "ppo", "temperature": 1.0}}, "policy_loss='ppo' does not use temperature"),
    ({"policy_loss": "gpg", "epsilon": 0.2}, "policy_loss='gpg' does not use epsilon"),
    ({"epsilon": 0.1, "policy_loss": {"name": "ppo", "epsilon": 0.2}}, "epsilon is set twice"),
    ({"policy_loss": {"epsilon": 0.2}}, "without a name"),
    ({"scale_rewards": "batch", "advantage_options": {"scale": "none"}}, "scale is set twice"),
    ({"scale_rewards": "group", "advantage_estimator": "rloo"}, "does not use scale"),
    ({"advantage_options": {"gamma": 0.5}}, "advantage_estimator='grpo' does not use gamma"),
    ({"advantage_estimator": "gae"}, r"advantage_estimator is 'gae', which needs a critic; train pl_grouprl\.PPO "),
    ({"advantage_estimator": "group_ppo"}, r"'group_ppo', which needs a critic; train pl_grouprl\.GroupPPO "),
    ({"advantage_estimator": "gpro"}, "advantage_estimator is 'gpro'; it must be one of"),
    ({"multi_objective_aggregation": "sum"}, "multi_objective_aggregation"),
    *(
        ({"advantage_estimator": name, "multi_objective_aggregation": "normalize_then_sum"}, "takes one reward")
        for name in ("reinforce_plus_plus", "vine")
    ),
    ({"beta": 0.1, "kl": {"place": "reward"}, "multi_objective_aggregation": "normalize_then_sum"}, "takes one reward"),
    ({"importance_sampling": {"mode": "truncate"}}, "importance_sampling"),
    ({"importance_sampling": {"low": 0.5}}, "importance_sampling.low is 0.5 .* importance_sampling.mode is 'none'"),
    ({"importance_sampling": {"high": 2.0}}, "importance_sampling.high is 2.0, but importance_sampling.mode is 'none'"),
    ({"importance_sampling": {"mode": "token_mask", "high": None}}, "needs a bound"),
    ({"importance_sampling": {"mode": "token_mask", "low": 4.0}}, "high is 3.0"),
    ({"sharing": {"mode": "both"}}, "sharing.mode"),
    ({"sharing": {"sequence_parallel_size": 0}}, "sharing.sequence_parallel_size"),
    ({"evaluation": {"num_generations": 0}}, "evaluation.num_generations"),
    ({"sharing": {"backend": "magic"}}, "backend"),
    ({"sharing": {"backend": "magic", "mode": "repeated"}}, "backend"),
    ({"guards": {"max_nonfinite_steps": 0}}, "max_nonfinite_steps"),
    ({"max_staleness": -1, "importance_sampling": {"mode": "token_truncate"}}, "max_staleness"),
    ({"sampling": SamplingConfig(temperature=0)}, "sampling.temperature"),
    ({"rewards": []}, "rewards"),
    ({"rewards": None, "tools": [look_up]}, "rewards"),
    ({"episodes": {"tool_timeout": 3.0}}, "tool_timeout"),
    ({"episodes": {"max_turn_tokens": 3}}, "max_turn_tokens"),
    ({"tools": [look_up], "episodes": {"max_turn_tokens": 0}}, "max_turn_tokens"),
    ({"tools": [look_up], "episodes": {"max_tool_calling_iterations": -1}}, "max_tool_calling_iterations"),
    ({"tools": [look_up], "episodes": {"tool_workers": -1}}, "tool_workers"),
    (
        {"episodes": {"branching": {"points": "every_n", "every_n": 2, "width": 2, "depth": 2, "budget": 3}}},
        "Branching.budget",
    ),
    ({"episodes": {"branching": {"points": "every_n"}}}, "every_n is None"),
]


@pytest.mark.parametrize(
    ("cls", "options", "name"),
    [
        *((GRPO, *row) for row in GRPO_OPTIONS),
        *((PPO, *row) for row in PPO_OPTIONS),
        *((GroupPPO, *row) for row in GROUP_PPO),
    ],
)
def test_options_that_cannot_work_are_refused_by_name(make_module, cls, options, name):
    with pytest.raises(ValueError, match=name):
        make_module(cls, **options)


class NoEngine:
    def bind(self, model, tokenizer=None):
        pass

    def generate(self, prompts, sampling, **kwargs):
        return []


def test_types_that_are_refused(make_module):
    for options, message in (
        ({"policy": TinyPolicy().load()}, "policy is a Qwen3ForCausalLM"),
        ({"episodes": {"branching": "turn"}}, "branching is 'turn'"),
        ({"engine": type("Half", (NoEngine,), {"update_weights": None})()}, "engine is a Half"),
    ):
        with pytest.raises(TypeError, match=message):
            make_module(**options)


# NaN and infinity are refused by name in every numeric option of every public class.


class NoPolicy:
    def load(self):
        raise AssertionError("nothing is loaded by a constructor")

    def load_tokenizer(self):
        raise AssertionError("nothing is loaded by a constructor")


ARCHITECTURE = {"model_type": "qwen3"}


MAKERS = {
    **{cls: {"policy": NoPolicy(), "rewards": reward} for cls in (GRPO, PPO, GroupPPO)},
    **{cls: {} for cls in (SamplingConfig, OptimizerConfig, EpisodeOptions, EvaluationOptions, GuardOptions)},
    **{cls: {} for cls in (ImportanceSampling, KLOptions, RewardCallOptions, SharingOptions)},
    Weighted: {"function": reward},
    KLController: {"coef": 0.1, "target": 0.1},
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


CHECKED_WHEN_USED = {name for function in FUNCTIONS for name in function.known_options()} - {"gamma", "lam"}
"""Options that algorithms pass to their loss or estimator; PPO checks these two itself."""


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
        data |= {"branches": BranchPaths([(), ()], [(), ()]), "turns": rows.long(), "states": rows.long()}
        tensors[0] = rows if function.takes_token_rewards else zeros
    for value in (math.nan, math.inf, -math.inf):
        with pytest.raises(ValueError, match=rf"{name}\b.* is -?(nan|inf)"):
            function.with_options({name: value})(*tensors, **data)


def test_the_sweep_is_not_empty(record_property):
    floats = [name for cls, name in CASES if cls in (GroupPPO, OptimizerConfig)]
    assert {"beta", "gamma", "lam", "group_epsilon", "threshold_lr", "eps", "betas", "max_grad_norm"} <= set(floats)
    assert len(CASES) + len(OPTIONS) > 150
    record_property("figure", f"{len(CASES)} options of {len(MAKERS)} classes, {len(OPTIONS)} of functions")
    with pytest.raises(ValueError, match="lam is nan"):
        check_options({"lam": (math.nan, not math.nan < 0, "0 or larger")})
    assert not is_finite({"a": [1.0, (2.0, math.inf)]})
    assert is_finite({"a": [1.0, None, "nan", 3]})


# Mappings from Python and from the command line.


def test_mappings_from_python(make_module):
    module = make_module(
        optimizer={"learning_rate": 1e-5, "betas": [0.9, 0.95]},
        sampling={"max_new_tokens": 4, "stop": ["x"]},
        evaluation={"sampling": {"temperature": 0.0}},
    )
    assert module.optimizer_config == OptimizerConfig(learning_rate=1e-5, betas=(0.9, 0.95))
    assert module.sampling == SamplingConfig(max_new_tokens=4, stop=("x",))
    assert module.evaluation_sampling == SamplingConfig(max_new_tokens=4, stop=("x",), temperature=0.0)
    assert make_module(PPO, critic_optimizer={"weight_decay": 0.1}).critic_optimizer == OptimizerConfig(
        weight_decay=0.1
    )


def test_rewards_and_adapters_by_mappings(make_module, tmp_path):
    reward = constant(0.0)
    for rewards in ([{"function": reward, "weight": 0.5}], {"function": reward, "weight": 0.5}, Weighted(reward, 0.5)):
        assert [(own.function, own.weight) for own in as_weighted(make_module(rewards=rewards).rewards)] == [
            (reward, 0.5)
        ]
    with pytest.raises(TypeError, match="wieght"):
        as_weighted([{"function": reward, "wieght": 0.5}])
    pytest.importorskip("peft")
    assert PretrainedPolicy(str(tmp_path), adapter={"r": 4}).adapter == LoRAAdapter(r=4)


# The tables of docs/options.md.


DOCS = Path(pl_grouprl.__file__).resolve().parents[1] / "docs"


def rows() -> list[list[str]]:
    """Cells of the tables of options.md that map names: TRL, verl, here."""
    found, maps = [], False
    for line in (DOCS / "options.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(cells) >= 3 and cells[0].startswith("TRL"):
            maps = cells[2] == "here" or cells[2].startswith("option of")
        elif maps and len(cells) >= 3:
            found.append(cells)
    return found


def parameters(cls) -> set[str]:
    return {name for base in cls.__mro__ if "__init__" in vars(base) for name in inspect.signature(base).parameters}


def test_our_options_in_the_tables_exist():
    """`model.init_args.X` and `data.init_args.X` are parameters of a constructor."""
    options = {
        "model": {n for c in (PPO, GRPO, GroupPPO, Distillation) for n in parameters(c)},
        "data": parameters(PromptDataModule),
        "trainer": parameters(Trainer),
    }
    found = {place for cells in rows() for place in re.findall(r"`((?:model|data|trainer)\.[\w.]+)`", cells[2])}
    assert len(found) > 100
    for place in found:
        group, name = re.match(r"(\w+)\.(?:init_args\.)?(\w+)", place).groups()
        assert name in options[group], place


def test_every_option_of_trl_has_a_row():
    """With our option or the reason why there is none; the fields are those of TRL 1.16's own source."""
    classes = json.loads((Path(__file__).parent / "trl_1_16_options.json").read_text(encoding="utf-8"))["fields"]
    explained, of_trl = set(), False
    for line in (DOCS / "options.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        of_trl = bool(cells) and (of_trl or cells[0].startswith("TRL"))
        if of_trl and any(cells[2:]):
            explained |= set(re.findall(r"\w+", " ".join(re.findall(r"`([^`]+)`", cells[0]))))
    assert {name: sorted({*fields} - explained) for name, fields in classes.items()} == {name: [] for name in classes}


# Options that were passed on have no effect when they are set later.


def test_setting_one_is_refused():
    module = GRPO(TinyPolicy(), reward)
    for name in PASSED_ON:
        before = getattr(module, name)
        with pytest.raises(AttributeError, match=f"{name} cannot be set on a GRPO"):
            setattr(module, name, before)
        assert getattr(copy.deepcopy(module), name) == before or name == "engine"


class WithLevel(PPO):
    def __init__(self, *args, level=1, **kwargs):
        super().__init__(*args, **kwargs)
        self.level = level


def test_what_is_read_when_it_is_needed_can_be_set():
    module = WithLevel(TinyPolicy(), reward, level=3)
    module.gamma = 0.5
    assert (module.level, module.gamma) == (3, 0.5)

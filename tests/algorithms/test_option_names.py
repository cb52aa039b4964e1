"""Options of the public classes: mappings for configs, names of TRL and verl, objects where a source is wanted."""

from __future__ import annotations

import importlib
import inspect
import json
import re
import typing
from pathlib import Path

import pytest
import torch

import pl_grouprl
from pl_grouprl.algorithms import GRPO, PPO, OptimizerConfig
from pl_grouprl.data import PromptDataModule
from pl_grouprl.models import LoRAAdapter, PretrainedPolicy
from pl_grouprl.rewards import Weighted
from pl_grouprl.rewards.base import as_weighted
from pl_grouprl.types import SamplingConfig
from pl_grouprl.utilities.option_names import OPTION_PATHS

DOCS = Path(pl_grouprl.__file__).resolve().parents[1] / "docs"
PARTS = (
    "algorithms",
    "callbacks",
    "data",
    "demo",
    "harnesses",
    "models",
    "rewards",
    "rollout",
    "functional.policy_loss",
    "functional.advantages",
)
NO_OPTIONS = {  # built by the package, or by a user who passes models and rollouts
    *("Estimate", "CriticRows", "LossSums", "MicroBatch", "RolloutBuffer", "PolicyLoss"),
    *("Critic", "ValueHead", "PrefixPass", "PendingRewards", "RewardWorkers", "RewardConfigurationError"),
    *("EvalPromptLoader", "TrainPromptLoader", "PromptBatch", "StoppedBySignal"),
    *("CompressionRatio", "TokenGroupStatistics", "PolicyLossFunction", "AdvantageEstimator"),
}


def test_mappings_from_python(make_module):
    module = make_module(
        optimizer={"learning_rate": 1e-5, "betas": [0.9, 0.95]},
        sampling={"max_new_tokens": 4, "stop": ["x"]},
        val_sampling={"temperature": 0.0},
    )
    assert module.optimizer_config == OptimizerConfig(learning_rate=1e-5, betas=(0.9, 0.95))
    assert module.sampling == SamplingConfig(max_new_tokens=4, stop=("x",))
    assert module.val_sampling == SamplingConfig(temperature=0.0)
    assert make_module(PPO, critic_optimizer={"weight_decay": 0.1}).critic_optimizer == OptimizerConfig(
        weight_decay=0.1
    )


def test_rewards_by_mappings(make_module):
    def reward(completions, **columns):
        return [0.0 for _ in completions]

    for rewards in ([{"function": reward, "weight": 0.5}], {"function": reward, "weight": 0.5}, Weighted(reward, 0.5)):
        assert as_weighted(make_module(rewards=rewards).rewards) == [Weighted(reward, 0.5, "reward")]
    with pytest.raises(TypeError, match=r"rewards\[0\]: Weighted takes no 'wieght'; did you mean 'weight'"):
        make_module(rewards=[{"function": reward, "wieght": 0.5}])


def test_adapter_by_a_mapping(tmp_path):
    pytest.importorskip("peft")
    assert PretrainedPolicy(str(tmp_path), adapter={"r": 4}).adapter == LoRAAdapter(r=4)
    with pytest.raises(TypeError, match=r"PretrainedPolicy.adapter: LoRAAdapter.r is 4.5; it must be a whole number"):
        PretrainedPolicy(str(tmp_path), adapter={"r": 4.5})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"learning_rate": 1e-5},
            "takes no 'learning_rate'; it is part of optimizer: optimizer={'learning_rate': ...}",
        ),
        ({"temperature": 1.0}, "takes no 'temperature'; it is part of sampling"),
        ({"lr": 1e-5}, "takes no 'lr'; here it is learning_rate, an option of the optimizer"),
        (
            {"max_completion_length": 9},
            "here it is max_new_tokens, an option of sampling: sampling={'max_new_tokens': ...}",
        ),
        ({"max_prompt_length": 9}, "it is an option of the data: PromptDataModule(max_prompt_length=...)"),
        ({"num_train_epochs": 1}, "here it is max_epochs, an option of the Trainer: Trainer(max_epochs=...)"),
        ({"max_steps": 1}, "it is an option of the Trainer: Trainer(max_steps=...)"),
        (
            {"per_device_train_batch_size": 1},
            "here it is max_tokens_per_micro_batch. It counts tokens, not completions",
        ),
        ({"gradient_accumulation_steps": 1}, "here it is max_tokens_per_micro_batch. It counts tokens"),
        ({"use_dynamic_bsz": True}, "here it is max_tokens_per_micro_batch. It is a number of tokens"),
        ({"ppo_mini_batch_size": 64}, "num_mini_batches. It is a number of parts: train_batch_size / ppo_mini_batch"),
        ({"importance_sampling_level": "sequence"}, "'sequence' is loss_type='gspo'; 'token' is"),
        ({"whiten_rewards": True}, "takes no 'whiten_rewards'. It is not available yet: docs/options.md"),
        ({"save_steps": 10}, "SafeCheckpoint(every_n_train_steps=...) to the Trainer"),
        ({"steps_per_generation": 2}, "here it is num_mini_batches. It is a number of optimizer steps"),
        ({"critic_warmup": 1}, "an option of PPO: PPO(critic_warmup_steps=...). It counts optimizer steps"),
        ({"teacher_model": "x"}, "here it is teacher, an option of Distillation(teacher=...)"),
        ({"use_kl_loss": True}, "here it is beta. It is the coefficient"),
        ({"norm_adv_by_std_in_grpo": True}, "here it is scale_rewards. False is 'none' and True is 'group'"),
        ({"scale_rewards": False}, "'none' or None. False is 'none' and True is 'group'"),
        (
            {"scale_rewards": "none", "advantage_estimator": "rloo"},
            "'rloo' does not use scale_rewards, which is 'none'",
        ),
        ({"loss_type": "vespo"}, "loss_type is 'vespo'; it must be one of grpo, dr_grpo"),
        ({"loss_type": "vespo"}, "It is not available yet: docs/options.md#not-available-yet"),
        ({"advantage_estimator": "gae"}, "'gae' is pl_grouprl.PPO."),
        ({"max_grad_norm": 1.0}, "optimizer={'max_grad_norm': ...}. The Trainer's gradient_clip_val does the same"),
        ({"n": 8}, "here it is num_generations."),
        ({"multi_turn": True}, "takes no 'multi_turn'. Pass tools or environment_factory"),
        ({"args": {}}, "takes no 'args'. Pass the fields of a GRPOConfig one by one: docs/coming_from_trl.md."),
        ({"rewards": "my.reward"}, "Pass the function itself; only YAML knows import paths."),
        ({"kl_coef": 0.1}, "here it is beta"),
        ({"clip_ratio": 0.1}, "here it is epsilon"),
        ({"vllm_mode": "colocate"}, "here it is engine. Import it from pl_grouprl.rollout: VLLMRolloutEngine()"),
        ({"num_generation": 4}, "did you mean 'num_generations'"),
        ({"num_generations": "4"}, "num_generations is '4'; it must be a whole number"),
        ({"num_generations": True}, "num_generations is True; it must be a whole number"),
        ({"engine": "vllm"}, "engine is 'vllm'; it must be a RolloutEngine or None"),
        ({"engine": torch.nn.Linear(1, 1)}, "engine is a Linear; pass an engine of pl_grouprl.rollout"),
        (
            {"sampling": {"stop_token_ids": ("a",)}},
            "SamplingConfig.stop_token_ids[0] is 'a'; it must be a whole number",
        ),
    ],
)
def test_refused_with_the_remedy(make_module, options, message):
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        make_module(**options)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("adv_estimator", "pl_grouprl.PPO always uses GAE: leave it out."),
        ("scale_rewards", "whiten_advantages=True or False."),
        ("norm_adv_by_std_in_grpo", "whiten_advantages=True or False."),
    ],
)
def test_what_ppo_has_instead(make_module, option, message):
    with pytest.raises(TypeError, match=re.escape(f"PPO takes no {option!r}. ") + ".*" + re.escape(message)):
        make_module(PPO, **{option: "gae"})


def test_stop_tokens_are_whole_numbers():
    with pytest.raises(TypeError, match=r"SamplingConfig.stop_token_ids\[0\] is 'a'; it must be a whole number"):
        SamplingConfig(stop_token_ids=("a",))


def test_a_model_is_no_policy(make_module, tiny_policy):
    with pytest.raises(TypeError, match=r"policy is a Qwen3ForCausalLM; .* Save model and tokenizer"):
        make_module(policy=tiny_policy().load())
    with pytest.raises(TypeError, match="critic is a Qwen3ForCausalLM; pass a path"):
        make_module(PPO, critic=tiny_policy().load())


def test_the_data_module_says_where_options_belong():
    with pytest.raises(TypeError, match=r"'num_generations'; it is an option of the algorithm, such as GRPO"):
        PromptDataModule(num_generations=4)
    with pytest.raises(TypeError, match="PromptDataModule takes no 'batchsize'; did you mean 'batch_size'"):
        PromptDataModule(batchsize=4)


@pytest.mark.parametrize("part", PARTS)
def test_every_public_constructor_compares_its_arguments(part):
    module = importlib.import_module(f"pl_grouprl.{part}")
    for name in getattr(module, "__all__", dir(module)):
        cls = getattr(module, name)
        public = inspect.isclass(cls) and cls.__module__.startswith("pl_grouprl") and name not in NO_OPTIONS
        if public and not getattr(cls, "_is_protocol", False) and "__init__" in vars(cls):
            arguments = list(inspect.signature(cls.__init__).parameters)[1:]
            own = inspect.unwrap(cls.__init__)
            assert not arguments or cls.__init__ is not own, f"{name} is not decorated with checked_arguments"
            typing.get_type_hints(own if own.__code__.co_filename != "<string>" else cls)


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


def test_places_agree_with_the_tables():
    known = {
        (name.rsplit(".", 1)[-1], place.rsplit(".", 1)[-1])
        for cells in rows()
        for cell in cells[:2]
        for name in re.findall(r"`([^`]+)`", cell)
        for place in re.findall(r"`([^`]+)`", cells[2])
    }
    for place, names in OPTION_PATHS.items():
        for name in names.split():
            assert (name, place.rsplit(".", 1)[-1]) in known, f"{name} -> {place} is in no row of options.md"


def test_names_of_the_tables_have_a_place():
    foreign = {name for names in OPTION_PATHS.values() for name in names.split()} | {
        p.rsplit(".", 1)[-1] for p in OPTION_PATHS
    }
    taken = {name for cls in PPO.__mro__ + GRPO.__mro__ for name in inspect.signature(cls.__init__).parameters}
    for cells in rows():
        places = re.findall(r"`((?:model|data|trainer)[\w.]+)`", cells[2])
        for name in re.findall(r"`(\w{4,})`", cells[0]):
            if places and name not in ("images", "image", "prompt", "stop", "model_init_kwargs", "PeftModel"):
                assert name in foreign | taken, f"{name} of options.md is in no row of OPTION_PATHS"


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

"""Options of the public classes: mappings for configs, objects for sources, and the tables of docs/options.md."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path

import pytest
from lightning.pytorch import Trainer

import pl_grouprl
from pl_grouprl.algorithms import GRPO, PPO, Distillation, GroupPPO, OptimizerConfig
from pl_grouprl.data import PromptDataModule
from pl_grouprl.models import LoRAAdapter, PretrainedPolicy
from pl_grouprl.rewards import Weighted
from pl_grouprl.rewards.base import as_weighted
from pl_grouprl.types import SamplingConfig

DOCS = Path(pl_grouprl.__file__).resolve().parents[1] / "docs"


def test_mappings_from_python(make_module):
    module = make_module(
        optimizer={"learning_rate": 1e-5, "betas": [0.9, 0.95]},
        sampling={"max_new_tokens": 4, "stop": ["x"]},
        evaluation={"sampling": {"temperature": 0.0}},
    )
    assert module.optimizer_config == OptimizerConfig(learning_rate=1e-5, betas=(0.9, 0.95))
    assert module.sampling == SamplingConfig(max_new_tokens=4, stop=("x",))
    assert module.evaluation_sampling == SamplingConfig(temperature=0.0)
    assert make_module(PPO, critic_optimizer={"weight_decay": 0.1}).critic_optimizer == OptimizerConfig(
        weight_decay=0.1
    )


def test_rewards_by_mappings(make_module):
    def reward(completions, **columns):
        return [0.0 for _ in completions]

    for rewards in ([{"function": reward, "weight": 0.5}], {"function": reward, "weight": 0.5}, Weighted(reward, 0.5)):
        assert as_weighted(make_module(rewards=rewards).rewards) == [Weighted(reward, 0.5, "reward")]
    with pytest.raises(TypeError, match="wieght"):
        as_weighted([{"function": reward, "wieght": 0.5}])


def test_adapter_by_a_mapping(tmp_path):
    pytest.importorskip("peft")
    assert PretrainedPolicy(str(tmp_path), adapter={"r": 4}).adapter == LoRAAdapter(r=4)


def test_a_model_is_no_policy(make_module, tiny_policy):
    with pytest.raises(TypeError, match="policy is a Qwen3ForCausalLM"):
        make_module(policy=tiny_policy().load())


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


def parameters(cls) -> set[str]:
    return {name for base in cls.__mro__ if "__init__" in vars(base) for name in inspect.signature(base).parameters}


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

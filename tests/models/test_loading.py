"""Weights that are missing, left over, of another shape, not finite or unreadable are errors wherever models load."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from helpers.scripts import run_script
from helpers.tiny_models import tiny_model
from helpers.tiny_vision import tiny_vision_model
from safetensors.torch import load_file, save_file

from pl_grouprl.demo.warm_start import WarmStartedPolicy
from pl_grouprl.models.adapters import LoRAAdapter, save_adapter
from pl_grouprl.models.critic import PretrainedCritic
from pl_grouprl.models.policy import PretrainedPolicy
from pl_grouprl.rewards import ModelReward
from pl_grouprl.rewards.base import RewardConfigurationError

ROOT = Path(__file__).resolve().parents[2]
UP = "model.layers.0.mlp.up_proj.weight"


def change(folder, edit, file="model.safetensors"):
    """Take out, add or replace tensors of a saved model."""
    path = Path(folder) / file
    weights = load_file(path)
    edit(weights)
    save_file(weights, path, metadata={"format": "pt"})


def edit_config(folder, **fields):
    path = Path(folder) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def without(name):
    return lambda weights: weights.pop(name)


def replaced(name, tensor):
    return lambda weights: weights.update({name: tensor})


def with_nan(name):
    return lambda weights: weights[name].flatten()[5:6].fill_(math.nan)


def classifier(**options):
    from transformers import AutoConfig, AutoModelForSequenceClassification

    config = tiny_model("llama").config.to_dict() | {"num_labels": 1} | options
    return AutoModelForSequenceClassification.from_config(AutoConfig.for_model(**config))


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "model"
    tiny_model("llama").save_pretrained(path)
    return str(path)


EXTRA = "model.layers.2.mlp.up_proj.weight"
CASES = {
    "missing": (without(UP), f"missing from it: {UP}"),
    "left over": (replaced(EXTRA, torch.zeros(48, 32)), f"unknown to the model: {EXTRA}"),
    "of another shape": (replaced(UP, torch.zeros(40, 32)), f"of another shape: {UP}"),
    "not finite": (with_nan(UP), f"NaN .*{UP}"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_policy_with_mismatched_weights_is_refused(folder, case):
    edit, message = CASES[case]
    change(folder, edit)
    with pytest.raises(ValueError, match=message) as caught:
        PretrainedPolicy(folder).load()
    assert f"model path {folder!r}" in str(caught.value)


@pytest.mark.parametrize(
    ("saved", "config", "message"),
    [
        ("llama", {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}, r"missing from it: .*k_norm"),
        ("qwen3", {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, r"unknown to the model: .*k_norm"),
        ("llama", {"num_hidden_layers": 1}, r"unknown to the model: model\.layers\.1"),
        ("llama", {"vocab_size": 70}, r"of another shape: .*embed_tokens"),
    ],
    ids=str,
)
def test_weights_of_another_config_are_refused(tmp_path, saved, config, message):
    tiny_model(saved).save_pretrained(tmp_path)
    edit_config(tmp_path, **config)
    with pytest.raises(ValueError, match=message):
        PretrainedPolicy(str(tmp_path)).load()


@pytest.mark.parametrize(
    ("family", "tied"), [("llama", False), ("gpt2", True), ("qwen3_moe", False), ("gemma2", True), ("opt", True)]
)
def test_complete_folders_load(tmp_path, family, tied):
    """Tied weights have one name in the file, experts are stored one by one, buffers not at all."""
    saved = tiny_model(family, tie_word_embeddings=tied, **({"word_embed_proj_dim": 32} if family == "opt" else {}))
    saved.save_pretrained(tmp_path, max_shard_size="20KB")
    loaded = PretrainedPolicy(str(tmp_path)).load()
    assert all(torch.equal(*pair) for pair in zip(saved.parameters(), loaded.parameters(), strict=True))


def test_experts(tmp_path):
    """transformers puts them together."""
    name = "model.layers.0.mlp.experts.1.down_proj.weight"
    for edit, error in ((without(name), ValueError), (replaced(name, torch.zeros(3, 5)), RuntimeError)):
        tiny_model("qwen3_moe").save_pretrained(tmp_path)
        change(tmp_path, edit)
        with pytest.raises(error):
            PretrainedPolicy(str(tmp_path)).load()


def test_a_vision_tower(tmp_path):
    tiny_vision_model("qwen3_vl").save_pretrained(tmp_path)
    PretrainedPolicy(str(tmp_path)).load()
    name = next(key for key in load_file(tmp_path / "model.safetensors") if "visual" in key)
    change(tmp_path, without(name))
    with pytest.raises(ValueError, match=rf"missing from it: {name}"):
        PretrainedPolicy(str(tmp_path)).load()


def test_listed_weights_may_differ_and_are_the_same_in_every_run(folder):
    change(folder, without("lm_head.weight"))
    change(folder, replaced("extra.weight", torch.zeros(2)))
    policy = PretrainedPolicy(folder, allow_mismatched_weights=("lm_head.weight", "extra.*"))
    torch.manual_seed(0)
    expected_next = torch.rand(2)
    heads = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        heads.append(policy.load().lm_head.weight)
        if not seed:
            assert torch.equal(torch.rand(2), expected_next)  # global random numbers are left alone
    assert torch.equal(*heads)
    assert heads[0].std() > 0
    with pytest.raises(ValueError, match=r"unknown to the model: extra.weight"):
        PretrainedPolicy(folder, allow_mismatched_weights=("lm_head.weight",)).load()


@pytest.mark.parametrize("patterns", [("lm_hed*",), "lm_head"])
def test_a_pattern_that_matches_nothing(folder, patterns):
    with pytest.raises(ValueError, match="allow_mismatched_weights"):
        PretrainedPolicy(folder, allow_mismatched_weights=patterns).load()


def test_shards(tmp_path):
    tiny_model("llama").save_pretrained(tmp_path, max_shard_size="20KB")
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    name = next(iter(load_file(shard)))
    change(tmp_path, lambda weights: weights.update({"x": weights.pop(name)}), shard.name)
    with pytest.raises(ValueError, match=rf"missing from it: {name}; unknown to the model: x"):
        PretrainedPolicy(str(tmp_path)).load()


def test_a_pickle_file(folder):
    weights = load_file(Path(folder) / "model.safetensors")
    (Path(folder) / "model.safetensors").unlink()
    path = Path(folder) / "pytorch_model.bin"
    torch.save(weights, path)
    PretrainedPolicy(folder).load()


def test_weights_that_the_dtype_cannot_hold(folder):
    change(folder, replaced(UP, torch.full((48, 32), 1e6)))
    PretrainedPolicy(folder, dtype="bfloat16").load()
    with pytest.raises(ValueError, match=f"float16: {UP}"):
        PretrainedPolicy(folder, dtype="float16").load()


def test_critics(tmp_path, folder):
    """The head of a language model is left out and a value head is new; a classifier's head must be there."""
    policy = tiny_model("llama")
    PretrainedCritic(folder).load(policy)
    base = tmp_path / "base"
    policy.model.save_pretrained(base)
    PretrainedCritic(str(base)).load(policy)
    change(base, replaced("layers.2.mlp.up_proj.weight", torch.zeros(48, 32)))
    with pytest.raises(ValueError, match=r"unknown to the model: layers.2.mlp"):
        PretrainedCritic(str(base)).load(policy)
    change(folder, replaced(EXTRA, torch.zeros(48, 32)))
    with pytest.raises(ValueError, match=f"unknown to the model: {EXTRA}"):
        PretrainedCritic(folder).load(policy)
    PretrainedCritic(folder, allow_mismatched_weights=("model.layers.2.*",)).load(policy)
    scored = tmp_path / "scored"
    classifier().save_pretrained(scored)
    PretrainedCritic(str(scored)).load(policy)
    change(scored, without("score.weight"))
    with pytest.raises(ValueError, match=r"missing from it: score.weight"):
        PretrainedCritic(str(scored)).load(policy)


def test_reward_models_without_a_score(tmp_path):
    classifier().save_pretrained(tmp_path)
    change(tmp_path, without("score.weight"))
    with pytest.raises(RewardConfigurationError, match=r"missing from it: score.weight"):
        ModelReward(str(tmp_path)).set_up()
    ModelReward(str(tmp_path), allow_mismatched_weights=["score.*"]).set_up()
    tiny_model("llama").save_pretrained(tmp_path / "other")
    edit_config(tmp_path / "other", architectures=["LlamaForSequenceClassification"], num_labels=1)
    with pytest.raises(RewardConfigurationError, match=r"missing from it: score.weight; unknown to the model: lm_head"):
        ModelReward(str(tmp_path / "other")).set_up()


@pytest.fixture
def adapter(tmp_path, folder):
    pytest.importorskip("peft")
    path = tmp_path / "adapter"
    save_adapter(PretrainedPolicy(folder, adapter=LoRAAdapter(r=4)).load(), path)
    return path


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda weights, name: weights.pop(name), "missing from it: {name}"),
        (lambda weights, name: weights.update(x=torch.zeros(2)), "unknown to the model: x"),
        (lambda weights, name: weights.update({name: torch.zeros(5, 32)}), "of another shape: {name}"),
        (lambda weights, name: weights[name].fill_(math.inf), "NaN .*{name}"),
    ],
    ids=["missing", "left over", "of another shape", "not finite"],
)
def test_adapters(folder, adapter, edit, message):
    PretrainedPolicy(folder, adapter=LoRAAdapter(path=str(adapter))).load()
    file = "adapter_model.safetensors"
    name = "base_model.model.model.layers.0.mlp.gate_proj.lora_A.weight"
    change(adapter, lambda weights: edit(weights, name), file)
    message = message.format(name=name.removeprefix("base_model.model."))
    with pytest.raises(ValueError, match=rf"the adapter of path '{adapter}' .*{message}"):
        PretrainedPolicy(folder, adapter=LoRAAdapter(path=str(adapter))).load()


def test_the_cache_of_a_warm_start(tmp_path):
    from pl_grouprl.demo import MostFrequentDigit

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    source = WarmStartedPolicy(
        MostFrequentDigit(prompt_length=8), {"model_type": "llama", **sizes}, steps=0, cache_dir=str(tmp_path)
    )
    source.load()
    change(source.folder, without(UP))
    with pytest.raises(ValueError, match=f"remove the folder.*{UP}"):
        source.load()
    shutil.rmtree(source.folder)
    source.load()


def test_the_command_line_exits_with_the_names(folder):
    """`parity`, which passed with random weights, on a folder without one of its weights."""
    change(folder, without(UP))
    ended = run_script(ROOT / "cli.py", "parity", "--model", folder, cwd=folder, check=False)
    assert ended.returncode == 1
    assert f"missing from it: {UP}" in ended.stderr
    assert "passed" not in ended.stdout

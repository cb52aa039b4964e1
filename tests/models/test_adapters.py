"""The adapter option: where the layers go, what is trained, the same on every rank; saved adapters to start from."""

import copy
import json
import math
import re

import peft
import pytest
import torch
from helpers.tiny_models import FAMILIES, random_groups, tiny_model
from helpers.versions import needs
from torch import nn

from pl_grouprl.attention import check_parity, find_decoder, shared_prefix
from pl_grouprl.demo import MostFrequentDigit, WarmStartedPolicy
from pl_grouprl.models import (
    FourBit,
    LoRAAdapter,
    LoRACritic,
    PolicyCopyCritic,
    PolicySource,
    PretrainedPolicy,
    SharedTrunkCritic,
    rollout_logprobs,
)
from pl_grouprl.models.adapters import (
    adapter_layers,
    adapters_off,
    check_adapters,
    has_adapters,
    merged_copy,
    save_adapter,
)
from pl_grouprl.packing import pack
from pl_grouprl.rollout import HFRolloutEngine
from pl_grouprl.types import RolloutGroup, SamplingConfig
from pl_grouprl.utilities import optional

IDS = torch.tensor([[1, 2, 3, 4, 5]])
KINDS = [*((family, False) for family in FAMILIES), ("qwen3_moe", True), ("gpt2", True)]


def trained(model):
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def adapted(family="llama", **options):
    """A model whose adapter does something, in training mode."""
    model = LoRAAdapter(r=4, **options).add_to(tiny_model(family)).train()
    torch.manual_seed(5)
    for parameter in trained(model).values():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model


def places(model):
    """Names of the layers that got an adapter."""
    return {name.split(".lora_A")[0] for name in trained(model) if "lora_A" in name}


def llava():
    """Vision tower and language model with layers of the same names."""
    from transformers import LlavaConfig, LlavaForConditionalGeneration

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision = {"model_type": "clip_vision_model", "image_size": 8, "patch_size": 4, "projection_dim": 32, **sizes}
    text = {"model_type": "llama", "vocab_size": 61, "num_key_value_heads": 1, **sizes}
    return LlavaForConditionalGeneration(LlavaConfig(vision_config=vision, text_config=text))


@pytest.fixture
def folder(tmp_path):
    model = tiny_model("llama")
    model.save_pretrained(tmp_path / "base")
    return str(tmp_path / "base")


@pytest.mark.parametrize(("family", "use_dora"), KINDS)
def test_it_starts_as_zero_and_is_all_that_is_trained(family, use_dora):
    from transformers import PreTrainedModel

    base = tiny_model(family)
    model = LoRAAdapter(r=4, use_dora=use_dora).add_to(tiny_model(family))
    torch.testing.assert_close(model(IDS).logits, base(IDS).logits, atol=1e-5, rtol=1e-5)
    assert isinstance(model, PreTrainedModel)
    assert trained(model)
    assert all("lora_" in name for name in trained(model))
    assert any("magnitude" in name for name in trained(model)) == use_dora
    assert not any("lm_head" in name or "experts" in name for name in trained(model))


def test_options():
    model = LoRAAdapter(r=2, alpha=6, target_modules=["q_proj", "up_proj"]).add_to(tiny_model("llama"))
    assert {name.rpartition(".")[2] for name in places(model)} == {"q_proj", "up_proj"}
    layer = model.model.layers[1].self_attn.q_proj
    assert layer.lora_A["default"].weight.shape == (2, 32)
    assert layer.scaling["default"] == 3.0
    stable = LoRAAdapter(r=4, alpha=6, use_rslora=True).add_to(tiny_model("llama"))
    assert stable.model.layers[0].self_attn.q_proj.scaling["default"] == 3.0  # 6 / sqrt(4)
    with pytest.raises(ValueError, match="already has adapters"):
        LoRAAdapter().add_to(model)


@pytest.mark.parametrize(
    ("name", "wrong"), [("r", 0), ("alpha", 0), ("alpha", math.inf), ("dropout", 0.1), ("target_modules", [])]
)
def test_options_out_of_range(name, wrong):
    with pytest.raises(ValueError, match=name):
        LoRAAdapter(**{name: wrong})


@pytest.mark.parametrize(
    "wrong",
    ["q_proj", ".*nowhere", "(", ["q_proj", "nowhere"], ["mlp"], r".*\.mlp", ["layers.0.input_layernorm"]],
    ids=str,
)
def test_missing_layers_and_layers_that_take_no_adapter(wrong):
    with pytest.raises((ValueError, re.error), match="nowhere" if "nowhere" in wrong else ""):
        LoRAAdapter(target_modules=wrong).add_to(tiny_model("llama"))


def test_tied_weights_get_no_adapter():
    with pytest.raises(ValueError, match="lm_head"):
        LoRAAdapter(target_modules=["lm_head"]).add_to(tiny_model("qwen2", tie_word_embeddings=True))
    assert places(LoRAAdapter(target_modules=["lm_head"]).add_to(tiny_model("qwen2"))) == {"lm_head"}


@pytest.mark.parametrize(
    ("target_modules", "outside"),
    [
        ("all-linear", set()),
        (["q_proj"], set()),
        (["q_proj", "linear_1"], {"model.multi_modal_projector.linear_1"}),
        (r".*vision_tower.*\.0\..*q_proj", {"model.vision_tower.encoder.layers.0.self_attn.q_proj"}),
    ],
)
def test_a_vision_tower_gets_an_adapter_only_on_request(target_modules, outside):
    names = places(LoRAAdapter(r=2, target_modules=target_modules).add_to(llava()))
    assert {name for name in names if "language_model" not in name} == outside
    per_layer = {"all-linear": 7}.get(str(target_modules), int(isinstance(target_modules, list)))
    assert len(names - outside) == 2 * per_layer


@needs("peft", "0.21")
def test_experts_are_not_linear_layers():
    """PEFT reads the names of the dense layers as those of all experts' parameters, and would leave the former out."""
    dense = tiny_model("qwen3_moe", mlp_only_layers=[0])
    with pytest.raises(ValueError, match="target_modules"):
        LoRAAdapter(r=2).add_to(dense)
    experts = LoRAAdapter(r=2, target_modules=r".*experts\.down_proj").add_to(tiny_model("qwen3_moe"))
    assert {name.rpartition(".")[2] for name in places(experts)} == {"experts"}
    assert check_parity(experts.train()).passed


def test_a_policy_that_reads_images_is_loaded_whole(tmp_path):
    from transformers import AutoConfig, LlavaForConditionalGeneration

    model = llava()
    model.config.text_config.attention_dropout = model.config.vision_config.attention_dropout = 0.2
    model.save_pretrained(tmp_path)
    policy = PretrainedPolicy(str(tmp_path), adapter=LoRAAdapter(r=2)).load()
    assert isinstance(policy, LlavaForConditionalGeneration)
    assert all("language_model" in name for name in trained(policy))
    assert AutoConfig.from_pretrained(tmp_path).text_config.attention_dropout == 0.2
    assert {policy.config.text_config.attention_dropout, policy.config.vision_config.attention_dropout} == {0.0}
    assert all(torch.equal(p, policy.get_parameter(name)) for name, p in model.named_parameters() if "vision" in name)


def test_the_same_on_every_rank_and_float32_on_a_bfloat16_base():
    with torch.random.fork_rng():
        torch.manual_seed(1)
        before = torch.random.get_rng_state()
        one = LoRAAdapter().add_to(tiny_model("llama", dtype=torch.bfloat16))
        assert torch.equal(before, torch.random.get_rng_state())
        torch.manual_seed(2)
        other = LoRAAdapter().add_to(tiny_model("llama", dtype=torch.bfloat16))
    assert {p.dtype for p in trained(one).values()} == {torch.float32}
    assert {p.dtype for p in one.parameters() if not p.requires_grad} == {torch.bfloat16}
    assert all(torch.equal(p, trained(other)[name]) for name, p in trained(one).items())
    another = trained(LoRAAdapter(seed=1).add_to(tiny_model("llama", dtype=torch.bfloat16)))
    assert any(not torch.equal(p, another[name]) for name, p in trained(one).items())
    one(IDS).logits.sum().backward()
    assert all(p.grad is not None for p in trained(one).values())


def test_activation_checkpointing(folder):
    plain, recomputing = (
        PretrainedPolicy(folder, gradient_checkpointing=own, adapter=LoRAAdapter(r=4)).load().train()
        for own in (False, True)
    )
    for model in (plain, recomputing):
        model(IDS).logits.square().mean().backward()
    assert recomputing.is_gradient_checkpointing
    for name, parameter in trained(plain).items():
        torch.testing.assert_close(trained(recomputing)[name].grad, parameter.grad, atol=1e-7, rtol=1e-5)


def test_policy_sources(folder, tmp_path):
    source = PretrainedPolicy(folder, adapter=LoRAAdapter(r=4))
    assert isinstance(source, PolicySource)
    assert trained(source.load())
    options = {
        "demonstrations": MostFrequentDigit(prompt_length=8, train_size=4, val_size=4),
        "architecture": {"model_type": "llama", "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
                         "num_attention_heads": 2},
        "steps": 1, "cache_dir": str(tmp_path / "cache"), "progress_bar": False,
    }  # fmt: skip
    warm = WarmStartedPolicy(**options, adapter=LoRAAdapter(r=4))
    assert warm.folder == WarmStartedPolicy(**options).folder  # the base is the same
    model, plain = warm.load(), WarmStartedPolicy(**options).load()
    assert all("lora_" in name for name in trained(model))
    torch.testing.assert_close(model(IDS).logits, plain(IDS).logits)


def test_a_saved_adapter_is_the_start(folder, tmp_path):
    model = PretrainedPolicy(folder, adapter=LoRAAdapter(r=4, alpha=4, use_dora=True)).load()
    for parameter in trained(model).values():
        nn.init.normal_(parameter, std=0.3)
    save_adapter(model, tmp_path / "adapter")
    path = str(tmp_path / "adapter")
    again = PretrainedPolicy(folder, adapter=LoRAAdapter(path=path)).load()
    assert torch.equal(again(IDS).logits, model(IDS).logits)
    assert trained(again).keys() == trained(model).keys()
    assert LoRAAdapter(path=path, r=4, use_dora=True).add_to(tiny_model("llama")) is not None
    with pytest.raises(ValueError, match=r"LoRAAdapter\.r"):
        LoRAAdapter(path=path, r=8).add_to(tiny_model("llama"))
    for other in (tiny_model("gpt2"), tiny_model("llama", num_hidden_layers=3)):
        with pytest.raises(ValueError, match=r"does not fit|not found"):
            LoRAAdapter(path=path).add_to(other)
    with pytest.raises((OSError, ValueError)):
        PretrainedPolicy(path).load()  # an adapter alone, which transformers would freeze


@pytest.mark.parametrize(
    ("flag", "make", "extra"),
    [
        ("PEFT_AVAILABLE", LoRAAdapter, "lora"),
        ("PEFT_AVAILABLE", LoRACritic, "lora"),
        ("BITSANDBYTES_AVAILABLE", FourBit, "bitsandbytes"),
        ("GGUF_AVAILABLE", lambda: PretrainedPolicy("folder", gguf_file="a.gguf"), "gguf"),
    ],
)
def test_constructors_name_the_extra_that_is_missing(flag, make, extra, monkeypatch):
    monkeypatch.setattr(optional, flag, False)
    with pytest.raises(ModuleNotFoundError, match=extra):
        make()


@pytest.mark.parametrize(
    "options",
    [
        {"init_lora_weights": "pissa_niter_16"},
        {"init_lora_weights": "another"},
        {"trainable_token_indices": [1, 2]},
        {"alora_invocation_tokens": [3]},
        {"layer_replication": [[0, 2], [1, 2]]},
        {"kasa_config": {"beta": 1e-4}},
        {"of_a_newer_peft": {"noise": 0.1}},
        {"peft_type": "ADALORA", "beta1": 0.85},
        {"peft_type": "NEWER"},
    ],
    ids=str,
)
def test_a_saved_adapter_that_is_not_known_to_be_lora_is_refused(tmp_path, options):
    save_adapter(LoRAAdapter(r=2).add_to(tiny_model("llama")), tmp_path)
    file = tmp_path / "adapter_config.json"
    config = json.loads(file.read_text())
    other = {"of_a_newer_peft": None, "init_lora_weights": "gaussian", "lora_dropout": 0.1}
    file.write_text(json.dumps({**config, **other}))
    model = LoRAAdapter(path=str(tmp_path)).add_to(tiny_model("llama"))
    assert model.peft_config["default"].lora_dropout == 0
    assert not any(isinstance(module, nn.Dropout) for module in model.modules())
    file.write_text(json.dumps({**config, **options}))
    with pytest.raises(ValueError, match=f"{next(iter(options))}="):
        LoRAAdapter(path=str(tmp_path)).add_to(tiny_model("llama"))


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        ("AdaLoraConfig", {"total_step": 9}, "peft_type=.*ADALORA"),
        ("VeraConfig", {}, "peft_type=.*VERA"),
        ("PromptTuningConfig", {"num_virtual_tokens": 2}, "peft_type=.*PROMPT_TUNING"),
        ("LoraConfig", {"alora_invocation_tokens": [3]}, "alora_invocation_tokens"),
        ("LoraConfig", {"init_lora_weights": "olora"}, "init_lora_weights='olora'"),
    ],
)
def test_a_model_whose_adapter_is_not_known_to_be_lora_is_refused(config, options, message):
    import peft

    targets = {} if config == "PromptTuningConfig" else {"target_modules": ["q_proj"]}
    options = {"task_type": "CAUSAL_LM", **targets, **options}
    model = peft.get_peft_model(tiny_model("llama"), getattr(peft, config)(**options))
    with pytest.raises(ValueError, match=f"the critic .*{message}"):
        check_adapters(model, "the critic")
    plain = peft.get_peft_model(tiny_model("llama"), peft.LoraConfig(target_modules=["q_proj"], bias="all"))
    check_adapters(plain, "policy")
    check_adapters(adapted("llama", use_dora=True), "policy")


@pytest.mark.parametrize("options", [{}, {"use_dora": True, "target_modules": ["embed_tokens", "q_proj"]}], ids=str)
def test_an_adapter_is_saved_as_transformers_saves_it(options, tmp_path):
    from safetensors.torch import load_file

    model = adapted("llama", **options)
    save_adapter(model, tmp_path / "ours")
    try:
        model.save_pretrained(tmp_path / "theirs")
    except ValueError as error:
        pytest.skip(f"transformers: {error}")
    ours, theirs = (load_file(tmp_path / who / "adapter_model.safetensors") for who in ("ours", "theirs"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())
    ours, theirs = (json.loads((tmp_path / who / "adapter_config.json").read_text()) for who in ("ours", "theirs"))
    assert ours == theirs


def test_the_active_adapter_of_several_is_saved(tmp_path):
    from peft import LoraConfig, inject_adapter_in_model
    from safetensors.torch import load_file

    model = adapted("llama")
    inject_adapter_in_model(LoraConfig(r=2, target_modules=["q_proj"]), model, "other")
    for layer in adapter_layers(model):
        layer.set_adapter("other")
    save_adapter(model, tmp_path)
    saved = load_file(tmp_path / "adapter_model.safetensors")
    assert {weight.shape[0] for name, weight in saved.items() if "lora_A" in name} == {2}
    assert json.loads((tmp_path / "adapter_config.json").read_text())["r"] == 2


GROUPS = random_groups(0, [(9, [4, 0, 7]), (3, [1])])


def wrapped(family="llama", **options):
    """What users do: PEFT's own model around theirs."""
    targets = ["c_attn"] if family == "gpt2" else ["q_proj", "o_proj"]
    torch.manual_seed(3)
    config = peft.LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM", init_lora_weights=False, **options)
    return peft.get_peft_model(tiny_model(family), config).train()


def flags(model):
    return {name: p.requires_grad for name, p in model.named_parameters()}


@pytest.mark.parametrize(("make", "use_dora"), [(adapted, True), (wrapped, False)])
def test_off_equals_the_base_bitwise_and_on_is_restored(make, use_dora):
    model, base = make(use_dora=use_dora), tiny_model("llama")
    before, trained = model(IDS).logits, flags(model)
    with adapters_off(model):
        off = model(IDS).logits
        assert not off.requires_grad
    assert torch.equal(off, base(IDS).logits)
    assert not torch.allclose(before, off)
    assert torch.equal(model(IDS).logits, before)
    assert flags(model) == trained
    with pytest.raises(RuntimeError, match="stop"), adapters_off(model):
        raise RuntimeError("stop")
    assert torch.equal(model(IDS).logits, before)
    assert flags(model) == trained


def test_off_with_shared_prefixes():
    model, base = adapted("qwen3"), tiny_model("qwen3")
    with shared_prefix(model), adapters_off(model):
        off = rollout_logprobs(model, GROUPS)
    for actual, expected in zip(off, rollout_logprobs(base, GROUPS), strict=True):
        assert torch.equal(actual, expected)


def test_off_does_not_change_other_settings():
    """An adapter that was frozen stays so, and one that was off stays off."""
    model = adapted()
    for parameter in find_decoder(model).layers[0].parameters():
        parameter.requires_grad_(False)
    trained = flags(model)
    for layer in adapter_layers(model):
        layer.enable_adapters(False)
    disabled = model(IDS).logits
    with adapters_off(model):
        pass
    assert torch.equal(model(IDS).logits, disabled)
    for layer in adapter_layers(model):
        layer.enable_adapters(True)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained[name])
    with adapters_off(model):
        pass
    assert flags(model) == trained


@pytest.mark.parametrize("bias", ["all", "lora_only"])
def test_weights_trained_besides_the_adapter_are_refused(bias):
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], bias=bias)
    model = peft.get_peft_model(tiny_model("qwen2"), config)
    trained = flags(model)
    with pytest.raises(ValueError, match="besides its adapters"), adapters_off(model):
        pass
    assert flags(model) == trained


def test_a_model_without_adapters_cannot_switch_them_off():
    with pytest.raises(ValueError, match="no adapters"), adapters_off(tiny_model()):
        pass


@pytest.mark.parametrize(("family", "use_dora"), KINDS)
def test_a_merged_copy_computes_the_same_and_changes_nothing(family, use_dora):
    model = adapted(family, use_dora=use_dora)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    logits, plain = model(IDS).logits, tiny_model(family)
    merged = merged_copy(model)
    assert type(merged) is type(plain)
    assert not has_adapters(merged)
    assert merged.state_dict().keys() == plain.state_dict().keys()
    torch.testing.assert_close(merged(IDS).logits, logits, atol=2e-5, rtol=1e-4)
    assert torch.equal(model(IDS).logits, logits)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    # What has no adapter exists once.
    assert merged.get_input_embeddings().weight.data_ptr() == model.get_input_embeddings().weight.data_ptr()


def test_modules_that_peft_trains_in_full():
    model, base = wrapped(modules_to_save=["lm_head"]), tiny_model("llama")
    model.get_base_model().lm_head.modules_to_save["default"].weight.data += 0.1
    with adapters_off(model):
        assert torch.equal(model(IDS).logits, base(IDS).logits)
    torch.testing.assert_close(merged_copy(model)(IDS).logits, model(IDS).logits, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("make", "family", "use_dora"), [*((wrapped, *kind) for kind in KINDS), (adapted, "qwen3_moe", True)]
)
def test_prefixes_are_shared(make, family, use_dora):
    model = make(family, use_dora=use_dora)
    report = check_parity(model)
    assert report.passed, str(report)
    pairs = zip(rollout_logprobs(model, GROUPS), rollout_logprobs(model, GROUPS, sharing="repeated"), strict=True)
    for shared, repeated in pairs:
        torch.testing.assert_close(shared, repeated, atol=1e-5, rtol=1e-5)
    rows = torch.randint(1, 61, (1, 40)).repeat(3, 1)
    rows[:, -4:] = torch.arange(1, 13).reshape(3, 4)
    mask = torch.ones_like(rows)
    expected = model(rows, attention_mask=mask, labels=rows)
    with shared_prefix(model) as context:
        actual = model(rows, attention_mask=mask, labels=rows)
        assert context.last_call.token_ratio > 2
    torch.testing.assert_close(actual.logits, expected.logits, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(actual.loss, expected.loss)


@pytest.mark.parametrize("make", [adapted, wrapped])
def test_rollouts_are_sampled_with_the_adapter_on(make):
    """The sampler's log-probabilities are those of the adapted policy."""
    model = make().eval()
    engine = HFRolloutEngine()
    engine.bind(model)
    (rollouts,) = engine.generate([[5, 6, 7, 8]], SamplingConfig(max_new_tokens=6), num_generations=3, seed=0)
    for rollout, scored in zip(rollouts, rollout_logprobs(model, [RolloutGroup([5, 6, 7, 8], rollouts)]), strict=True):
        torch.testing.assert_close(torch.tensor(rollout.logprobs), scored.detach(), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("make", [adapted, wrapped])
def test_a_copied_critic_includes_the_merged_adapter(make):
    model = make()
    batch = pack(GROUPS)
    critic = PolicyCopyCritic(head_std=0.3).load(model)
    shared = SharedTrunkCritic(head_std=0.3).load(model)
    assert all(p.requires_grad for p in critic.parameters())
    assert not has_adapters(critic)
    with shared_prefix(critic.trunk), shared_prefix(model):
        torch.testing.assert_close(critic.values(batch), shared.values(batch), atol=1e-4, rtol=1e-4)
    theirs = {p.data_ptr() for p in model.parameters()}
    assert not {p.data_ptr() for p in critic.parameters()} & theirs


def test_a_copy_of_an_adapted_model_is_one():
    model = adapted()
    duplicate = copy.deepcopy(model)
    nn.init.zeros_(duplicate.lm_head.weight)
    with adapters_off(duplicate):
        assert not duplicate(IDS).logits.any()
    assert model(IDS).logits.any()

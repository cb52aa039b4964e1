"""Streams of weights for samplers: what they hold is what PEFT and `save_pretrained` write, names and bits."""

import gc
import json

import peft
import pytest
import torch
from helpers.sweeps import sweep
from helpers.tiny_models import FAMILIES, tiny_model
from helpers.tiny_vision import FAMILIES as VISION_FAMILIES
from helpers.tiny_vision import tiny_vision_model
from safetensors.torch import load_file
from transformers import PreTrainedModel

from pl_grouprl.distributed.strategies import StrategySupport
from pl_grouprl.distributed.weight_stream import adapter_config, adapter_weights, base_weights, checkpoint_weights
from pl_grouprl.models import LoRAAdapter
from pl_grouprl.models.adapters import base_of, has_adapters, merged_copy, save_adapter

DTYPES = pytest.mark.parametrize("dtype", sweep([torch.float32, torch.bfloat16], quick=[torch.bfloat16]), ids=str)


def build(family, **options):
    if family not in VISION_FAMILIES:
        return tiny_model(family, **options)
    return tiny_vision_model(family, **options)


def adapted(family="llama", *, dtype=torch.float32, tied=None, **options):
    tie = {} if tied is None else {"tie_word_embeddings": tied}
    return disturbed(LoRAAdapter(r=4, **options).add_to(build(family, dtype=dtype, **tie)))


def wrapped(family="llama", *, tied=False, **options):
    """What users do: PEFT's own model around theirs."""
    options = {"r": 4, "target_modules": ["q_proj", "o_proj"], "task_type": "CAUSAL_LM", **options}
    model = tiny_model(family, tie_word_embeddings=tied)
    return disturbed(peft.get_peft_model(model, peft.LoraConfig(**options)))


def disturbed(model):
    torch.manual_seed(5)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn_like(parameter)
    return model


def raw(model):
    """What the strategies hand over."""
    return StrategySupport(None).named_weights(model)


def saved(model, folder, **options):
    if isinstance(model, PreTrainedModel) and has_adapters(model):  # transformers asks for a newer PEFT than it needs
        save_adapter(model, folder)
    else:
        model.save_pretrained(folder, **options)
    return {name: value for file in folder.rglob("*.safetensors") for name, value in load_file(file).items()}


def assert_same(stream, expected):
    stream = list(stream)
    actual = dict(stream)
    assert len(actual) == len(stream)
    assert actual.keys() == expected.keys()
    for name, value in actual.items():
        assert not value.requires_grad
        assert value.dtype == expected[name].dtype, name
        assert torch.equal(value, expected[name]), name


@DTYPES
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", [*FAMILIES, *VISION_FAMILIES])
def test_a_model_is_as_saved(family, tied, dtype, tmp_path):
    model = build(family, dtype=dtype, **({} if family in VISION_FAMILIES else {"tie_word_embeddings": tied}))
    assert_same(checkpoint_weights(model, raw(model)), saved(model, tmp_path / "first"))
    if family in ("qwen3_moe", "qwen2_5_vl", "gemma3"):  # it knows the form of the checkpoint that it was read from
        loaded = type(model).from_pretrained(tmp_path / "first")
        assert_same(checkpoint_weights(loaded, raw(loaded)), saved(loaded, tmp_path / "second"))


def test_weights_that_checkpoints_keep_fused(tmp_path):
    """Several weights in memory are one in the checkpoint."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "hrm_text", vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=64, pad_token_id=0, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = LoRAAdapter(r=4).add_to(AutoModelForCausalLM.from_config(config))
    expected = saved(merged_copy(disturbed(model)), tmp_path)
    assert any("gqkv_proj" in name for name in expected)
    assert_same(checkpoint_weights(model, raw(model)), expected)


ADAPTED = pytest.mark.parametrize("family", [*FAMILIES, *VISION_FAMILIES])


@DTYPES
@pytest.mark.parametrize("options", [{}, {"use_rslora": True}, {"use_dora": True}], ids=str)
@ADAPTED
def test_adapters_are_merged_as_in_a_merged_copy(family, options, dtype, tmp_path):
    model = adapted(family, dtype=dtype, **options)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    expected = saved(merged_copy(model), tmp_path)
    assert_same(checkpoint_weights(model, raw(model)), expected)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@DTYPES
@pytest.mark.parametrize("use_dora", [False, True])
@ADAPTED
def test_adapter_and_base_separately(family, use_dora, dtype, tmp_path):
    model = adapted(family, dtype=dtype, use_dora=use_dora)
    assert_same(base_weights(model, raw(model)), saved(build(family, dtype=dtype), tmp_path / "base"))
    assert_same(adapter_weights(model, raw(model)), saved(model, tmp_path / "adapter"))
    written = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    config = adapter_config(model)
    assert json.loads(json.dumps(config)) == config
    assert config.pop("target_modules") == sorted(written.pop("target_modules"))
    assert config == written
    assert config["use_dora"] is use_dora


WRAPPED = {
    "plain": {},
    "DoRA": {"use_dora": True},
    "embedding": {"target_modules": ["embed_tokens", "q_proj", "lm_head"]},
    "embedding, DoRA": {"target_modules": ["embed_tokens", "q_proj"], "use_dora": True},
    "tied embedding": {"target_modules": ["embed_tokens", "q_proj"], "tied": True},
    "GPT2's embedding": {"family": "gpt2", "target_modules": ["wte", "c_attn"]},
    "biases beside": {"family": "qwen2", "bias": "all"},
    "biases of its layers": {"family": "qwen2", "bias": "lora_only"},
    "bias in the adapter": {"family": "qwen2", "target_modules": ["q_proj"], "lora_bias": True},
    "ranks of layers": {"rank_pattern": {"layers.1.self_attn.q_proj": 2}, "alpha_pattern": {"o_proj": 3}},
    "whole head": {"modules_to_save": ["lm_head"]},
    "whole tied head": {"modules_to_save": ["lm_head"], "tied": True},
    "whole tied embedding": {"modules_to_save": ["embed_tokens"], "tied": True},
    "both, which stay tied": {"modules_to_save": ["embed_tokens"], "tied": True, "ensure_weight_tying": True},
    "experts in one weight": {
        "family": "qwen3_moe",
        "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    },
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("options", WRAPPED.values(), ids=WRAPPED)
def test_models_wrapped_by_peft(options, tmp_path):
    model = wrapped(**options)
    plain = tiny_model(options.get("family", "llama"), tie_word_embeddings=options.get("tied", False))
    assert_same(checkpoint_weights(model, raw(model)), saved(merged_copy(model), tmp_path / "merged"))
    assert_same(adapter_weights(model, raw(model)), saved(model, tmp_path / "adapter"))
    if "bias" not in options:  # the base's own are trained then
        assert_same(base_weights(model, raw(model)), saved(plain, tmp_path / "base"))


def test_names_may_come_without_the_prefix_of_peft(tmp_path):
    model = wrapped()
    expected = saved(merged_copy(model), tmp_path)
    assert_same(checkpoint_weights(model, raw(base_of(model))), expected)
    assert_same(checkpoint_weights(base_of(model), raw(model)), expected)


def test_only_the_active_adapter(tmp_path):
    model = wrapped()
    other = peft.LoraConfig(r=2, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    model.add_adapter("other", other)
    first = dict(checkpoint_weights(model, raw(model)))
    model.set_adapter("other")
    assert_same(checkpoint_weights(model, raw(model)), saved(merged_copy(model), tmp_path / "merged"))
    assert_same(adapter_weights(model, raw(model)), saved(model, tmp_path / "own", selected_adapters=["other"]))
    assert adapter_config(model)["r"] == 2
    second = dict(checkpoint_weights(model, raw(model)))
    changed = {name.split(".")[-2] for name in first if not torch.equal(first[name], second[name])}
    assert changed == {"q_proj", "o_proj", "up_proj"}


FUNCTIONS = pytest.mark.parametrize("function", [checkpoint_weights, adapter_weights, base_weights])


@FUNCTIONS
@pytest.mark.parametrize("use_dora", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "qwen3_vl"])
def test_nothing_is_read_from_the_model(family, use_dora, function):
    """As under ZeRO-3, where its tensors are empty."""
    model = adapted(family, use_dora=use_dora)
    weights = [(name, value.clone()) for name, value in raw(model)]
    expected = {name: value.clone() for name, value in function(model, raw(model))}
    for parameter in model.parameters():
        parameter.data = torch.empty(0, dtype=parameter.dtype)
    assert_same(function(model, iter(weights)), expected)


@pytest.fixture
def two_ranks():
    """This process as one of two that never hear of each other."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield torch.distributed.init_device_mesh("cpu", (2,))
    torch.distributed.destroy_process_group()


@FUNCTIONS
def test_a_sharded_model(function, two_ranks):
    """FSDP2 has changed the classes of its modules, whose weights are shards, and hangs hooks on them."""
    from torch.distributed.fsdp import fully_shard

    model = adapted("qwen3_moe", use_dora=True)
    weights = [(name, value.clone()) for name, value in raw(model)]
    expected = {name: value.clone() for name, value in function(model, raw(model))}
    for layer in model.model.layers:
        fully_shard(layer.self_attn.q_proj, mesh=two_ranks)  # one of PEFT's
        fully_shard(layer, mesh=two_ranks)
    fully_shard(model, mesh=two_ranks)
    model.model.layers[0].self_attn.k_proj.register_forward_hook(lambda *_: None)
    assert_same(function(model, iter(weights)), expected)


def bytes_held():
    """Of all tensors that came since `gc.freeze`, each storage once."""
    storages = {}
    for own in gc.get_objects():
        if isinstance(own, torch.Tensor):
            storage = own.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def peak_bytes(stream_of, weights):
    """The most that is held, just before the stream is asked for the next weight and just after it gave one."""
    gc.collect()
    gc.freeze()
    peak = 0

    def source():
        nonlocal peak
        for name, value in weights:
            peak = max(peak, bytes_held())
            yield name, value.clone()

    for _ in stream_of(source()):
        peak = max(peak, bytes_held())
        del _
    return peak


@FUNCTIONS
def test_at_most_one_module_is_held(function):
    model = LoRAAdapter(r=4).add_to(
        tiny_model("qwen3_moe", num_hidden_layers=12, intermediate_size=256, hidden_size=64, moe_intermediate_size=64)
    )
    weights = [(name, value.detach()) for name, value in raw(model)]
    modules = [sum(p.nbytes for p in module.parameters(recurse=False)) for module in model.modules()]
    total, largest = sum(modules), max(modules)
    assert total > 12 * largest
    peak = peak_bytes(lambda source: function(model, source), weights)
    assert peak <= 2.2 * largest  # a module's own and what is made of them
    assert peak_bytes(lambda source: list(function(model, source)), weights) > 6 * peak


def test_a_dense_model_passes_straight_through():
    """Each weight comes out before the next is asked for, in its own storage."""
    model = tiny_model("qwen3")
    asked, source = [], raw(model)

    def watched():
        for name, value in source:
            asked.append((name, value.data_ptr()))
            yield name, value

    for name, value in checkpoint_weights(model, watched()):
        assert asked[-1] == (name, value.data_ptr())


def test_missing_and_unexpected_weights_are_refused():
    model = tiny_model()
    weights = dict(raw(model))
    last = next(reversed(weights))
    missing = {name: value for name, value in weights.items() if name != "model.layers.1.mlp.up_proj.weight"}
    for items, message in (
        (missing.items(), "without 1 of LlamaForCausalLM, such as 'model.layers.1.mlp.up_proj"),
        ({**weights, "critic.weight": weights[last]}.items(), "has 'critic.weight'"),
        ([*weights.items(), (last, weights[last])], f"has '{last}' twice"),
    ):
        with pytest.raises(ValueError, match=message):
            list(checkpoint_weights(model, items))


def test_refusals_come_before_anything_is_read():
    def never():
        raise AssertionError
        yield

    for refused in (lambda: adapter_weights(tiny_model(), never()), lambda: adapter_config(tiny_model())):
        with pytest.raises(ValueError, match="0 active adapters"):
            refused()
    merged = wrapped()
    merged.merge_adapter()
    with pytest.raises(ValueError, match="unmerge_adapter"):
        base_weights(merged, never())
    with pytest.raises(TypeError, match="TrainableTokensWrapper"):
        checkpoint_weights(wrapped(trainable_token_indices=[1, 2]), never())


def test_a_form_that_cannot_be_reversed():
    from transformers.core_model_loading import ConversionOps, Transpose, WeightConverter

    class OneWay(ConversionOps):
        def convert(self, input_dict, source_patterns, target_patterns, **kwargs):
            return input_dict

    model = tiny_model()
    model._weight_conversions = [WeightConverter("mlp.up_proj", "mlp.up_proj", operations=[OneWay()])]
    with pytest.raises(ValueError, match="stores weights differently"):
        checkpoint_weights(model, raw(model))
    checked = [Transpose(0, 1, check_dims=True)]  # looks at the shape that the model has
    model._weight_conversions = [WeightConverter("mlp.wi.weight", "mlp.up_proj.weight", operations=checked)]
    with pytest.raises(ValueError, match="differently"):
        list(checkpoint_weights(model, raw(model)))


def test_peft_does_not_ask_the_hub(monkeypatch):
    import peft.utils.save_and_load as theirs

    monkeypatch.setattr(theirs, "check_file_exists_on_hf_hub", lambda *_: pytest.fail("the hub was asked"))
    model = wrapped()
    model.peft_config["default"].base_model_name_or_path = "somebody/somewhere"
    assert dict(adapter_weights(model, raw(model)))
    assert adapter_config(model)["base_model_name_or_path"] == "somebody/somewhere"

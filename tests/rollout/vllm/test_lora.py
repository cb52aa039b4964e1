"""A LoRA adapter by itself in a running vLLM, on a base that was sent once."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.adapted import POLICIES, adapted, adapter_bytes, assert_like_merged, renew, sync
from helpers.engines import new_engine, new_policy
from helpers.rollouts import PROMPTS, assert_same, ids, reference_logprobs
from helpers.tiny_vision import tiny_image, tiny_processor, vision_group
from helpers.vllm_engines import LONG, assert_greedy, nudged, sample, started
from lightning.pytorch import Callback, Trainer, seed_everything
from safetensors.torch import load_file

from pl_grouprl.algorithms import GRPO, OptimizerConfig
from pl_grouprl.data import PromptDataModule
from pl_grouprl.demo import MostFrequentDigit
from pl_grouprl.distributed.checksum import WeightsMismatchError
from pl_grouprl.distributed.weight_stream import adapter_config, checkpoint_weights
from pl_grouprl.models import LoRAAdapter
from pl_grouprl.rollout.engine import AdapterWeights
from pl_grouprl.rollout.vllm.adapter import adapter_folder
from pl_grouprl.types import SamplingConfig

pytestmark = pytest.mark.vllm
pytest.importorskip("vllm")
peft = pytest.importorskip("peft")

from helpers.vllm_vision import fresh_logprobs, import_vllm_models  # noqa: E402
from helpers.vllm_vision import tiny_model as tiny_vision  # noqa: E402


@pytest.fixture
def start():
    """Engines with a policy's base and adapter."""
    with started(lambda engine, model: sync(engine, model, base=True), adapter="separate", kv_cache_gib=0.1) as start:
        yield start


@pytest.mark.parametrize("policy", POLICIES)
def test_new_adapters_are_sampled_from(start, policy):
    model = adapted(policy)
    engine = start(model)
    prompts = [*PROMPTS, LONG[0]]
    seen = [assert_greedy(engine, model, prompts)]
    for seed in (1, 2):
        renew(model, seed)
        assert ids(sample(engine, prompts, temperature=0.0)) == seen[-1]  # until the engine is given it
        figures = sync(engine, model)
        assert figures["bytes"] == adapter_bytes(model)
        seen.append(assert_greedy(engine, model, prompts))
        assert all(new != before for new, before in zip(seen[-1], seen[-2], strict=True))
    with torch.no_grad():  # another base can follow
        for name, parameter in model.named_parameters():
            if "lora_" not in name and parameter.ndim > 1:
                parameter.copy_(parameter.flip(0))
    sync(engine, model, base=True)
    assert_greedy(engine, model)
    renew(model, 3)
    sync(engine, model)
    assert_greedy(engine, model)
    assert engine.version == 5


def test_each_of_twenty_syncs_is_sampled_from(start):
    model = adapted()
    engine, before = start(model), None
    for seed in range(20):
        renew(model, seed, scale=0.1)
        sync(engine, model)
        found = assert_like_merged(engine, model)
        assert before is None or not any(map(torch.equal, found, before))
        assert engine._vllm._adapter.lora_name == f"policy-{engine.version}"
        before, stale = found, engine._vllm._adapter
    sync(engine, model)
    engine._vllm._adapter = stale
    with pytest.raises(Exception, match=f"{stale.lora_name}"):
        sample(engine)


@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["v_proj", "down_proj"]},
        {"r": 3, "use_rslora": True},
        {"rank_pattern": {"q_proj": 20, r"layers\.1\.mlp\.up_proj": 2}, "alpha_pattern": {"k_proj": 5, "o_proj": 40}},
        {"layers_to_transform": [1], "layers_pattern": "layers", "target_modules": ["q_proj", "gate_proj"]},
        {"init_lora_weights": "pissa"},
    ],
)
def test_adapters_of_other_forms(start, options):
    model = adapted(**options)
    engine = start(model)
    before = assert_greedy(engine, model)
    renew(model, 1)
    sync(engine, model)
    assert assert_greedy(engine, model) != before


def test_merged_and_separate_agree(start):
    model = adapted("llama")
    merged = new_engine("vllm", kv_cache_gib=0.1)
    merged.bind(model)
    try:
        merged.update_weights(checkpoint_weights(model, model.named_parameters()), version=1)
        expected = sample(merged, max_new_tokens=16)
    finally:
        merged.close()
    assert_same(sample(start(model), max_new_tokens=16), expected, atol=1e-4)


def test_bfloat16(start):
    """The adapter is trained in float32 and sampled with in bfloat16; vLLM's own rounding is what remains."""
    model = adapted(dtype=torch.bfloat16, lora_alpha=11)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name)))
    engine = start(model)
    model.float()
    for prompt, (rollout,) in zip(PROMPTS, sample(engine, max_new_tokens=16), strict=True):
        expected = reference_logprobs(model, prompt, rollout, SamplingConfig())
        torch.testing.assert_close(torch.tensor(rollout.logprobs), expected, atol=0.1, rtol=0)


def test_leftovers_of_an_older_adapter_are_detected(start, monkeypatch):
    """In a part of a layer that this adapter has not."""
    model = adapted(target_modules=["q_proj", "v_proj"])
    engine = start(model)
    load = engine._vllm.load_adapter

    def load_and_leave(version, config, weights):
        load(version, config, weights)
        worker = engine._vllm._engine.model_executor.driver_worker.worker
        layer = worker.model_runner.get_model().lora_manager.modules["model.layers.1.self_attn.qkv_proj"]
        layer.lora_b_stacked[1][0, 0, 0, 0] = 1.0

    monkeypatch.setattr(engine._vllm, "load_adapter", load_and_leave)
    with pytest.raises(WeightsMismatchError, match=r"1 differ: model.layers.1.self_attn.k_proj.lora_B was not sent"):
        sync(engine, model)


def never():
    """A stream that nothing may be read of."""
    pytest.fail("weights were read")
    yield


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"lora_bias": True}, "lora_bias"),
        ({"bias": "lora_only"}, "bias='lora_only'"),
        ({"trainable_token_indices": [1, 2]}, "trainable_token_indices"),
        ({"r": 600}, "rank 600"),
        ({"rank_pattern": {"q_proj": 600}}, "rank 600"),
        ({"target_modules": ["q_proj", "embed_tokens"]}, "embed_tokens"),
        ({"target_modules": ["q_proj", "lm_head"]}, "lm_head"),
    ],
)
def test_adapters_that_vllm_would_apply_differently_are_refused(options, message):
    model = adapted(**options)
    engine = new_engine("vllm", adapter="separate")
    engine.bind(model)
    with pytest.raises(ValueError, match=rf"{message}.*; pass adapter='merged'"):
        engine.update_weights(never(), version=1, adapter=AdapterWeights(adapter_config(model), never()))
    assert engine._vllm._engine is None


def test_auto_is_separate_where_vllm_can_apply_the_adapter(caplog, monkeypatch):
    model = adapted()
    for engine, policy, reason in (
        (new_engine("vllm"), model, None),
        (new_engine("vllm", adapter="merged"), model, ""),
        (new_engine("vllm"), new_policy("llama")[0], ""),
        (new_engine("vllm"), adapted(use_dora=True), "use_dora=True"),
        (new_engine("vllm", sleep_level=2), model, "sleep_level is 2"),
    ):
        caplog.clear()
        with caplog.at_level("INFO"):
            engine.bind(policy)
        assert engine.adapter == ("separate" if reason is None else "merged")
        assert (reason or "") in caplog.text
    monkeypatch.setattr("vllm.model_executor.models.supports_lora", lambda kind: False)
    with caplog.at_level("INFO"):
        new_engine("vllm").bind(model)
    assert "merged into its base: vLLM's Qwen3ForCausalLM takes no adapter." in caplog.text


def test_other_adapters_and_scales_are_refused():
    model = adapted()
    engine = new_engine("vllm", adapter="separate")
    engine.bind(model)
    config = adapter_config(model)
    with pytest.raises(ValueError, match="peft_type"):
        engine.update_weights(never(), version=1, adapter=AdapterWeights({**config, "peft_type": "LOHA"}, never()))
    model.base_model.model.model.layers[0].mlp.up_proj.scale_layer(0.5)
    with pytest.raises(ValueError, match="up_proj is scaled by"):
        engine.update_weights(never(), version=1, adapter=AdapterWeights(config, never()))


def test_what_was_not_asked_for_is_refused(start):
    model = adapted()
    with pytest.raises(ValueError, match="sleep_level"):
        new_engine("vllm", adapter="separate", sleep_level=2)
    with pytest.raises(ValueError, match="max_loras"):
        new_engine("vllm", engine_kwargs={"max_loras": 2})
    engine = start(model)
    engine.close()
    with pytest.raises(ValueError, match="no base"):
        sync(engine, model)


def test_ranks_that_share_an_engine(tmp_path):
    """Each has some rows or columns of the adapter."""
    command = [sys.executable, Path(__file__).with_name("lora_ranks.py"), tmp_path]
    run = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-4000:]


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_prompts_with_images(start, family):
    """The language model has an adapter; the tower beside it cannot."""
    import_vllm_models()
    policy, processor = tiny_vision(family), tiny_processor(family)
    model = LoRAAdapter(r=8, alpha=16).add_to(policy).eval()
    renew(model, 0)
    engine = start(model, max_model_len=256, max_num_seqs=8)
    groups = [vision_group(processor, "cat?", [tiny_image(0)], []), vision_group(processor, "text", [], [])]
    prompts, media = [group.prompt_ids for group in groups], [group.media for group in groups]
    for seed in (1, 2):
        renew(model, seed)
        sync(engine, model)
        sampled = engine.generate(prompts, SamplingConfig(max_new_tokens=8), num_generations=2, seed=3, media=media)
        for prompt, own, rollouts in zip(prompts, media, sampled, strict=True):
            for rollout in rollouts:
                expected = fresh_logprobs(model, prompt, own, rollout)
                torch.testing.assert_close(torch.tensor(rollout.logprobs), expected, atol=1e-3, rtol=0)
    tower = peft.get_peft_model(tiny_vision(family), peft.LoraConfig(target_modules=r".*visual.*\.qkv"))
    engine.bind(tower)
    with pytest.raises(ValueError, match=r"on model\.visual\.blocks\.0\.attn\.qkv, a Linear, and vLLM's are"):
        sync(engine, tower, base=True)


def test_the_folder_is_private_and_temporary():
    with adapter_folder({"r": 1, "init_lora_weights": "pissa"}, {"weight": torch.ones(2)}) as folder:
        assert Path(folder).stat().st_mode & 0o777 == 0o700
        assert json.loads(Path(folder, "adapter_config.json").read_text()) == {"r": 1, "init_lora_weights": True}
        assert torch.equal(load_file(Path(folder, "adapter_model.safetensors"))["weight"], torch.ones(2))
    assert not Path(folder).exists()


class Adapted:
    """A policy of small size with an adapter."""

    def load(self):
        return LoRAAdapter(r=8, alpha=32).add_to(new_policy("digits")[0])

    def load_tokenizer(self):
        return new_policy("digits")[1]


class Metrics(Callback):
    """Of every step."""

    def __init__(self):
        self.steps = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.steps.append({name: float(value) for name, value in trainer.callback_metrics.items()})


def test_grpo(tmp_path):
    """Each step's rollouts are of the adapter that is trained in it."""
    seed_everything(1, verbose=False)
    task = MostFrequentDigit(prompt_length=8, train_size=16, val_size=4)
    module = GRPO(
        Adapted(),
        lambda completions, **columns: [sum(c.isalpha() for c in text) for text in completions],
        engine=new_engine("vllm", adapter="separate", kv_cache_gib=0.1),
        num_generations=4,
        sampling=SamplingConfig(max_new_tokens=8),
        optimizer=OptimizerConfig(learning_rate=0.02),
        importance_sampling={"mode": "token_truncate"},
        sharing={"verify": False},
    )
    metrics = Metrics()
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
    trainer = Trainer(max_steps=4, callbacks=[metrics], default_root_dir=tmp_path, **options)
    trainer.fit(module, PromptDataModule(task, batch_size=4))
    own = sum(p.nbytes for p in module.policy.parameters() if p.requires_grad)
    everything = sum(p.nbytes for p in module.policy.parameters())
    assert [step["sync/bytes"] for step in metrics.steps] == [everything, own, own, own]
    for step in metrics.steps:
        assert step["sampling/sampling_logp_difference/max"] < 1e-3


@pytest.fixture(scope="module")
def running():
    """An engine that stays; a process has one at a time, so nothing that starts another may follow."""
    model = adapted("qwen2 tied")
    engine = new_engine("vllm", adapter="separate", kv_cache_gib=0.1)
    engine.bind(model)
    sync(engine, model, base=True)
    yield engine, model
    engine.close()


def assert_well_again(engine, model):
    assert engine.version is None
    with pytest.raises(RuntimeError, match="has no weights"):
        sample(engine)
    sync(engine, model)
    assert_greedy(engine, model, PROMPTS[:1], 4)


@pytest.mark.parametrize("layer", ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"])
@pytest.mark.parametrize("part", ["lora_A", "lora_B"])
def test_a_flipped_bit_is_detected(running, monkeypatch, layer, part):
    """The last entry of one weight arrives as the number next to it."""
    engine, model = running
    load, changed = engine._vllm.load_adapter, f"layers.1.{'mlp' if layer[0] in 'gud' else 'self_attn'}.{layer}.{part}"

    def load_otherwise(version, config, weights):
        (name,) = (name for name in weights if changed in name)
        load(version, config, {**weights, name: nudged(weights[name])})

    with monkeypatch.context() as patch:
        patch.setattr(engine._vllm, "load_adapter", load_otherwise)
        with pytest.raises(WeightsMismatchError, match=rf"1 differ: \S*{changed}"):
            sync(engine, model)
    assert_well_again(engine, model)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda config, own: (config, {name: w for name, w in own.items() if "layers.0.mlp.up_proj" not in name}),
            r"2 differ: \S*layers.0.mlp.up_proj.lora_A",
        ),
        (lambda config, own: ({**config, "lora_alpha": 17}, own), "14 differ: "),
    ],
    ids=["a missing weight", "another scale"],
)
def test_an_adapter_that_arrives_otherwise_is_detected(running, monkeypatch, change, message):
    engine, model = running
    load = engine._vllm.load_adapter
    with monkeypatch.context() as patch:
        patch.setattr(engine._vllm, "load_adapter", lambda version, *own: load(version, *change(*own)))
        with pytest.raises(WeightsMismatchError, match=message):
            sync(engine, model)
    assert_well_again(engine, model)


def test_an_unloaded_adapter_is_detected(running, monkeypatch):
    engine, model = running
    with monkeypatch.context() as patch:
        patch.setattr(engine._vllm._engine, "add_lora", lambda request: True)
        with pytest.raises(WeightsMismatchError, match="was sent, but no parameter contains it"):
            sync(engine, model)
    assert_well_again(engine, model)


def test_a_changed_base_is_detected(running):
    engine, model = running
    norm = engine._vllm._engine.model_executor.driver_worker.worker.model_runner.get_model().model.norm.weight
    kept = norm.clone()
    with torch.no_grad():
        norm[0] += 1
    with pytest.raises(WeightsMismatchError, match=r"1 differ: model.norm.weight differs from what was sent"):
        sync(engine, model)
    with torch.no_grad():
        norm.copy_(kept)
    assert_well_again(engine, model)

"""The plan of a run has the figures of the run."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers.quantized import save_policy
from helpers.qwen_tokenizer import qwen_tokenizer
from helpers.sweeps import sweep_pairs

from pl_grouprl import GRPO, PPO, OptimizerConfig, PromptDataModule, SamplingConfig
from pl_grouprl.chat.format import read_template
from pl_grouprl.cli import RLTrainer, main
from pl_grouprl.models import LoRAAdapter, LoRACritic, PretrainedCritic, PretrainedPolicy, SharedTrunkCritic
from pl_grouprl.planning import Hardware, plan_run
from pl_grouprl.planning.memory import count_devices, strategy_name
from pl_grouprl.planning.plan import rounded
from pl_grouprl.rollout import HFRolloutEngine
from pl_grouprl.training.optimizer import build_optimizer

ROWS = [{"prompt": "1 2 3 4", "answer": "4"}, {"prompt": "1 2", "answer": "2"}]
SIZES = {"0.6B": (1024, 3072, 28, 16), "1.7B": (2048, 6144, 28, 16), "4B": (2560, 9728, 36, 32)}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return save_policy(tmp_path_factory.mktemp("policy"))


def zero(completions, **columns):
    return [0.0] * len(completions)


def planned(module, batch_size=2, **options):
    data = PromptDataModule(train=ROWS, batch_size=batch_size)
    trainer = RLTrainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    trainer.planned_options = {"precision": "bf16-mixed", "devices": 1, **options}
    return trainer.plan(module, data)


def counted(module):
    """Bytes of the loaded models, of their gradients and of the optimizer's moments after a step."""
    module.load_models()
    parts = module.optimized_parts()
    optimizer = build_optimizer(parts, lambda: 0)["optimizer"]
    loaded = [own for own in (module.policy, module.reference, getattr(module, "critic", None)) if own is not None]
    parameters = list({p.data_ptr(): p for own in loaded for p in own.parameters()}.values())  # tied ones once
    for parameter in parameters:
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    names = ("exp_avg", "exp_avg_sq", "state1", "state2", "absmax1", "absmax2")
    moments = sum(state[name].nbytes for state in optimizer.state.values() for name in names if name in state)
    gradients = sum(p.grad.nbytes for p in parameters if p.grad is not None)
    return sum(p.nbytes for p in parameters), gradients, moments


MODULES = {
    "full": lambda path: GRPO(path, zero),
    "bfloat16": lambda path: GRPO(PretrainedPolicy(path, "bfloat16"), zero, beta=0.1),
    "8 bits": lambda path: GRPO(path, zero, optimizer=OptimizerConfig(state_bits=8)),
    "LoRA on two layers, DoRA": lambda path: GRPO(
        PretrainedPolicy(path, "bfloat16", adapter=LoRAAdapter(r=4, target_modules=["q_proj"], use_dora=True)),
        zero,
        beta=0.1,
    ),
    "critic, 8 bits": lambda path: PPO(path, zero, critic_optimizer=OptimizerConfig(state_bits=8)),
    "critic's own folder": lambda path: PPO(path, zero, critic=PretrainedCritic(path)),
    "critic on the trunk": lambda path: PPO(path, zero, critic=SharedTrunkCritic()),
    "critic with an adapter": lambda path: PPO(
        PretrainedPolicy(path, adapter=LoRAAdapter(r=4)), zero, critic=LoRACritic(r=2)
    ),
}


@pytest.mark.parametrize("name", MODULES)
def test_figures_are_the_counted_bytes(name, path):
    module = MODULES[name](path)
    plan = planned(module)
    assert module.policy is None  # nothing is loaded
    held = plan.footprint
    weights, gradients, moments = counted(MODULES[name](path))
    assert held.policy.weights + held.critic.weights + held.reference == weights
    assert held.policy.gradients + held.critic.gradients == gradients
    assert held.policy.moments + held.critic.moments == moments
    parts = ("weights", "gradients", "moments", "reference", "critic")
    assert sum(plan.memory[part] for part in parts) == held.resident == weights + gradients + moments


def test_tokens_are_those_of_the_data(path):
    """By hand: prompts of 4 and 2 digits, 8 rollouts of 6 tokens."""
    work = planned(GRPO(path, zero, sampling=SamplingConfig(max_new_tokens=6))).workload
    lengths = work.prompt_lengths
    assert work.tokens("shared") == sum(lengths) + 2 * 8 * 6
    assert work.tokens("repeated") == 8 * sum(lengths) + 2 * 8 * 6
    assert work.longest_micro_batch == 2 * (lengths[-1] + 8 * 6)
    assert work.cached_tokens == 2 * lengths[-1] + 2 * 8 * 6
    limited = planned(GRPO(path, zero, sampling=SamplingConfig(max_new_tokens=6), max_tokens_per_micro_batch=20))
    assert limited.workload.longest_micro_batch == 20


def test_the_largest_budget_fits_and_the_next_does_not(path):
    plan = planned(GRPO(path, zero))
    gib = 0.01
    budget, held = plan.footprint.largest_budget(gib, False), plan.footprint

    def total(tokens):
        return held.resident + held.copies + held.activations(tokens, False) + held.logits(tokens, False)

    assert total(budget) <= gib * 2**30 * 0.9 < total(budget + 1)


def test_a_rate_gives_a_least_time(path):
    module = GRPO(path, zero)
    plan = planned(module)
    assert plan.step_seconds() is None
    assert "no time estimate" in str(plan)
    data = PromptDataModule(train=ROWS, batch_size=2, tokenizer=module.policy_source.load_tokenizer())
    data.setup("fit")
    known = plan_run(module, data, Hardware("bf16-mixed", device="h100"))
    _, trained = known.step_operations()
    attention = known.workload.operations(replace(known.models.cost, per_token=0, per_prediction=0), "shared")
    # Checkpointed on a GPU: 4 forwards.
    for newest, share in ((False, 0.35), (True, 0.75)):
        expected = (trained + 4 * attention * (1 / share - 1)) / 989e12
        assert known.step_seconds(newest_flash=newest)[1] == pytest.approx(expected)
    assert "h100" in str(known)
    assert "with FlashAttention-3 installed" in str(known)
    assert plan_run(module, data, Hardware("32-true", device="h100")).step_seconds() is None


def test_an_update_is_a_forward_and_two_of_backward(path):
    plan = planned(GRPO(path, zero, beta=0.1, num_iterations=2))
    forward = plan.workload.operations(plan.models.cost, "shared")
    assert plan.step_operations() == pytest.approx((forward, forward * (2 * 3 + 2)))  # old scores, reference
    lora = planned(GRPO(PretrainedPolicy(path, adapter=LoRAAdapter(r=4), gradient_checkpointing=True), zero))
    assert lora.step_operations() == pytest.approx((forward, forward * 3))
    saving = planned(GRPO(PretrainedPolicy(path, gradient_checkpointing="attention"), zero))
    attention = plan.workload.operations(plan.models.cost, "shared") - plan.workload.operations(
        replace(plan.models.cost, per_pair={}), "shared"
    )
    assert saving.step_operations() == pytest.approx((forward, forward * 4 - attention))
    assert "gradient checkpointing, attention saved" in str(saving)


@pytest.mark.parametrize(
    ("strategy", "name"),
    [
        ("auto", "ddp"),
        ("ddp_spawn", "ddp"),
        ("deepspeed_stage_3", "deepspeed_stage_3"),
        ({"class_path": "lightning.pytorch.strategies.ModelParallelStrategy", "init_args": {}}, "fsdp2"),
        (
            {"class_path": "lightning.pytorch.strategies.DeepSpeedStrategy", "init_args": {"stage": 3}},
            "deepspeed_stage_3",
        ),
    ],
)
def test_strategies_by_name(strategy, name):
    assert Hardware.of_trainer({"strategy": strategy, "devices": 2}).strategy == strategy_name(strategy, 2) == name


def test_devices_are_counted():
    assert [count_devices(own) for own in (4, "4", [0, 1], "0,1,2")] == [4, 4, 2, 3]
    assert Hardware.of_trainer({"devices": 2, "num_nodes": 3}).processes == 6
    assert rounded(53_999) == 53_000


@pytest.mark.parametrize("options", [{"strategy": "tpu"}, {"device": "h1"}])
def test_unknown_names_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        Hardware(**options)


def test_what_cannot_be_planned_is_refused(path):
    class Source:
        def load(self):
            raise NotImplementedError

        def load_tokenizer(self):
            return PretrainedPolicy(path).load_tokenizer()

    with pytest.raises(TypeError, match="load_config"):
        planned(GRPO(Source(), zero))
    with pytest.raises(TypeError, match="PromptDataModule"):
        plan_run(GRPO(path, zero), None, Hardware())


def save_config_and_rows(folder: Path, size: str) -> None:
    """What `plan` reads of a run on Qwen3 and GSM8K: config, tokenizer, and rows up to the length limit."""
    import pyarrow as pa
    from pyarrow import parquet
    from transformers import Qwen3Config

    hidden, inner, layers, heads = SIZES[size]
    model = folder / "Qwen" / f"Qwen3-{size}"
    tokenizer = qwen_tokenizer()
    tokenizer.chat_template = read_template("qwen3")
    tokenizer.save_pretrained(model)
    Qwen3Config(
        hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=8, head_dim=128, vocab_size=151936, tie_word_embeddings=True,
    ).save_pretrained(model)  # fmt: skip
    rows = [
        {"data_source": "openai/gsm8k", "prompt": [{"role": "user", "content": "7" * length}],
         "reward_model": {"style": "rule", "ground_truth": "7"}}
        for length in [100] * 31 + [400]
    ]  # fmt: skip
    (folder / "data" / "gsm8k").mkdir(parents=True)
    for split in ("train", "test"):
        parquet.write_table(pa.Table.from_pylist(rows), folder / "data" / "gsm8k" / f"{split}.parquet")


@pytest.mark.parametrize(
    ("config", "size", "gib"),
    sweep_pairs(
        [("grpo_qwen3_gsm8k", "0.6B", 24), ("grpo_qwen3_1.7b_gsm8k", "1.7B", 48), ("grpo_qwen3_4b_gsm8k", "4B", 24)],
        quick=[("grpo_qwen3_gsm8k", "0.6B", 24)],
    ),
)
def test_the_configurations_fit_where_they_say(config, size, gib, tmp_path, monkeypatch, capsys):
    root = Path.cwd()
    assert f"one GPU with {gib} GB or more" in (root / "configs" / f"{config}.yaml").read_text().replace("\n# ", " ")
    save_config_and_rows(tmp_path, size)
    monkeypatch.chdir(tmp_path)  # transformers prefers a folder of that name to the hub
    main(["plan", "--config", config, "--device", "h100"])
    page = capsys.readouterr().out
    fits = {int(line.split()[0]): "fits as configured" in line for line in page.splitlines() if " GB  " in line}
    assert fits == {own: own >= gib for own in (24, 48, 80, 141)}
    assert "Qwen3ForCausalLM with" in page
    assert "at least" in page
    assert json.dumps(sorted(path.name for path in tmp_path.iterdir())) == '["Qwen", "data"]'  # nothing is written


FULL_4B = "policy: {init_args: {adapter: null, dtype: float32}}"


@pytest.mark.parametrize(
    ("config", "size", "gib", "options"),
    sweep_pairs(
        [
            SMALLER := ("grpo_qwen3_1.7b_gsm8k", "1.7B", 24, "optimizer: {state_bits: 8}"),
            ("grpo_qwen3_4b_gsm8k", "4B", 80, FULL_4B),
        ],
        quick=[SMALLER],
    ),
)
def test_less_memory_would_not_do(config, size, gib, options, tmp_path, monkeypatch, capsys):
    save_config_and_rows(tmp_path, size)
    monkeypatch.chdir(tmp_path)
    main(["plan", "--config", config, "--config", f"{{model: {{init_args: {{{options}}}}}}}"])
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith(f"  {gib} GB"))
    assert "fits as configured" not in line
    assert f"{'8-bit AdamW' if gib == 80 else 'LoRA'}: " in line


def test_too_few_prompts_are_an_error(path):
    with pytest.raises(ValueError, match="batch_size"):
        planned(GRPO(path, zero), batch_size=3)


def test_sequences_at_once_are_what_the_engine_bounds(path):
    sampling = SamplingConfig(max_new_tokens=6)
    plan = planned(GRPO(path, zero, sampling=sampling))
    config = PretrainedPolicy(path).load_config()
    per_token = config.num_hidden_layers * 2 * config.num_key_value_heads * config.head_dim * 2
    # Keys and values in bfloat16: 2 prompts as long as the longest, 16 responses of 6.
    assert plan.memory["caches"] == per_token * (2 * plan.workload.prompt_lengths[-1] + 16 * 6)
    assert "All 16 sequences at once need" in str(plan)
    page = str(planned(GRPO(path, zero, sampling=sampling, engine=HFRolloutEngine(max_sequences=4))))
    assert "at once need" not in page
    assert "KV caches of 4 sequences" in page

"""The plan of a run has the figures of the run."""

import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from helpers.quantized import save_policy
from helpers.qwen_tokenizer import qwen_tokenizer
from helpers.sweeps import sweep_pairs

from pl_grouprl import GRPO, PPO, Distillation, OptimizerConfig, PromptDataModule, SamplingConfig
from pl_grouprl.chat.format import read_template
from pl_grouprl.cli import RLTrainer, main
from pl_grouprl.models import FourBit, LoRAAdapter, LoRACritic, PretrainedCritic, PretrainedPolicy, SharedTrunkCritic
from pl_grouprl.planning import Hardware, plan_run
from pl_grouprl.planning.memory import USABLE, count_devices, strategy_name
from pl_grouprl.planning.plan import describe_servers, rounded
from pl_grouprl.rollout import HFRolloutEngine, VLLMRolloutEngine, VLLMServerRolloutEngine
from pl_grouprl.rollout.engine import SampleRequest
from pl_grouprl.training.micro_batches import SharingOptions
from pl_grouprl.training.optimizer import build_optimizer

ROWS = [{"prompt": "1 2 3 4", "answer": "4"}, {"prompt": "1 2", "answer": "2"}]
SIZES = {
    "0.6B": (1024, 3072, 28, 16),
    "1.7B": (2048, 6144, 28, 16),
    "4B": (2560, 9728, 36, 32),
    "short": (2048, 6144, 8, 16),
}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return save_policy(tmp_path_factory.mktemp("policy"))


def zero(completions, **columns):
    return [0.0] * len(completions)


def planned(module, batch_size=2, device=None, **options):
    data = PromptDataModule(train=ROWS, batch_size=batch_size)
    trainer = RLTrainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    trainer.planned_options = {"precision": "bf16-mixed", "devices": 1, **options}
    return trainer.plan(module, data, device)


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
    assert sum(list(plan.memory(24).values())[:5]) == held.resident == weights + gradients + moments


def test_tokens_are_those_of_the_data(path):
    """By hand: prompts of 4 and 2 digits, 8 rollouts of 6 tokens."""
    work = planned(GRPO(path, zero, sampling=SamplingConfig(max_new_tokens=6))).workload
    lengths = work.prompt_lengths
    assert work.tokens("shared") == sum(lengths) + 2 * 8 * 6
    assert work.tokens("repeated") == 8 * sum(lengths) + 2 * 8 * 6
    assert work.longest_micro_batch == 2 * (lengths[-1] + 8 * 6)
    assert work.sequences == 2 * 8
    limited = planned(GRPO(path, zero, sampling=SamplingConfig(max_new_tokens=6), max_tokens_per_micro_batch=20))
    assert limited.workload.longest_micro_batch == 20


def test_the_largest_budget_fits_and_the_next_does_not(path):
    plan = planned(GRPO(path, zero))
    gib = 0.01
    budget, held = plan.footprint.largest_budget(gib, False), plan.footprint

    def total(tokens):
        return held.resident + held.copies + held.activations(tokens, False) + held.logits(tokens, False)

    assert total(budget) <= gib * 2**30 * 0.9 < total(budget + 1)


def test_times_are_operations_at_the_rates(path):
    module = GRPO(path, zero, beta=0.1, num_iterations=2)
    plan = planned(module)
    assert plan.step() is None
    assert "time is unknown without --device" in str(plan)
    known = replace(plan, hardware=replace(plan.hardware, device="h100"))
    forward = plan.workload.operations(plan.models.cost, "shared")
    step = known.step_model()
    assert step.scoring == pytest.approx(2 * forward / (0.4 * 989e12))  # old scores, reference
    assert step.update == pytest.approx(2 * 3 * forward / (0.4 * 989e12))  # a forward, and a backward of two
    assert known.step().update == pytest.approx(step.update)
    lora = planned(GRPO(PretrainedPolicy(path, adapter=LoRAAdapter(r=4)), zero), device="h100")
    assert lora.step_model().update == pytest.approx(2 * forward / (0.4 * 989e12))  # no gradients of frozen weights
    repeated = planned(GRPO(path, zero, sharing=SharingOptions("repeated")), device="h100")
    assert repeated.step_model().update == pytest.approx(
        3 * plan.workload.operations(plan.models.cost, "repeated") / (0.4 * 989e12)
    )
    in_float32 = replace(known, hardware=replace(known.hardware, precision="32-true"), layouts=())
    assert in_float32.step() is None
    assert "no rates for 32-true" in str(in_float32)


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
    assert Hardware.of_trainer({"strategy": strategy, "devices": 2}).strategy == strategy_name(strategy) == name


def test_devices_are_counted():
    assert [count_devices(own) for own in (4, "4", [0, 1], "0,1,2")] == [4, 4, 2, 3]
    assert Hardware.of_trainer({"devices": 2, "num_nodes": 3}).processes == 6
    assert Hardware(strategy="ddp").strategy == "single"
    assert Hardware.of_trainer({}, "NVIDIA H100 PCIe").gib == 80
    assert rounded(53_999) == 53_000


@pytest.mark.parametrize("options", [{"strategy": "tpu"}, {"device": "h1"}, {"gpus": 0}, {"nodes": 0}])
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
    main(["plan", "--config", config])
    page = capsys.readouterr().out
    fits = {int(cells[0]): cells[6] == "yes" for cells in map(str.split, page.splitlines()) if cells[1:2] == ["GB"]}
    assert fits == {own: own >= gib for own in (24, 48, 80, 141)}
    head, _, sentences = page.split("\n\n")
    assert "of Qwen3ForCausalLM (" in head
    assert len(sentences.splitlines()) <= 5
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
    page = capsys.readouterr().out
    (line,) = (line for line in page.splitlines() if line.strip().startswith(f"{gib} GB"))
    assert f"  {'8-bit AdamW' if gib == 80 else 'LoRA'}  " in line
    assert f"{gib} GB: {'optimizer.state_bits: 8' if gib == 80 else 'policy dtype: bfloat16 and adapter'}" in page


AS_THE_REMEDY_SAYS = {
    "smaller batches": {},
    "8-bit AdamW": {"optimizer": OptimizerConfig(state_bits=8)},
    "LoRA": {"dtype": "bfloat16", "adapter": LoRAAdapter(r=16)},
    "4 bits and LoRA": {
        "dtype": "bfloat16", "adapter": LoRAAdapter(r=16), "quantization": FourBit(compute_dtype="bfloat16"),
    },
    **{f"fsdp2 on {n}": {"devices": n, "strategy": {"class_path": "ModelParallelStrategy"}} for n in (2, 8)},
}  # fmt: skip


@pytest.mark.parametrize(
    ("precision", "devices", "is_taught", "remedies"),
    [
        ("32-true", 1, False, {120: "smaller batches", 12: "8-bit AdamW", 4: "LoRA"}),
        ("bf16-mixed", 1, True, {120: "smaller batches", 14: "8-bit AdamW", 5: "LoRA", 2.8: "4 bits and LoRA"}),
        ("bf16-mixed", 2, False, {14: "fsdp2 on 2"}),
        ("bf16-mixed", 8, False, {14: "fsdp2 on 8"}),
    ],
)
def test_a_remedy_names_all_that_has_to_be_set(precision, devices, is_taught, remedies, tmp_path):
    """Batches given too large are too large for another method, too; planned again as the remedy says, the run fits."""
    save_config_and_rows(tmp_path, "short")
    folder = str(tmp_path / "Qwen" / "Qwen3-short")

    def plan(precision, tokens, sequences, dtype="float32", optimizer=None, devices=1, strategy="auto", **low_rank):
        policy = PretrainedPolicy(folder, dtype, gradient_checkpointing=True, **low_rank)
        module = (partial(Distillation, teacher=PretrainedPolicy(folder, "bfloat16")) if is_taught else GRPO)(
            policy, rewards=zero, num_generations=4096, sampling=SamplingConfig(max_new_tokens=512),
            optimizer=optimizer or OptimizerConfig(), engine=HFRolloutEngine(max_sequences=sequences),
            max_tokens_per_micro_batch=tokens,
        )  # fmt: skip
        return planned(module, precision=precision, devices=devices, strategy=strategy)

    given = {"max_tokens_per_micro_batch": 10**6, "max_sequences": 8000}
    first = plan(precision, *given.values(), devices=devices)
    for gib, name in remedies.items():
        remedy = first.remedy(gib)
        assert remedy.name == name
        said = {option: int(number) for option, number in re.findall(r"(max_\w+): (\d+)", remedy.options)}
        assert said.keys() == given.keys()
        assert "gradient_checkpointing" not in remedy.options  # is on already
        changed = next(iter(re.findall(r"--trainer.precision (\S+),", remedy.options)), precision)
        again = plan(changed, *said.values(), **AS_THE_REMEDY_SAYS[name])
        assert again.remedy(gib).name == "yes"


@pytest.mark.parametrize(("gpus", "nodes"), [(1, 2), (8, 2)])
def test_fsdp2_shards_over_all_nodes_that_are_planned(gpus, nodes, tmp_path):
    save_config_and_rows(tmp_path, "short")
    source = PretrainedPolicy(str(tmp_path / "Qwen" / "Qwen3-short"), gradient_checkpointing=True)
    plan = planned(GRPO(source, zero), precision="bf16-mixed")
    remedy = plan.on(replace(plan.hardware, gpus=gpus, nodes=nodes, strategy="ddp", device=None)).remedy(14)
    assert remedy.name == f"fsdp2 on {gpus * nodes}"
    assert f"--trainer.devices {gpus} --trainer.strategy.init_args.data_parallel_size {gpus * nodes}" in remedy.options


def test_servers_hold_weights_and_caches_by_hand(tmp_path, monkeypatch, capsys):
    """2 bytes per parameter; 112 KiB of keys and values per token, as vLLM reports for Qwen3-0.6B; 0.92 of the GPU."""
    save_config_and_rows(tmp_path, "0.6B")
    monkeypatch.chdir(tmp_path)
    arguments = ["plan", "--config", "grpo_qwen3_gsm8k.yaml", "--device", "l4", "--servers", "0,2"]
    main(arguments)
    page = capsys.readouterr().out
    count, token = 596_049_920, 28 * 2 * 8 * 128 * 2
    (said,) = (line for line in page.splitlines() if "of a server's GPU" in line)
    longest = int(re.search(r"sequences of ([\d,]+) tokens", said)[1].replace(",", ""))
    assert "weights of 1.1 GiB" in said
    fit = int((0.92 * 24 * 2**30 - 2 * count) // (longest * token))
    assert said.endswith(f" tokens: {fit:,} on l4.")  # 40,960 tokens fit, too: 4.4 GiB
    assert "the sampling engine's memory" not in page
    main([*arguments[:-1], "0"])
    assert "server's GPU" not in capsys.readouterr().out


def test_vllm_in_the_process_keeps_its_share_unless_it_sleeps(path, monkeypatch):
    monkeypatch.setattr("pl_grouprl.utilities.optional.VLLM_AVAILABLE", True)
    for sleep_level, usable in ((0, 48.0), (1, 72.0)):
        engine = VLLMRolloutEngine(gpu_memory_utilization=0.3, sleep_level=sleep_level)
        plan = planned(GRPO(path, zero, engine=engine), precision="bf16-mixed")
        row = plan.on(replace(plan.hardware, memory=80.0))
        assert row.gib * USABLE == pytest.approx(usable)
        for whole in ({"servers": 1}, {"device": "cpu"}):  # a CPU's vLLM takes no share
            assert plan.on(replace(row.hardware, **whole)).gib == 80.0
        (line,) = (line for line in str(plan).splitlines() if line.strip().startswith("80 GB"))
        assert f" {usable:.0f} " in line
        assert ("the sampling engine's memory" in str(plan)) == (sleep_level > 0)


def test_servers_that_are_too_small(path):
    plan = planned(
        GRPO(path, zero, engine=VLLMServerRolloutEngine(dtype="float32"), sampling=SamplingConfig(max_new_tokens=6))
    )
    weights, longest = 4 * plan.models.num_parameters, plan.workload.prompt_lengths[-1] + plan.workload.response
    config = plan.models.config
    token = config.num_hidden_layers * 2 * config.num_key_value_heads * config.head_dim * 4
    most = config.max_position_embeddings
    for bytes_of_caches, served, said in [
        (token * longest - 1, 0, "give a server more GPUs: --tensor-parallel-size 2."),
        (token * longest + 1, 1, f"set --max-model-len {longest}, or vLLM needs room for one of {most:,}."),
        (token * most + 1, most // longest, f"sequences of {longest:,} tokens: {most // longest} on 0 GB."),
    ]:
        gib = (weights + bytes_of_caches) / 0.92 / 2**30
        row = plan.on(replace(plan.hardware, memory=gib, servers=1, device=None))
        assert row.served(longest) == served
        assert said in describe_servers([row])


def test_too_few_prompts_are_an_error(path):
    with pytest.raises(ValueError, match="batch_size"):
        planned(GRPO(path, zero), batch_size=3)


def test_sequences_at_once_by_hand(path):
    """Rollouts of a group share the prompt's cache, in the peak, in what fits, and in what is suggested."""
    sampling = SamplingConfig(max_new_tokens=6)
    plan = planned(GRPO(path, zero, sampling=sampling))
    config, longest = PretrainedPolicy(path).load_config(), plan.workload.prompt_lengths[-1]
    token = config.num_hidden_layers * 2 * config.num_key_value_heads * config.head_dim * 2  # in bfloat16
    logits = 24 * config.vocab_size
    held = plan.footprint.resident + plan.footprint.sampling_copy
    assert plan.memory(24)["caches"] == token * (2 * longest + 16 * 6) + 16 * logits
    assert plan.sampled_bytes(8) == held + token * (longest + 8 * 6) + 8 * logits
    assert plan.sampled_bytes(9) == held + token * (2 * longest + 9 * 6) + 9 * logits
    for count in (1, 8, 9, 16):
        room = plan.sampled_bytes(count) / 0.9 / 2**30
        assert plan.most_sequences(room * (1 + 1e-9)) == count
        assert plan.most_sequences(room * (1 - 1e-9)) == count - 1
    fixed = planned(
        GRPO(path, zero, sampling=sampling, num_generations=64, engine=HFRolloutEngine(max_sequences=120),
             max_tokens_per_micro_batch=20)
    )  # fmt: skip
    room = fixed.sampled_bytes(100) / 0.9 / 2**30 * (1 + 1e-9)
    assert fixed.sequences(room) == 120
    assert fixed.update_bytes(room) < fixed.sampled_bytes(100) == held + token * (2 * longest + 600) + 100 * logits
    assert fixed.remedy(room).options == "engine.init_args.max_sequences: 100"


def test_the_engine_decides_as_planned(path, monkeypatch):
    """Without `max_sequences`, by the same function of the same bytes."""
    asked = []

    def bound(count, needed, free):
        asked.append((count, needed))
        return count

    plan = planned(GRPO(path, zero, sampling=SamplingConfig(max_new_tokens=6)))
    monkeypatch.setattr("pl_grouprl.planning.plan.sequences_at_once", bound)
    monkeypatch.setattr("pl_grouprl.rollout.hf.engine.sequences_at_once", bound)
    assert plan.sequences(24) == 16
    engine = HFRolloutEngine(dtype="bfloat16")
    engine.bind(PretrainedPolicy(path).load(), PretrainedPolicy(path).load_tokenizer())
    prompt = [1] * plan.workload.prompt_lengths[-1]
    engine.sample([SampleRequest(prompt, 16, 0, 6)], SamplingConfig(max_new_tokens=6), 0)
    assert asked[0] == asked[1]


def test_a_gpu_chooses_a_budget_that_is_not_set(path):
    plan = planned(GRPO(path, zero))
    everything = plan.workload.longest_micro_batch
    assert plan.micro_batch(24) == everything
    room = plan.update_bytes(24) / 0.9 / 2**30 * 0.9
    assert plan.micro_batch(room) == plan.budget(room) < everything
    on_cpu = replace(plan, hardware=replace(plan.hardware, device="cpu"))
    assert on_cpu.micro_batch(room) == everything


def test_many_prompts_are_sampled(path):
    rows = [{"prompt": "1 " * (1 + index % 7)} for index in range(3000)] + [{"prompt": "1 " * 20}]
    trainer = RLTrainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    data = PromptDataModule(train=rows, batch_size=2)
    lengths = trainer.plan(GRPO(path, zero), data).workload.prompt_lengths
    assert 1024 <= len(lengths) < 2048
    assert lengths[-1] == 2 * 20  # digits and spaces
    assert sum(lengths) / len(lengths) == pytest.approx(2 * sum(i % 7 + 1 for i in range(3000)) / 3000, rel=0.02)
    assert data.prompts == {}
    assert len(data.sources["train"]) == 3001


MISTAKES = {
    "no such model": (
        ["--model.init_args.policy", "nobody/nothing"],
        "there is no folder 'nobody/nothing', nor",
    ),
    "unknown GPU": (["--device", "h1"], "device is 'h1'"),
    "no GPUs": (["--gpus", "0"], "gpus is 0"),
    "not a number": (["--gpus", "many"], "gpus is 'many'"),
    "no file": (["--data.init_args.train", "no.jsonl"], "no file matches 'no.jsonl'"),
    "some rates missing": (
        ["--device", "h100", "--trainer.precision", "32-true", "--rates.decode_step", "0.1"],
        "add rates.decode_sequence, rates.scoring_mfu, rates.update_mfu.",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_one_sentence(name, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    options, said = MISTAKES[name]
    with pytest.raises(SystemExit) as error:
        main(["plan", "--config", "grpo_pg.yaml", *options])
    assert said in str(error.value)  # exit code 1
    assert str(error.value).startswith("no plan: ")
    assert "\n" not in str(error.value)


def test_a_config_without_a_model(capsys):
    with pytest.raises(SystemExit) as error:
        main(
            [
                "plan",
                "--config",
                "{data: {class_path: pl_grouprl.PromptDataModule, init_args: {train: [], batch_size: 1}}}",
            ]
        )
    assert error.value.code == 2
    assert "arguments are required: plan.model" in capsys.readouterr().err

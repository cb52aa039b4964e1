"""What a run does on a GPU where nothing is set, tried with devices that only claim to be one, and precisions."""

from __future__ import annotations

import re
import warnings
from types import SimpleNamespace

import pytest
import torch
from helpers.sweeps import sweep
from helpers.tiny_models import tiny_model
from helpers.tiny_runs import AHEAD, RaggedEngine
from helpers.variants import SPAN
from helpers.versions import needs

from pl_grouprl import PPO, PretrainedPolicy
from pl_grouprl.algorithms import OptimizerConfig
from pl_grouprl.attention.backends.saved import checkpointing_of
from pl_grouprl.demo.tasks import digit_tokenizer
from pl_grouprl.models import PretrainedCritic
from pl_grouprl.rollout import HFRolloutEngine
from pl_grouprl.rollout.hf import engine as hf_engine
from pl_grouprl.training import device_choices
from pl_grouprl.training.device_choices import DeviceChoices
from pl_grouprl.utilities.device_defaults import GIB

GPU = torch.device("cuda")


@pytest.fixture
def folder(tmp_path):
    tiny_model("qwen3", vocab_size=len(digit_tokenizer()), eos_token_id=1).save_pretrained(tmp_path / "policy")
    digit_tokenizer().save_pretrained(tmp_path / "policy")
    return str(tmp_path / "policy")


@pytest.mark.parametrize("options", [{}, AHEAD], ids=["", "ahead"])
def test_rollouts_in_bfloat16_are_of_copies_of_the_current_weights(options, fit, caplog, monkeypatch):
    sampled, sample = [], hf_engine.sample_in_batches

    def record(model, requests, *args, **kwargs):
        if len(requests) == 4:  # not the check of decoding
            sampled.append([weight.detach().clone() for weight in model.parameters()])
        return sample(model, requests, *args, **kwargs)

    monkeypatch.setattr(hf_engine, "sample_in_batches", record)
    engine = HFRolloutEngine(dtype="bfloat16")
    with caplog.at_level("INFO"):
        run = fit(steps=3, trainer={"precision": "bf16-mixed"}, engine=engine, **options)
    before = [weight.detach().bfloat16() for weight in run.module.policy_source.load().parameters()]
    assert {weight.dtype for weights in sampled for weight in weights} == {torch.bfloat16}
    assert all(map(torch.equal, sampled[0], before))
    assert not all(map(torch.equal, sampled[0], sampled[-1]))
    (last,) = (group["params"] for group in run.trainer.optimizers[0].param_groups)
    assert all(now is kept for now, kept in zip(run.module.policy.parameters(), last, strict=True))
    assert {weight.dtype for weight in last} == {torch.float32}
    lines = [record.message for record in caplog.records if record.message.startswith("On cpu")]
    assert lines == ["On cpu: computes in bfloat16 (precision bf16-mixed), samples in bfloat16."]


@pytest.mark.parametrize(("device", "expected"), [("cuda:0", torch.bfloat16), ("cpu", None)])
def test_bf16_mixed_samples_in_bfloat16_on_a_gpu_alone(device, expected, make_module):
    module = make_module(engine=HFRolloutEngine())
    module._trainer = SimpleNamespace(strategy=SimpleNamespace(root_device=torch.device(device)))
    module._support = SimpleNamespace(
        serves=lambda trainer: True, trainer=module._trainer, autocast_dtype=lambda kind: torch.bfloat16
    )
    module.sampler.reset()
    assert module.engine.compute_dtype == expected


def on_a_gpu(module):
    module._trainer = SimpleNamespace(strategy=SimpleNamespace(root_device=GPU))
    module._support = SimpleNamespace(serves=lambda trainer: True)
    return module


@pytest.mark.parametrize(
    ("setting", "expected"), [(None, True), (False, False), (True, True), ("attention", "attention")]
)
def test_activations_are_recomputed_on_a_gpu_unless_it_is_set(setting, expected, folder, make_module):
    policy = PretrainedPolicy(folder, gradient_checkpointing=setting)
    module = on_a_gpu(make_module(PPO, policy, critic=PretrainedCritic(folder)))
    module.load_models()
    assert checkpointing_of(module.policy) == expected
    assert checkpointing_of(module.critic.trunk) == expected
    on_cpu = make_module(policy=policy)
    on_cpu.load_models()
    assert on_cpu.policy.is_gradient_checkpointing == bool(setting)


@pytest.fixture
def pretend(make_module, monkeypatch):
    """A module that has begun a fit on a GPU with some free memory."""

    def begun(free, **options):
        module = make_module(**options)
        module.load_models()
        monkeypatch.setattr(type(module), "device", GPU)
        monkeypatch.setattr(device_choices, "free_memory", lambda device: free)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "an H100")
        precision = SimpleNamespace(scaler=None)
        module._trainer = SimpleNamespace(optimizers=[], precision="bf16-mixed", precision_plugin=precision)
        module._support = SimpleNamespace(
            serves=lambda trainer: True, bounds_micro_batches=True, autocast_dtype=lambda kind: torch.bfloat16
        )
        return module

    return begun


def test_micro_batches_are_bounded_by_free_memory(pretend):
    """Of 32 hidden and 64 inner units, 4 + 2 heads of 8, 2 layers and the one that is in its backward pass."""
    per_token = 3 * (40 * 32 + 12 * 6 * 8 + 10 * 64)
    module = pretend(2**30)
    weights = sum(weight.numel() for weight in module.policy.parameters())
    pending = (2 + 4 + 8) * weights + 8 * 512 * len(digit_tokenizer())
    expected = (int(0.7 * 2**30) - pending) // per_token // 1024 * 1024
    assert module.device_choices.micro_batch_tokens() == expected > 1024


def test_micro_batches_are_not_bounded_where_that_would_change_the_result_or_is_not_needed(pretend, monkeypatch):
    for options in ({"policy_loss": "clip_cov"}, {"policy_loss": "kl_cov"}, {"sharing": {"sequence_parallel_size": 2}}):
        assert pretend(GIB, **options).device_choices.micro_batch_tokens() is None
    module = pretend(GIB)
    module._support.bounds_micro_batches = False
    assert module.device_choices.micro_batch_tokens() is None
    module._support.bounds_micro_batches = True
    monkeypatch.setattr(type(module), "device", torch.device("cpu"))
    assert module.device_choices.micro_batch_tokens() is None


def test_a_chosen_budget_changes_no_result(fit, monkeypatch):
    """Prompts of 20 tokens and rollouts of up to 11: at least 31 tokens, so the groups of a step are divided."""
    runs = []
    for tokens in (None, 8):
        monkeypatch.setattr(DeviceChoices, "micro_batch_tokens", lambda self, tokens=tokens: tokens)
        runs.append(fit(steps=2, engine=RaggedEngine(), data={"shuffle": False}))
    whole, divided = runs
    one, several = (run.module.micro_batcher.for_update(run.buffer, range(4)).number for run in runs)
    assert one == 1 < several
    for expected, found in zip(whole.gradients, divided.gradients, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    monkeypatch.setattr(DeviceChoices, "micro_batch_tokens", lambda self: pytest.fail("chosen"))
    fit(engine=RaggedEngine(), max_tokens_per_micro_batch=64)  # what is set is not chosen


def test_float32_on_a_gpu_is_warned_of(pretend, caplog):
    module = pretend(60 * GIB)
    with caplog.at_level("INFO"):
        module.device_choices.describe()
    line = caplog.records[-1].message
    assert line.startswith("On an H100, 60.0 GiB free: computes in bfloat16 (precision bf16-mixed), samples in float32")
    module._support.autocast_dtype = lambda kind: None
    with pytest.warns(UserWarning, match="computes in float32 on a GPU.*default_precision"):
        module.device_choices.describe()


def test_the_first_lines_of_a_run_say_how_it_computes(folder, make_module, make_data, make_trainer, caplog):
    policy = PretrainedPolicy(folder, gradient_checkpointing="attention")
    with caplog.at_level("INFO"):
        trainer = make_trainer(max_steps=1, precision="bf16-mixed")
        trainer.fit(make_module(policy=policy, engine=HFRolloutEngine()), make_data())
    lines = [record.message for record in caplog.records if record.message.startswith("On cpu")]
    computes = "computes in bfloat16 (precision bf16-mixed), samples in float32"
    assert lines == [f"On cpu: {computes}, recomputes activations except those of attention."]


@pytest.mark.parametrize(
    ("dtype", "precision", "learning_rate", "warned"),
    [
        ("bfloat16", "32-true", 1e-6, True),
        ("bfloat16", "bf16-mixed", 1e-6, True),
        ("float32", "bf16-true", 1e-4, True),
        ("bfloat16", "32-true", 1.0, False),
        ("float32", "bf16-mixed", 1e-6, False),
    ],
)
def test_weights_too_coarse_for_the_learning_rate_are_counted(dtype, precision, learning_rate, warned, folder, fit):
    """The share is that of weights which a first step of PyTorch's AdamW leaves unchanged, whatever the gradient."""
    policy = PretrainedPolicy(folder, dtype=dtype)
    optimizer = OptimizerConfig(learning_rate, schedule="linear", warmup_steps=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(policy=policy, optimizer=optimizer, trainer={"precision": precision})
    texts = "\n".join(str(warning.message) for warning in caught)
    found = re.findall(r"([\d.]+)% of the trained half-precision weights do not move .*bf16-mixed", texts)
    if not warned:
        assert not found
        return
    model = policy.load().to(torch.bfloat16)
    before = [weight.detach().clone() for weight in model.parameters()]
    for weight in model.parameters():
        weight.grad = torch.where(torch.rand(weight.shape) < 0.5, -1.0, 1.0).to(weight.dtype)
    torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0).step()
    pairs = list(zip(model.parameters(), before, strict=True))
    share = sum(int((now == then).sum()) for now, then in pairs) / sum(then.numel() for then in before)
    assert share > 0.3
    assert [float(percent) for percent in found] == [pytest.approx(100 * share, abs=1)]


# Precisions of the Trainer, with attention that is more than causal softmax, and with states.


FAMILIES = {
    "qwen3": {},
    "gemma2": {"sliding_window": SPAN, "attn_logit_softcapping": 2.0},
    "gpt_oss": {"sliding_window": SPAN, "num_local_experts": 4},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "qwen3_5_text": {
        **{"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8},
        **{"linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"]},
    },
}


class Policy:
    def __init__(self, family):
        self.family = family

    def load(self):
        model = tiny_model(self.family, vocab_size=len(digit_tokenizer()), eos_token_id=1, **FAMILIES[self.family])
        generator = torch.Generator().manual_seed(1)
        for parameter in model.parameters():
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
        return model

    def load_tokenizer(self):
        return digit_tokenizer()


@pytest.fixture
def fit_family(fit):
    def run(family, precision, mode, verify=False, **options):
        """Rollouts do not depend on the policy, so that runs differ by their arithmetic alone."""
        return fit(
            policy=Policy(family), engine=RaggedEngine(), sharing={"mode": mode, "verify": verify},
            optimizer=OptimizerConfig(1e-3), trainer={"precision": precision}, data={"shuffle": False}, **options,
        )  # fmt: skip

    return run


def distance(found, expected):
    """Norm of the difference of all gradients, over that of the expected ones."""
    assert found.keys() == expected.keys()
    names = [name for name, gradient in expected.items() if gradient is not None]
    difference = sum((found[name].double() - expected[name].double()).square().sum() for name in names)
    return float((difference / sum(expected[name].double().square().sum() for name in names)).sqrt())


@needs("torch", "2.13")
@pytest.mark.parametrize("family", sweep(FAMILIES, quick=["gemma2", "qwen3_5_text"]))
def test_sharing_rounds_no_more_than_repeating(family, fit_family):
    """Gradients of the first step, against those of float32 with repeated prefixes."""

    def gradients(precision, mode):
        return fit_family(family, precision, mode).gradients[0]

    exact = gradients("32-true", "repeated")
    assert distance(gradients("32-true", "shared"), exact) < 1e-4
    for precision in ("bf16-mixed", "bf16-true"):
        shared, repeated = (distance(gradients(precision, mode), exact) for mode in ("shared", "repeated"))
        assert 1e-4 < repeated < 0.3, precision
        assert shared < 1.5 * repeated, precision


@pytest.mark.parametrize(("precision", "dtype"), [("bf16-mixed", torch.float32), ("bf16-true", torch.bfloat16)])
@pytest.mark.parametrize("family", sweep(FAMILIES, quick=["qwen3", "gpt_oss", "lfm2"]))
def test_what_is_kept_in_which_dtype(family, precision, dtype, fit_family):
    """Checked at the start, scored without gradient, a reference beside it, several steps."""
    run = fit_family(family, precision, "shared", steps=4, verify=True, beta=0.1, num_iterations=2, num_mini_batches=2)
    moments = [own[name] for own in run.trainer.optimizers[0].state.values() for name in ("exp_avg", "exp_avg_sq")]
    gradients = [gradient for gradient in run.gradients[-1].values() if gradient is not None]
    for tensors in (run.module.policy.parameters(), run.module.reference.parameters(), gradients, moments):
        assert {tensor.dtype for tensor in tensors} == {dtype}
    for name in ("old_logprobs", "advantages"):
        assert {values.dtype for values in run.buffer.tokens[name]} == {torch.float32}
    assert all(torch.isfinite(torch.tensor(list(step.values()))).all() for step in run.steps)
    assert any(not weight.equal(run.weights[-1][name]) for name, weight in run.weights[0].items())

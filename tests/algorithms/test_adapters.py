"""Runs that train an adapter: the base, quantized or not, never moves, is the reference, and is in no checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from helpers.copied_engine import CopiedPolicyEngine
from helpers.quantized import FLOAT, quantized_policy, save_policy
from helpers.sweeps import sweep, sweep_pairs
from helpers.tiny_gguf import write_gguf
from helpers.tiny_runs import AHEAD, TinyPolicy, part, same
from helpers.versions import needs
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy

from pl_grouprl.algorithms import GRPO, PPO, Distillation, OptimizerConfig
from pl_grouprl.callbacks import ExportPolicy
from pl_grouprl.data import PromptDataModule
from pl_grouprl.demo import MostFrequentDigit
from pl_grouprl.models import LoRAAdapter, PolicyCopyCritic, PretrainedPolicy, SharedTrunkCritic, rollout_logprobs
from pl_grouprl.models.adapters import adapters_off, quantized_layers
from pl_grouprl.models.critic import LoRACritic
from pl_grouprl.training.checks import check_quantized

LORA, DORA = LoRAAdapter(r=4, alpha=16), LoRAAdapter(r=4, alpha=16, use_dora=True)


@dataclass
class Adapted:
    """The tiny policy with an adapter, ours or by PEFT."""

    adapter: Any = LORA
    gradient_checkpointing: bool = False
    seed: int = 0

    def load(self):
        model = TinyPolicy(self.gradient_checkpointing, seed=self.seed).load()
        if isinstance(self.adapter, LoRAAdapter):
            return self.adapter.add_to(model)
        import peft

        with torch.random.fork_rng():
            torch.manual_seed(0)
            return peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **self.adapter))

    load_tokenizer = TinyPolicy().load_tokenizer


BY_PEFT = {"r": 4, "target_modules": ["q_proj", "up_proj"]}


def frozen(module):
    return {name: p for name, p in module.policy.named_parameters() if not p.requires_grad}


class ReferenceScores(Callback):
    """Reference log-probabilities of each batch of rollouts, as trained with."""

    def __init__(self):
        self.buffers = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.buffers.append((module.last_rollouts.groups, module.last_rollouts.joined("ref_logprobs")))


@pytest.mark.parametrize("adapter", [LORA, DORA, BY_PEFT], ids=["lora", "dora", "peft"])
def test_the_base_never_moves_and_is_the_reference(fit, adapter):
    scores, options = ReferenceScores(), {"num_mini_batches": 2, "num_iterations": 2, "beta": 0.05}
    run = fit(steps=6, policy=Adapted(adapter), callbacks=[scores], sharing={"verify": True}, **options)
    base, module = TinyPolicy().load(), run.module
    assert module.reference is None
    assert module.scored_models() == {"policy": module.policy}
    own = {name.removeprefix("base_model.model.").replace(".base_layer", ""): p for name, p in frozen(module).items()}
    assert len(own) == len({id(p) for p in base.parameters()})
    assert all(torch.equal(own[name], p) for name, p in base.named_parameters())
    for groups, ref_logprobs_N in scores.buffers:
        expected_N = torch.cat(rollout_logprobs(base, groups)).detach()
        torch.testing.assert_close(ref_logprobs_N, expected_N, atol=1e-6, rtol=1e-6)
    assert run.steps[0]["kl"] == pytest.approx(0.0, abs=1e-7)
    assert run.steps[-1]["kl"] > 1e-4
    assert all(p.requires_grad == ("lora_" in name) for name, p in module.policy.named_parameters())
    optimized = {id(p) for group in run.trainer.optimizers[0].param_groups for p in group["params"]}
    assert optimized == {id(p) for name, p in module.policy.named_parameters() if "lora_" in name}


@pytest.mark.parametrize(
    "kl", [{"kl": {"place": "reward"}}, {"kl": {"target": 0.01, "horizon": 100}}, {"beta": 0.0}], ids=str
)
def test_other_ways_of_the_penalty(fit, monkeypatch, kl):
    if not kl.get("beta", 1):
        monkeypatch.setattr(GRPO, "reference_policy", lambda self: pytest.fail("no reference is needed"))
    run = fit(steps=3, policy=Adapted(), **{"beta": 0.05, **kl})
    assert run.steps[-1].get("kl", 1) > 0


def test_its_base_does_not_follow_the_policy(make_module):
    module = make_module(policy=Adapted(), beta=0.05, kl={"ref_model_sync_steps": 2})
    with pytest.raises(ValueError, match=r"kl\.ref_model_sync_steps is 2; a reference moves only with all weights"):
        module.load_models()


@pytest.mark.parametrize(
    ("adapter", "gradient_checkpointing"),
    sweep_pairs([(LORA, False), (LORA, True), (DORA, False), (DORA, True)], quick=[(LORA, False), (DORA, True)]),
)
def test_sharing_on_and_off_give_the_same_trajectory(fit, adapter, gradient_checkpointing):
    options = {"policy": Adapted(adapter, gradient_checkpointing), "num_mini_batches": 2, "beta": 0.05}
    runs = (
        fit(steps=6, sharing={"mode": mode, "verify": True}, optimizer=OptimizerConfig(1e-3), **options)
        for mode in ("shared", "repeated")
    )
    shared, repeated = ([step["loss"] for step in run.steps] for run in runs)
    assert shared == pytest.approx(repeated, abs=1e-4, rel=0)
    assert max(map(abs, shared)) > 1e-3


@pytest.mark.parametrize("where", ["policy", "critic"])
def test_adapters_that_are_not_known_to_be_lora_are_refused(fit, where):
    """Made by PEFT itself, in a source of one's own."""
    activated = {"target_modules": ["q_proj"], "alora_invocation_tokens": [3]}

    class Critic:
        def load(self, policy):
            import peft

            critic = PolicyCopyCritic().load(policy)
            config = peft.LoraConfig(task_type="CAUSAL_LM", **activated)
            return peft.inject_adapter_in_model(config, critic.trunk) and critic

    options = {"policy": Adapted(activated)} if where == "policy" else {"critic": Critic()}
    with pytest.raises(ValueError, match=rf"the adapter 'default' of {where} has alora_invocation_tokens=\[3\]"):
        fit(PPO, **options)


RUNS = {
    "grpo": (GRPO, {}),
    "ppo, lora": (PPO, {"critic": LoRACritic(r=4, head_std=0.1)}),
    "ppo, dora": (PPO, {"critic": LoRACritic(r=4, head_std=0.1, use_dora=True), "critic_warmup_steps": 2}),
    "ppo, shared trunk": (PPO, {"critic": SharedTrunkCritic(head_std=0.1)}),
    "ppo, copy": (PPO, {"critic": PolicyCopyCritic(head_std=0.1)}),
}


@pytest.mark.parametrize("resumed_at", [(3,), pytest.param((1, 4), marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("run", sweep(RUNS, quick=["grpo", "ppo, dora", "ppo, shared trunk"]))
def test_checkpoints_hold_what_is_trained_and_resume_is_exact(fit, tmp_path, run, resumed_at):
    cls, options = RUNS[run]
    options = {
        "policy": Adapted(DORA), "num_iterations": 2, "num_mini_batches": 2, "beta": 0.1, "sharing": {"verify": True},
        "optimizer": OptimizerConfig(1e-2, weight_decay=0.1), "data": {"train_size": 8}, "steps": 5, **options,
    }  # fmt: skip
    whole = fit(cls, save=True, **options)
    saved = torch.load(tmp_path / "step=3.ckpt", weights_only=True)["state_dict"]
    assert saved.keys() == {name for name, p in whole.module.named_parameters() if p.requires_grad}
    for step in resumed_at:
        assert same(fit(cls, resume=step, **options).weights[-1], whole.weights[-1]), step


OTHERS = {
    "alpha": ({"adapter": LoRAAdapter(r=4, alpha=64)}, r"policy .*: default.alpha is 64 \(was 16\); restore"),
    "rslora": ({"adapter": LoRAAdapter(r=4, alpha=16, use_rslora=True)}, r"default.use_rslora is True \(was False\)"),
    "dora": ({"adapter": DORA}, r"default.use_dora is True \(was False\)"),
    "rank": ({"adapter": LoRAAdapter(r=8, alpha=16)}, r"default.r is 8 \(was 4\)"),
    "layers": (
        {"adapter": LoRAAdapter(r=4, alpha=16, target_modules=["q_proj"])},
        r"default.target_modules is \['q_proj'\] \(was \['down_proj', .*\]\)",
    ),
    "several": ({"adapter": BY_PEFT}, r"default.alpha is 8 \(was 16\)"),
    "critic": ({"critic": LoRACritic(r=4, alpha=8)}, r"critic .*: critic.alpha is 8 \(was 32\); restore"),
    "no critic's": ({"critic": PolicyCopyCritic()}, r"critic .*: critic.alpha is None \(was 32\)"),
}


def test_a_checkpoint_is_for_adapters_of_the_same_options(fit, make_module, make_data, make_trainer, tmp_path):
    """Weights of the same shapes act otherwise under another alpha: nothing else would notice."""

    def ppo(critic=LoRACritic(r=4), **options):  # noqa: B008
        return make_module(PPO, policy=Adapted(**options), critic=critic)

    saved = fit(module=ppo(), save=True)
    data = make_data(val=True, test=MostFrequentDigit(prompt_length=20, train_size=4, val_size=4))
    again, path = ppo(), tmp_path / "step=1.ckpt"
    make_trainer().validate(again, datamodule=data, ckpt_path=path, verbose=False)
    assert same(again.policy.state_dict(), saved.module.policy.state_dict())
    for name, (options, difference) in OTHERS.items():
        for stage in ("fit", "validate", "test") if name == "alpha" else ("validate",):
            more = {"weights_only": True} if stage == "fit" else {}
            with pytest.raises(ValueError, match=difference):
                getattr(make_trainer(), stage)(ppo(**options), datamodule=data, ckpt_path=path, **more)
    # A changed base matters without a reference too: it is no part of the checkpoint.
    with pytest.raises(ValueError, match=r"policy=.* is a different model .* or the base of its adapter"):
        fit(module=ppo(seed=1), steps=2, resume=1)
    # The seed is of weights that the checkpoint replaces.
    fit(module=ppo(adapter=LoRAAdapter(r=4, alpha=16, seed=3)), steps=2, resume=1)


def test_ppo_with_a_critic_and_an_adapted_policy(fit):
    """One base, two adapters: the critic's values move, its base does not, and the policy's adapter is not in it."""
    critic = LoRACritic(r=4, head_std=0.1)
    run = fit(PPO, steps=4, policy=Adapted(), critic=critic, beta=0.05, sharing={"verify": True}, num_mini_batches=2)
    module = run.module
    own = {p.data_ptr() for p in module.critic.parameters() if not p.requires_grad}
    assert own <= {p.data_ptr() for p in frozen(module).values()}
    assert all(torch.isfinite(torch.tensor(step["value/loss"])) for step in run.steps)
    assert run.steps[-1]["kl"] > 0
    with adapters_off(module.critic.trunk):
        off = module.critic.trunk(torch.tensor([[1, 2, 3]])).last_hidden_state
    with adapters_off(module.policy):
        base = module.policy.model(torch.tensor([[1, 2, 3]])).last_hidden_state
    assert torch.equal(off, base)


# A base of 4 bits.


IDS = torch.tensor([[1, 2, 3, 4, 5]])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_policy(tmp_path_factory.mktemp("policy"))


def codes(model):
    return [layer.weight.data for _, layer in quantized_layers(model)]


@pytest.mark.parametrize(
    ("cls", "options"),
    [(GRPO, {"beta": 0.05, "sharing": {"verify": True}}), (PPO, {"critic": LoRACritic(r=4, head_std=0.1)})],
    ids=["grpo", "ppo"],
)
def test_a_quantized_base_trains_only_the_adapter_and_resumes_exactly(fit, folder, tmp_path, cls, options):
    options = {
        "policy": quantized_policy(folder), "optimizer": OptimizerConfig(1e-2, weight_decay=0.1, state_bits=8),
        "num_mini_batches": 2, "data": {"train_size": 8}, "steps": 3, **options,
    }  # fmt: skip
    whole, start = fit(cls, save=True, **options), quantized_policy(folder).load()
    assert all(torch.equal(a, b) for a, b in zip(codes(start), codes(whole.module.policy), strict=True))
    trained = {name for name, p in whole.module.named_parameters() if p.requires_grad}
    assert all(name.startswith("critic.") or "lora_" in name for name in trained)
    saved = torch.load(tmp_path / "step=1.ckpt", weights_only=True)["state_dict"]
    assert saved.keys() == trained
    before = {f"policy.{name}": p for name, p in start.named_parameters()}
    after = part(whole.weights[-1], "policy")
    assert min((after[name] - before[name]).abs().max() for name in after.keys() & trained) > 1e-4
    assert same(whole.weights[-1], fit(cls, resume=1, **options).weights[-1])


def test_both_exports_are_the_trained_policy(fit, folder, make_data, tmp_path):
    from peft import PeftModel

    exports = [ExportPolicy(folder="merged"), ExportPolicy(folder="separate", adapter="separate")]
    run = fit(steps=2, policy=quantized_policy(folder), callbacks=exports, data={"val": True}, **AHEAD)
    run.trainer.validate(run.module, make_data(val=True), verbose=False)
    assert "val/reward" in run.trainer.callback_metrics
    merged, separate = (next(tmp_path.rglob(f"{name}/config.json"), None) for name in ("merged", "separate"))
    assert separate is None  # the adapter alone
    expected = run.module.policy.eval()(IDS).logits
    policy = PretrainedPolicy(str(merged.parent)).load().eval()
    torch.testing.assert_close(policy(IDS).logits, expected, rtol=1e-4, atol=1e-5)
    adapter = quantized_policy(folder).adapter
    base = PretrainedPolicy(folder, adapter=adapter, quantization=FLOAT).load_as("AutoModelForCausalLM")
    adapted = PeftModel.from_pretrained(base, next(tmp_path.rglob("adapter_config.json")).parent).eval()
    torch.testing.assert_close(adapted(IDS).logits, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("strategy", "quantized"),
    [(ModelParallelStrategy, "policy"), (FSDPStrategy, "teacher"), (DeepSpeedStrategy, "policy")],
)
def test_strategies_that_shard_a_quantized_base_are_refused(make_module, monkeypatch, folder, strategy, quantized):
    models = {"policy": PretrainedPolicy(folder), "teacher": PretrainedPolicy(folder)}
    module = make_module(Distillation, **models | {quantized: quantized_policy(folder)})
    module.trainer = trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    monkeypatch.setattr(trainer.strategy, "__class__", strategy)
    monkeypatch.setattr(trainer.strategy, "config", {}, raising=False)
    with pytest.raises(ValueError, match=f"{quantized} has a quantization under {strategy.__name__}"):
        check_quantized(module)


@pytest.mark.parametrize("adapter", ["merged", "separate"])
def test_engines_that_receive_weights_of_a_quantized_base_are_refused(fit, folder, adapter):
    with pytest.raises(ValueError, match=r"engine is CopiedPolicyEngine, .* are quantized"):
        fit(policy=quantized_policy(folder), engine=CopiedPolicyEngine(adapter=adapter))


# A GGUF file.


@needs("transformers", "5.23")
@pytest.mark.parametrize("adapter", [None, pytest.param({"r": 2}, marks=pytest.mark.slow)])
def test_a_gguf_policy_trains_resumes_and_exports_an_ordinary_model(fit, tmp_path, adapter):
    from transformers import AutoModelForCausalLM

    def lengths(completions, **columns):
        return [float(len(text)) for text in completions]

    write_gguf(tmp_path / "tiny.gguf", "Q8_0")
    options = {
        "policy": PretrainedPolicy(str(tmp_path), gguf_file="tiny.gguf", adapter=adapter), "rewards": lengths,
        "beta": 0.1, "data": PromptDataModule([{"prompt": f"{n} + {n}"} for n in range(8)], batch_size=2), "steps": 2,
    }  # fmt: skip
    whole = fit(save=True, callbacks=[ExportPolicy(folder=str(tmp_path / "policy"))], **options)
    assert same(whole.weights[-1], fit(resume=1, **options).weights[-1])
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "policy")
    assert not hasattr(exported.config, "quantization_config")
    tokens = torch.tensor([[4, 5, 6]])
    torch.testing.assert_close(exported(tokens).logits, whole.module.policy.eval()(tokens).logits, atol=1e-5, rtol=0)

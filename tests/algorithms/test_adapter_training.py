"""Runs that train an adapter: the base never moves, is the reference, and is no part of a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from helpers.sweeps import sweep
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint

from pl_grouprl.algorithms import GRPO, PPO, OptimizerConfig
from pl_grouprl.demo import MostFrequentDigit
from pl_grouprl.models import LoRAAdapter, PolicyCopyCritic, SharedTrunkCritic, rollout_logprobs
from pl_grouprl.models.adapters import adapters_off
from pl_grouprl.models.critic import LoRACritic

LORA, DORA = LoRAAdapter(r=4, alpha=16), LoRAAdapter(r=4, alpha=16, use_dora=True)


@pytest.fixture
def adapted(tiny_policy):
    """A policy source: the tiny policy with an adapter."""

    @dataclass
    class Adapted:
        adapter: LoRAAdapter = LORA
        gradient_checkpointing: bool = False
        seed: int = 0
        by_peft: bool = False

        def load(self):
            model = tiny_policy(self.gradient_checkpointing, seed=self.seed).load()
            if self.by_peft:
                import peft

                config = peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM")
                with torch.random.fork_rng():
                    torch.manual_seed(0)
                    return peft.get_peft_model(model, config)
            return self.adapter.add_to(model)

        def load_tokenizer(self):
            return tiny_policy().load_tokenizer()

    return Adapted


class ReferenceScores(Callback):
    """Reference log-probabilities of each batch of rollouts, as trained with, and with which model."""

    def __init__(self):
        self.buffers = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.buffers.append((module.last_rollouts.groups, module.last_rollouts.joined("ref_logprobs")))


def saving(folder):
    return ModelCheckpoint(dirpath=folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)


def frozen(module):
    return {name: p for name, p in module.policy.named_parameters() if not p.requires_grad}


@pytest.mark.parametrize("options", [{"adapter": LORA}, {"adapter": DORA}, {"by_peft": True}], ids=str)
def test_the_base_never_moves_and_is_the_reference(
    make_module, make_data, make_trainer, adapted, tiny_policy, history, options
):
    metrics, scores = history(), ReferenceScores()
    module = make_module(
        policy=adapted(**options), beta=0.05, num_mini_batches=2, num_iterations=2, sharing={"verify": True}
    )
    trainer = make_trainer(max_steps=8, callbacks=[metrics, scores])
    trainer.fit(module, make_data())
    base = tiny_policy().load()
    assert module.reference is None
    assert module.scored_models() == {"policy": module.policy}
    plain = {id(p) for p in base.parameters()}
    assert len(frozen(module)) == len(plain)
    own = {name.removeprefix("base_model.model.").replace(".base_layer", ""): p for name, p in frozen(module).items()}
    assert all(torch.equal(own[name], p) for name, p in base.named_parameters())
    for groups, ref_logprobs_N in scores.buffers:
        expected_N = torch.cat(rollout_logprobs(base, groups)).detach()
        torch.testing.assert_close(ref_logprobs_N, expected_N, atol=1e-6, rtol=1e-6)
    assert metrics.steps[0]["kl"] == pytest.approx(0.0, abs=1e-7)
    assert metrics.steps[-1]["kl"] > 1e-4
    assert all(p.requires_grad == ("lora_" in name) for name, p in module.policy.named_parameters())
    optimized = {id(p) for group in trainer.optimizers[0].param_groups for p in group["params"]}
    assert optimized == {id(p) for name, p in module.policy.named_parameters() if "lora_" in name}


@pytest.mark.parametrize("kl", [{"kl": {"place": "reward"}}, {"kl": {"target": 0.01, "horizon": 100}}], ids=str)
def test_other_ways_of_the_penalty(make_module, make_data, make_trainer, adapted, history, kl):
    metrics = history()
    module = make_module(policy=adapted(), beta=0.05, **kl)
    make_trainer(max_steps=4, callbacks=[metrics]).fit(module, make_data())
    assert metrics.steps[-1]["kl"] > 0


def test_its_base_does_not_follow_the_policy(make_module, adapted):
    module = make_module(policy=adapted(), beta=0.05, kl={"ref_model_sync_steps": 2})
    with pytest.raises(ValueError, match=r"kl\.ref_model_sync_steps is 2; a reference moves only with all weights"):
        module.load_models()


def test_without_a_penalty_the_base_is_not_scored(make_module, make_data, make_trainer, adapted, monkeypatch):
    monkeypatch.setattr(GRPO, "reference_policy", lambda self: pytest.fail("no reference is needed"))
    make_trainer(max_steps=2).fit(make_module(policy=adapted()), make_data())


@pytest.mark.parametrize(
    ("adapter", "gradient_checkpointing"),
    [
        (LORA, False),
        (DORA, True),
        *(pytest.param(*own, marks=pytest.mark.slow) for own in ((LORA, True), (DORA, False))),
    ],
    ids=["lora", "dora, checkpointed", "lora, checkpointed", "dora"],
)
def test_sharing_on_and_off_give_the_same_trajectory(
    make_module, make_data, make_trainer, adapted, history, adapter, gradient_checkpointing
):
    losses = {}
    for sharing in ("shared", "repeated"):
        metrics = history()
        module = make_module(
            policy=adapted(adapter, gradient_checkpointing), sharing={"mode": sharing, "verify": True},
            num_mini_batches=2, beta=0.05, optimizer=OptimizerConfig(learning_rate=1e-3),
        )  # fmt: skip
        make_trainer(max_steps=6, callbacks=[metrics]).fit(module, make_data())
        losses[sharing] = [step["loss"] for step in metrics.steps]
    assert max(abs(a - b) for a, b in zip(losses["shared"], losses["repeated"], strict=True)) < 1e-4
    assert max(map(abs, losses["shared"])) > 1e-3


@pytest.mark.parametrize("where", ["policy", "critic"])
def test_adapters_that_are_not_known_to_be_lora_are_refused(make_module, make_data, make_trainer, tiny_policy, where):
    """Made by PEFT itself, in a source of one's own."""
    import peft

    class Critic:
        def load(self, policy):
            critic = PolicyCopyCritic().load(policy)
            return peft.inject_adapter_in_model(peft.LoraConfig(**activated), critic.trunk) and critic

    class Policy:
        load_tokenizer = tiny_policy().load_tokenizer

        def load(self):
            model = tiny_policy().load()
            return peft.get_peft_model(model, peft.LoraConfig(**activated)) if where == "policy" else model

    activated = {"target_modules": ["q_proj"], "task_type": "CAUSAL_LM", "alora_invocation_tokens": [3]}
    module = make_module(PPO, policy=Policy(), critic=Critic() if where == "critic" else PolicyCopyCritic())
    with pytest.raises(ValueError, match=rf"the adapter 'default' of {where} has alora_invocation_tokens=\[3\]"):
        make_trainer(max_steps=2).fit(module, make_data())


RUNS = {
    "grpo": (GRPO, {}),
    "ppo, lora": (PPO, {"critic": LoRACritic(r=4, head_std=0.1)}),
    "ppo, dora": (PPO, {"critic": LoRACritic(r=4, head_std=0.1, use_dora=True), "critic_warmup_steps": 2}),
    "ppo, shared trunk": (PPO, {"critic": SharedTrunkCritic(head_std=0.1)}),
    "ppo, copy": (PPO, {"critic": PolicyCopyCritic(head_std=0.1)}),
}


@pytest.mark.parametrize("resumed_at", [(3,), pytest.param((1, 4), marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("run", sweep(RUNS, quick=["grpo", "ppo, dora", "ppo, shared trunk"]))
def test_checkpoints_hold_what_is_trained_and_resume_is_exact(
    make_module, make_data, make_trainer, adapted, tmp_path, run, resumed_at
):
    cls, options = RUNS[run]

    def fit(checkpoint=None, callbacks=()):
        module = make_module(
            cls, policy=adapted(DORA), num_iterations=2, num_mini_batches=2, beta=0.1, sharing={"verify": True},
            optimizer=OptimizerConfig(1e-2, weight_decay=0.1), **options,
        )  # fmt: skip
        make_trainer(max_steps=6, callbacks=list(callbacks)).fit(
            module, make_data(train_size=8), ckpt_path=checkpoint, weights_only=True
        )
        return module

    undisturbed = fit(callbacks=[saving(tmp_path)])
    saved = torch.load(tmp_path / "step=3.ckpt", weights_only=True)["state_dict"]
    trained = {name for name, p in undisturbed.named_parameters() if p.requires_grad}
    assert saved.keys() == trained
    whole = dict(undisturbed.named_parameters())
    for step in resumed_at:
        resumed = dict(fit(tmp_path / f"step={step}.ckpt").named_parameters())
        assert resumed.keys() == whole.keys()
        assert all(torch.equal(value, whole[name]) for name, value in resumed.items()), step


def test_validation_of_a_checkpoint(make_module, make_data, make_trainer, adapted, tmp_path):
    kwargs = {"beta": 0.1, "policy": adapted()}
    module = make_module(**kwargs)
    make_trainer(max_steps=4, callbacks=[saving(tmp_path)]).fit(module, make_data())
    again = make_module(**kwargs)
    trainer = make_trainer()
    trainer.validate(again, datamodule=make_data(val=True), ckpt_path=tmp_path / "step=4.ckpt", verbose=False)
    assert "val/reward" in trainer.callback_metrics
    whole = dict(module.policy.named_parameters())
    assert all(torch.equal(p, whole[name]) for name, p in again.policy.named_parameters())


def test_another_base_is_noticed(make_module, make_data, make_trainer, adapted, tmp_path):
    """A changed base matters without a reference too: it is no part of the checkpoint."""
    make_trainer(max_steps=1, callbacks=[saving(tmp_path)]).fit(make_module(policy=adapted()), make_data())
    other = make_module(policy=adapted(seed=1))
    with pytest.raises(ValueError, match=r"is a different model .* or the base of its adapter, would differ"):
        make_trainer(max_steps=2).fit(other, make_data(), ckpt_path=tmp_path / "step=1.ckpt", weights_only=True)


OTHERS = {
    "alpha": ({"adapter": LoRAAdapter(r=4, alpha=64)}, r"policy .*: default.alpha is 64 \(was 16\); restore"),
    "rslora": ({"adapter": LoRAAdapter(r=4, alpha=16, use_rslora=True)}, r"default.use_rslora is True \(was False\)"),
    "dora": ({"adapter": DORA}, r"default.use_dora is True \(was False\)"),
    "rank": ({"adapter": LoRAAdapter(r=8, alpha=16)}, r"default.r is 8 \(was 4\)"),
    "layers": (
        {"adapter": LoRAAdapter(r=4, alpha=16, target_modules=["q_proj"])},
        r"default.target_modules is \['q_proj'\] \(was \['down_proj', .*\]\)",
    ),
    "several": (
        {"by_peft": True},
        r"default.alpha is 8 \(was 16\)",
    ),
    "critic": ({"critic": LoRACritic(r=4, alpha=8)}, r"critic .*: critic.alpha is 8 \(was 32\); restore"),
    "no critic's": ({"critic": PolicyCopyCritic()}, r"critic .*: critic.alpha is None \(was 32\)"),
}


def test_a_checkpoint_is_for_adapters_of_the_same_options(make_module, make_data, make_trainer, adapted, tmp_path):
    """Weights of the same shapes act otherwise under another alpha: nothing else would notice."""

    def ppo(critic=LoRACritic(r=4), **options):  # noqa: B008
        return make_module(PPO, policy=adapted(**options), critic=critic)

    make_trainer(max_steps=1, callbacks=[saving(tmp_path)]).fit(ppo(), make_data())
    data = make_data(val=True, test=MostFrequentDigit(prompt_length=20, train_size=4, val_size=4))
    for name, (options, difference) in OTHERS.items():
        for stage in ("fit", "validate", "test") if name == "alpha" else ("validate",):
            more = {"weights_only": True} if stage == "fit" else {}
            with pytest.raises(ValueError, match=difference):
                getattr(make_trainer(), stage)(
                    ppo(**options), datamodule=data, ckpt_path=tmp_path / "step=1.ckpt", **more
                )


def test_what_trains_the_adapter_may_be_another(make_module, make_data, make_trainer, adapted, tmp_path):
    """The seed is of weights that the checkpoint replaces."""
    make_trainer(max_steps=1, callbacks=[saving(tmp_path)]).fit(make_module(policy=adapted()), make_data())
    other = make_module(policy=adapted(LoRAAdapter(r=4, alpha=16, seed=3)))
    make_trainer(max_steps=2).fit(other, make_data(), ckpt_path=tmp_path / "step=1.ckpt", weights_only=True)


def test_ppo_with_a_critic_and_an_adapted_policy(make_module, make_data, make_trainer, adapted, history):
    """One base, two adapters: the critic's values move, its base does not, and the policy's adapter is not in it."""
    metrics = history()
    module = make_module(
        PPO,
        policy=adapted(),
        critic=LoRACritic(r=4, head_std=0.1),
        beta=0.05,
        sharing={"verify": True},
        num_mini_batches=2,
    )
    make_trainer(max_steps=6, callbacks=[metrics]).fit(module, make_data())
    own = {p.data_ptr() for p in module.critic.parameters() if not p.requires_grad}
    assert own <= {p.data_ptr() for p in frozen(module).values()}
    assert all(torch.isfinite(torch.tensor(step["value/loss"])) for step in metrics.steps)
    assert metrics.steps[-1]["kl"] > 0
    with adapters_off(module.critic.trunk):
        off = module.critic.trunk(torch.tensor([[1, 2, 3]])).last_hidden_state
    with adapters_off(module.policy):
        base = module.policy.model(torch.tensor([[1, 2, 3]])).last_hidden_state
    assert torch.equal(off, base)

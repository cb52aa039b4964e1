"""Short runs of each kind: the same with shared and repeated prefixes, and their exports are ordinary models."""

import pytest
import torch
from helpers.smollm2 import QUESTIONS, prompt_ids, rewards_right, rows
from lightning.pytorch import Callback, Trainer

from pl_grouprl.algorithms import GRPO, PPO, OptimizerConfig
from pl_grouprl.callbacks import ExportPolicy
from pl_grouprl.data import PromptDataModule
from pl_grouprl.models import PolicyCopyCritic, PretrainedPolicy
from pl_grouprl.models.adapters import LoRAAdapter
from pl_grouprl.types import SamplingConfig

KINDS = {
    "grpo": (GRPO, {}, {"beta": 0.05}),
    "lora": (GRPO, {"adapter": LoRAAdapter(r=4)}, {"beta": 0.05}),
    "ppo": (PPO, {}, {"critic": PolicyCopyCritic()}),
}


class Steps(Callback):
    """The metrics of every step."""

    def __init__(self):
        self.metrics = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.metrics.append({name: float(value) for name, value in trainer.callback_metrics.items()})


def train(kind, sharing, converted, folder):
    """Two updates; returns the module and the metrics after each."""
    algorithm, source, options = KINDS[kind]
    module = algorithm(
        PretrainedPolicy(str(converted), **source),
        rewards_right,
        num_generations=4,
        sampling=SamplingConfig(max_new_tokens=12, temperature=1.5),  # so that rollouts of the question differ
        optimizer=OptimizerConfig(learning_rate=1e-5),
        sharing={"mode": sharing, "verify": False},
        **options,
    )
    steps, exports = Steps(), [ExportPolicy(folder=str(folder / "policy"))] if sharing == "shared" else []
    trainer = Trainer(
        **{"accelerator": "cpu", "devices": 1, "max_steps": 2, "max_epochs": -1, "default_root_dir": folder},
        **{"logger": False, "enable_checkpointing": False, "callbacks": [steps, *exports]},
        **{"enable_progress_bar": False, "enable_model_summary": False},
    )
    trainer.fit(module, PromptDataModule(rows()[:1], batch_size=1, shuffle=False))
    return module, steps.metrics


@pytest.mark.parametrize("kind", KINDS)
def test_sharing_changes_nothing_and_the_export_is_an_ordinary_model(kind, converted, tmp_path):
    module, shared = train(kind, "shared", converted, tmp_path)
    check_export(module, tmp_path / "policy")
    _, repeated = train(kind, "repeated", converted, tmp_path)
    assert len(shared) == len(repeated) == 2
    assert shared[0]["prefix/token_ratio"] > 2
    assert repeated[0]["prefix/token_ratio"] <= 1
    assert max(own["grad_norm"] for own in shared) > 0.1  # the loss itself is about 0
    for one, other in zip(shared, repeated, strict=True):
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-2)
        for name in ("loss", "reward", "completions/mean_length", "entropy"):
            assert one[name] == pytest.approx(other[name], abs=1e-3), name


@torch.no_grad()
def check_export(module, folder):
    """Loaded by transformers alone, it has the logits of the policy, and the same tokens."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert prompt_ids(tokenizer, QUESTIONS[0]) == prompt_ids(module.tokenizer, QUESTIONS[0])
    tokens = torch.tensor([prompt_ids(tokenizer, QUESTIONS[0])])
    torch.testing.assert_close(model(tokens).logits, module.policy.eval()(tokens).logits, atol=1e-3, rtol=0)

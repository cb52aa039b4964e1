"""Policies with liger-kernel's layers: with a stand-in for it, and in Triton's interpreter where it is installed."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import fake_liger
from helpers.tiny_models import gradients, tiny_model, worst_gradient_error
from lightning.pytorch import Callback, Trainer, seed_everything
from transformers.models.qwen3 import modeling_qwen3

from pl_grouprl.algorithms import GRPO, OptimizerConfig
from pl_grouprl.attention import shared_prefix
from pl_grouprl.callbacks import ExportPolicy
from pl_grouprl.checks import check_parity
from pl_grouprl.data import PromptDataModule
from pl_grouprl.demo import MostFrequentDigit
from pl_grouprl.demo.tasks import digit_tokenizer
from pl_grouprl.models import LoRAAdapter, PretrainedPolicy
from pl_grouprl.models.kernels import fuse_if_exact, fuse_layers, is_fused, unfuse_layers, unfused
from pl_grouprl.models.score import score
from pl_grouprl.packing import pack
from pl_grouprl.training import checks
from pl_grouprl.types import Rollout, RolloutGroup, SamplingConfig
from pl_grouprl.utilities import optional

TOKENS = torch.arange(1, 13).reshape(2, 6)


@pytest.fixture
def liger(monkeypatch):
    fake_liger.install(monkeypatch)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    tiny_model("qwen3", vocab_size=len(digit_tokenizer()), eos_token_id=1).save_pretrained(path)
    digit_tokenizer().save_pretrained(path)
    return str(path)


def test_layers_are_replaced_on_the_model_alone(liger):
    own = dict(vars(modeling_qwen3))
    plain, model = tiny_model("qwen3"), tiny_model("qwen3")
    expected, names = plain(TOKENS).logits, list(model.state_dict())
    fuse_layers(model)
    assert is_fused(model)
    assert dict(vars(modeling_qwen3)) == own
    assert list(model.state_dict()) == names
    torch.testing.assert_close(model(TOKENS).logits, expected, atol=1e-5, rtol=1e-5)
    assert fake_liger.LAUNCHED == {"rms_norm": 9, "rope": 2, "swiglu": 2}  # two layers and the last norm
    assert torch.equal(plain(TOKENS).logits, expected)
    assert torch.equal(tiny_model("qwen3")(TOKENS).logits, expected)
    assert fake_liger.LAUNCHED["rope"] == 2
    copied = copy.deepcopy(model)
    with torch.no_grad():
        copied.model.norm.weight.zero_()
    assert is_fused(copied)
    assert not copied(TOKENS).logits.any()
    assert model(TOKENS).logits.any()
    with unfused(model):
        assert torch.equal(model(TOKENS).logits, expected)
    assert is_fused(model)
    unfuse_layers(copied)
    assert (is_fused(copied), is_fused(model)) == (False, True)
    assert str(copied) == str(plain)


def test_shared_and_repeated_prefixes(liger):
    model = tiny_model("qwen3").train()
    assert fuse_if_exact(model) is None
    report = check_parity(model)
    assert report.passed
    assert max(report.differences) < 1e-5


def test_other_layers_are_not_kept(monkeypatch):
    fake_liger.install(monkeypatch, wrong=0.01)
    model = tiny_model("qwen3").train()
    reason = fuse_if_exact(model)
    assert reason.startswith("its log-probabilities differ by")
    assert not is_fused(model)
    decoder = tiny_model("qwen3").model.requires_grad_(False)
    assert "differ" in fuse_if_exact(decoder)


def test_what_liger_raises_leaves_the_layers(liger, monkeypatch):
    model = tiny_model("qwen3")
    monkeypatch.setattr(fake_liger.Launch, "forward", None)
    assert fuse_if_exact(model).startswith("TypeError")
    assert not is_fused(model)


def test_models_that_liger_does_not_know(liger):
    with pytest.raises(ValueError, match="'gpt2'"):
        fuse_layers(tiny_model("gpt2"))
    assert fuse_if_exact(tiny_model("llama")).endswith("which has no layers for 'llama'; omit it")


def test_without_liger(folder, monkeypatch):
    monkeypatch.setattr(optional, "LIGER_AVAILABLE", False)
    assert fuse_if_exact(tiny_model("qwen3")) == "it is not installed (pip install 'pl-grouprl[liger]')"
    with pytest.raises(ModuleNotFoundError, match=r"pl-grouprl\[liger\]"):
        PretrainedPolicy(folder, kernels="liger").load()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu(folder, liger, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ValueError, match="needs a GPU"):
        PretrainedPolicy(folder, kernels="liger").load()


def share_of_letters(completions, **columns):
    return [sum(c.isalpha() for c in text) / max(len(text), 1) for text in completions]


class Fused(Callback):
    """Notes which models run fused layers at the end of the last step."""

    def on_train_end(self, trainer, module):
        self.names = [name for name, model in module.scored_models().items() if is_fused(model)]


def fit(policy, tmp_path, **options):
    """Train two steps; returns the module, and the names of models with fused layers."""
    seed_everything(1, verbose=False)
    sampling = SamplingConfig(max_new_tokens=6)
    module = GRPO(
        policy, share_of_letters, num_generations=3, sampling=sampling, beta=0.1,
        optimizer=OptimizerConfig(learning_rate=1e-2), **options,
    )  # fmt: skip
    trainer = Trainer(
        accelerator="cpu", devices=1, max_steps=2, max_epochs=-1, logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, default_root_dir=tmp_path,
        callbacks=[ExportPolicy(folder=str(tmp_path / "exported")), fused := Fused()],
    )  # fmt: skip
    task = MostFrequentDigit(prompt_length=20, majority_share=0.4, train_size=16, val_size=4)
    trainer.fit(module, PromptDataModule(task, batch_size=2))
    return module, fused.names


def test_a_run(folder, liger, tmp_path, caplog):
    """Update, reference and rollouts run them, and an export has the model's own names."""
    expected, names = fit(PretrainedPolicy(folder), tmp_path)
    assert not names
    assert not fake_liger.LAUNCHED
    with caplog.at_level("INFO"):
        module, names = fit(PretrainedPolicy(folder, kernels="liger"), tmp_path)
    assert "The layers of policy and reference run liger-kernel's fused kernels." in caplog.text
    assert names == ["policy", "reference"]
    assert not is_fused(module.policy)  # which is on the CPU after a fit on a GPU
    state = dict(module.policy.state_dict())
    torch.testing.assert_close(state, dict(expected.policy.state_dict()), atol=1e-5, rtol=0)
    exported = PretrainedPolicy(str(tmp_path / "exported")).load().state_dict()
    torch.testing.assert_close(dict(exported), state, atol=0, rtol=0)


def test_a_run_whose_kernels_are_wrong(folder, tmp_path, caplog, monkeypatch):
    expected, _ = fit(PretrainedPolicy(folder), tmp_path)
    fake_liger.install(monkeypatch, wrong=0.1)
    with caplog.at_level("INFO"):
        module, _ = fit(PretrainedPolicy(folder, kernels="liger"), tmp_path)
    assert "The layers of policy run without liger-kernel: its log-probabilities differ" in caplog.text
    torch.testing.assert_close(dict(module.state_dict()), dict(expected.state_dict()), atol=0, rtol=0)


@pytest.mark.parametrize("options", [{}, {"max_staleness": 1, "importance_sampling": {"mode": "token_truncate"}}])
def test_a_run_whose_parity_fails(folder, liger, tmp_path, caplog, monkeypatch, options):
    """Then the models' own layers are compared, too, and run."""
    compared = []

    def reports(module):
        found = [check_parity(module.policy, padded_rows=False)]
        compared.append(is_fused(module.policy))
        fake_liger.LAUNCHED.clear()
        if compared[-1]:
            object.__setattr__(found[0], "gradient_difference", 1.0)
        return found

    monkeypatch.setattr(GRPO, "parity_reports", reports)
    with caplog.at_level("INFO"):
        _, names = fit(PretrainedPolicy(folder, kernels="liger"), tmp_path, **options)
    assert compared == [True, False]
    assert not names
    assert not fake_liger.LAUNCHED  # not in the sampler's copy, either
    assert "All layers run without liger-kernel: sharing prefixes is not exact with it." in caplog.text
    assert checks.is_fused is is_fused


def test_an_adapter(folder, liger):
    groups = [RolloutGroup(list(range(1, 10)), [Rollout([3, 1, 4, 1]), Rollout([5, 2])])]
    found = []
    for kernels in ("none", "liger"):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            policy = PretrainedPolicy(folder, adapter=LoRAAdapter(r=2), kernels=kernels).load()
        for name, weight in policy.named_parameters():
            if "lora_B" in name:
                torch.nn.init.constant_(weight, 0.01)
        with shared_prefix(policy, min_saved_tokens=1):
            score(policy, pack(groups)).logprobs_N.sum().backward()
        found.append(gradients(policy))
    assert fake_liger.LAUNCHED["rope, backward"] == 2
    assert worst_gradient_error(*found) < 1e-5


FAMILIES = ("llama", "mistral", "qwen3", "gemma", "gemma3_text", "phi3", "qwen3_moe")


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_ligers_kernels_in_the_interpreter(family):
    pytest.importorskip("triton")
    pytest.importorskip("liger_kernel")
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    script = Path(__file__).parents[1] / "helpers" / "interpreted_liger.py"
    done = subprocess.run([sys.executable, script, family], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

"""Policies whose decoder layers are compiled: few graphs, and the numbers of the uncompiled run."""

from __future__ import annotations

import shutil

import pytest
import torch
from helpers.tiny_models import tiny_model
from lightning.pytorch import Callback, Trainer, seed_everything
from torch import nn

from pl_grouprl.algorithms import GRPO, OptimizerConfig
from pl_grouprl.attention.support import decoder_layers
from pl_grouprl.callbacks import ExportPolicy
from pl_grouprl.data import PromptDataModule
from pl_grouprl.demo import MostFrequentDigit
from pl_grouprl.demo.tasks import digit_tokenizer
from pl_grouprl.demo.warm_start import WarmStartedPolicy
from pl_grouprl.models import kernels as compiling
from pl_grouprl.models.adapters import LoRAAdapter
from pl_grouprl.models.policy import PretrainedPolicy
from pl_grouprl.types import SamplingConfig

SIZES = {"hidden_size": 48, "head_dim": 18, "intermediate_size": 80}
"""None of them is a number of rows or a length of this file: the compiler takes equal sizes for the same one."""


class Graphs:
    """A backend that runs graphs as they are, and counts them."""

    def __init__(self):
        self.seen = set()

    def __call__(self, graph, inputs):
        from torch._dynamo.backends.debugging import aot_eager

        self.seen.add(str(torch._guards.CompileContext.current_compile_id()))
        return aot_eager(graph, inputs)


@pytest.fixture
def graphs(monkeypatch):
    torch._dynamo.reset()
    backend = Graphs()
    monkeypatch.setattr(compiling, "COMPILER_BACKEND", backend)
    yield backend.seen
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    tiny_model("qwen3", vocab_size=len(digit_tokenizer()), eos_token_id=1, **SIZES).save_pretrained(path)
    digit_tokenizer().save_pretrained(path)
    return str(path)


class Losses(Callback):
    def __init__(self):
        self.seen, self.lengths = [], set()

    def on_train_batch_end(self, trainer, module, *_):
        metrics = trainer.callback_metrics
        self.seen.append([float(metrics[name]) for name in ("loss", "grad_norm", "kl", "entropy")])
        groups = module.last_rollouts.groups
        self.lengths.add(tuple(len(rollout.token_ids) for group in groups for rollout in group.rollouts))


def share_of_letters(completions, **columns):
    return [sum(c.isalpha() for c in text) / max(len(text), 1) for text in completions]


def fit(policy, tmp_path, steps=3, **options):
    """The module after a few steps, and its losses."""
    seed_everything(1, verbose=False)
    module = GRPO(
        policy,
        share_of_letters,
        num_generations=3,
        sampling=SamplingConfig(max_new_tokens=9),
        optimizer=OptimizerConfig(learning_rate=1e-3),
        beta=0.1,
        **options,
    )
    task = MostFrequentDigit(prompt_length=20, majority_share=0.4, train_size=16, val_size=4)
    losses = Losses()
    trainer = Trainer(
        accelerator="cpu", devices=1, max_steps=steps, max_epochs=-1, logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, default_root_dir=tmp_path,
        callbacks=[losses, ExportPolicy(folder=str(tmp_path / "exported"))],
    )  # fmt: skip
    trainer.fit(module, PromptDataModule(task, batch_size=4))
    assert len(losses.lengths) > 1
    return module, losses.seen


def assert_same_run(found, expected):
    (module, losses), (plain, plain_losses) = found, expected
    torch.testing.assert_close(losses, plain_losses, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(dict(module.state_dict()), dict(plain.state_dict()), atol=1e-5, rtol=0)


def test_grpo_with_shared_prefixes(folder, graphs, tmp_path):
    """Two passes over each batch of rollouts, so that they are scored without gradient too; checked at the start."""
    expected = fit(PretrainedPolicy(folder), tmp_path, num_iterations=2)
    assert not graphs
    found = fit(PretrainedPolicy(folder, kernels="compile"), tmp_path, num_iterations=2)
    assert_same_run(found, expected)
    assert 1 <= len(graphs) <= 3
    exported = PretrainedPolicy(str(tmp_path / "exported")).load().state_dict()
    torch.testing.assert_close(dict(exported), dict(found[0].policy.state_dict()), atol=0, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "options"),
    [
        ({}, {"num_iterations": 2, "sharing": {"mode": "repeated"}}),
        (
            {"adapter": LoRAAdapter(r=4), "gradient_checkpointing": True},
            {"sharing": {"verify": False}},
        ),  # adapter on and off
    ],
    ids=["repeated prefixes", "an adapter"],
)
def test_grpo_with(policy, options, folder, graphs, tmp_path):
    expected = fit(PretrainedPolicy(folder, **policy), tmp_path, **options)
    found = fit(PretrainedPolicy(folder, kernels="compile", **policy), tmp_path, **options)
    assert_same_run(found, expected)
    assert 1 <= len(graphs) <= 3
    assert (tmp_path / "exported" / "model.safetensors").is_file()


def test_rollouts_compile_nothing(folder, graphs):
    from pl_grouprl.rollout import HFRolloutEngine

    plain, policy = (PretrainedPolicy(folder, kernels=kernels).load() for kernels in ("none", "compile"))
    prompts, sampling = [[5, 6, 7], [8, 9]], SamplingConfig(max_new_tokens=4)
    expected, found = (
        HFRolloutEngine(model).generate(prompts, sampling, num_generations=2, seed=0) for model in (plain, policy)
    )
    assert found == expected
    assert not graphs


def test_the_layers_and_nothing_else_are_compiled(folder):
    policy = PretrainedPolicy(folder, kernels="compile").load()
    compiled = [name for name, module in policy.named_modules() if module._compiled_call_impl is not None]
    assert compiled == ["model.layers.0", "model.layers.1"]
    assert policy.state_dict().keys() == PretrainedPolicy(folder).load().state_dict().keys()


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("gpt2", {}),
        ("opt", {"ffn_dim": 64, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2}),
        ("qwen3_moe", {"num_experts": 2}),  # as many experts as layers
    ],
)
def test_layers_are_found(family, sizes):
    model = tiny_model(family, **sizes)
    layers = decoder_layers(model)
    assert len(layers) == 2
    assert all("Layer" in type(layer).__name__ or "Block" in type(layer).__name__ for layer in layers)


def test_a_decoder_without_such_a_list_is_refused():
    model = tiny_model("qwen3")
    model.config.num_hidden_layers = 3
    with pytest.raises(ValueError, match="Qwen3Model"):
        compiling.compile_layers(model)


def test_a_warm_started_policy(graphs, tmp_path):
    task = MostFrequentDigit(prompt_length=5, majority_share=0.4, train_size=4, val_size=4)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "head_dim": 8}
    architecture = {"model_type": "qwen3", "num_hidden_layers": 1, "num_key_value_heads": 1, **sizes}
    options = {"steps": 1, "batch_size": 2, "cache_dir": str(tmp_path), "progress_bar": False}
    source = WarmStartedPolicy(task, architecture, kernels="compile", **options)
    policy = source.load()
    assert isinstance(policy.model.layers, nn.ModuleList)
    assert policy.model.layers[0]._compiled_call_impl is not None
    assert source.folder == WarmStartedPolicy(task, architecture, **options).folder
    assert not graphs


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="the compiler's own backend needs g++ here")
def test_the_compilers_own_backend(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR", "0")  # the compiler sets it for good
    torch._dynamo.reset()
    expected = fit(PretrainedPolicy(folder), tmp_path, num_iterations=2)
    assert compiling.COMPILER_BACKEND == "inductor"
    found = fit(PretrainedPolicy(folder, kernels="compile"), tmp_path, num_iterations=2)
    assert_same_run(found, expected)
    torch._dynamo.reset()

from __future__ import annotations

import io
import shutil
from pathlib import Path

import pytest
import torch
from helpers.tiny_models import gradients, random_groups, tiny_model, worst_gradient_error
from helpers.tiny_vision import tiny_vision_model
from torch import nn

from pl_grouprl.attention import shared_prefix
from pl_grouprl.models.adapters import LoRAAdapter
from pl_grouprl.models.policy import PolicySource, PretrainedPolicy, fingerprint, frozen_copy, leave_out_of_checkpoints
from pl_grouprl.models.score import rollout_logprobs


@pytest.fixture
def folder(tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=11, n_embd=8, n_layer=1, n_head=2, n_positions=16, attn_pdrop=0.3)
    GPT2LMHeadModel(config).to(torch.bfloat16).save_pretrained(tmp_path)
    return str(tmp_path)


def test_dtype_dropout_and_checkpointing(folder):
    model = PretrainedPolicy(folder).load()
    assert model.dtype == torch.float32
    assert all(module.p == 0 for module in model.modules() if isinstance(module, nn.Dropout))
    assert not model.is_gradient_checkpointing
    kept = PretrainedPolicy(folder, dtype="auto", disable_dropout=False, gradient_checkpointing=True).load()
    assert kept.dtype == torch.bfloat16
    assert kept.config.attn_pdrop == 0.3
    assert kept.is_gradient_checkpointing
    assert isinstance(PretrainedPolicy(folder), PolicySource)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    path = tmp_path_factory.mktemp("qwen3")
    tiny_model("qwen3").save_pretrained(path)
    return str(path)


@pytest.mark.parametrize(
    ("trained", "use_reentrant", "mode"),
    [
        ("adapter", True, True),
        ("last layer", True, True),
        ("all", True, True),
        ("adapter", False, True),
        ("adapter", False, "attention"),
        ("last layer", False, "attention"),
    ],
)
def test_no_kind_of_checkpointing_loses_a_gradient(qwen, trained, use_reentrant, mode):
    """Reentrant checkpointing gives a layer gradients only where its input has one, which frozen embeddings lack."""
    found = []
    for options in ({}, {"gradient_checkpointing": mode, "gradient_checkpointing_kwargs": {"use_reentrant": True}}):
        if options and not use_reentrant:
            del options["gradient_checkpointing_kwargs"]
        policy = PretrainedPolicy(qwen, adapter=LoRAAdapter(r=2) if trained == "adapter" else None, **options).load()
        if trained == "last layer":
            policy.requires_grad_(False).model.layers[-1].requires_grad_(True)
        recomputed, last = [], policy.model.layers[-1].self_attn
        with shared_prefix(policy.train()):
            last.register_forward_hook(lambda *_, recomputed=recomputed: recomputed.append(torch.is_grad_enabled()))
            logprobs = rollout_logprobs(policy, random_groups(0, [(9, [4, 0, 6])]))
            torch.cat(logprobs).sum().backward()
        assert recomputed == ([not use_reentrant, True] if options else [True])
        found.append(gradients(policy))
    assert {name for name, p in policy.named_parameters() if p.requires_grad} == found[0].keys()
    assert worst_gradient_error(found[1], found[0]) < 1e-5


def test_an_adapter_of_a_vision_tower_that_would_get_no_gradient_is_refused(tmp_path):
    model = tiny_vision_model("qwen3_vl")
    model.save_pretrained(tmp_path)
    names = [name for name, _ in model.named_modules()]
    adapters = {
        place: LoRAAdapter(r=2, target_modules=[name for name in names if name.endswith(end) and place in name])
        for place, end in (("visual", "attn.qkv"), ("language_model", "q_proj"))
    }
    reentrant = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
    with pytest.raises(ValueError, match="no gradient"):
        PretrainedPolicy(str(tmp_path), adapter=adapters["visual"], **reentrant).load()
    assert PretrainedPolicy(str(tmp_path), adapter=adapters["visual"], gradient_checkpointing=True).load()
    assert PretrainedPolicy(str(tmp_path), adapter=adapters["language_model"], **reentrant).load()
    assert PretrainedPolicy(str(tmp_path), **reentrant).load()


def test_arguments_of_checkpointing(qwen):
    with pytest.raises(ValueError, match="gradient_checkpointing_kwargs"):
        PretrainedPolicy(qwen, gradient_checkpointing_kwargs={"use_reentrant": True})
    options = {"preserve_rng_state": False, "determinism_check": "none"}
    policy = PretrainedPolicy(qwen, gradient_checkpointing=True, gradient_checkpointing_kwargs=options).load()
    assert policy.model.layers[0]._gradient_checkpointing_func.keywords == {"use_reentrant": False, **options}
    options = {"context_fn": print, "use_reentrant": False}
    with pytest.raises(ValueError, match="context_fn and use_reentrant"):
        PretrainedPolicy(qwen, gradient_checkpointing="attention", gradient_checkpointing_kwargs=options)


def test_what_a_local_path_lacks_is_said_without_asking_the_hub(folder, tmp_path):
    (tmp_path / "bare").mkdir()
    shutil.copy(Path(folder) / "config.json", tmp_path / "bare")
    with pytest.raises(ValueError, match="bare has no tokenizer files"):
        PretrainedPolicy(str(tmp_path / "bare")).load_tokenizer()
    for path in ("./nowhere", "~/nowhere", "/nowhere"):
        for load in (PretrainedPolicy(path).load, PretrainedPolicy(path).load_tokenizer):
            with pytest.raises(FileNotFoundError, match=f"there is no folder {path}"):
                load()


def test_an_adapter_may_be_a_mapping(qwen):
    pytest.importorskip("peft")
    assert PretrainedPolicy(qwen, adapter={"r": 4}).adapter == LoRAAdapter(r=4)


def test_attention_implementation(folder):
    assert PretrainedPolicy(folder, attn_implementation="eager").load().config._attn_implementation == "eager"


def test_reference_is_frozen_and_not_saved():
    parent = nn.Module()
    parent.policy = nn.Linear(2, 2)
    parent.reference = frozen_copy(parent.policy)
    leave_out_of_checkpoints(parent, "reference")
    assert not any(p.requires_grad for p in parent.reference.parameters())
    assert fingerprint(parent.reference) == pytest.approx(fingerprint(parent.policy))
    state = parent.state_dict()
    assert set(state) == {"policy.weight", "policy.bias"}
    stream = io.BytesIO()
    torch.save(state, stream)
    with torch.no_grad():
        parent.policy.weight.zero_()
        parent.reference.weight.fill_(3.0)
    stream.seek(0)
    parent.load_state_dict(torch.load(stream, weights_only=True))
    assert parent.policy.weight.abs().sum() > 0
    assert (parent.reference.weight == 3).all()
    with pytest.raises(RuntimeError, match="Missing key"):
        parent.load_state_dict({"policy.bias": state["policy.bias"]})

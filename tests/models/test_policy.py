from __future__ import annotations

import io

import pytest
import torch
from torch import nn

from pl_grouprl.models.policy import PolicySource, PretrainedPolicy
from pl_grouprl.models.reference import fingerprint, frozen_copy, leave_out_of_checkpoints


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


def test_attention_implementation(folder):
    assert PretrainedPolicy(folder, attn_implementation="eager").load().config._attn_implementation == "eager"


def test_a_folder_that_is_not_there():
    with pytest.raises(FileNotFoundError, match=r"model path './nowhere' is not a folder"):
        PretrainedPolicy("./nowhere")


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

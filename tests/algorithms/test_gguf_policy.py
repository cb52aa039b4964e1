"""A run that starts from a GGUF file: it trains, resumes, and exports an ordinary model."""

import pytest
import torch
from helpers.tiny_gguf import write_gguf
from helpers.versions import needs

from pl_grouprl.callbacks import ExportPolicy, SafeCheckpoint
from pl_grouprl.data import PromptDataModule
from pl_grouprl.models import PretrainedPolicy


def lengths(completions, **columns):
    return [float(len(text)) for text in completions]


@needs("transformers", "5.23")
@pytest.mark.parametrize("adapter", [None, pytest.param({"r": 2}, marks=pytest.mark.slow)])
def test_train_resume_and_export(make_module, make_trainer, tmp_path, adapter):
    from transformers import AutoModelForCausalLM

    write_gguf(tmp_path / "tiny.gguf", "Q8_0")

    def fit(max_steps, callbacks, checkpoint=None):
        policy = PretrainedPolicy(str(tmp_path), gguf_file="tiny.gguf", adapter=adapter)
        module = make_module(policy=policy, rewards=lengths, beta=0.1)
        data = PromptDataModule([{"prompt": f"{n} + {n}"} for n in range(8)], batch_size=2)
        make_trainer(max_steps=max_steps, callbacks=callbacks).fit(
            module, data, **({} if checkpoint is None else {"ckpt_path": checkpoint, "weights_only": True})
        )
        return module

    whole = fit(
        2,
        [
            ExportPolicy(folder=str(tmp_path / "policy")),
            SafeCheckpoint(dirpath=tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1),
        ],
    )
    resumed = fit(2, [], tmp_path / "step=1.ckpt")
    for one, other in zip(whole.policy.parameters(), resumed.policy.parameters(), strict=True):
        assert torch.equal(one, other)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "policy")
    assert not hasattr(exported.config, "quantization_config")
    tokens = torch.tensor([[4, 5, 6]])
    torch.testing.assert_close(exported(tokens).logits, whole.policy.eval()(tokens).logits, atol=1e-5, rtol=0)

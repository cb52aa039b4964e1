import pytest
import torch
from lightning.pytorch import Trainer

from pl_grouprl.callbacks import ExportPolicy
from pl_grouprl.callbacks.export_policy import export


def tiny_model(seed=0):
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    return Qwen2ForCausalLM(Qwen2Config(vocab_size=7, num_attention_heads=2, num_key_value_heads=1, **sizes))


def test_the_folder_loads_as_the_same_model(fit, counter, tmp_path):
    from transformers import AutoModelForCausalLM

    counter.policy = tiny_model()
    fit(counter, ExportPolicy(tokenizer_attribute=None), max_steps=1)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "version_0" / "policy")
    ids = torch.tensor([[1, 2, 3]])
    assert torch.equal(loaded(ids).logits, counter.policy(ids).logits)


def test_a_former_export_is_replaced_as_a_whole(tmp_path):
    from transformers import AutoModelForCausalLM

    export(tiny_model(0), None, tmp_path / "policy")
    (tmp_path / "policy" / "left_over.txt").touch()
    export(tiny_model(1), None, tmp_path / "policy")
    assert [path.name for path in tmp_path.iterdir()] == ["policy"]
    assert not (tmp_path / "policy" / "left_over.txt").exists()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "policy")
    assert torch.equal(loaded.lm_head.weight, tiny_model(1).lm_head.weight)


def test_a_failed_export_keeps_the_former_one(tmp_path, monkeypatch):
    export(tiny_model(), None, tmp_path / "policy")
    model = tiny_model()
    monkeypatch.setattr(model, "save_pretrained", lambda folder: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        export(model, None, tmp_path / "policy")
    assert (tmp_path / "policy" / "config.json").is_file()
    assert [path.name for path in tmp_path.iterdir()] == ["policy"]


def test_a_trial_exports_nothing(fit, counter, tmp_path):
    counter.policy = tiny_model()
    fit(counter, ExportPolicy(tokenizer_attribute=None), fast_dev_run=True, logger=None)
    assert not list(tmp_path.rglob("policy"))


def test_a_missing_attribute_is_refused_before_training(fit, counter):
    with pytest.raises(AttributeError, match="'Counter' object has no attribute 'policy'"):
        fit(counter, ExportPolicy())


def test_what_is_no_transformers_model_is_refused_before_training(fit, counter):
    counter.policy = torch.nn.Linear(1, 1)
    with pytest.raises(TypeError, match="attribute='policy' is a Linear"):
        fit(counter, ExportPolicy(tokenizer_attribute=None), max_steps=1)
    assert counter.trainer.global_step == 0


def test_an_unknown_strategy_is_refused_before_training(counter):
    class Sharded:
        pass

    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    trainer._accelerator_connector.strategy = Sharded()
    with pytest.raises(ValueError, match="strategy is Sharded, which is not supported here"):
        ExportPolicy().setup(trainer, counter, "fit")

"""GRPO under each precision of the Trainer, with attention that is more than causal softmax, and with states."""

from __future__ import annotations

import pytest
import torch
from helpers.sweeps import sweep
from helpers.tiny_models import tiny_model
from helpers.variants import SPAN
from helpers.versions import needs

from pl_grouprl.algorithms import OptimizerConfig
from pl_grouprl.demo.tasks import digit_tokenizer

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
def fit(make_module, make_data, make_trainer, history, ragged_engine):
    def run(family, precision, mode, steps=1, verify=False, **options):
        """Rollouts do not depend on the policy, so that runs differ by their arithmetic alone."""
        steps_seen = history(keep_tensors=True)
        optimizer = OptimizerConfig(learning_rate=1e-3)
        sharing = {"mode": mode, "verify": verify}
        module = make_module(
            policy=Policy(family), engine=ragged_engine(), sharing=sharing, optimizer=optimizer, **options
        )
        trainer = make_trainer(max_steps=steps, precision=precision, callbacks=[steps_seen])
        trainer.fit(module, make_data(shuffle=False))
        return module, steps_seen, trainer.optimizers[0].state

    return run


def distance(found, expected):
    """Norm of the difference of all gradients, over that of the expected ones."""
    assert found.keys() == expected.keys()
    names = [name for name, gradient in expected.items() if gradient is not None]
    difference = sum((found[name].double() - expected[name].double()).square().sum() for name in names)
    return float((difference / sum(expected[name].double().square().sum() for name in names)).sqrt())


@needs("torch", "2.13")
@pytest.mark.parametrize("family", sweep(FAMILIES, quick=["gemma2", "qwen3_5_text"]))
def test_sharing_rounds_no_more_than_repeating(family, fit):
    """Gradients of the first step, against those of float32 with repeated prefixes."""
    exact = fit(family, "32-true", "repeated")[1].gradients[0]
    assert distance(fit(family, "32-true", "shared")[1].gradients[0], exact) < 1e-4
    for precision in ("bf16-mixed", "bf16-true"):
        shared, repeated = (distance(fit(family, precision, s)[1].gradients[0], exact) for s in ("shared", "repeated"))
        assert 1e-4 < repeated < 0.3, precision
        assert shared < 1.5 * repeated, precision


@pytest.mark.parametrize(("precision", "dtype"), [("bf16-mixed", torch.float32), ("bf16-true", torch.bfloat16)])
@pytest.mark.parametrize("family", sweep(FAMILIES, quick=["qwen3", "gpt_oss", "lfm2"]))
def test_what_is_kept_in_which_dtype(family, precision, dtype, fit):
    """Checked at the start, scored without gradient, a reference beside it, several steps."""
    module, steps, state = fit(
        family, precision, "shared", steps=4, verify=True, beta=0.1, num_iterations=2, num_mini_batches=2
    )
    assert {parameter.dtype for parameter in module.policy.parameters()} == {dtype}
    assert {parameter.dtype for parameter in module.reference.parameters()} == {dtype}
    assert {gradient.dtype for gradient in steps.gradients[-1].values() if gradient is not None} == {dtype}
    assert {own[name].dtype for own in state.values() for name in ("exp_avg", "exp_avg_sq")} == {dtype}
    assert {values.dtype for values in module.last_rollouts.tokens["old_logprobs"]} == {torch.float32}
    assert all(torch.isfinite(torch.tensor(list(step.values()))).all() for step in steps.steps)
    moved = [name for name, weight in steps.weights[0].items() if not weight.equal(steps.weights[-1][name])]
    assert moved

import pytest
import torch
from helpers.rollouts import reference_logprobs
from torch import nn

from pl_grouprl.rollout import HFRolloutEngine
from pl_grouprl.rollout.hf.packed_linear import MIN_STEPS, _can_pack, original_weights, packed_linears
from pl_grouprl.types import SamplingConfig

needs_packing = pytest.mark.skipif(not _can_pack(), reason="PyTorch cannot pack weights on this processor")


class Doubled(nn.Linear):
    def forward(self, input):
        return 2 * super().forward(input)


@needs_packing
@torch.no_grad()
@pytest.mark.parametrize("shape", [(3, 512), (2, 5, 512), (0, 512), (512,)])
@pytest.mark.parametrize("bias", [False, True])
def test_packed_layers_compute_the_same(shape, bias):
    linear, x = nn.Linear(512, 300, bias=bias), torch.randn(shape)
    expected = linear(x)
    with packed_linears(linear, MIN_STEPS):
        assert "forward" in linear.__dict__
        torch.testing.assert_close(linear(x), expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(linear(x), expected)
    assert "forward" not in linear.__dict__


@needs_packing
def test_only_large_plain_float32_layers_of_long_rollouts_are_packed():
    left = [nn.Linear(16, 16), Doubled(512, 512), nn.Linear(512, 512, dtype=torch.bfloat16), nn.Linear(512, 512)]
    left[3].forward = replaced = lambda input: input
    taken = nn.Linear(512, 512)
    model = nn.ModuleList([*left, taken])
    with packed_linears(model, MIN_STEPS):
        assert [m for m in model if "forward" in m.__dict__] == [left[3], taken]
        assert left[3].forward is replaced
    assert left[3].forward is replaced
    with packed_linears(model, MIN_STEPS - 1):
        assert "forward" not in taken.__dict__
    with torch.autocast("cpu"), packed_linears(model, MIN_STEPS):
        assert "forward" not in taken.__dict__


@needs_packing
@torch.no_grad()
@pytest.mark.parametrize("hooked", [0, 1], ids=["the layer", "what it is in"])
def test_layers_whose_weights_a_hook_fetches_are_not_packed(hooked):
    linear, x = nn.Linear(512, 512), torch.randn(3, 512)
    model = nn.Sequential(linear)
    expected, kept = model(x), linear.weight.detach().clone()

    def fetch(*_):
        linear.weight.copy_(kept)

    (linear, model)[hooked].register_forward_pre_hook(fetch)
    linear.weight.zero_()
    with packed_linears(model, MIN_STEPS):
        assert "forward" not in vars(linear)
        assert torch.equal(model(x), expected)


@needs_packing
@torch.no_grad()
def test_the_original_weights_are_run_in_between():
    linear, x = nn.Linear(512, 512), torch.randn(3, 512)
    with packed_linears(linear, MIN_STEPS):
        before = linear(x)
        linear.weight.mul_(2)  # what must not happen is seen this way
        assert torch.equal(linear(x), before)
        with original_weights(linear):
            changed = linear(x)
        assert not torch.allclose(changed, before)
        assert torch.equal(linear(x), before)


@needs_packing
def test_rollouts_follow_the_weights(make_model):
    model = make_model("qwen3", hidden_size=512, intermediate_size=512, vocab_size=256, initializer_range=0.05)
    engine, sampling = HFRolloutEngine(model), SamplingConfig(max_new_tokens=MIN_STEPS)
    for _ in range(2):
        groups = engine.generate([[1, 2, 3], [4, 5]], sampling, num_generations=2, seed=0)
        for prompt, group in zip([[1, 2, 3], [4, 5]], groups, strict=True):
            for rollout in group:
                expected = reference_logprobs(model, prompt, rollout, sampling)
                torch.testing.assert_close(torch.tensor(rollout.logprobs), expected, atol=1e-5, rtol=0)
        with torch.no_grad():
            model.lm_head.weight.mul_(1.5)  # what an optimizer step does

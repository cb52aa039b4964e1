"""The load-balancing loss of routers: by hand, against a loop over tokens, and against transformers."""

import pytest
import torch

from pl_grouprl.functional.losses import load_balancing_loss


def random_logits(seed, tokens, experts, layers=2, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    made = [2 * torch.randn(tokens, experts, generator=generator, dtype=torch.float64) for _ in range(layers)]
    return tuple(logits.to(dtype).requires_grad_() for logits in made)


def loop(router_logits, top_k, copies):
    """The definition, a copy of a token at a time."""
    experts = router_logits[0].shape[1]
    fraction, probability, count = torch.zeros(experts, dtype=torch.float64), 0, 0
    for logits in router_logits:
        for row, times in zip(logits, copies, strict=True):
            for _ in range(times):
                for chosen in row.argsort(descending=True)[:top_k].tolist():
                    fraction[chosen] += 1
                probability = probability + row.exp() / row.exp().sum()
                count += 1
    return experts * (fraction / count * probability / count).sum()


def test_by_hand():
    # Token 1 chooses expert 0 with probability 3/4, token 2 expert 1 with 3/5.
    logits = torch.tensor([[0.75, 0.25], [0.4, 0.6]], dtype=torch.float64).log()
    # f = (1/2, 1/2), P = (0.575, 0.425)
    torch.testing.assert_close(load_balancing_loss([logits], 1), torch.tensor(1.0, dtype=torch.float64))
    # Token 1 held by three sequences: f = (3/4, 1/4), P = (2.65/4, 1.35/4)
    expected = 2 * (0.75 * 2.65 / 4 + 0.25 * 1.35 / 4)
    actual = load_balancing_loss([logits], 1, torch.tensor([3, 1]))
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("top_k", [1, 2, 5])
def test_is_top_k_if_all_experts_are_used_equally(top_k):
    experts = 5
    # The five rotations of one row: each expert is chosen equally often, with the same mean probability.
    row = torch.arange(experts, dtype=torch.float64)
    logits = torch.stack([row.roll(shift) for shift in range(experts)])
    torch.testing.assert_close(load_balancing_loss([logits], top_k), torch.tensor(float(top_k), dtype=torch.float64))


@pytest.mark.parametrize(("top_k", "layers"), [(1, 1), (2, 3), (4, 2)])
def test_a_weight_counts_copies(top_k, layers):
    logits = random_logits(0, 9, 6, layers)
    copies = [4, 4, 4, 1, 1, 0, 2, 1, 3]
    actual = load_balancing_loss(logits, top_k, torch.tensor(copies))
    expected = loop(logits, top_k, copies)
    torch.testing.assert_close(actual, expected)
    grads = zip(torch.autograd.grad(actual, logits), torch.autograd.grad(expected, logits), strict=True)
    for own, theirs in grads:
        torch.testing.assert_close(own, theirs)


@pytest.mark.parametrize("module", ["mixtral", "qwen3_moe", "gpt_oss", "olmoe"])
def test_agrees_with_transformers(module):
    theirs = pytest.importorskip(f"transformers.models.{module}.modeling_{module}").load_balancing_loss_func
    logits = random_logits(1, 12, 6)
    mask = torch.tensor([[1, 1, 1, 0], [0, 1, 1, 1], [1, 1, 1, 1]])
    for weights, arguments in ((None, {}), (mask.flatten(), {"attention_mask": mask})):
        actual, expected = load_balancing_loss(logits, 2, weights), theirs(logits, 6, 2, **arguments)
        # They count and add up in float32 whatever the logits are.
        torch.testing.assert_close(actual, expected.double(), rtol=1e-6, atol=0)
        grads = zip(torch.autograd.grad(actual, logits), torch.autograd.grad(expected, logits), strict=True)
        for own, other in grads:
            torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-7)


def test_multiplicities_of_a_packed_row_are_transformers_loss_of_the_repeated_rows():
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    from pl_grouprl.packing import SharedPrefixLayout

    layout = SharedPrefixLayout.from_groups([(4, [2, 0, 3]), (3, [5]), (2, [1, 1])])
    logits = random_logits(2, layout.num_tokens, 5)
    index = torch.cat([layout.path(leaf) for leaf in layout.leaves])
    actual = load_balancing_loss(logits, 2, layout.multiplicity)
    expected = load_balancing_loss_func(tuple(layer[index] for layer in logits), 5, 2)
    torch.testing.assert_close(actual, expected.double(), rtol=1e-6, atol=0)
    grads = zip(torch.autograd.grad(actual, logits), torch.autograd.grad(expected, logits), strict=True)
    for own, other in grads:
        torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-7)
    unweighted = load_balancing_loss(logits, 2)
    assert (unweighted - actual).abs() > 1e-3


def test_values_at_padding_do_not_matter():
    (logits,) = random_logits(3, 6, 4, 1)
    weights = torch.tensor([1, 1, 0, 2, 0, 1])
    changed = logits.detach().clone()
    changed[2], changed[4] = 0, 50
    torch.testing.assert_close(
        load_balancing_loss([changed], 2, weights), load_balancing_loss([logits.detach()], 2, weights)
    )


def test_half_precision_is_summed_in_float32():
    exact = random_logits(4, 4000, 8, dtype=torch.bfloat16)
    loss = load_balancing_loss(exact, 2)
    assert loss.dtype == torch.float32
    expected = load_balancing_loss([logits.detach().double() for logits in exact], 2)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=0)


def test_no_tokens_give_zero():
    (logits,) = random_logits(5, 3, 4, 1)
    loss = load_balancing_loss([logits], 2, torch.zeros(3))
    assert loss == 0
    (gradient,) = torch.autograd.grad(loss, [logits])
    assert (gradient == 0).all()

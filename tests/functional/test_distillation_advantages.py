"""Advantages from a teacher: by hand, and their expectation against gradients of enumerated KLs."""

from __future__ import annotations

import itertools

import pytest
import torch

from pl_grouprl.functional.advantages import distillation_advantages

V = 3  # tokens


class Tabular(torch.nn.Module):
    """A policy over responses of a fixed length: logits for each prefix, [V ** t, V] at place t."""

    def __init__(self, length: int, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        tables = [torch.randn(V**t, V, generator=generator, dtype=torch.float64) for t in range(length)]
        self.tables = torch.nn.ParameterList(tables)

    def logprobs(self, responses: torch.Tensor) -> torch.Tensor:
        """Of each token, shape [B, T]."""
        prefix, columns = torch.zeros(len(responses), dtype=torch.long), []
        for t, table in enumerate(self.tables):
            columns.append(table.log_softmax(1)[prefix].gather(1, responses[:, t : t + 1]))
            prefix = prefix * V + responses[:, t]
        return torch.cat(columns, dim=1)


def pair(length):
    responses = torch.tensor(list(itertools.product(range(V), repeat=length)))
    return Tabular(length, 0), Tabular(length, 1), responses


def gradients(loss, model):
    return torch.autograd.grad(loss, list(model.tables))


def expected_policy_gradient(student, teacher, responses, gamma):
    """The expectation over all responses of the loss's gradient, -sum_t A_t grad log pi(y_t)."""
    logprobs = student.logprobs(responses)
    old = logprobs.detach()
    mask = torch.ones_like(responses, dtype=torch.bool)
    advantages = distillation_advantages(old, teacher.logprobs(responses).detach(), mask, gamma=gamma)
    return gradients(-(old.sum(1).exp()[:, None] * advantages * logprobs).sum(), student)


def assert_close(left, right):
    for a, b in zip(left, right, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_one_token_is_the_gradient_of_the_reverse_kl():
    student, teacher, responses = pair(1)
    p, q = (model.tables[0].log_softmax(1) for model in (student, teacher))
    exact = gradients((p.exp() * (p - q.detach())).sum(), student)
    assert exact[0].abs().max() > 0.1
    assert_close(expected_policy_gradient(student, teacher, responses, gamma=0.0), exact)


def test_gamma_1_is_the_gradient_of_the_reverse_kl_of_responses():
    student, teacher, responses = pair(3)
    logp, logq = student.logprobs(responses).sum(1), teacher.logprobs(responses).sum(1).detach()
    exact = gradients((logp.exp() * (logp - logq)).sum(), student)
    assert_close(expected_policy_gradient(student, teacher, responses, gamma=1.0), exact)


def test_gamma_0_is_the_gradient_of_each_tokens_kl_at_fixed_prefixes():
    student, teacher, responses = pair(3)
    logprobs = student.logprobs(responses).detach()
    loss, visits = torch.zeros((), dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    for own, theirs in zip(student.tables, teacher.tables, strict=True):
        p, q = own.log_softmax(1), theirs.detach().log_softmax(1)
        loss = loss + (visits * (p.exp() * (p - q)).sum(1)).sum()
        visits = (visits[:, None] * p.exp().detach()).flatten()
    torch.testing.assert_close(visits, logprobs.sum(1).exp())
    at_fixed_prefixes = gradients(loss, student)
    assert_close(expected_policy_gradient(student, teacher, responses, gamma=0.0), at_fixed_prefixes)
    whole = expected_policy_gradient(student, teacher, responses, gamma=1.0)
    assert (whole[0] - at_fixed_prefixes[0]).abs().max() > 0.01  # what it leaves out
    assert_close(whole[-1:], at_fixed_prefixes[-1:])  # nothing follows the last token


def test_by_hand_with_a_gap():
    old = torch.tensor([[-1.0, -2.0, -9.0, -0.5], [-1.0, 0.0, 0.0, 0.0]])
    teacher = torch.tensor([[-3.0, -1.0, -5.0, -1.0], [-0.25, 0.0, 0.0, 0.0]])
    mask = torch.tensor([[1, 1, 0, 1], [1, 0, 0, 0]], dtype=torch.bool)
    each = torch.tensor([[-2.0, 1.0, 0.0, -0.5], [0.75, 0.0, 0.0, 0.0]])
    torch.testing.assert_close(distillation_advantages(old, teacher, mask), each)
    # 1 + 0.5 * -0.5 = 0.75 across the gap, and -2 + 0.5 * 0.75 = -1.625.
    summed = torch.tensor([[-1.625, 0.75, 0.0, -0.5], [0.75, 0.0, 0.0, 0.0]])
    torch.testing.assert_close(distillation_advantages(old, teacher, mask, gamma=0.5), summed)


def test_refused():
    rows, mask = torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"teacher_logprobs has shape \(1, 3\)"):
        distillation_advantages(rows, torch.zeros(1, 3), mask)
    with pytest.raises(ValueError, match=r"gamma is 1\.5"):
        distillation_advantages(rows, rows, mask, gamma=1.5)
    with pytest.raises(ValueError, match="infinite"):
        distillation_advantages(rows, torch.tensor([[-torch.inf, 0.0]]), mask)

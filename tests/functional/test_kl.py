"""Estimates of the KL by hand and by enumeration, and the controllers of its coefficient."""

import math

import pytest
import torch

from pl_grouprl.functional.kl import KLController, bias_corrected_kl, kl_estimate

# ref_logp - logp = log 2, 0, -1
LOGP = torch.tensor([-2.0, -1.0, -0.5], dtype=torch.float64)
REF_LOGP = LOGP + torch.tensor([math.log(2), 0.0, -1.0], dtype=torch.float64)
VALUES = {
    "k1": [-math.log(2), 0.0, 1.0],
    "abs": [math.log(2), 0.0, 1.0],
    "k2": [math.log(2) ** 2 / 2, 0.0, 0.5],
    "k3": [2 - math.log(2) - 1, 0.0, math.exp(-1) + 1 - 1],
}
GRADIENTS = {
    "k1": [1.0, 1.0, 1.0],
    "abs": [-1.0, 0.0, 1.0],
    "k2": [-math.log(2), 0.0, 1.0],
    "k3": [1 - 2.0, 0.0, 1 - math.exp(-1)],
}
ALIASES = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}


def _value_and_gradient(kind, **options):
    logp = LOGP.clone().requires_grad_()
    value = kl_estimate(logp, REF_LOGP, kind, **options)
    (gradient,) = torch.autograd.grad(value.sum(), logp)
    return value.detach(), gradient


@pytest.mark.parametrize("kind", [*VALUES, *ALIASES])
@pytest.mark.parametrize("suffix", ["", "+"])
def test_value_and_gradient_by_hand(kind, suffix):
    base = ALIASES.get(kind, kind)
    value, gradient = _value_and_gradient(kind + suffix)
    torch.testing.assert_close(value, torch.tensor(VALUES[base], dtype=torch.float64))
    expected = GRADIENTS["k2" if suffix else base]
    torch.testing.assert_close(gradient, torch.tensor(expected, dtype=torch.float64))


def test_expected_value_and_gradient_over_a_vocabulary():
    """Enumerated: k1 and k3 have the value of the KL; k2, hence every '+', has its gradient."""
    logits = torch.tensor([0.3, -1.0, 0.8, 0.1], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([0.0, 0.5, -0.2, 1.0], dtype=torch.float64).log_softmax(-1)
    logp = logits.log_softmax(-1)
    exact = (logp.exp() * (logp - ref)).sum()
    (exact_gradient,) = torch.autograd.grad(exact, logits, retain_graph=True)
    probs = logp.detach().exp()
    for kind in ("k1", "k3", "k1+", "k3+"):
        torch.testing.assert_close((probs * kl_estimate(logp, ref, kind)).sum(), exact)
    for kind in ("k2", "k1+", "k3+", "abs+", "k2+"):
        estimate = (probs * kl_estimate(logp, ref, kind)).sum()
        (gradient,) = torch.autograd.grad(estimate, logits, retain_graph=True)
        torch.testing.assert_close(gradient, exact_gradient)
    (gradient,) = torch.autograd.grad((probs * kl_estimate(logp, ref, "k3")).sum(), logits, retain_graph=True)
    swapped = (ref.exp() * (ref - logp)).sum()
    (swapped_gradient,) = torch.autograd.grad(swapped, logits)
    torch.testing.assert_close(gradient, swapped_gradient)


def test_a_corrected_estimate_is_unbiased_off_policy():
    """Enumerated under another sampler: value and gradient of k1 and k3 are those of the KL, without '+'."""
    logits = torch.tensor([0.3, -1.0, 0.8, 0.1], dtype=torch.float64, requires_grad=True)
    ref, old = (torch.tensor(x, dtype=torch.float64).log_softmax(-1) for x in ([0.0, 0.5, -0.2, 1.0], [1.0, 0, 0, -1]))
    logp = logits.log_softmax(-1)
    exact = (logp.exp() * (logp - ref)).sum()
    (exact_gradient,) = torch.autograd.grad(exact, logits, retain_graph=True)
    for kind in ("k1", "k3"):
        estimate = (old.exp() * bias_corrected_kl(logp, old, ref, kind)).sum()
        (gradient,) = torch.autograd.grad(estimate, logits, retain_graph=True)
        torch.testing.assert_close((estimate, gradient), (exact, exact_gradient))
    with pytest.raises(ValueError, match=r"'k3\+'.*without '\+'"):
        bias_corrected_kl(logp, old, ref, "k3+")


def test_log_ratio_is_clamped_and_value_only_on_request():
    logp, ref_logp = torch.tensor([-100.0, -5.0]), torch.tensor([0.0, 0.0])
    value = kl_estimate(logp, ref_logp, "k3")
    torch.testing.assert_close(value, torch.tensor([math.exp(20) - 21, math.exp(5) - 6]))
    assert kl_estimate(logp, ref_logp, "k3", max_value=10.0).tolist() == [10.0, 10.0]


def test_close_policies_do_not_cancel():
    logp = torch.zeros(2)
    value = kl_estimate(logp, torch.tensor([1e-4, -1e-4]), "k3")
    torch.testing.assert_close(value, torch.tensor([5.00017e-9, 4.99983e-9]), rtol=1e-2, atol=0)
    assert (value >= 0).all()


def test_fixed_stays_and_follows_the_configuration_on_resume():
    controller = KLController(0.05)
    controller.update(100.0, 64)
    assert controller.coef == 0.05
    resumed = KLController(0.01)
    resumed.load_state_dict(controller.state_dict())
    assert resumed.coef == 0.01


@pytest.mark.parametrize(
    ("kl", "factor"),
    [
        (6.6, 1 + 0.1 * 0.02),  # 10 % above the target, 200 of 10 000 rollouts
        (5.4, 1 - 0.1 * 0.02),
        (6.0, 1.0),
        (100.0, 1 + 0.2 * 0.02),  # limited
        (math.inf, 1 + 0.2 * 0.02),
        (0.0, 1 - 0.2 * 0.02),
        (math.nan, 1.0),
    ],
)
def test_adaptive_by_hand(kl, factor):
    controller = KLController(0.2, target=6.0)
    controller.update(kl, 200)
    assert controller.coef == pytest.approx(0.2 * factor, rel=1e-14)


def test_adaptive_reaches_the_target():
    """In a toy where KL = 1 / coef the target 4 needs the coefficient 1/4; from both sides."""
    for start in (0.01, 5.0):
        controller = KLController(start, target=4.0, horizon=1000)
        for _ in range(500):
            controller.update(1 / controller.coef, 100)
        assert controller.coef == pytest.approx(0.25, rel=1e-6)


def test_adaptive_resumes_where_it_was():
    controller = KLController(0.2, target=6.0)
    controller.update(9.0, 100)
    resumed = KLController(0.2, target=6.0)
    resumed.load_state_dict(controller.state_dict())
    controller.update(3.0, 100)
    resumed.update(3.0, 100)
    assert resumed.coef == controller.coef != 0.2
    resumed.load_state_dict(KLController(0.5).state_dict())  # a run that was fixed until now
    assert resumed.coef == controller.coef


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (lambda: kl_estimate(torch.zeros(2), torch.zeros(1), "k1"), "ref_logp"),
        *(
            (lambda kind=kind: kl_estimate(torch.zeros(1), torch.zeros(1), kind), "kind")
            for kind in ("k4", "", "+", "k3++")
        ),
        (lambda: kl_estimate(torch.zeros(1), torch.zeros(1), "k1", max_value=10.0), "max_value"),
        (lambda: KLController(-1), "coef"),
        (lambda: KLController(0, target=6.0), "coef"),
        (lambda: KLController(0.1, target=0), "target"),
        (lambda: KLController(0.1, target=6.0, horizon=0), "horizon"),
        (lambda: KLController(0.1, 6.0, 100).update(1.0, 512), "horizon"),
    ],
)
def test_errors_name_the_argument(call, argument):
    with pytest.raises(ValueError, match=argument):
        call()

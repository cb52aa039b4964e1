import math

import pytest

from pl_grouprl.functional.kl import KLController


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


def test_errors_name_argument_value_and_remedy():
    with pytest.raises(ValueError, match=r"coef is -1; it must be 0 \(no penalty\) or larger"):
        KLController(-1)
    with pytest.raises(ValueError, match="coef is 0"):
        KLController(0, target=6.0)
    with pytest.raises(ValueError, match=r"target is 0; it must be larger than 0"):
        KLController(0.1, target=0)
    with pytest.raises(ValueError, match=r"horizon is 0; it must be larger than 0"):
        KLController(0.1, target=6.0, horizon=0)
    with pytest.raises(ValueError, match=r"horizon is 100 and a rollout phase has 512 .* horizon above 103"):
        KLController(0.1, 6.0, 100).update(1.0, 512)

import math

import pytest

from pl_grouprl.functional.kl import AdaptiveKLController, FixedKLController, make_kl_controller


def test_fixed_stays_and_follows_the_configuration_on_resume():
    controller = make_kl_controller(0.05)
    assert isinstance(controller, FixedKLController)
    controller.update(100.0, 64)
    assert controller.coef == 0.05
    resumed = make_kl_controller(0.01)
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
    controller = make_kl_controller(0.2, target=6.0)
    controller.update(kl, 200)
    assert controller.coef == pytest.approx(0.2 * factor, rel=1e-14)


def test_adaptive_reaches_the_target():
    """In a toy where KL = 1 / coef the target 4 needs the coefficient 1/4; from both sides."""
    for start in (0.01, 5.0):
        controller = make_kl_controller(start, target=4.0, horizon=1000)
        for _ in range(500):
            controller.update(1 / controller.coef, 100)
        assert controller.coef == pytest.approx(0.25, rel=1e-6)


def test_adaptive_resumes_where_it_was():
    controller = make_kl_controller(0.2, target=6.0)
    controller.update(9.0, 100)
    resumed = make_kl_controller(0.2, target=6.0)
    resumed.load_state_dict(controller.state_dict())
    controller.update(3.0, 100)
    resumed.update(3.0, 100)
    assert resumed.coef == controller.coef != 0.2
    resumed.load_state_dict(FixedKLController(0.5).state_dict())  # a run that was fixed until now
    assert resumed.coef == controller.coef


def test_errors_name_argument_value_and_remedy():
    with pytest.raises(ValueError, match=r"coef is -1; it must be 0 \(no penalty\) or larger"):
        make_kl_controller(-1)
    with pytest.raises(ValueError, match=r"coef is 0; it must be larger than 0 for an adaptive coefficient"):
        make_kl_controller(0, target=6.0)
    with pytest.raises(ValueError, match=r"target is 0; it must be larger than 0"):
        make_kl_controller(0.1, target=0)
    with pytest.raises(ValueError, match=r"horizon is 0; it must be larger than 0"):
        make_kl_controller(0.1, target=6.0, horizon=0)
    with pytest.raises(ValueError, match=r"horizon is 100 and target is None; .* Set a target"):
        make_kl_controller(0.1, horizon=100)
    with pytest.raises(ValueError, match=r"horizon is 100 and a rollout phase has 512 .* horizon above 103"):
        AdaptiveKLController(0.1, 6.0, 100).update(1.0, 512)

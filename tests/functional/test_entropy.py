"""Tokens of high entropy by hand, and the adaptive weight of the entropy bonus against TRL's."""

import math

import pytest
import torch

from pl_grouprl.functional.entropy import EntropyController, EntropyOptions, high_entropy_mask

# From TRL 1.16.0: entropies of ten optimizer steps; the weight in each, and the coefficient after it.
ENTROPIES = [0.9, 0.25, 0.19, 0.1, 0.3, 0.31, 0.05, 0.0, 0.0, 0.0]
APPLIED = [0.0, 0.0, 0.0, 0.03, 0.04, 0.0, 0.0, 0.03, 0.04, 0.05]
COEFS = [0.02, 0.02, 0.03, 0.04, 0.03, 0.02, 0.03, 0.04, 0.05, 0.05]


@pytest.mark.parametrize(
    ("quantile", "found"),
    [
        (1.0, [0, 1, 3, 4, 5, 6]),
        (0.6, [1, 4, 5, 6]),  # from 3.0, at place 2 of 1, 2, 3, 4, 5, 6, counted from 0
        (0.5, [1, 4, 6]),  # from 3.5
        (0.2, [1, 4]),  # from 5.0
        (0.01, [4]),
    ],
)
def test_tokens_by_hand(quantile, found):
    entropy_N = torch.tensor([1.0, 5.0, math.nan, 2.0, 6.0, 3.0, 4.0], dtype=torch.float64)
    mask_N = torch.tensor([True, True, False, True, True, True, True])
    assert high_entropy_mask(entropy_N, mask_N, quantile).nonzero().flatten().tolist() == found


def test_over_ranks_it_is_one_quantile():
    entropy_N = torch.rand(40, generator=torch.Generator().manual_seed(0))
    whole_N = high_entropy_mask(entropy_N, entropy_N >= 0, 0.3)
    assert int(whole_N.sum()) == 12
    parts = [high_entropy_mask(p, p >= 0, 0.3, gather=lambda _: entropy_N) for p in (entropy_N[:30], entropy_N[30:])]
    assert torch.equal(torch.cat(parts), whole_N)
    nothing = torch.zeros(2, dtype=torch.bool)
    assert not high_entropy_mask(entropy_N[:2], nothing, 0.3).any()


def test_the_weight_is_that_of_trl():
    controller = EntropyController(EntropyOptions(0.03, target=0.2, coef_min=0.02, coef_max=0.05, coef_delta=0.01))
    assert controller.adapts
    for entropy, applied, coef in zip(ENTROPIES, APPLIED, COEFS, strict=True):
        assert controller.applied == pytest.approx(applied, rel=1e-12)
        for part in (entropy - 0.01, entropy + 0.01):  # two mini-batches
            controller.measure(part)
        controller.step()
        assert controller.coef == pytest.approx(coef, rel=1e-12)
    resumed = EntropyController(EntropyOptions(0.03, target=0.2))
    resumed.load_state_dict(controller.state_dict())
    assert (resumed.coef, resumed.applied) == (controller.coef, controller.coef)
    controller.step()  # nothing was trained
    assert controller.coef == pytest.approx(0.05)


def test_a_fixed_weight_stays():
    controller = EntropyController(EntropyOptions(0.03))
    controller.measure(0.0)
    controller.step()
    assert (controller.applied, controller.state_dict()) == (0.03, {})


@pytest.mark.parametrize(
    ("options", "argument"),
    [
        ({"coef": -1.0}, "entropy_coef"),
        ({"target": 0.0}, "target"),
        ({"target": 0.1, "coef_min": -0.1}, "coef_min"),
        ({"target": 0.1, "coef_min": 0.2, "coef_max": 0.1}, "coef_max"),
        ({"target": 0.1, "coef_delta": 0.0}, "coef_delta"),
        ({"coef_delta": 0.1}, "no target"),
        ({"top_quantile": 0.0}, "top_quantile"),
    ],
)
def test_options_out_of_range(options, argument):
    with pytest.raises(ValueError, match=argument):
        EntropyOptions(**options)

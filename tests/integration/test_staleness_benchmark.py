"""The table of runs with rollouts sampled ahead."""

import pytest


@pytest.fixture
def staleness(load):
    return load("staleness")


def test_a_row_has_medians_of_the_steps_but_the_first(staleness):
    points = {
        "time/step": {1: 9.0, 2: 1.0, 3: 3.0, 4: 2.0},
        "time/update": {1: 0.5, 2: 0.5, 3: 0.5, 4: 0.5},
        "rollout/staleness/mean": {1: 0.0, 2: 1.0, 3: 1.0, 4: 1.0},
        "rollout/dropped_stale": {1: 0.0, 2: 2.0},
        staleness.METRIC: {4: 0.5, 0: 0.25},
    }
    run = staleness.summary(points)
    assert (run["seconds"]["step"], run["seconds"]["update"], run["seconds"]["rollout"]) == (2.0, 0.5, 0.0)
    assert (run["staleness"], run["dropped"], run["curve"]) == (0.75, 2.0, [(0, 0.25), (4, 0.5)])
    row = staleness.row_of(1, [run, run])
    assert row.items() >= {"step s": 2.0, "staleness": 0.75, "dropped": 4.0, "last": [0.5, 0.5], "seeds": 2}.items()

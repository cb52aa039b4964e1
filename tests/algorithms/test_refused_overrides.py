"""What would have no effect is refused: options set too late, advantages that are never computed, half an engine."""

import copy

import pytest

from pl_grouprl import GRPO, PPO
from pl_grouprl.training.checkpoint import PASSED_ON


def zero(completions, **kwargs):
    return [0.0 for _ in completions]


@pytest.mark.parametrize("name", sorted(PASSED_ON))
def test_setting_one_is_refused(name, tiny_policy):
    module = GRPO(tiny_policy(), zero)
    before = getattr(module, name)
    with pytest.raises(AttributeError, match=f"{name} cannot be set on a GRPO: .* pass it to the constructor"):
        setattr(module, name, before)
    assert getattr(copy.deepcopy(module), name) == before or name == "engine"


def test_what_is_read_when_it_is_needed_can_be_set(tiny_policy):
    module = PPO(tiny_policy(), zero)
    module.gamma = 0.5
    assert module.gamma == 0.5


def test_a_subclass_sets_its_own_attributes(tiny_policy):
    class Mine(GRPO):
        def __init__(self, *args, level=1, **kwargs):
            super().__init__(*args, **kwargs)
            self.level = level

    assert Mine(tiny_policy(), zero, level=3).level == 3


def test_advantage_overrides_that_would_never_be_called_are_refused(tiny_policy):
    class Mine(GRPO):
        def compute_advantages(self, groups):
            raise AssertionError

    with pytest.raises(ValueError, match=r"Mine\.compute_advantages would never be called: .*'reinforce_plus_plus'"):
        Mine(tiny_policy(), zero, advantage_estimator="reinforce_plus_plus")


def test_an_engine_with_half_of_the_sync_protocol_is_refused(tiny_policy):
    class Half:
        def bind(self, model, tokenizer=None):
            pass

        def generate(self, prompts, sampling, **kwargs):
            return []

        def update_weights(self, weights, **kwargs):
            return {}

    with pytest.raises(TypeError, match="engine is a Half"):
        GRPO(tiny_policy(), zero, engine=Half())


def test_manual_optimization_is_refused(tiny_policy, make_trainer, make_data):
    class Mine(GRPO):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.automatic_optimization = False

    with pytest.raises(ValueError, match=r"Mine\.automatic_optimization is False, .* leave it at True"):
        make_trainer(max_steps=1).fit(Mine(tiny_policy(), zero), make_data())

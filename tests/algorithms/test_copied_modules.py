"""A deep copy of a module, as callbacks that average weights make it."""

import copy

import pytest

from pl_grouprl.algorithms import GRPO, PPO, GroupPPO


@pytest.mark.parametrize("cls", [GRPO, PPO, GroupPPO])
def test_the_parts_of_a_copy_belong_to_the_copy(make_module, make_data, make_trainer, cls):
    module = make_module(cls)
    copied = copy.deepcopy(module)
    assert copied.rewarder._run is copied.sampler._run is copied.scorer._run is copied.collector._run is copied
    assert copied.updater._compute_loss.args[0] is copied
    assert copied.collector._sampler is copied.sampler
    make_trainer(max_steps=1).fit(copied, make_data())
    assert copied.last_rollouts is not None
    assert module.policy is None

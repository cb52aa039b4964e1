"""Old names still work, and say what to use."""

import importlib

import pytest

MOVED = {
    "pl_grouprl.models.media.load_processor": "pl_grouprl.media.processor.load_processor",
    "pl_grouprl.models.weight_stream.checkpoint_weights": "pl_grouprl.sync.stream.checkpoint_weights",
    "pl_grouprl.rollout.engine.SamplerLostError": "pl_grouprl.sync.sampler.SamplerLostError",
    "pl_grouprl.rollout.weights.buckets": "pl_grouprl.sync.transfer.buckets",
    "pl_grouprl.rollout.weights.checksum": "pl_grouprl.sync.checksum.checksum",
}


def split(name):
    module, _, attribute = name.rpartition(".")
    return importlib.import_module(module), attribute


@pytest.mark.parametrize(("old", "new"), MOVED.items())
def test_an_old_name_is_the_new_one_with_a_warning(old, new):
    with pytest.warns(DeprecationWarning, match=f"{old} is now {new}."):
        found = getattr(*split(old))
    assert found is getattr(*split(new))


def test_other_names_are_missing():
    module = importlib.import_module("pl_grouprl.rollout.weights")
    with pytest.raises(AttributeError, match=r"'pl_grouprl\.rollout\.weights' has no attribute 'missing'"):
        module.missing  # noqa: B018

import pytest

import pl_grouprl.data
import pl_grouprl.data.tasks
import pl_grouprl.demo
import pl_grouprl.models
from pl_grouprl.utilities.moved import moved


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (pl_grouprl.data, "MostFrequentDigit"),
        (pl_grouprl.data.tasks, "MostFrequentDigit"),
        (pl_grouprl.models, "WarmStartedPolicy"),
    ],
)
def test_an_old_name_is_the_new_object(module, name):
    with pytest.warns(DeprecationWarning, match=rf"{module.__name__}.{name} is now pl_grouprl.demo(.digits)?.{name}"):
        assert getattr(module, name) is getattr(pl_grouprl.demo, name)


def test_any_other_name_is_an_error():
    with pytest.raises(AttributeError, match="module 'package' has no attribute 'absent'"):
        moved("package", {"old": "os.path"})("absent")
    with pytest.raises(AttributeError, match=r"module 'pl_grouprl\.data' has no attribute 'absent'"):
        pl_grouprl.data.absent  # noqa: B018


def test_an_old_class_path_works_in_yaml():
    from jsonargparse import ArgumentParser

    from pl_grouprl.models import PolicySource

    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--policy", type=PolicySource)
    task = {"class_path": "pl_grouprl.data.MostFrequentDigit", "init_args": {"prompt_length": 16}}
    init_args = {"demonstrations": task, "architecture": {"model_type": "qwen3"}}
    parsed = parser.parse_object(
        {"policy": {"class_path": "pl_grouprl.models.WarmStartedPolicy", "init_args": init_args}}
    )
    policy = parser.instantiate_classes(parsed).policy
    assert isinstance(policy, pl_grouprl.demo.WarmStartedPolicy)
    assert isinstance(policy.demonstrations, pl_grouprl.demo.MostFrequentDigit)

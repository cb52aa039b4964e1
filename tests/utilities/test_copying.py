"""private_copy: containers are copied all the way down, what they hold at the bottom is shared."""

from collections import OrderedDict, UserDict, defaultdict, namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from pl_grouprl.types import Rollout, RolloutGroup
from pl_grouprl.utilities.describe import private_copy

Pair = namedtuple("Pair", ["left", "right"])


class Tagged(list):
    tag = None


@dataclass(frozen=True)
class Frozen:
    items: list


VALUES = [
    [1, 2, 3], [[1], {"a": [2]}, "text", None], {"a": {"b": [1]}, 2: (1, [2])}, ([1], [2]), Pair([1], {"x": [2]}),
    OrderedDict(a=[1]), defaultdict(list, a=[1]), UserDict(a=[1]), Tagged([[1], 2]), {1, 2}, bytearray(b"ab"),
    Frozen([1, [2]]),
    RolloutGroup([1, 2], [Rollout([3], logprobs=[-1.0])], columns={"a": [{"b": 1}]}, prompt=[{"role": "user"}]),
]  # fmt: skip


def containers(value, found=None):
    """Ids of every container in a value."""
    found = set() if found is None else found
    if isinstance(value, (list, tuple, set, bytearray)):
        inside = list(value)
    elif isinstance(value, (dict, UserDict)):
        inside = list(value.values())
    elif hasattr(value, "__dict__"):
        inside = list(vars(value).values())
    else:
        return found
    for item in inside:
        containers(item, found)
    if not isinstance(value, tuple):
        found.add(id(value))
    return found


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_equal_and_of_the_same_type_with_no_container_in_common(value):
    own = private_copy(value)
    assert type(own) is type(value)
    assert own == value
    assert containers(own).isdisjoint(containers(value))


def test_arrays_are_copied_and_leaves_are_shared():
    leaf, tensor, array = object(), torch.zeros(2), np.zeros(2)
    own = private_copy({"leaf": leaf, "tensor": [tensor], "array": array})
    assert own["leaf"] is leaf
    assert own["tensor"][0] is tensor
    own["array"][:] = 1
    assert array.tolist() == [0, 0]


def test_attributes_of_subclasses_survive():
    value = Tagged([1])
    value.tag = "kept"
    assert private_copy(value).tag == "kept"
    assert private_copy(defaultdict(list))["new"] == []


class Point(tuple):
    def __new__(cls, x, y):
        return super().__new__(cls, (x, y))


def test_tuples_that_are_made_in_ways_of_their_own_are_shared():
    point = Point(1, 2)
    assert private_copy({"points": [point]})["points"][0] is point

"""Constructors take what their annotations say, mappings for configs too, and refuse the rest by name."""

from __future__ import annotations

import inspect
import pickle
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from pl_grouprl.utilities.options import ArgumentError, checked_arguments, convert


@checked_arguments
@dataclass(frozen=True)
class Inner:
    rate: float = 0.5
    steps: int = 1
    names: tuple[str, ...] = ()


@checked_arguments
class Base:
    def __init__(self, size: int, *, inner: Inner | None = None, mode: Literal["a", "b"] = "a") -> None:
        self.size, self.inner, self.mode = size, inner, mode


@checked_arguments
class Derived(Base):
    def __init__(self, size: int, *, path: str | None = None, **kwargs: Any) -> None:
        super().__init__(size, **kwargs)
        self.path = path


class OfTheUser(Derived):
    def __init__(self, *args: Any, own: int = 0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.own = own


def test_mappings_become_configs():
    made = Derived(3, inner={"rate": 1, "names": ["x"]})
    assert made.inner == Inner(1.0, 1, ("x",))
    assert Derived(3, inner=made.inner).inner is made.inner


@pytest.mark.parametrize(
    ("hint", "value", "expected"),
    [
        (int, np.int64(3), 3),
        (float, 2, 2),
        (float, np.float32(0.5), 0.5),
        (str | None, Path("a") / "b", "a/b"),
        (tuple[int, ...], [1, 2], (1, 2)),
        (list[str], ("x",), ["x"]),
        (list[Inner | int], {"steps": 4}, [Inner(steps=4)]),
        (dict[str, Any], {"a": 1}, {"a": 1}),
    ],
)
def test_what_stands_for_a_value(hint, value, expected):
    found = convert(hint, value, "option")
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": True}, "Derived.size is True; it must be a whole number"),
        ({"size": "3"}, "Derived.size is '3'; it must be a whole number"),
        ({"size": 3.0}, "Derived.size is 3.0; it must be a whole number"),
        ({"mode": "c"}, "Derived.mode is 'c'; it must be 'a' or 'b'"),
        (
            {"inner": 3},
            r"Derived.inner is 3; it must be a Inner, or a mapping of its fields \(rate, steps, names\) or None",
        ),
        ({"inner": {"rate": "1"}}, "Derived.inner: Inner.rate is '1'; it must be a number"),
        ({"inner": {"steps": True}}, "Derived.inner: Inner.steps is True"),
        ({"inner": {"names": "x"}}, "Inner.names is 'x'; it must be a list, each item a string"),
        ({"inner": {"names": [1]}}, r"Inner.names\[0\] is 1; it must be a string"),
        ({"inner": {"rat": 1}}, "Derived.inner: Inner takes no 'rat'; did you mean 'rate'"),
        ({"inner": {"class_path": "Inner"}}, "Derived.inner is a mapping with a class_path, which only YAML knows"),
        ({"steps": 3}, r"Derived takes no 'steps'; it is part of inner: inner=\{'steps': ...\}"),
        ({"mod": "a"}, "Derived takes no 'mod'; did you mean 'mode'"),
        ({"zzz": 1}, "Derived takes no 'zzz'; it takes size, path, inner, mode"),
    ],
)
def test_refused(options, message):
    with pytest.raises(ArgumentError, match=message):
        Derived(**{"size": 1, **options})


def test_a_class_on_top_has_names_of_its_own():
    assert OfTheUser(1, own=2, mode="b").mode == "b"
    with pytest.raises(ArgumentError, match="OfTheUser takes no 'mod'; did you mean 'mode'"):
        OfTheUser(1, mod="b")


def test_too_many_by_position():
    with pytest.raises(ArgumentError, match="Derived takes only size by position; pass 'b' by name"):
        Derived(1, "b")


def test_signature_source_and_copies_stay():
    assert list(inspect.signature(Derived).parameters) == ["size", "path", "kwargs"]
    assert "super().__init__(size, **kwargs)" in inspect.getsource(Derived.__init__)
    assert pickle.loads(pickle.dumps(Inner(2.0))) == replace(Inner(), rate=2.0)

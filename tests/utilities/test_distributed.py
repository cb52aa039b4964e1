from __future__ import annotations

import pytest

from pl_grouprl.utilities import distributed
from pl_grouprl.utilities.distributed import derive_seed, gather_plain, num_ranks, raise_on_all_ranks


def test_one_process():
    value = {"a": [1, None, "x"]}
    assert num_ranks() == 1
    assert gather_plain(value) == [value]


def test_seeds():
    assert derive_seed("rollout", 1, 2) == derive_seed("rollout", 1, 2)
    assert len({derive_seed("rollout", i, j) for i in range(30) for j in range(30)}) == 900
    assert derive_seed("rollout", 12, 3) != derive_seed("rollout", 1, 23)
    assert all(0 <= derive_seed(i) < 2**63 for i in range(100))


def raises(error):
    def run():
        raise error

    return run


def test_what_fails_on_one_rank_fails_on_all(monkeypatch):
    assert raise_on_all_ranks(lambda: 3) == 3
    with pytest.raises(KeyError):
        raise_on_all_ranks(raises(KeyError("own")))
    told = [False, "OSError: no file"]
    monkeypatch.setattr(distributed, "gather_plain", lambda value, device, group: [value, told])
    with pytest.raises(RuntimeError, match="rank 1 failed with OSError: no file"):
        raise_on_all_ranks(lambda: 3)
    with pytest.raises(KeyError):
        raise_on_all_ranks(raises(KeyError("own")))


@pytest.mark.parametrize("error", [TimeoutError("x"), KeyError("x")])
def test_one_rank_alone_raises_its_own(error):
    with pytest.raises(type(error)) as raised:
        raise_on_all_ranks(raises(error), shared=TimeoutError)
    assert raised.value is error


def test_a_shared_type_is_raised_on_all_unless_a_rank_raised_another(monkeypatch):
    """Rank 0 is this one; ranks 1 and 2 say what they raised."""
    others = [[True, "TimeoutError: away"], None]
    monkeypatch.setattr(distributed, "gather_plain", lambda value, device, group: [value, *others])
    with pytest.raises(TimeoutError, match="rank 1 failed with TimeoutError: away"):
        raise_on_all_ranks(lambda: 3, shared=TimeoutError)
    with pytest.raises(TimeoutError, match="own"):
        raise_on_all_ranks(raises(TimeoutError("own")), shared=TimeoutError)
    others[1] = [False, "ValueError: too long"]
    for run in (lambda: 3, raises(TimeoutError("own"))):
        with pytest.raises(RuntimeError, match="rank 2 failed with ValueError: too long"):
            raise_on_all_ranks(run, shared=TimeoutError)
    with pytest.raises(KeyError, match="own"):
        raise_on_all_ranks(raises(KeyError("own")), shared=TimeoutError)


def test_a_group_of_ranks_is_enough(monkeypatch):
    monkeypatch.setattr(distributed, "gather_plain", lambda value, device, group: [value, [False, group]])
    with pytest.raises(RuntimeError, match="rank 1 failed with the group"):
        raise_on_all_ranks(lambda: 3, group="the group")

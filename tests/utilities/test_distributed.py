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


def test_what_fails_on_one_rank_fails_on_all(monkeypatch):
    raise_on_all_ranks(None)
    with pytest.raises(KeyError):
        raise_on_all_ranks(KeyError("own"))
    monkeypatch.setattr(distributed, "gather_plain", lambda value, device: [value, "OSError: no file"])
    with pytest.raises(RuntimeError, match="rank 1 failed with OSError: no file"):
        raise_on_all_ranks(None)

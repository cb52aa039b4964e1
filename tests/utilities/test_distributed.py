from __future__ import annotations

import pytest
from helpers.scripts import run_script

from pl_grouprl.utilities import distributed
from pl_grouprl.utilities.distributed import derive_seed, gather_plain, num_ranks, raise_on_all_ranks


def test_one_process():
    value = {"a": [1, None, "x"]}
    assert num_ranks() == 1
    assert gather_plain(value) == [value]


GATHER = """
import torch
from pl_grouprl.utilities.distributed import _FIRST_BYTES, gather_plain

torch.distributed.init_process_group("gloo")
rank = torch.distributed.get_rank()
texts = [size * "x" for size in (0, _FIRST_BYTES - 100, 2 * _FIRST_BYTES, 3 * _FIRST_BYTES)]
for of_ranks in [[None, texts[0]], [{"a": [1.5, None]}, texts[1]], texts[:4:2], texts[3:1:-1], [7, {7: texts[1]}]]:
    assert gather_plain(of_ranks[rank]) == of_ranks, of_ranks
first, second = gather_plain(torch.arange(1000 * (1 + rank)))
assert torch.equal(first, torch.arange(1000)) and torch.equal(second, torch.arange(2000))
torch.distributed.destroy_process_group()
"""


def test_values_of_all_sizes_are_gathered(tmp_path):
    (tmp_path / "script.py").write_text(GATHER)
    run_script(tmp_path / "script.py", ranks=2)


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
    for error in (TimeoutError("x"), KeyError("x")):
        with pytest.raises(type(error)) as raised:
            raise_on_all_ranks(raises(error), shared=TimeoutError)
        assert raised.value is error
    told = [False, "OSError: no file"]
    monkeypatch.setattr(distributed, "gather_plain", lambda value, device, group: [value, told])
    with pytest.raises(RuntimeError, match="rank 1 failed with OSError: no file"):
        raise_on_all_ranks(lambda: 3)
    with pytest.raises(KeyError):
        raise_on_all_ranks(raises(KeyError("own")))


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

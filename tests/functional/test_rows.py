import pytest
import torch

from pl_grouprl.functional.masked import compact, from_rows, places_of, reverse_scan, to_rows


def test_rows_and_back():
    values, lengths = torch.tensor([1.0, 2, 3, 4, 5, 6]), torch.tensor([2, 0, 3, 1])
    rows = to_rows(values, lengths)
    assert rows.tolist() == [[1, 2, 0], [0, 0, 0], [3, 4, 5], [6, 0, 0]]
    assert torch.equal(from_rows(rows, lengths), values)


def test_vectors():
    values, lengths = torch.arange(12.0).view(3, 4), torch.tensor([1, 2])
    rows = to_rows(values, lengths)
    assert rows.shape == (2, 2, 4)
    assert torch.equal(rows[1], values[1:])
    assert torch.equal(from_rows(rows, lengths), values)


def test_no_rollouts_and_no_tokens():
    assert to_rows(torch.zeros(0), torch.zeros(0, dtype=torch.long)).shape == (0, 0)
    assert to_rows(torch.zeros(0), torch.tensor([0, 0])).shape == (2, 0)


def test_places_of_some_rollouts():
    lengths = torch.tensor([2, 1, 3, 0])
    assert places_of(torch.tensor([2, 3, 0]), lengths).tolist() == [3, 4, 5, 0, 1]
    assert places_of(torch.tensor([], dtype=torch.long), lengths).shape == (0,)


def test_mismatched_lengths():
    with pytest.raises(ValueError, match="lengths_B adds up to 3"):
        to_rows(torch.zeros(2), torch.tensor([1, 2]))


def test_gaps_close_and_reopen():
    mask = torch.tensor([[0, 1, 1, 0, 1], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]], dtype=torch.bool)
    values = torch.arange(15.0).view(3, 5) + 1
    rows = compact(mask)
    closed = rows.close(values)
    assert closed.tolist() == [[2, 3, 5, 0, 0], [0, 0, 0, 0, 0], [11, 12, 13, 14, 15]]
    assert rows.mask_BT.sum(1).tolist() == [3, 0, 5]
    assert torch.equal(rows.reopen(closed), values * mask)
    assert torch.equal(rows.reopen(closed, fill=-1), values.masked_fill(~mask, -1))


@pytest.mark.parametrize("length", [0, 1, 2, 3, 7, 8, 33])
def test_scan_is_the_recursion(length):
    generator = torch.Generator().manual_seed(length)
    values, decay = torch.randn(2, 4, length, dtype=torch.float64, generator=generator).unbind(0)
    expected, after = torch.zeros_like(values), torch.zeros(4, dtype=torch.float64)
    for t in range(length - 1, -1, -1):
        after = expected[:, t] = values[:, t] + decay[:, t] * after
    torch.testing.assert_close(reverse_scan(values, decay), expected, rtol=1e-12, atol=1e-12)

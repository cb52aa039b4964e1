import pytest
import torch

from pl_grouprl.packing.batch import _move_as_block, move_together

TENSORS = {
    "mask": torch.tensor([True, False, True]),
    "ids": torch.arange(6).view(2, 3),
    "transposed": torch.arange(6.0).view(2, 3).t(),
    "half": torch.tensor([0.5, -2.0, 3.0], dtype=torch.bfloat16),
    "number": torch.tensor(7),
    "expanded": torch.tensor([7]).as_strided((1,), (0,)),  # as `expand` leaves it
    "none": torch.empty(0, dtype=torch.long),
}


def test_joined_tensors_are_separated_again():
    separated = _move_as_block(TENSORS, torch.device("cpu"))
    assert list(separated) == list(TENSORS)
    for name, tensor in TENSORS.items():
        assert separated[name].dtype == tensor.dtype
        assert torch.equal(separated[name], tensor)


def test_on_the_cpu_nothing_is_copied():
    moved = move_together(TENSORS, "cpu")
    assert all(moved[name] is tensor for name, tensor in TENSORS.items())


def test_nothing_moves_to_another_device():
    assert move_together({}, "meta") == {}


def test_another_device_gets_every_shape_and_dtype():
    moved = move_together(TENSORS, "meta")
    assert {name: (own.shape, own.dtype) for name, own in moved.items()} == {
        name: (own.shape, own.dtype) for name, own in TENSORS.items()
    }
    assert all(own.is_meta for own in moved.values())


@pytest.mark.gpu
def test_a_gpu_gets_the_same_numbers():
    moved = move_together(TENSORS, "cuda")
    for name, tensor in TENSORS.items():
        assert torch.equal(moved[name].cpu(), tensor)

"""Copies of a module, and the parts of a batch."""

import numpy as np
import pytest
import torch

import tristep


@pytest.mark.parametrize(("size", "parts"), [(6, 3), (7, 3), (8, 3), (2, 4), (0, 2), (5, 1)])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_parts_are_those_of_numpy(size, parts, axis):
    """Gluon 1.9.1 splits as NumPy's array_split: the first parts get what does not divide."""
    shape = [2, 2]
    shape[axis] = size
    data = torch.arange(2.0 * size).reshape(shape)
    found = tristep.split_data(data, parts, batch_axis=axis, even_split=False)
    expected = np.array_split(data.numpy(), parts, axis=axis)
    assert [part.tolist() for part in found] == [part.tolist() for part in expected]
    assert all(part.untyped_storage().data_ptr() == data.untyped_storage().data_ptr() for part in found)
    loaded = tristep.split_and_load(data, ["cpu"] * parts, axis, even_split=False)
    assert [part.tolist() for part in loaded] == [part.tolist() for part in expected]


def test_parts_go_to_their_devices(device):
    parts = tristep.split_and_load(np.arange(4.0, dtype=np.float32), [device, "meta"])
    assert [part.device.type for part in parts] == [device.type, "meta"]
    assert parts[0].tolist() == [0.0, 1.0]
    (whole,) = tristep.split_and_load([[1.0], [2.0], [3.0]], [device])
    assert whole.tolist() == [[1.0], [2.0], [3.0]]


def test_copies_are_equal_and_apart(device):
    module = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    module[1].weight = module[1].bias  # shared stays shared
    module[0].bias.lr_mult = 0.5
    module[0].weight.requires_grad_(False)
    copies = tristep.replicate(module, [device, "cpu"])
    assert [copy[0].weight.device.type for copy in copies] == [device.type, "cpu"]
    for copy in copies:
        for (name, old), (other, new) in zip(module.state_dict().items(), copy.state_dict().items(), strict=True):
            assert name == other
            assert torch.equal(old.cpu(), new.cpu())
        assert copy[1].weight is copy[1].bias
        assert copy[0].bias.lr_mult == 0.5
        assert not copy[0].weight.requires_grad
    with torch.no_grad():
        copies[0][0].weight.zero_()
    assert copies[1][0].weight.abs().max() > 0
    assert module[0].weight.abs().max() > 0


def test_a_batch_that_does_not_divide_is_refused():
    with pytest.raises(ValueError, match=r"data of shape \(5, 2\) does not divide into 2 equal parts along axis 0"):
        tristep.split_data(torch.zeros(5, 2), 2)

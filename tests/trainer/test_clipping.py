"""`tristep.clip_global_norm` by MXNet's formula in NumPy, and `tristep.optim.clip_grad_norm_` against torch's."""

import math
import warnings

import numpy as np
import pytest
import torch

import tristep

SHAPES = ((5, 3), (), (150,), (4, 2, 3))


def numbers(seed=0):
    rng = np.random.default_rng(seed)
    return [rng.normal(size=shape) for shape in SHAPES]


def as_tensors(arrays, device, dtype=torch.float32):
    return [torch.tensor(array, dtype=dtype).to(device) for array in arrays]


@pytest.mark.parametrize("max_norm", [0.7, 1e4])
@pytest.mark.parametrize("check", [True, False])
def test_gluons_formula(max_norm, check, device):
    arrays = numbers()
    found = as_tensors(arrays, device)
    norm = math.sqrt(sum((array**2).sum() for array in arrays))
    result = tristep.clip_global_norm(found, max_norm, check_isfinite=check)
    if check:
        assert type(result) is float
    else:
        assert result.shape == (1,)
    assert float(result) == pytest.approx(norm, rel=1e-6)
    for tensor, array in zip(found, arrays, strict=True):
        np.testing.assert_allclose(tensor.cpu().numpy(), array * min(1.0, max_norm / (norm + 1e-8)), rtol=2e-6)


def test_gluons_epsilon():
    """Zeros would be divided by zero; a norm of 1e-8 shows which epsilon it is."""
    x = torch.tensor([1e-8], dtype=torch.float64)
    tristep.clip_global_norm([x], 1e-8)
    assert x.item() == pytest.approx(0.5e-8)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_gluons_warning(value):
    x, y = torch.tensor([1.0, value]), torch.tensor([2.0])
    with pytest.warns(UserWarning, match="nan or inf is detected. Clipping results will be undefined."):
        found = tristep.clip_global_norm([x, y], 1.0)
    assert math.isnan(found) if math.isnan(value) else found == math.inf
    assert y.item() == (2.0 if math.isnan(value) else 0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tristep.clip_global_norm([torch.tensor([value])], 1.0, check_isfinite=False)


def test_sparse_arrays_are_clipped_as_in_gluon():
    """MXNet's test_global_norm_clip with row_sparse arrays, and one that lists a row twice."""
    arrays = [torch.ones(3, 3).to_sparse(1), torch.ones(4, 4).to_sparse(1)]
    assert tristep.clip_global_norm(arrays, 1.0) == 5.0
    for array, size in zip(arrays, (3, 4), strict=True):
        np.testing.assert_allclose(array.to_dense(), np.full((size, size), 0.2), rtol=1e-6)
    twice = torch.sparse_coo_tensor(torch.tensor([[1, 1]]), torch.tensor([[1.0], [2.0]]), (3, 1), check_invariants=True)
    nothing, dense = torch.zeros(3, 1).to_sparse(1), torch.tensor([4.0])
    assert tristep.clip_global_norm([twice, nothing, dense], 1.0) == 5.0
    np.testing.assert_allclose(twice.to_dense(), [[0.0], [0.6], [0.0]], rtol=1e-6)
    np.testing.assert_allclose(dense, [0.8], rtol=1e-6)
    assert nothing.to_dense().tolist() == [[0.0]] * 3


def pair(device, dtype=torch.float32, arrays=None):
    made = []
    for _ in range(2):
        params = [torch.nn.Parameter(torch.zeros(array.shape, dtype=dtype, device=device)) for array in arrays or numbers()]
        for param, gradient in zip(params, as_tensors(arrays or numbers(), device, dtype), strict=True):
            param.grad = gradient
        made.append([*params, torch.nn.Parameter(torch.zeros(2, device=device))])
    return made


@pytest.mark.parametrize("norm_type", [2, 2.0, 1, math.inf, "inf", 3.0, 0.5, 0.0, -math.inf])
@pytest.mark.parametrize("max_norm", [0.5, 1e5, 0.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_torchs_numbers(norm_type, max_norm, dtype, device):
    ours, theirs = pair(device, dtype)
    found = tristep.optim.clip_grad_norm_(ours, max_norm, norm_type)
    expected = torch.nn.utils.clip_grad_norm_(theirs, max_norm, norm_type)
    rtol = 2e-6 if dtype == torch.float32 else 1e-13
    torch.testing.assert_close(found, expected, rtol=rtol, atol=0)
    for a, b in zip(ours[:-1], theirs[:-1], strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=rtol, atol=0)
    assert ours[-1].grad is None


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_torchs_error_and_results_for_nonfinite_norms(value, norm_type, device):
    arrays = [np.array([1.0, value]), np.array([2.0])]
    ours, theirs = pair(device, arrays=arrays)
    messages = []
    for clip, params in ((tristep.optim.clip_grad_norm_, ours), (torch.nn.utils.clip_grad_norm_, theirs)):
        with pytest.raises(RuntimeError) as caught:
            clip(params, 1.0, norm_type, error_if_nonfinite=True)
        messages.append(str(caught.value))
        assert params[1].grad.item() == 2.0
        clip(params, 1.0, norm_type)
    assert messages[0] == messages[1]
    for a, b in zip(ours[:-1], theirs[:-1], strict=True):
        torch.testing.assert_close(a.grad, b.grad, equal_nan=True)

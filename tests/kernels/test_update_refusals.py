"""What an update refuses before anything has changed."""

import math

import pytest
import torch

from tristep.kernels import Update, rules, update

F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16


def _ones(*shape, **options):
    return torch.ones(*shape or (3,), **options)


MOMENTUM = {"lr": 0.1, "wd": 0.0, "clip": math.inf, "momentum": 0.9}

# Each row: what is changed of a good call, and what the message of the error must say.
TYPE_ERRORS = {
    "an integer weight": (
        {"weights": [_ones(), _ones(dtype=torch.int64)]},
        r"weights\[1\] is torch.int64: must be one of torch.float64, torch.float32, torch.float16, torch.bfloat16",
    ),
    "a sparse weight": ({"weights": [_ones(), _ones().to_sparse()]}, r"weights\[1\] is sparse \(torch.sparse_coo\)"),
    "a sparse gradient": (
        {"gradients": [_ones(), _ones().to_sparse()]},
        r"the gradient of weights\[1\] is sparse \(torch.sparse_coo\).*sparse=False in the layer",
    ),
    "an integer gradient": (
        {"gradients": [_ones(), _ones(dtype=torch.int32)]},
        r"the gradient of weights\[1\] is torch.int32: must be one of torch.float64",
    ),
}
VALUE_ERRORS = {
    "too few gradients": ({"gradients": [_ones()]}, "2 weights came with 1 gradients"),
    "too few values": ({"hyper": [MOMENTUM]}, "2 weights came with .* and 1 sets of hyper-parameters"),
    "a missing state": (
        {"states": [(_ones(),), ()]},
        r"the state of weights\[1\] has 0 tensors: rule 'sgd_momentum' has 1 \(mom\)",
    ),
    "a state for a rule without": (
        {"rule": rules.sgd},
        r"the state of weights\[0\] has 1 tensors: rule 'sgd' has 0 \(none\)",
    ),
    "a state of another type": (
        {"states": [(_ones(),), (_ones(dtype=F64),)]},
        r"mom of weights\[1\] is torch.float64 \(3,\) on cpu: must be torch.float32 or torch.bfloat16 \(3,\) on cpu",
    ),
    "a state of another shape": ({"states": [(_ones(),), (_ones(1, 3),)]}, r"\(1, 3\) on cpu: must be .* \(3,\)"),
    "a state elsewhere": ({"states": [(_ones(),), (_ones(device="meta"),)]}, r"on meta: must be .* on cpu"),
    "a state of other strides": (
        {"weights": [_ones(), _ones(2, 3)], "gradients": [_ones(), _ones(2, 3)], "states": [(_ones(),), (_ones(3, 2).T,)]},
        r"mom of weights\[1\] has strides \(1, 2\): must have \(3, 1\), the weight's",
    ),
    "a gradient of another shape": (
        {"gradients": [_ones(), _ones(1)]},
        r"the gradient of weights\[1\] is \(1,\) on cpu: its weight is \(3,\) on cpu",
    ),
    "a gradient elsewhere": ({"gradients": [_ones(), _ones(device="meta")]}, r"is \(3,\) on meta: its weight is"),
}


@pytest.mark.parametrize("what", TYPE_ERRORS | VALUE_ERRORS)
def test_refused_before_anything_changes(what):
    changed, message = (TYPE_ERRORS | VALUE_ERRORS)[what]
    good = {
        "rule": rules.sgd_momentum,
        "weights": [_ones(), _ones()],
        "gradients": [_ones(), _ones()],
        "states": [(_ones(),), (_ones(),)],
        "hyper": MOMENTUM,
    }
    arguments = good | changed
    with pytest.raises(TypeError if what in TYPE_ERRORS else ValueError, match=message):
        update(**arguments, engine="eager")
    for tensor in [arguments["weights"][0], *arguments["states"][0]]:
        assert tensor.tolist() == [1.0, 1.0, 1.0]
    update(**good, engine="eager")  # but for the change it would have run
    assert good["weights"][0].tolist() != [1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"states": [()]}, ValueError, "1 states for 2 weights: there must be as many"),
        ({"masters": [None]}, ValueError, "1 masters for 2 weights"),
        ({"names": ["a", "b", "c"]}, ValueError, "3 names for 2 weights"),
        ({"masters": [None, _ones(dtype=F64)]}, ValueError, "master of weights.1. is torch.float64"),
        ({"masters": [None, _ones(4)], "names": ["head", "body"]}, ValueError, "master of body is"),
    ],
    ids=lambda value: "" if isinstance(value, type) else None,
)
def test_an_update_refuses(arguments, error, message):
    good = {"rule": rules.sgd, "weights": [_ones(), _ones(dtype=BF16)], "states": [(), ()]}
    Update(**good)
    with pytest.raises(error, match=message):
        Update(**good | arguments)


def test_a_refused_gradient_leaves_the_bound_ones(place):
    weight, good = torch.zeros(3, device=place.device), torch.ones(3, device=place.device)
    run = Update(rules.sgd, [weight], [()], engine=place.engine)
    run.hyper[:] = [1.0, 1.0, 0.0, math.inf]
    run.bind([good])
    with pytest.raises(ValueError, match="the gradient of"):
        run.bind([torch.ones(4, device=place.device)])
    run()
    assert weight.tolist() == [-1.0, -1.0, -1.0]


def test_states_fit_until_a_weight_is_converted_or_cut(place):
    weight = torch.zeros(4, 2, device=place.device)
    run = Update(rules.sgd_momentum, [weight], [(torch.zeros_like(weight),)], engine=place.engine)
    assert run.fits()
    assert not run.fits(lambda weight: F32)  # it has no master
    assert run.fits(lambda weight: None)
    # moved, cut, or converted: to float16, which is computed in float32, too
    for rows, dtype, fits in ((4, F32, True), (3, F32, False), (4, F64, False), (4, F16, True)):
        weight.data = torch.zeros(rows, 2, device=place.device, dtype=dtype)
        assert run.fits() == fits, (rows, dtype)

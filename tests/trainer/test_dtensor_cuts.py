"""tristep.optim on DTensors that are cut in other ways: mixed with plain tensors, replaced, uneven, and what is refused."""

import copy
import re

import numpy as np
import pytest
import torch
import torch.distributed as dist
from dtensors import sent_by, whole_tensors
from owner_training import make_mesh, placed

import tristep


def _placed(whole, dim, grad=None):
    """A parameter cut along an axis, or for None whole on every rank."""
    mesh = make_mesh()
    parameter = torch.nn.Parameter(placed(whole, mesh, dim))
    if grad is not None:
        parameter.grad = placed(grad, mesh, dim)
    return parameter


def _mixed():
    """A parameter that is cut, one that is a DTensor on all ranks, and a plain one."""
    from torch.distributed.tensor import DTensor, Partial, Replicate

    torch.manual_seed(1)
    weights, grads = [torch.randn(5, 2) for _ in range(3)], [torch.randn(5, 2) for _ in range(3)]
    plain = [torch.nn.Parameter(weight.clone()) for weight in weights]
    for parameter, grad in zip(plain, grads, strict=True):
        parameter.grad = grad.clone()
    mixed = [_placed(weights[0], 0, grads[0]), _placed(weights[1], None), copy.deepcopy(plain[2])]
    mixed[2].grad = grads[2].clone()
    # What a rank has of a sum over ranks is made whole before.
    share = grads[1] * (1 + dist.get_rank()) / 3
    mixed[1].grad = DTensor.from_local(share, mixed[1].device_mesh, [Partial()], run_check=False)
    versions = [parameter._version for parameter in mixed]
    for parameters in (plain, mixed):
        optimizer = tristep.optim.LAMB(parameters, lr=0.1)
        optimizer.step()
        mean = [optimizer.state[parameter]["mean"] for parameter in parameters]
    assert all(parameter._version > before for parameter, before in zip(mixed, versions, strict=True))
    norms = []
    mixed[1].grad = mixed[1].grad.redistribute(placements=[Replicate()])
    for parameters in (plain, mixed):
        norms.append(tristep.optim.clip_grad_norm_(parameters, 0.5).item())
        mean += whole_tensors(parameter.grad for parameter in parameters)
    return sent_by((whole_tensors(plain), whole_tensors(mixed), norms, whole_tensors(mean[:3]), mean[3:]))


def test_plain_tensors_and_dtensors_may_be_in_one_optimizer(processes):
    for plain, mixed, norms, means, clipped in processes(2).run(_mixed):
        assert means[0].shape == (5, 2)
        assert norms[1] == pytest.approx(norms[0], rel=1e-6)
        for a, b in [*zip(plain, mixed, strict=True), *zip(clipped[:3], clipped[3:], strict=True)]:
            torch.testing.assert_close(a, b)


def _noise():
    parameter = _placed(torch.zeros(64, 4), 0, torch.zeros(64, 4))
    tristep.optim.SGLD([parameter], lr=0.1).step()
    return sent_by(whole_tensors([parameter])[0])


def test_shards_have_random_numbers_of_their_own(processes):
    for noise in processes(2).run(_noise):
        assert not np.isclose(noise[:32], noise[32:]).any()


def _odd_cuts():
    """Ranks that have nothing at all, and columns instead of rows."""
    found = []
    for shape, dim in (((1,), 0), ((1, 3), 0), ((3, 5), 1), ((2, 1), 1)):
        whole, grad = torch.randn(shape), torch.randn(shape)
        for name in ("LAMB", "Lion"):
            parameter, other = _placed(whole, dim, grad), torch.nn.Parameter(whole.clone())
            other.grad = grad.clone()
            for each in (parameter, other):
                optimizer = getattr(tristep.optim, name)([each], lr=0.1, clip_norm=0.5)
                optimizer.step()
                optimizer.step()
            found.append((*whole_tensors([parameter, other]), *whole_tensors([optimizer.state[other]["mean"]])))
    return sent_by(found)


def test_a_rank_may_have_nothing_and_cuts_may_be_of_columns(processes):
    for found in processes(2).run(_odd_cuts):
        assert len(found) == 8
        for cut, whole, mean in found:
            assert mean.any()
            np.testing.assert_allclose(cut, whole, rtol=1e-6, atol=1e-7)


def _refused():
    from torch.distributed.tensor import DTensor, Partial, Replicate

    whole = torch.randn(6, 4)
    cut = _placed(whole, 0, torch.ones(6, 4))
    everywhere = _placed(whole, None, torch.ones(6, 4))
    partial = torch.nn.Parameter(DTensor.from_local(whole, cut.device_mesh, [Partial()], run_check=False))
    messages = []

    def refuse(kind, what):
        try:
            what()
        except kind as error:
            messages.append(str(error))
        else:
            messages.append("")

    refuse(TypeError, lambda: tristep.optim.SGD([partial], lr=0.1))
    refuse(NotImplementedError, lambda: tristep.optim.Lion([cut, everywhere], lr=0.1, clip_norm=1.0))
    tristep.optim.Muon([everywhere], lr=0.1).step()  # all of it is here
    optimizer = tristep.optim.AdamW([cut], lr=0.1)
    optimizer.step()
    state = optimizer.state[cut]
    kept = state["exp_avg"]
    state["exp_avg"] = torch.zeros(6, 4)
    before = cut.full_tensor().clone()
    refuse(ValueError, optimizer.step)
    optimizer.state[cut]["exp_avg"] = kept.redistribute(placements=[Replicate()])
    refuse(ValueError, optimizer.step)
    assert torch.equal(before, cut.full_tensor())
    refuse(TypeError, lambda: tristep.Trainer([cut], "sgd"))
    return messages


def test_what_cannot_be_cut_is_refused_with_the_way_out(processes):
    expected = [
        r"params\[0\] is a DTensor, with partial sums on every rank: .*redistribute",
        r"Lion with sharded parameters: .*clip by tristep.optim.clip_grad_norm_ instead",
        r"'exp_avg' of params\[0\] is a whole tensor, .*set_optimizer_state_dict",
        r"'exp_avg' of params\[0\] is placed as .*Replicate.*set_optimizer_state_dict",
        r"params: '0' is a DTensor: .*tristep.optim",
    ]
    for messages in processes(2).run(_refused):
        assert len(messages) == len(expected)
        for message, pattern in zip(messages, expected, strict=True):
            assert re.match(pattern, message), (pattern, message)

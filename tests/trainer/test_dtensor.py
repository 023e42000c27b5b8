"""tristep.optim on DTensors, as fully_shard and distribute_tensor make them, against torch.optim on the same."""

import copy
import re

import numpy as np
import pytest
import torch
import torch.distributed as dist

import tristep
from tristep.trainer.optim import shards


def _net(dtype=torch.float32):
    torch.manual_seed(0)
    layers = [torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)]
    return torch.nn.Sequential(*layers).to(dtype)  # of the last a rank has nothing


def _sharded(net, shape=(-1,)):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    shape = (dist.get_world_size(),) if shape == (-1,) else shape
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("copies", "shards")[-len(shape) :])
    return fully_shard(net, mesh=mesh)


def _backward(net, step, rank=None):
    """Gradients that are means over ranks: of all the batch with `rank` None, else this rank's part of it."""
    torch.manual_seed(100 + step)
    dtype = next(net.parameters()).dtype
    x, y = torch.randn(12, 3, dtype=dtype), torch.randn(12, 1, dtype=dtype)
    if rank is not None:
        ranks = dist.get_world_size()
        x, y = x.chunk(ranks)[rank], y.chunk(ranks)[rank]
    net.zero_grad()
    torch.nn.functional.mse_loss(net(x), y).backward()


def _whole(tensors):
    return [(each.full_tensor() if shards.is_dtensor(each) else each).detach().clone() for each in tensors]


def _sent(value):
    """As it can be sent to the test's process: with arrays instead of tensors."""
    if isinstance(value, torch.Tensor):
        return value.double().numpy()
    if isinstance(value, dict):
        return {key: _sent(each) for key, each in value.items()}
    return type(value)(map(_sent, value)) if isinstance(value, (list, tuple)) else value


def _trained(make, dtype, steps=4, shape=None):
    """The weights after training: with `shape` those of FSDP on such a mesh, gathered, else of one process alone."""
    net = _net(dtype)
    if shape is not None:
        _sharded(net, shape)
    optimizer = make(net.parameters())
    for step in range(steps):
        _backward(net, step, None if shape is None else dist.get_rank())
        optimizer.step()
    return _whole(net.parameters()), optimizer, net


OPTIMIZERS = {
    "adamw": (lambda ps: tristep.optim.AdamW(ps, lr=0.05), lambda ps: torch.optim.AdamW(ps, lr=0.05)),
    "momentum": (
        lambda ps: tristep.optim.SGD(ps, lr=0.1, momentum=0.9, nesterov=True),
        lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, nesterov=True),
    ),
    "lion": (lambda ps: tristep.optim.Lion(ps, lr=0.01, weight_decay=0.1), None),
    "lamb": (lambda ps: tristep.optim.LAMB(ps, lr=0.02, weight_decay=0.1), None),
    "novograd": (lambda ps: tristep.optim.NovoGrad(ps, lr=0.02), None),
    "stable": (lambda ps: tristep.optim.StableAdamW(ps, lr=0.02), None),
    "clipped": (lambda ps: tristep.optim.Adan(ps, lr=0.02, clip_norm=0.1, skip_nonfinite=True), None),
    "prodigy": (lambda ps: tristep.optim.Prodigy(ps), None),
}


def _differences(name, dtype, shape):
    ours, torchs = OPTIMIZERS[name]
    weights, optimizer, net = _trained(ours, dtype, shape=shape)
    alone, _, _ = _trained(ours, dtype)
    found = [max((a - b).abs().max().item() for a, b in zip(weights, alone, strict=True))]
    if torchs is not None:
        other, of_torch, other_net = _trained(torchs, dtype, shape=shape)
        found.append(max((a - b).abs().max().item() for a, b in zip(weights, other, strict=True)))
        for p, q in zip(net.parameters(), other_net.parameters(), strict=True):
            mine, theirs = optimizer.state[p], of_torch.state[q]
            assert {k: type(v) for k, v in mine.items()} == {k: type(v) for k, v in theirs.items()}
            for key, value in mine.items():
                if shards.is_dtensor(value):
                    assert (value.placements, value.device_mesh) == (theirs[key].placements, theirs[key].device_mesh)
                    torch.testing.assert_close(value.full_tensor(), theirs[key].full_tensor())
    return found


def _all_differences(dtype, shape, engine, names):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRISTEP_ENGINE", engine)
        return {name: _differences(name, dtype, shape) for name in names}


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("ranks", "shape", "dtype", "engine", "names"),
    [
        (2, (-1,), torch.float64, "eager", tuple(OPTIMIZERS)),
        (2, (-1,), torch.float32, "cpu", ("adamw", "lamb", "clipped")),
        (2, (-1,), torch.float32, "triton", ("adamw", "lamb")),
        (4, (2, 2), torch.float32, "eager", ("adamw", "lamb", "clipped")),
    ],
    ids=["float64", "native", "triton", "copies of shards"],
)
def test_fully_sharded_nets_train_as_in_one_process_and_as_by_torch(processes, ranks, shape, dtype, engine, names):
    limit = 1e-12 if dtype == torch.float64 else 1e-6
    for found in processes(ranks).run(_all_differences, dtype, shape, engine, names):
        for name, differences in found.items():
            assert max(differences) < limit, (name, differences)


def _state_goes_to_and_fro(source, target):
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )

    kinds = {"torch": torch.optim, "tristep": tristep.optim}

    def trained(kind, steps):
        net = _sharded(_net())
        optimizer = kind.AdamW(net.parameters(), lr=0.05)
        for step in steps:
            _backward(net, step, dist.get_rank())
            optimizer.step()
        return net, optimizer

    found = []
    for full in (False, True):
        options = StateDictOptions(full_state_dict=full)
        net, optimizer = trained(kinds[source], range(3))
        saved = copy.deepcopy(get_optimizer_state_dict(net, optimizer, options=options))
        other = _sharded(_net())
        other.load_state_dict(net.state_dict())
        second = kinds[target].AdamW(other.parameters(), lr=0.7)
        set_optimizer_state_dict(other, second, saved, options=options)
        for one, its in ((net, optimizer), (other, second)):
            _backward(one, 3, dist.get_rank())
            its.step()
        pairs = zip(_whole(net.parameters()), _whole(other.parameters()), strict=True)
        found.append(
            (sorted(saved["state"]), second.param_groups[0]["lr"], max((a - b).abs().max().item() for a, b in pairs))
        )
    return found


@pytest.mark.parametrize("there", ["torch", "tristep"])
@pytest.mark.parametrize("back", ["torch", "tristep"])
def test_states_go_through_torchs_checkpoints(processes, there, back):
    for found in processes(2).run(_state_goes_to_and_fro, there, back):
        for names, lr, difference in found:
            assert names == sorted(name for name, _ in _net().named_parameters())
            assert lr == 0.05
            assert difference < 1e-6


def _clipped_by(norm_type, max_norm):
    net, other = _sharded(_net()), _net()
    _backward(net, 0, dist.get_rank())
    for p, q in zip(net.parameters(), other.parameters(), strict=True):
        q.grad = p.grad.full_tensor().clone()
    ours = tristep.optim.clip_grad_norm_(net.parameters(), max_norm, norm_type)
    torchs = torch.nn.utils.clip_grad_norm_(other.parameters(), max_norm, norm_type)
    pairs = zip(_whole(p.grad for p in net.parameters()), _whole(p.grad for p in other.parameters()), strict=True)
    return ours.item(), torchs.item(), _sent(list(pairs))


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, float("inf")])
def test_gradients_are_clipped_by_the_norm_of_all_shards(processes, norm_type):
    for ours, torchs, pairs in processes(2).run(_clipped_by, norm_type, 0.05):
        assert ours == pytest.approx(torchs, rel=1e-6)
        for a, b in pairs:
            torch.testing.assert_close(a, b)


def _placed(whole, placement, grad=None):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parameter = torch.nn.Parameter(distribute_tensor(whole.clone(), mesh, [placement]))
    if grad is not None:
        parameter.grad = distribute_tensor(grad.clone(), mesh, [placement])
    return parameter


def _mixed():
    """A parameter that is cut, one that is a DTensor on all ranks, and a plain one."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    torch.manual_seed(1)
    weights, grads = [torch.randn(5, 2) for _ in range(3)], [torch.randn(5, 2) for _ in range(3)]
    plain = [torch.nn.Parameter(weight.clone()) for weight in weights]
    for parameter, grad in zip(plain, grads, strict=True):
        parameter.grad = grad.clone()
    mixed = [_placed(weights[0], Shard(0), grads[0]), _placed(weights[1], Replicate()), copy.deepcopy(plain[2])]
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
        mean += _whole(parameter.grad for parameter in parameters)
    return _sent((_whole(plain), _whole(mixed), norms, _whole(mean[:3]), mean[3:]))


def test_plain_tensors_and_dtensors_may_be_in_one_optimizer(processes):
    for plain, mixed, norms, means, clipped in processes(2).run(_mixed):
        assert means[0].shape == (5, 2)
        assert norms[1] == pytest.approx(norms[0], rel=1e-6)
        for a, b in [*zip(plain, mixed, strict=True), *zip(clipped[:3], clipped[3:], strict=True)]:
            torch.testing.assert_close(a, b)


def _not_finite():
    net = _sharded(_net())
    optimizer = tristep.optim.Lion(net.parameters(), lr=0.1, skip_nonfinite=True)
    before = _whole(net.parameters())
    _backward(net, 0, dist.get_rank())
    if dist.get_rank() == 1:
        next(net.parameters()).grad.to_local()[0, 0] = float("nan")
    optimizer.step()
    skipped = all(torch.equal(a, b) for a, b in zip(before, _whole(net.parameters()), strict=True))
    _backward(net, 0, dist.get_rank())
    optimizer.step()
    return skipped, any(torch.equal(a, b) for a, b in zip(before, _whole(net.parameters()), strict=True))


def test_a_nonfinite_value_in_one_shard_is_seen_by_all(processes):
    assert processes(2).run(_not_finite) == [(True, False)] * 2


def _in_few_bits():
    from torch.distributed.tensor import distribute_tensor

    net = _sharded(_net(torch.bfloat16))
    optimizer = tristep.optim.Lion(net.parameters(), lr=0.01, state_dtype="bfloat16", kahan=True, ema_decay=0.9)
    alone = _net(torch.bfloat16)
    other = tristep.optim.Lion(alone.parameters(), lr=0.01, state_dtype="bfloat16", kahan=True, ema_decay=0.9)
    for _ in range(3):
        for p, q in zip(net.parameters(), alone.parameters(), strict=True):
            q.grad = torch.randn(q.shape).bfloat16()
            p.grad = distribute_tensor(q.grad, p.device_mesh, p.placements)
        optimizer.step()
        other.step()
    rows = [
        (dict(zip(row, _whole(row.values()), strict=True)), other.state[q])
        for row, q in zip(optimizer.state.values(), alone.parameters(), strict=True)
    ]
    with optimizer.averaged_weights(), other.averaged_weights():
        averages = _whole(net.parameters()), _whole(alone.parameters())
    return _sent((rows, averages, (_whole(net.parameters()), _whole(alone.parameters()))))


def test_low_precision_states_and_averages_are_sharded_as_the_parameters_are(processes):
    for rows, *pairs in processes(2).run(_in_few_bits):
        for ours, alone in rows:
            assert ours.keys() == alone.keys()
            assert "compensation" in ours
            for key, value in ours.items():
                torch.testing.assert_close(value, alone[key], rtol=0, atol=0)
        for ours, alone in pairs:
            torch.testing.assert_close(ours, alone, rtol=0, atol=0)


def _noise():
    from torch.distributed.tensor import Shard

    parameter = _placed(torch.zeros(64, 4), Shard(0), torch.zeros(64, 4))
    tristep.optim.SGLD([parameter], lr=0.1).step()
    return _sent(_whole([parameter])[0])


def test_shards_have_random_numbers_of_their_own(processes):
    for noise in processes(2).run(_noise):
        assert not np.isclose(noise[:32], noise[32:]).any()


def _plans():
    net = _sharded(_net())
    optimizer = tristep.optim.AdamW(net.parameters(), lr=0.05)
    plans = []
    for step in range(4):
        _backward(net, step, dist.get_rank())
        optimizer.step()
        plans.append(optimizer._plan)
    return all(plan is plans[0] for plan in plans)


def test_what_is_found_out_of_shards_is_kept_from_step_to_step(processes):
    assert processes(2).run(_plans) == [True, True]


def _replaced():
    from torch.distributed.tensor import Shard

    whole, grad = torch.randn(5, 2), torch.randn(5, 2)
    parameter, other = _placed(whole, Shard(0), grad), torch.nn.Parameter(whole.clone())
    other.grad = grad
    optimizer, alone = tristep.optim.AdamW([parameter], lr=0.05), torch.optim.AdamW([other], lr=0.05)
    for _ in range(3):
        optimizer.step()
        alone.step()
        parameter._local_tensor = parameter._local_tensor.clone()
    return _sent((_whole([parameter]), _whole([other])))


def test_a_shard_may_be_replaced(processes):
    for ours, alone in processes(2).run(_replaced):
        np.testing.assert_allclose(ours[0], alone[0], rtol=1e-6, atol=1e-7)


def _odd_cuts():
    """Ranks that have nothing at all, and columns instead of rows."""
    from torch.distributed.tensor import Shard

    found = []
    for shape, dim in (((1,), 0), ((1, 3), 0), ((3, 5), 1), ((2, 1), 1)):
        whole, grad = torch.randn(shape), torch.randn(shape)
        for name in ("LAMB", "Lion"):
            parameter, other = _placed(whole, Shard(dim), grad), torch.nn.Parameter(whole.clone())
            other.grad = grad.clone()
            for each in (parameter, other):
                optimizer = getattr(tristep.optim, name)([each], lr=0.1, clip_norm=0.5)
                optimizer.step()
                optimizer.step()
            found.append((*_whole([parameter, other]), *_whole([optimizer.state[other]["mean"]])))
    return _sent(found)


def test_a_rank_may_have_nothing_and_cuts_may_be_of_columns(processes):
    for found in processes(2).run(_odd_cuts):
        assert len(found) == 8
        for cut, whole, mean in found:
            assert mean.any()
            np.testing.assert_allclose(cut, whole, rtol=1e-6, atol=1e-7)


def _refused():
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    whole = torch.randn(6, 4)
    cut = _placed(whole, Shard(0), torch.ones(6, 4))
    everywhere = _placed(whole, Replicate(), torch.ones(6, 4))
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
    refuse(NotImplementedError, lambda: tristep.optim.Muon([cut], lr=0.1))
    refuse(NotImplementedError, lambda: tristep.optim.Lion([cut], lr=0.1, state_dtype="8bit"))
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
        r"params\[0\] is a DTensor, of which every rank has a summand: .*redistribute",
        r"Muon with sharded parameters: its rule, 'muon', is one of whole matrices.*ignored_params",
        r"Lion with sharded parameters: state_dtype='8bit' .* must be 'bfloat16' or None",
        r"Lion with sharded parameters: .*clip by tristep.optim.clip_grad_norm_ instead",
        r"'exp_avg' of params\[0\] is a whole tensor, .*set_optimizer_state_dict",
        r"'exp_avg' of params\[0\] is placed as .*Replicate.*set_optimizer_state_dict",
        r"params: '0' is a DTensor: .*tristep.optim",
    ]
    for messages in processes(2).run(_refused):
        assert len(messages) == len(expected)
        for message, pattern in zip(messages, expected, strict=True):
            assert re.match(pattern, message), (pattern, message)

"""tristep.optim on DTensors, as fully_shard and distribute_tensor make them, against torch.optim on the same."""

import copy

import pytest
import torch
import torch.distributed as dist
from dtensors import sent_by, whole_tensors
from owner_training import make_mesh, make_net

import tristep
from tristep.trainer.optim import shards


def _net(dtype=torch.float32):
    return make_net().to(dtype)


def _sharded(net, shape=(-1,)):
    from torch.distributed.fsdp import fully_shard

    return fully_shard(net, mesh=make_mesh(shape))


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


def _trained(make, dtype, steps=4, shape=None):
    """The weights after training: with `shape` those of FSDP on such a mesh, gathered, else of one process alone."""
    net = _net(dtype)
    if shape is not None:
        _sharded(net, shape)
    optimizer = make(net.parameters())
    for step in range(steps):
        _backward(net, step, None if shape is None else dist.get_rank())
        optimizer.step()
    return whole_tensors(net.parameters()), optimizer, net


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
    "guarded": (lambda ps: tristep.optim.Lion(ps, lr=0.02, clip_norm=0.1, agc=0.1, skip_norm=1e3), None),
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
        pytest.param(4, (2, 2), torch.float32, "eager", ("adamw", "lamb", "clipped"), marks=pytest.mark.sample(0)),
    ],
    ids=["float64", "native", "triton", "copies of shards"],
)
def test_fully_sharded_nets_train_as_in_one_process_and_as_by_torch(processes, ranks, shape, dtype, engine, names):
    if engine == "triton" and torch.cuda.is_available():
        pytest.skip("these ranks are on the CPU, and Triton's interpreter is off where there is a GPU")
    limit = 1e-12 if dtype == torch.float64 else 1e-6
    for found in processes(ranks).run(_all_differences, dtype, shape, engine, names):
        for name, differences in found.items():
            assert max(differences) < limit, (name, differences)


def _state_goes_to_and_fro(source, target):
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict

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
        pairs = zip(whole_tensors(net.parameters()), whole_tensors(other.parameters()), strict=True)
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
    pairs = zip(
        whole_tensors(p.grad for p in net.parameters()), whole_tensors(p.grad for p in other.parameters()), strict=True
    )
    return ours.item(), torchs.item(), sent_by(list(pairs))


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, float("inf")])
def test_gradients_are_clipped_by_the_norm_of_all_shards(processes, norm_type):
    for ours, torchs, pairs in processes(2).run(_clipped_by, norm_type, 0.05):
        assert ours == pytest.approx(torchs, rel=1e-6)
        for a, b in pairs:
            torch.testing.assert_close(a, b)


def _in_few_bits():
    from torch.distributed.tensor import distribute_tensor

    net, alone = _sharded(_net(torch.bfloat16)), _net(torch.bfloat16)
    options = {"state_dtype": "bfloat16", "multi_precision": "remainder", "ema_decay": 0.9}
    optimizer, other = (tristep.optim.Lion(each.parameters(), lr=0.01, **options) for each in (net, alone))
    for _ in range(3):
        for p, q in zip(net.parameters(), alone.parameters(), strict=True):
            q.grad = torch.randn(q.shape).bfloat16()
            p.grad = distribute_tensor(q.grad, p.device_mesh, p.placements)
        optimizer.step()
        other.step()
    rows = [
        [
            dict(zip(row, whole_tensors(v.int() if v.dtype == torch.int16 else v for v in row.values()), strict=True))
            for row in (optimizer.state[p], other.state[q])  # gloo and NCCL send no int16
        ]
        for p, q in zip(net.parameters(), alone.parameters(), strict=True)
    ]
    with optimizer.averaged_weights(), other.averaged_weights():
        averages = whole_tensors(net.parameters()), whole_tensors(alone.parameters())
    return sent_by((rows, averages, (whole_tensors(net.parameters()), whole_tensors(alone.parameters()))))


def test_low_precision_states_and_averages_are_sharded_as_the_parameters_are(processes):
    for rows, *pairs in processes(2).run(_in_few_bits):
        for ours, alone in rows:
            assert ours.keys() == alone.keys()
            assert "master" in ours
            for key, value in ours.items():
                torch.testing.assert_close(value, alone[key], rtol=0, atol=0)
        for ours, alone in pairs:
            torch.testing.assert_close(ours, alone, rtol=0, atol=0)

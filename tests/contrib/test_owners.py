"""tristep.optim's rules of whole tensors on DTensors, whose owners update them, against the same tensors on one process."""

from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from dtensors import sent_by, whole_tensors
from owner_training import MATRICES, RULES, Pair, backward, fully_sharded, make_mesh, make_net

import tristep
from tristep.contrib.owners import ranks
from tristep.trainer.utils import distributed

pytestmark = pytest.mark.sample(0)  # the quick tier runs a smoke test

mixed_types = pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="this torch wants gradients of one type")


def _trained(name, shape, dtype, gradient_dtype):
    make, shapes = RULES[name]
    pair = Pair(make, shapes, dtype, make_mesh(shape), gradient_dtype)
    for k in range(4):
        pair.step(k, missing={0: (2,), 2: (0, 4)}.get(k, ()))  # of one parameter the first gradient comes later
    held = sum(v.numel() for p in pair.cut[:3] for v in pair.optimizers[0].state[p].values() if v.dim())
    return *pair.results(), held


def _all_trained(names, *given):
    return {name: _trained(name, *given) for name in names}


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("ranks", "shape", "dtype", "gradient_dtype"),
    [
        (2, (-1,), torch.float32, None),
        *(
            pytest.param(*each, marks=(pytest.mark.sample(0), *marks))
            for *each, marks in [
                (2, (-1,), torch.bfloat16, None, ()),
                (2, (-1,), torch.float32, torch.bfloat16, (mixed_types,)),
                (4, (2, 2), torch.float32, None, ()),
                (3, (-1,), torch.float32, None, ()),
            ]
        ),
    ],
    ids=["float32", "bfloat16", "bfloat16 gradients", "copies of shards", "three ranks"],
)
def test_whole_tensors_train_as_on_one_process_to_the_bit(processes, ranks, shape, dtype, gradient_dtype):
    answers = processes(ranks).run(_all_trained, tuple(RULES), shape, dtype, gradient_dtype)
    for name in RULES:
        for (weights, states), (weights_alone, states_alone), _ in (answer[name] for answer in answers):
            for a, b in zip(weights, weights_alone, strict=True):
                assert a.tobytes() == b.tobytes(), name
            for i, (row, alone) in enumerate(zip(states, states_alone, strict=True)):
                assert row.keys() == alone.keys(), (name, i)
                for key in row:
                    assert row[key].tobytes() == alone[key].tobytes(), (name, i, key)
        kept = sum(v.size for row in answers[0][name][1][1][:3] for v in row.values() if v.ndim)
        copies = 2 if shape == (2, 2) else 1
        assert sum(answer[name][2] for answer in answers) == kept * copies, name


def _by_torch(name, arguments, dtype):
    kinds = torch.optim, tristep.optim
    make = lambda groups: None  # noqa: E731
    pair = Pair(make, MATRICES, dtype)
    pair.optimizers = [getattr(kinds[k], name)(ps, lr=0.02, **arguments) for k, ps in ((1, pair.cut), (0, pair.alone))]
    for k in range(3):
        pair.step(k)
    return pair.results()


@pytest.mark.parametrize(("name", "arguments"), [("Muon", {"nesterov": False}), ("Adafactor", {"weight_decay": 0.1})])
def test_whole_tensors_train_as_by_torch(processes, name, arguments):
    for (weights, states), (weights_torch, states_torch) in processes(2).run(_by_torch, name, arguments, torch.float64):
        for a, b in zip(weights, weights_torch, strict=True):
            torch.testing.assert_close(torch.from_numpy(a), torch.from_numpy(b), rtol=1e-9, atol=1e-9)
        for row, others in zip(states, states_torch, strict=True):
            assert row.keys() == others.keys()
            for key, value in row.items():
                torch.testing.assert_close(torch.from_numpy(value), torch.from_numpy(others[key]), rtol=1e-9, atol=1e-9)


@contextmanager
def _counted_exchanges():
    sent, all_to_all = [], distributed.all_to_all
    with mock.patch.object(distributed, "all_to_all", lambda *args, **kwargs: sent.append(1) or all_to_all(*args, **kwargs)):
        yield sent


def _fsdp(name):
    net, alone = fully_sharded(make_net()), make_net()
    optimizers = [RULES[name][0](list(each.parameters())) for each in (net, alone)]
    plans = []
    with _counted_exchanges() as sent:
        for step in range(4):
            backward(net, step)
            for p, grad in zip(alone.parameters(), whole_tensors(p.grad for p in net.parameters()), strict=True):
                p.grad = grad
            versions = [p._version for p in net.parameters()]
            for optimizer in optimizers:
                optimizer.step()
            assert all(p._version > before for p, before in zip(net.parameters(), versions, strict=True))
            plans.append(optimizers[0]._plan)
    assert all(plan is plans[0] for plan in plans)
    return sent_by((whole_tensors(net.parameters()), whole_tensors(alone.parameters()))), len(sent)


@pytest.mark.parametrize("name", ["muon", "soap", "adafactor"])
def test_fully_sharded_nets_need_two_exchanges_in_a_step(processes, name):
    for (weights, alone), sent in processes(2).run(_fsdp, name):
        assert sent == 2 * 4
        for a, b in zip(weights, alone, strict=True):
            assert a.tobytes() == b.tobytes()


def _in_stages():
    with mock.patch.object(ranks, "STAGE_BYTES", 100), _counted_exchanges() as sent:
        pair = Pair(*RULES["muon"])
        for k in range(3):
            pair.step(k)
    return len(sent), len(pair.optimizers[0]._plan._exchanging), pair.results()


def test_many_weights_go_in_several_exchanges(processes):
    for sent, stages, ((weights, _), (alone, _)) in processes(2).run(_in_stages):
        assert stages == 4  # of six matrices and a stack of two
        assert sent == 2 * 3 * stages
        for a, b in zip(weights, alone, strict=True):
            assert a.tobytes() == b.tobytes()

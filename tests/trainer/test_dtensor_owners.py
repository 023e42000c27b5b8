"""tristep.optim's rules of whole tensors on DTensors, whose owners update them, against the same tensors on one process."""

import copy
import re
from collections import Counter
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from dtensors import sent_by, whole_tensors

import tristep
from tristep.trainer import dist_utils
from tristep.trainer.optim import shards
from tristep.trainer.optim.owners import assign_owners

# Of no two alike is there a stack, so that arithmetic is the same with some of them as with all. Rows and columns that no
# number of ranks divides, and fewer rows than ranks.
MATRICES = [(7, 4), (1, 3), (5, 9), (12, 2), (3, 3), (6, 8)]
OTHERS = [(5,), (2, 3, 2), (1,), (4, 3, 1, 2)]
RULES = {
    "muon of torch": (lambda groups: tristep.optim.Muon(groups, lr=0.02, weight_decay=0.1), MATRICES),
    "muon": (lambda groups: AnyMuon(groups, lr=0.02, weight_decay=0.1), MATRICES + OTHERS),
    "soap": (lambda groups: tristep.optim.SOAP(groups, lr=0.02, precondition_frequency=2), MATRICES + OTHERS),
    "adafactor": (lambda groups: tristep.optim.Adafactor(groups, lr=0.02, weight_decay=0.1), MATRICES + OTHERS),
    "came": (lambda groups: tristep.optim.CAME(groups, lr=0.02, clip_threshold=0.5), MATRICES + OTHERS),
}
AnyMuon = tristep.optim.as_torch(tristep.optimizer.Muon)  # of which vectors take AdamW's steps


def _mesh(shape=(-1,)):
    from torch.distributed.device_mesh import init_device_mesh

    shape = (dist.get_world_size(),) if shape == (-1,) else shape
    return init_device_mesh("cpu", shape, mesh_dim_names=("copies", "shards")[-len(shape) :])


def _placed(whole, mesh, dim=0):
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    placement = Replicate() if dim is None else Shard(dim)
    return distribute_tensor(whole.clone(), mesh, [Replicate()] * (mesh.ndim - 1) + [placement])


def _dims(shapes):
    """Cut by rows and by columns in turn, and one that every rank has."""
    return [None if k == 3 else (k % 2 if len(shape) > 1 else 0) for k, shape in enumerate(shapes)]


class Pair:
    """The same parameters as DTensors and as a single process has them, in two groups, each with an optimizer."""

    def __init__(self, make, shapes, dtype=torch.float32, mesh=None, gradient_dtype=None):
        torch.manual_seed(0)
        self.mesh, self.dims, self.gradient_dtype = mesh or _mesh(), _dims(shapes), gradient_dtype
        self.alone = [torch.nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in shapes]
        self.cut = [
            torch.nn.Parameter(_placed(p.detach(), self.mesh, dim)) for p, dim in zip(self.alone, self.dims, strict=True)
        ]
        self.optimizers = [make([{"params": ps[:4]}, {"params": ps[4:], "lr": 0.01}]) for ps in (self.cut, self.alone)]

    def step(self, k, missing=()):
        torch.manual_seed(100 + k)
        for i, (p, q, dim) in enumerate(zip(self.cut, self.alone, self.dims, strict=True)):
            for each in (p, q):
                each.grad_dtype = self.gradient_dtype or q.dtype
            grad = torch.randn(q.shape, dtype=self.gradient_dtype or q.dtype)
            q.grad = None if i in missing else grad
            p.grad = None if i in missing else _placed(grad, self.mesh, dim)
        for optimizer in self.optimizers:
            optimizer.step()

    def results(self):
        """Weights and states of both, as arrays."""
        found = []
        for optimizer, parameters in zip(self.optimizers, (self.cut, self.alone), strict=True):
            rows = [optimizer.state_dict()["state"].get(i, {}) for i in range(len(parameters))]
            states = [dict(zip(row, whole_tensors(row.values()), strict=True)) for row in rows]
            found.append(sent_by((whole_tensors(parameters), states)))
        return found


def _trained(name, shape, dtype, gradient_dtype):
    make, shapes = RULES[name]
    pair = Pair(make, shapes, dtype, _mesh(shape), gradient_dtype)
    for k in range(4):
        pair.step(k, missing={0: (2,), 2: (0, 4)}.get(k, ()))  # of one parameter the first gradient comes later
    held = sum(v.numel() for p in pair.cut[:3] for v in pair.optimizers[0].state[p].values() if v.dim())
    return *pair.results(), held


def _all_trained(names, *given):
    return {name: _trained(name, *given) for name in names}


@pytest.mark.parametrize(
    ("ranks", "shape", "dtype", "gradient_dtype"),
    [
        (2, (-1,), torch.float32, None),
        (2, (-1,), torch.float64, None),
        (2, (-1,), torch.bfloat16, None),
        (2, (-1,), torch.float32, torch.bfloat16),
        (4, (2, 2), torch.float32, None),
        (4, (-1,), torch.float32, None),
    ],
    ids=["float32", "float64", "bfloat16", "bfloat16 gradients", "copies of shards", "four ranks"],
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


def _net():
    torch.manual_seed(0)
    layers = [torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)]
    return torch.nn.Sequential(*layers)  # of the last a rank has nothing


def _fully_sharded(net):
    from torch.distributed.fsdp import fully_shard

    fully_shard(net[0], mesh=_mesh())
    return fully_shard(net, mesh=_mesh())


def _backward(net, step):
    torch.manual_seed(100 + step)
    x, y = torch.randn(12, 3), torch.randn(12, 1)
    ranks, rank = dist.get_world_size(), dist.get_rank()
    net.zero_grad()
    torch.nn.functional.mse_loss(net(x.chunk(ranks)[rank]), y.chunk(ranks)[rank]).backward()


def _fsdp(name):
    net, alone = _fully_sharded(_net()), _net()
    optimizers = [RULES[name][0](list(each.parameters())) for each in (net, alone)]
    plans, sent = [], []
    all_to_all = dist_utils.all_to_all
    with mock.patch.object(dist_utils, "all_to_all", lambda *args, **kwargs: sent.append(1) or all_to_all(*args, **kwargs)):
        for step in range(4):
            _backward(net, step)
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


def _optimizer(name, net):
    if name == "several":
        entries = [("ndim<2", "adamw", {"lr": 0.01}), ("*", "muon", {"lr": 0.02})]
        return tristep.optim.MultiOptimizer(net, entries)
    return RULES[name][0](list(net.parameters()))


def _saved(name, folder):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    net = _fully_sharded(_net())
    optimizer = _optimizer(name, net)
    for step in range(3):
        _backward(net, step)
        optimizer.step()
    dcp.save({"net": net.state_dict(), "optimizer": get_optimizer_state_dict(net, optimizer)}, checkpoint_id=folder)
    _continue(net, optimizer)
    return sent_by(whole_tensors(net.parameters()))


def _continue(net, optimizer):
    """A step with gradients that do not depend on the number of ranks."""
    from torch.distributed.tensor import distribute_tensor

    torch.manual_seed(7)
    for p in net.parameters():
        grad = torch.randn(p.shape)
        p.grad = distribute_tensor(grad, p.device_mesh, p.placements) if shards.is_dtensor(p) else grad
    optimizer.step()


def _loaded(name, folder, cut):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    net = _fully_sharded(_net()) if cut else _net()
    optimizer = _optimizer(name, net)
    state = {"net": net.state_dict(), "optimizer": get_optimizer_state_dict(net, optimizer)}
    dcp.load(state, checkpoint_id=folder)
    net.load_state_dict(state["net"])
    set_optimizer_state_dict(net, optimizer, state["optimizer"])
    again = optimizer.state_dict()["state"]  # before there has been a step
    assert all(shards.is_dtensor(v) for row in again.values() for v in row.values() if v.dim() and cut)
    _continue(net, optimizer)
    return sent_by(whole_tensors(net.parameters()))


@pytest.mark.parametrize("name", ["several", "muon", "soap", "came"])
def test_saved_states_go_to_other_numbers_of_ranks(processes, tmp_path, name):
    want = processes(2).run(_saved, name, str(tmp_path))[0]
    for ranks, cut in ((2, True), (4, True), (2, False)):
        for found in processes(ranks).run(_loaded, name, str(tmp_path), cut):
            for a, b in zip(found, want, strict=True):
                assert a.tobytes() == b.tobytes(), (ranks, cut)


def _full_states(source, target):
    """From torch's optimizer or ours to the other, as whole tensors and as shards."""
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )

    kinds, found = {"torch": torch.optim, "tristep": tristep.optim}, []
    for full in (False, True):
        options = StateDictOptions(full_state_dict=full)
        layers = (torch.nn.Linear(3, rows, bias=False) for rows in (5, 2, 5, 2))
        nets = [_fully_sharded(torch.nn.Sequential(next(layers), next(layers))) for _ in range(2)]
        rates = {nets[0]: (kinds[source], 0.02), nets[1]: (kinds[target], 0.7)}
        first, second = (kind.Muon(net.parameters(), lr=lr) for net, (kind, lr) in rates.items())
        for _ in range(2):
            _continue(nets[0], first)
        nets[1].load_state_dict(nets[0].state_dict())
        saved = copy.deepcopy(get_optimizer_state_dict(nets[0], first, options=options))
        set_optimizer_state_dict(nets[1], second, saved, options=options)
        for net, optimizer in zip(nets, (first, second), strict=True):
            _continue(net, optimizer)
        momenta = [optimizer.state_dict()["state"][0]["momentum_buffer"] for optimizer in (first, second)]
        assert momenta[0].placements == momenta[1].placements
        found.append(
            (*map(whole_tensors, (momenta, nets[0].parameters(), nets[1].parameters())), second.param_groups[0]["lr"])
        )
    return sent_by(found)


@pytest.mark.parametrize(("source", "target"), [("torch", "tristep"), ("tristep", "torch")])
def test_states_are_placed_as_torchs_muon_has_them(processes, source, target):
    for both in processes(2).run(_full_states, source, target):
        for momenta, weights, others, lr in both:
            assert lr == 0.02
            torch.testing.assert_close(*map(torch.from_numpy, momenta), rtol=1e-6, atol=1e-6)
            for a, b in zip(weights, others, strict=True):  # torch's products in bfloat16 are sums of shards' products
                assert abs(a - b).max() < 0.1 * lr


def _whole_states():
    """A state that was saved by one process, loaded as it is."""
    pair = Pair(RULES["soap"][0], MATRICES[:5])
    pair.step(0)
    pair.step(1)
    again = Pair(RULES["soap"][0], MATRICES[:5])
    with torch.no_grad():
        for p, q, whole in zip(again.cut, again.alone, pair.alone, strict=True):
            q.copy_(whole)
            p.copy_(_placed(whole.detach(), p.device_mesh, None).redistribute(placements=p.placements))
    for optimizer in again.optimizers:
        optimizer.load_state_dict(copy.deepcopy(pair.optimizers[1].state_dict()))
    again.step(2)
    wrong = pair.optimizers[1].state_dict()
    wrong["state"][0]["mean"] = torch.zeros(2, 2)
    again.optimizers[0].load_state_dict(wrong)
    before = whole_tensors(again.cut)
    try:
        again.step(3)
    except ValueError as error:
        message = str(error)
    assert all(torch.equal(a, b) for a, b in zip(before, whole_tensors(again.cut), strict=True))
    return message, *sent_by((before, whole_tensors(again.alone)))


def test_states_of_one_process_can_be_loaded(processes):
    for message, cut, alone in processes(2).run(_whole_states):
        assert re.match(r"'mean' of params\[0\] has shape \(2, 2\), the parameter \(7, 4\)", message)
        for a, b in zip(cut, alone, strict=True):
            assert a.tobytes() == b.tobytes()


def _added():
    """Owners of some parameters, and of the same after others have been added."""
    shapes = [(60, 60), (20, 20), (20, 20), (10, 40), (30, 10), (2, 2)]
    pair = Pair(lambda groups: AnyMuon(groups[0]["params"], lr=0.02), shapes)
    optimizer = pair.optimizers[0]
    pair.step(0)
    first = [assign_owners(optimizer)[p] for p in pair.cut[:4] if shards.cut_among(p)]
    for each, params in zip(pair.optimizers, (pair.cut, pair.alone), strict=True):
        each.add_param_group({"params": params[4:]})
    pair.step(1)
    owners = assign_owners(optimizer)
    costs = Counter()
    for p in owners:
        costs[owners[p]] += optimizer._rule(optimizer.param_groups[0]).cost(p.shape)
    return first, [owners[p] for p in pair.cut if p in owners], dict(costs), *pair.results()


def test_owners_are_balanced_by_cost_and_stay(processes):
    answers = processes(2).run(_added)
    assert answers[0][:3] == answers[1][:3]
    for first, owners, costs, (weights, _), (alone, _) in answers:
        assert owners[:3] == first == [0, 1, 1]  # the first costs more than all others
        assert owners[3:] == [1, 1]
        assert costs[0] == 5 * 6 * 60**3
        for a, b in zip(weights, alone, strict=True):
            torch.testing.assert_close(torch.from_numpy(a), torch.from_numpy(b), rtol=1e-6, atol=1e-6)


def _refused():
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    squares = init_device_mesh("cpu", (2, 2))
    backwards = DeviceMesh("cpu", [3, 2, 1, 0])
    both = distribute_tensor(torch.zeros(4, 4), squares, [Shard(0), Shard(1)])
    cases = [
        (tristep.optim.Muon, both),
        (tristep.optim.SOAP, distribute_tensor(torch.zeros(4, 4, dtype=torch.complex64), _mesh(), [Shard(0)])),
        (tristep.optim.Adafactor, distribute_tensor(torch.zeros(4, 4), backwards, [Shard(0)])),
    ]
    messages = []
    for kind, tensor in cases:
        with pytest.raises(NotImplementedError) as caught:
            kind([torch.nn.Parameter(tensor)], lr=0.1)
        messages.append(str(caught.value))
    AnyMuon([torch.nn.Parameter(distribute_tensor(torch.zeros(4, 4, 4), squares, [Shard(0), Shard(1)]))]).zero_grad()
    return messages


def test_what_cannot_have_an_owner_is_refused(processes):
    expected = [
        r"Muon with sharded .*'muon'.*shape \(4, 4\).*Shard.*several dimensions of its mesh.*ignored_params",
        r"SOAP with sharded .*'soap'.*is complex; it must be real",
        r"Adafactor with sharded .*'adafactor'.*not in ascending order",
    ]
    for messages in processes(4).run(_refused):
        for message, pattern in zip(messages, expected, strict=True):
            assert re.match(pattern, message), message

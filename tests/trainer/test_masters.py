"""Master weights: split ones of 16 and 8 bits, and how they are converted; the judges are runs with float32 masters."""

import copy

import pytest
import torch
import torch.distributed as dist
from stored_training import made, parameters, saved, stepped, train, whole_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import tristep
from tristep import Trainer, optimizer
from tristep.kernels import Update, rules

F32, BF16, I16, I8 = torch.float32, torch.bfloat16, torch.int16, torch.int8


@pytest.mark.sample(3)
@pytest.mark.sample(0, "cpu", "triton")
@pytest.mark.parametrize("name", ["sgd", "adamw", "lamb", "lion"])
def test_remainders_are_masters_to_the_bit(name, engine, device):
    """Gradients are given, so that weights half-way between two numbers, rounded otherwise, have no consequences."""
    _, trainer = stepped(device, BF16, {"multi_precision": True}, engine, name, steps=10)
    weights, other = stepped(device, BF16, {"multi_precision": "remainder"}, engine, name, steps=10)
    masters, remainders = saved(trainer, "master copy"), saved(other, "master copy")
    for weight, master, remainder in zip(weights, masters.values(), remainders.values(), strict=True):
        assert remainder.dtype == I16
        whole = (weight.detach().float().view(torch.int32) + remainder.to(torch.int32)).view(F32)
        assert torch.equal(whole, master)


@pytest.mark.sample(1)
def test_steps_below_24_bits_are_right_on_average_at_random(engine, device):
    """A step of 1/16 of what 24 bits tell from numbers below 1, 64 times: none to the nearest."""
    moved, count, unit = {}, 4000, 2.0**-16
    for at_random in (False, True):
        param = torch.nn.Parameter(torch.ones(count, dtype=BF16, device=device))
        arguments = {"learning_rate": unit / 16, "multi_precision": "split8", "stochastic_rounding": at_random}
        trainer = Trainer([param], "sgd", arguments, engine=engine)
        for _ in range(64):
            param.grad = torch.ones_like(param)
            trainer.step(1)
        moved[at_random] = 1.0 - float(whole_of(param, saved(trainer, "master copy")["0"]).double().mean())
    assert moved[False] == 0.0
    assert moved[True] == pytest.approx(4 * unit, abs=5 * 2 * unit / count**0.5)  # variances of 64 steps add up to 4


@pytest.mark.sample(0, "cpu", "triton")
@pytest.mark.parametrize("before", [True, "remainder", "split8"])
@pytest.mark.parametrize("after", [True, "remainder", "split8"])
def test_masters_are_converted_when_they_are_loaded(before, after, engine, device):
    """As states are: a trainer keeps how it stores. A rest that does not fit is the largest."""
    params, trainer = stepped(device, BF16, {"multi_precision": before}, engine)
    wholes = list(map(whole_of, params, saved(trainer, "master copy").values()))
    others, other = made(device, BF16, {"multi_precision": after}, engine)
    other.load_state_dict(copy.deepcopy(trainer.state_dict()))
    assert other.optimizer.multi_precision == after
    for param, old in zip(others, params, strict=True):
        param.data.copy_(old)
        param.grad = torch.zeros_like(param)
    other.optimizer.lr = 0.0
    other.step(1)
    for param, master, whole in zip(others, saved(other, "master copy").values(), wholes, strict=True):
        assert master.dtype == {True: F32, "remainder": I16, "split8": I8}[after]
        found = whole_of(param, master)
        most = {True: 0, "remainder": 1, "split8": 0x100}[after]
        assert ((found.view(torch.int32) - whole.view(torch.int32)).abs() <= most).all()


def test_a_trainer_without_masters_takes_those_of_the_file(device):
    _, trainer = stepped(device, BF16, {"multi_precision": "split8"})
    _, other = made(device, BF16, {})
    other.load_state_dict(trainer.state_dict())
    assert other.optimizer.multi_precision == "split8"


@pytest.mark.sample(0, "cpu", "triton")
def test_a_converted_model_keeps_its_master_weights(engine, device):
    params, trainer = stepped(device, BF16, {"multi_precision": "remainder"}, engine)
    remainders = saved(trainer, "master copy")
    whole = [
        (param.detach().float().view(torch.int32) + rest.to(torch.int32)).view(F32)
        for param, rest in zip(params, remainders.values(), strict=True)
    ]
    trainer.optimizer.multi_precision = True
    for param in params:
        param.data = param.data.clone()  # moved, so that the trainer looks
        param.grad = torch.zeros_like(param)
    trainer.optimizer.lr = 0.0
    trainer.step(1)
    assert all(map(torch.equal, saved(trainer, "master copy").values(), whole))
    for param in params:
        param.data = param.data.float()
        param.grad = torch.zeros_like(param)
    trainer.step(1)
    assert all("master copy" not in slots for slots in trainer.state_dict()["state"].values())


def test_masters_of_torchs_interface_are_converted(device):
    params = parameters(device, BF16)
    optimizer = tristep.optim.Lion(params, lr=0.01, multi_precision=True)
    train(params, optimizer.step, 2)
    (group,) = optimizer.param_groups
    wholes = [optimizer.state[param]["master"].clone() for param in params]
    group.update(multi_precision="split8", lr=0.0)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for param in params:
        param.grad = torch.zeros_like(param)
    optimizer.step()
    for param, whole in zip(params, wholes, strict=True):
        assert optimizer.state[param]["master"].dtype == torch.int8
        found = whole_of(param, optimizer.state[param]["master"])
        assert ((found.view(torch.int32) - whole.view(torch.int32)).abs() <= 0x100).all()


RATE = 3 * 2.0**-12  # less than half of what bfloat16 tells from numbers below 1, of which no small multiple is half-way


def by_trainer(**arguments):
    def path(settings, engine):
        params = new_parameters()
        return params, Trainer(params, "sgd", settings, engine=engine, **arguments).step

    return path


def new_parameters():
    return [torch.nn.Parameter(torch.ones(shape, dtype=BF16)) for shape in ((40, 30), (7,))]


def of_replicas(kvstore, on_store):
    def path(settings, engine):
        first, second = new_parameters(), new_parameters()
        options = {"kvstore": kvstore, "update_on_kvstore": on_store, "engine": engine}
        trainer = Trainer(list(map(torch.nn.ParameterList, (first, second))), "sgd", settings, **options)

        def step(batch_size):
            for param, other in zip(first, second, strict=True):
                other.grad = torch.zeros_like(param)
            trainer.step(batch_size)

        return first, step

    return path


def of_several(settings, engine):
    params = new_parameters()
    return params, Trainer(params, [("*", optimizer.SGD(**settings))], engine=engine).step


def in_backward(settings, engine):
    params = new_parameters()
    trainer = Trainer(params, "sgd", settings, engine=engine)

    def step(batch_size):
        trainer.zero_grad()
        with trainer.step_in_backward(batch_size):
            sum(param.sum() for param in params).backward()

    return params, step


def of_updater(settings, engine):
    params = new_parameters()
    update = optimizer.get_updater(optimizer.SGD(**settings))
    return params, lambda _: update([0, 1], [param.grad for param in params], [param.data for param in params])


def of_calls(settings, engine):
    params, made = new_parameters(), optimizer.SGD(**settings)
    states = [made.create_state_multi_precision(i, param.data) for i, param in enumerate(params)]

    def step(_):
        for i, param in enumerate(params):
            made.update_multi_precision(i, param.data, param.grad, states[i])

    return params, step


class ByHand(optimizer.Optimizer):
    def create_state(self, index, weight):
        return None

    def update(self, index, weight, grad, state):
        weight.sub_(self._get_lr(index) * grad)


def by_hand(settings, engine):
    params = new_parameters()
    return params, Trainer(params, ByHand(**settings), engine=engine).step


def with_torchs_face(settings, engine, wrap=lambda param: param):
    params = list(map(wrap, new_parameters()))
    rate = settings.pop("learning_rate")
    made = tristep.optim.as_torch(optimizer.SGD)(params, lr=rate, **settings)
    return params, lambda _: made.step()


def sharded(settings, engine):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return with_torchs_face(
        settings, engine, lambda param: torch.nn.Parameter(distribute_tensor(param.detach(), mesh, [Shard(0)]))
    )


WRITTEN = {
    "Trainer": by_trainer(),
    "several optimizers": of_several,
    "step_in_backward": in_backward,
    "replicas": of_replicas("device", False),
    "replicas, update_on_kvstore": of_replicas("device", True),
    "Updater": of_updater,
    "update_multi_precision": of_calls,
    "by hand": by_hand,
    "as_torch": with_torchs_face,
}
ON_RANKS = {
    "ZeRO": by_trainer(kvstore="dist_sync", update_on_kvstore=True),
    "all-reduce": by_trainer(kvstore="dist_sync", update_on_kvstore=False),
    "shards": sharded,
}


def written_between_steps(path, kind, engine):
    """Yield the weights after each step, and those of torch's SGD in float32, to both of which a half was written."""
    params, step = path({"learning_rate": RATE, "multi_precision": kind}, engine)
    twins = [param.detach().float().requires_grad_() for param in new_parameters()]
    judge = torch.optim.SGD(twins, lr=RATE)
    for t in range(7):
        if t == 3:
            with torch.no_grad():
                for each in (*params, *twins):  # a rank's rows begin at an even one
                    (each.to_local() if isinstance(each, DTensor) else each)[::2] = 0.5
        for each in (*params, *twins):
            each.grad = torch.ones_like(each)
        if dist.is_initialized() and dist.get_rank() > 0:
            for param in params:
                param.grad *= float(isinstance(param, DTensor))  # others are summed over ranks
        step(1)
        judge.step()
        found = [param.detach() for param in params]
        yield [param.full_tensor() if isinstance(param, DTensor) else param for param in found], twins


def check_written(kind, found, expected):
    for param, twin in zip(found, expected, strict=True):
        if kind is True:
            assert torch.equal(param, twin.detach().to(BF16))
        else:  # what a split master added stays, less than half of a unit of the weight before
            torch.testing.assert_close(param.float(), twin.detach(), rtol=0, atol=2.0**-8)


@pytest.mark.sample(12)
@pytest.mark.parametrize("kind", [True, "remainder", "split8"])
@pytest.mark.parametrize("path", WRITTEN)
def test_weights_written_between_steps_hold(path, kind, engine, monkeypatch):
    """As a roll-back, a clamp or a mask writes them; what was not written keeps its master."""
    monkeypatch.setenv("TRISTEP_ENGINE", engine)
    if kind is not True and path in ("update_multi_precision", "by hand"):
        pytest.skip("has no split masters")
    for found, expected in written_between_steps(WRITTEN[path], kind, engine):
        check_written(kind, found, expected)


def on_ranks(path, kind):
    return [
        ([param.float().numpy() for param in found], [twin.detach().numpy().copy() for twin in twins])
        for found, twins in written_between_steps(ON_RANKS[path], kind, None)
    ]


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", [True, "remainder"])
@pytest.mark.parametrize("path", ON_RANKS)
def test_weights_written_between_steps_hold_on_ranks(path, kind, processes):
    for rank in processes(2).run(on_ranks, path, kind):
        for pair in rank:
            found, expected = (list(map(torch.from_numpy, each)) for each in pair)
            check_written(kind, [param.to(BF16) for param in found], expected)


@pytest.mark.parametrize("rule", [rules.sgd, rules.lamb], ids=lambda rule: rule.name)
@pytest.mark.parametrize("dtype", [torch.float16, BF16], ids=str)
def test_a_kernel_reads_the_weight_where_its_master_does_not_round_to_it(rule, dtype, engine, device):
    """As with the weight as its master; half-way between two numbers, the master, whichever of both the weight is."""
    first = torch.linspace(1.0, 2.0, 1030, device=device)
    first[0] = torch.nan
    weights = [first.to(dtype), first.to(dtype)]
    for weight in weights:
        weight[:3] = torch.tensor([-0.0, 4.0, 1.5])
    unit = torch.finfo(dtype).eps
    first[3:] = weights[0][3:].float() + (unit / 2 if dtype == BF16 else unit / 4)
    second = first.clone()
    weights[1][3:] += unit if dtype == BF16 else 0.0
    second[:3] = weights[1][:3].float()
    states = [tuple(torch.zeros(shape, device=device) for shape in rule.shapes(first.shape)) for _ in weights]
    update = Update(rule, weights, states, [first, second], engine)
    values = {"lr": 0.125, "wd": 0.0, "clip": torch.inf}
    update.hyper[:] = [1.0, *(values.get(name, 0.5) for name in rule.hyper)]
    update.bind([torch.ones_like(weight) for weight in weights])
    update()
    for one, other in ((first, second), weights, *zip(*states, strict=True)):
        assert torch.equal(one, other)
    if rule is rules.sgd:
        assert torch.equal(first[:3].cpu(), torch.tensor([-0.125, 3.875, 1.375]))

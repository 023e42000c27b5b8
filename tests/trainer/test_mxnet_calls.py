"""Forms of calls of optimizers that MXNet's own tests and tutorials use."""

import pytest
import torch

import tristep
from tristep import lr_scheduler


def lists(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(shape, generator=generator).to(dtype) for shape in ((3, 2), (5,), ())]
    return made, [torch.randn(weight.shape, generator=generator).to(dtype) for weight in made]


@pytest.mark.sample(2)
@pytest.mark.parametrize("multi_precision", [False, True])
@pytest.mark.parametrize("name", ["sgd", "adamw", "lamb", "lars", "nadam"])
def test_update_takes_lists_as_mxnets_does(name, multi_precision):
    """MXNet's test_multilamb calls `update_multi_precision` with lists. Numbers are a Trainer's, and of SGD torch's."""
    arguments = {"learning_rate": 0.1, "wd": 0.01} | ({"momentum": 0.9} if name == "sgd" else {})
    dtype = torch.bfloat16 if multi_precision else torch.float32
    weights, grads = lists(dtype)
    params = [torch.nn.Parameter(weight.clone()) for weight in weights]
    trainer = tristep.Trainer(params, name, arguments | {"multi_precision": multi_precision}, engine="eager")
    exact = [torch.nn.Parameter(weight.float().clone()) for weight in weights]
    theirs = torch.optim.SGD(exact, lr=0.1, momentum=0.9, weight_decay=0.01)
    optimizer = tristep.optimizer.create(name, multi_precision=multi_precision, **arguments)
    indices = list(range(len(weights)))
    states = [optimizer.create_state_multi_precision(i, weight) for i, weight in enumerate(weights)]
    for _ in range(3):
        for param, high, grad in zip(params, exact, grads, strict=True):
            param.grad, high.grad = grad.clone(), grad.float()
        trainer.step(1)
        theirs.step()
        optimizer.update_multi_precision(indices, weights, grads, states)
    assert optimizer.counts == dict.fromkeys(indices, 3)
    for weight, param, high in zip(weights, params, exact, strict=True):
        torch.testing.assert_close(weight, param.detach())
        if name == "sgd":
            torch.testing.assert_close(weight, high.detach().to(dtype))


# What `create_state_multi_precision` of MXNet 1.9.1 returned for weights of ones in float16: whether the master is first.
MASTER_FIRST = {"ccsgd": False, "lars": False, "nag": False, "sgd": False} | dict.fromkeys(
    [
        *("adadelta", "adagrad", "adam", "adamax", "dcasgd", "ftml", "ftrl", "groupadagrad", "lamb", "lbsgd", "nadam"),
        *("rmsprop", "sgld", "signum", "test"),
    ],
    True,
)
MOMENTUM = {"ccsgd", "dcasgd", "lars", "lbsgd", "nag", "sgd", "signum"}


@pytest.mark.sample(10)
@pytest.mark.parametrize(
    ("name", "momentum"), [*((name, 0.0) for name in MASTER_FIRST), *((name, 0.9) for name in sorted(MOMENTUM))]
)
def test_a_state_with_a_master_has_mxnets_order(name, momentum):
    settings = {"multi_precision": True} | ({"momentum": momentum} if name in MOMENTUM else {})
    optimizer = tristep.optimizer.create(name, **settings)
    weight = torch.ones(2, 3).half()
    pair = optimizer.create_state_multi_precision(0, weight)
    master, state = pair if MASTER_FIRST[name] else reversed(pair)
    assert isinstance(state, tuple)
    assert master.dtype == torch.float32
    assert master.tolist() == weight.tolist()
    param = torch.nn.Parameter(weight.clone())
    trainer = tristep.Trainer([param], name, settings, engine="eager")
    for _ in range(2):
        param.grad = torch.full_like(param, 0.25)
        trainer.step(1)
        optimizer.update_multi_precision(0, weight, torch.full_like(weight, 0.25), pair)
    assert torch.equal(weight, param.detach())
    assert torch.equal(master, trainer._updater.masters[0])
    assert all(map(torch.equal, state, trainer._updater.states[0]))
    with pytest.raises(TypeError, match="state has a tuple as master: .* as create_state_multi_precision returns them"):
        optimizer.update_multi_precision(0, weight, torch.ones_like(weight), pair[::-1])
    assert torch.equal(weight, param.detach())


def test_a_list_has_one_rate_and_is_refused_as_a_whole():
    """The schedule is asked once, for the count of the whole list, and sparse gradients update their rows only."""
    asked = []

    def schedule(n):
        asked.append(n)
        return 1.0 / n

    optimizer = tristep.optimizer.SGD(lr_scheduler=schedule)
    weights = [torch.zeros(2), torch.zeros(2, 1)]
    optimizer.update(0, weights[0], torch.ones(2), ())
    grads = [torch.ones(2), torch.sparse_coo_tensor(torch.tensor([[1]]), torch.ones(1, 1), (2, 1), check_invariants=True)]
    optimizer.update([0, 1], weights, grads, [(), ()])
    assert asked == [1, 2]
    assert [weight.flatten().tolist() for weight in weights] == [[-1.5, -1.5], [0.0, -0.5]]
    for arguments, error, message in (
        (([0, 1], weights, grads[:1], [(), ()]), ValueError, "2 indices came with 1 for grad"),
        (([0, 1], weights[0], grads, [(), ()]), TypeError, "index is a list, so weight must be one, too, got Tensor"),
        (([0, 0], weights, grads, [(), ()]), ValueError, "an index comes twice"),
        (([0, 1], weights, [grads[0], torch.ones(3)], [(), ()]), ValueError, "weight 1"),
    ):
        with pytest.raises(error, match=message):
            optimizer.update(*arguments)
    assert [weight.flatten().tolist() for weight in weights] == [[-1.5, -1.5], [0.0, -0.5]]
    assert optimizer.counts == {0: 2, 1: 1}


@pytest.mark.parametrize(
    ("name", "theirs", "ours"),
    [
        ("adagrad", {"epsilon": 0.5}, {"eps": 0.5}),
        ("groupadagrad", {"epsilon": 0.5}, {"eps": 0.5}),
        ("lars", {"epsilon": 0.5}, {"eps": 0.5}),
        ("rmsprop", {"rho": 0.5, "momentum": 0.25}, {"gamma1": 0.5, "gamma2": 0.25}),
    ],
)
def test_names_of_arguments_in_mxnet_2(name, theirs, ours):
    assert tristep.optimizer.create(name, **theirs).settings() == tristep.optimizer.create(name, **ours).settings()
    for other, own in zip(theirs, ours, strict=True):
        with pytest.raises(TypeError, match=f"{other}=.* together with {own}, which are one argument"):
            tristep.optimizer.create(name, **{other: 0.5, own: 0.5})


def test_a_rate_next_to_a_schedule_without_one_is_no_reason_for_a_warning():
    """`FactorScheduler(step=100, factor=0.9)` next to `learning_rate`, as in MXNet's documents."""
    schedule = lr_scheduler.FactorScheduler(step=100, factor=0.9)
    trainer = tristep.Trainer(torch.nn.Linear(2, 1), "sgd", {"learning_rate": 0.5, "lr_scheduler": schedule})
    assert trainer.learning_rate == 0.5
    assert schedule(101) == 0.45
    for made in (lr_scheduler.CosineScheduler(100), lr_scheduler.create("multifactor", step=[5], factor=0.1)):
        assert tristep.optimizer.SGD(learning_rate=0.5, lr_scheduler=made).learning_rate == 0.5


@pytest.mark.parametrize(
    "make",
    [
        lambda: lr_scheduler.FactorScheduler(step=100, base_lr=0.01),
        lambda: lr_scheduler.FactorScheduler(100, 1.0, 1e-8, 0.01),
        lambda: lr_scheduler.from_config({"class": "CosineScheduler", "kwargs": {"max_update": 10, "base_lr": 0.01}}),
        lambda: changed(lr_scheduler.FactorScheduler(step=100)),
    ],
)
def test_a_rate_next_to_a_schedule_with_its_own_is_warned_of(make):
    """Also where it is given as what is the default."""
    with pytest.warns(UserWarning, match="learning_rate=0.5 replaces base_lr="):
        tristep.optimizer.SGD(learning_rate=0.5, lr_scheduler=make())


def changed(schedule):
    schedule.base_lr = 0.2
    return schedule

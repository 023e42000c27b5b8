"""tristep's own optimizers behind torch's interface, against `tristep.Trainer` with the same ones: equal to the bit."""

import copy
import inspect
import pickle

import numpy as np
import pytest
import torch
from optimizer_table import row_of

import tristep
from tristep import Trainer
from tristep.kernels import tl

OURS = [
    name
    for name in tristep.optim.__all__
    if not hasattr(torch.optim, name)
    and name not in ("as_torch", "clip_grad_norm_", "FusedOptimizer", "MultiOptimizer", "SAM")
]


@tristep.rule
def halving(w, g, state, hyper):
    (steps,) = state
    lr, wd, share, one_minus_share = hyper
    steps = share * steps + one_minus_share * g
    return w - lr * tl.where(steps > 0.0, steps, 0.5 * steps) - wd * w, (steps,)


class Halving(tristep.optimizer.RuleOptimizer):
    """A user-defined optimizer."""

    rule = halving

    def __init__(self, share=0.5, **others):
        self.share = share
        super().__init__(**others)


TorchHalving = tristep.optim.as_torch(Halving)
TorchHalving.__name__ = TorchHalving.__qualname__ = "TorchHalving"  # by which pickle finds it


def _parameters(dtype=torch.float32):
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in ((4, 3), (5,), (), (2, 3, 2))]


def _give_gradients(parameters, step):
    torch.manual_seed(step)
    for i, parameter in enumerate(parameters):
        gradient = torch.randn(parameter.shape).to(parameter)
        parameter.grad = None if (step + i) % 5 == 4 else gradient


def _equal(ours, theirs):
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


# SGLD's noise depends on where a parameter stands, and Prodigy's estimate on all parameters of all groups.
@pytest.mark.sample(10)
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.sample(0))], ids=str)
@pytest.mark.parametrize("name", sorted(set(OURS) - {"SGLD", "Prodigy"}))
def test_groups_have_options_of_their_own_and_train_as_by_a_trainer_each(name, dtype):
    settings = [(0.02, 0.1, row_of(name).options), (0.05, 0.0, {})]
    parts, expected = (slice(0, 2), slice(2, 4)), _parameters(dtype)
    trainers = [
        Trainer(expected[part], name, {"learning_rate": lr, "wd": wd, **options})
        for part, (lr, wd, options) in zip(parts, settings, strict=True)
    ]
    parameters = _parameters(dtype)
    optimizer = getattr(tristep.optim, name)(
        [
            {"params": parameters[part], "lr": lr, "weight_decay": wd, **options}
            for part, (lr, wd, options) in zip(parts, settings, strict=True)
        ]
    )
    for step in range(6):
        _give_gradients(expected, step)
        if step == 4:
            trainers[0].set_learning_rate(0.01)
            optimizer.param_groups[0]["lr"] = 0.01
        for trainer in trainers:
            trainer.step(1, ignore_stale_grad=True)
        _give_gradients(parameters, step)
        optimizer.step()
    assert _equal(parameters, expected)
    assert not any(map(torch.equal, parameters, _parameters(dtype)))
    assert [group["lr"] for group in optimizer.param_groups] == [0.01, 0.05]


def test_prodigy_estimates_one_rate_for_all_groups():
    expected, parameters = _parameters(), _parameters()
    trainer = Trainer(expected, "prodigy", {"learning_rate": 1.0, "d0": 0.01})
    optimizer = tristep.optim.Prodigy([{"params": parameters[:2]}, {"params": parameters[2:]}], d0=0.01)
    for step in range(7):
        _give_gradients(expected, step)
        _give_gradients(parameters, step)
        trainer.step(1, ignore_stale_grad=True)
        optimizer.step()
    assert _equal(parameters, expected)
    assert len({row["d"].item() for row in optimizer.state.values()}) == 1


def test_a_changed_option_holds_from_the_next_step_on():
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = tristep.optim.NAG([parameter], lr=1.0, momentum=0.0)
    parameter.grad = torch.ones(1)
    optimizer.step()
    optimizer.param_groups[0]["clip_gradient"] = 0.25
    optimizer.step()
    assert parameter.item() == -1.25


def test_an_optimizer_of_ones_own_is_saved_copied_and_pickled():
    parameters = _parameters()
    optimizer = TorchHalving([{"params": parameters[:2]}, {"params": parameters[2:], "share": 0.25}], lr=0.1)
    for step in range(2):
        _give_gradients(parameters, step)
        optimizer.step()
    clones = [copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))]
    clones.append(TorchHalving([{"params": _parameters()[:2]}, {"params": _parameters()[2:]}]))
    clones[-1].load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for old, new in zip(parameters, [p for group in clones[-1].param_groups for p in group["params"]], strict=True):
        new.data.copy_(old.data)
    _give_gradients(parameters, 2)
    optimizer.step()
    for clone in clones:
        own = [parameter for group in clone.param_groups for parameter in group["params"]]
        _give_gradients(own, 2)
        clone.step()
        assert [group["share"] for group in clone.param_groups] == [0.5, 0.25]
        assert _equal(own, parameters)


# Averages


@pytest.mark.parametrize("masters", [{"multi_precision": True}, {"multi_precision": "remainder"}], ids=str)
def test_averages_of_16_bit_parameters_have_the_precision_of_their_masters(masters):
    lr, beta = 0.01, 0.9
    generator = torch.Generator().manual_seed(5)
    first = torch.randn(64, generator=generator).bfloat16()
    parameter = torch.nn.Parameter(first.clone())
    optimizer = tristep.optim.ScheduleFreeSGD([parameter], lr=lr, beta=beta, **masters)
    plain = average = first.double().numpy()  # z and x of Defazio et al. (2024), eq. 4
    for t in range(1, 21):
        parameter.grad = torch.randn(64, generator=generator).bfloat16()
        optimizer.step()
        plain = plain - lr * parameter.grad.double().numpy()
        average = average + (plain - average) / t
    with optimizer.averaged_weights():
        found = parameter.detach().double().numpy()
    half_a_unit = np.exp2(np.floor(np.log2(np.abs(average)))) * 2.0**-8
    assert (np.abs(found - average) <= half_a_unit * 1.001).all()


AVERAGED = {"ScheduleFreeSGD": {}, "ScheduleFreeAdamW": {"warmup": 2}, "Lion": {"ema_decay": 0.5}}


@pytest.mark.parametrize("name", AVERAGED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_eval_shows_averages_until_train(name, dtype):
    parameters = _parameters(dtype)
    optimizer = getattr(tristep.optim, name)(parameters, lr=0.05, **AVERAGED[name])
    optimizer.eval()
    assert _equal(parameters, _parameters(dtype))
    _give_gradients(parameters, 0)
    with pytest.raises(RuntimeError, match=r"step\(\) while parameters have their averaged values.* call train\(\)"):
        optimizer.step()
    optimizer.train()
    for step in range(3):
        _give_gradients(parameters, step)
        optimizer.step()
    trained, saved = [parameter.detach().clone() for parameter in parameters], str(optimizer.state_dict())
    with optimizer.averaged_weights():
        averages = [parameter.detach().clone() for parameter in parameters]
    assert not _equal(averages, trained)
    with pytest.raises(KeyError), optimizer.averaged_weights():
        raise KeyError
    assert _equal(parameters, trained)
    for _ in range(2):
        optimizer.eval()
        assert _equal(parameters, averages)
    with optimizer.averaged_weights():
        assert _equal(parameters, averages)
    assert _equal(parameters, averages)
    with pytest.raises(RuntimeError, match="averaged values"):
        optimizer.step()
    with pytest.raises(RuntimeError, match=r"float32_weights\(\) while parameters"):
        optimizer.float32_weights()
    for _ in range(2):
        optimizer.train()
        assert _equal(parameters, trained)
    assert str(optimizer.state_dict()) == saved
    optimizer.eval()
    with torch.no_grad():
        parameters[0].zero_()
    with pytest.raises(RuntimeError, match=r"written to between eval\(\) and train\(\)"):
        optimizer.train()
    assert _equal(parameters, trained)


@pytest.mark.parametrize("way", ["state_dict", "pickle"])
@pytest.mark.parametrize("name", AVERAGED)
def test_what_is_saved_after_eval_goes_on_as_it_was_trained(name, way):
    parameters = _parameters()
    optimizer = getattr(tristep.optim, name)(parameters, lr=0.05, **AVERAGED[name])
    for step in range(5):
        if step == 3:
            optimizer.eval()
            averages = [parameter.detach().clone() for parameter in parameters]
            if way == "pickle":
                others, again = pickle.loads(pickle.dumps((parameters, optimizer)))
            else:
                others = [torch.nn.Parameter(average.clone()) for average in averages]
                again = getattr(tristep.optim, name)(others, lr=0.05, **AVERAGED[name])
                again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            assert _equal(others, averages)
            _give_gradients(others, step)
            with pytest.raises(RuntimeError, match="averaged values"):
                again.step()
            optimizer.train()
            again.train()
        _give_gradients(parameters, step)
        optimizer.step()
        if step >= 3:
            _give_gradients(others, step)
            again.step()
            assert _equal(parameters, others)


def test_eval_is_the_papers_average():
    """Defazio et al. (2024), eq. 3 to 5, with a constant rate."""
    parameter = torch.nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.float64))
    optimizer = tristep.optim.ScheduleFreeSGD([parameter], lr=0.1, beta=0.8)
    x = z = np.array([1.0, -2.0])
    for t in range(1, 6):
        y = 0.2 * z + 0.8 * x
        np.testing.assert_allclose(parameter.detach().numpy(), y, rtol=1e-12)
        parameter.grad = parameter.detach() ** 2
        optimizer.step()
        z = z - 0.1 * y**2
        x = (1 - 1 / t) * x + z / t
        optimizer.eval()
        np.testing.assert_allclose(parameter.detach().numpy(), x, rtol=1e-12)
        optimizer.train()


@pytest.fixture
def registered():
    """A user's optimizer with defaults of its own, registered by name."""

    class Halved(Halving):
        def __init__(self, learning_rate=0.003, wd=0.2, share=0.5, **others):
            super().__init__(share, learning_rate=learning_rate, wd=wd, **others)

    yield tristep.optimizer.register(Halved)
    del tristep.optimizer.Optimizer.opt_registry["halved"]


def test_the_constructors_own_defaults_are_used(registered):
    trained = []
    for make in (lambda p: Trainer(p, registered()), lambda p: tristep.optim.as_torch(registered)(p)):
        parameters = _parameters()
        optimizer = make(parameters)
        _give_gradients(parameters, 0)
        optimizer.step(*[1] * isinstance(optimizer, Trainer))
        trained.append(parameters)
    assert _equal(*trained)
    adapter = tristep.optim.as_torch(registered)
    assert [inspect.signature(adapter).parameters[name].default for name in ("lr", "weight_decay")] == [0.003, 0.2]
    assert adapter(_parameters(), lr=0.0, weight_decay=0.0).param_groups[0]["weight_decay"] == 0.0


# By name, the option that torch's schedules of momentum change.
CYCLED = {
    name: "beta1" if "betas" in parameters else "momentum"
    for name in sorted(OURS)
    if {"betas", "momentum"} & (parameters := inspect.signature(getattr(tristep.optim, name)).parameters).keys()
}


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", CYCLED)
def test_schedules_of_torch_change_momentum(name):
    """As if the rate and `beta1` that the same schedule gives torch's Adam were set by hand."""
    trained = []
    for by_hand in (False, True):
        parameters, other = _parameters(), [torch.nn.Parameter(torch.ones(2))]
        optimizer, adam = getattr(tristep.optim, name)(parameters, lr=0.01), torch.optim.Adam(other, lr=0.01)
        arguments = {"max_lr": 0.02, "total_steps": 9, "base_momentum": 0.7, "max_momentum": 0.9}
        scheduler = torch.optim.lr_scheduler.OneCycleLR(adam if by_hand else optimizer, **arguments)
        seen = []
        for step in range(6):
            if by_hand:
                rate, (beta1, _) = adam.param_groups[0]["lr"], adam.param_groups[0]["betas"]
                optimizer.param_groups[0].update({"lr": rate, CYCLED[name]: beta1})
            _give_gradients(parameters, step)
            optimizer.step()
            adam.step()
            scheduler.step()
            seen.append(optimizer.param_groups[0][CYCLED[name]])
        assert len(set(seen)) > 3
        trained.append(parameters)
    assert _equal(*trained)


def test_beta1_and_betas_are_one():
    parameters = _parameters()
    lion = tristep.optim.Lion([{"params": parameters[:1]}, {"params": parameters[1:], "beta1": 0.5}], betas=(0.8, 0.7))
    assert [group["betas"] for group in lion.param_groups] == [(0.8, 0.7), (0.5, 0.7)]
    assert [group["beta1"] for group in lion.param_groups] == [0.8, 0.5]
    group = lion.param_groups[0]
    for change, expected in (
        ({"betas": (0.6, 0.7)}, (0.6, 0.7)),
        ({"beta2": 0.4}, (0.6, 0.4)),
        ({"betas": [0.1, 0.2]}, (0.1, 0.2)),
    ):
        group.update(change)
        for made in (lion, copy.deepcopy(lion)):
            saved = made.state_dict()["param_groups"][0]
            assert (saved["betas"], (saved["beta1"], saved["beta2"])) == (expected, expected)
    lion.param_groups[0].update(beta1=0.3, betas=(0.4, 0.2))
    with pytest.raises(ValueError, match=r"beta1=0.3 and betas=\(0.4, 0.2\): they must agree"):
        lion.step()

"""tristep.optim: torch's schedules, GradScaler, clipping and averaged models work as with torch.optim."""

import copy

import pytest
import torch
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR
from torch_peers import ARGUMENTS, CLOSE_IN_FLOAT32

import tristep


def _plateau(optimizer):
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    return lambda: scheduler.step(1.0)


def _each(*made):
    return lambda: [scheduler.step() for scheduler in made]


SCHEDULES = {
    "LambdaLR": lambda o: _each(lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch)),
    "CyclicLR": lambda o: _each(lr_scheduler.CyclicLR(o, 0.01, 0.1, 2, base_momentum=0.5, max_momentum=0.95)),
    "OneCycleLR": lambda o: _each(lr_scheduler.OneCycleLR(o, 0.1, 8)),
    "ReduceLROnPlateau": _plateau,
    "SWALR": lambda o: _each(SWALR(o, 0.01, 3)),
    "in sequence": lambda o: _each(
        lr_scheduler.SequentialLR(o, [lr_scheduler.LinearLR(o, 0.1, total_iters=2), lr_scheduler.StepLR(o, 1)], [2])
    ),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        *[
            ("SGD", {"momentum": 0.9}),
            ("SGD", {}),
            ("RMSprop", {"momentum": 0.5}),
            ("AdamW", {}),
            ("NAdam", {}),
            ("RAdam", {}),
        ],
        *[("Adamax", {}), ("Adam", {"lr": torch.tensor(0.1, dtype=torch.float64), "foreach": False})],
    ],
    ids=["SGD", "SGD without momentum", "RMSprop", "AdamW", "NAdam", "RAdam", "Adamax", "Adam with a tensor"],
)
def test_schedules_like_torch(name, arguments, schedule):
    runs = []
    for library in (tristep.optim, torch.optim):
        parameter = torch.nn.Parameter(torch.linspace(-1, 1, 5, dtype=torch.float64))
        optimizer = getattr(library, name)([parameter], **copy.deepcopy({"lr": 0.1, **arguments}))
        advance = SCHEDULES[schedule](optimizer)
        path = []
        for _ in range(7):
            optimizer.zero_grad()
            (parameter - 3).square().sum().backward()
            optimizer.step()
            advance()
            path.append(parameter.detach().clone())
        runs.append((path, float(optimizer.param_groups[0]["lr"])))
    torch.testing.assert_close(*runs, rtol=1e-9, atol=1e-11)


def test_gradients_that_a_step_unscales_stay_scaled():
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = tristep.optim.SGD([parameter], lr=0.25, fused=True)
    scaler.scale(parameter.sum()).backward()
    scaler.step(optimizer)
    assert parameter.tolist() == [0.75] * 2
    assert parameter.grad.tolist() == [8.0] * 2


def test_one_optimizer_for_each_parameter_stepping_in_the_backward_pass():
    weights = []
    for library in (tristep.optim, torch.optim):
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 1)).double()
        optimizers = {parameter: library.Adam([parameter], lr=0.1, foreach=False) for parameter in net.parameters()}

        def step(parameter, optimizers=optimizers):
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        for parameter in net.parameters():
            parameter.register_post_accumulate_grad_hook(step)
        for _ in range(3):
            net(torch.ones(1, 3, dtype=torch.float64)).sum().backward()
        weights.append(net.state_dict())
    torch.testing.assert_close(*weights, rtol=1e-9, atol=1e-11)


TORCHS = {name: getattr(torch.optim, name) for name in ARGUMENTS}


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", ARGUMENTS)
def test_classes_in_place_of_torchs(name, monkeypatch):
    """`torch.optim.Adam = tristep.optim.Adam` switches a whole program; schedules of torch are run with SGD."""
    for each in ARGUMENTS:
        monkeypatch.setattr(torch.optim, each, getattr(tristep.optim, each))
    parameters = [torch.nn.Parameter(torch.linspace(-1, 1, 6).reshape(2, 3)) for _ in range(2)]
    arguments = ARGUMENTS[name][-1]
    theirs, ours = (
        klass([parameter], **arguments)
        for klass, parameter in zip((TORCHS[name], getattr(torch.optim, name)), parameters, strict=True)
    )
    schedule = torch.optim.lr_scheduler.StepLR(ours, 100)
    for step in range(4):
        if step == 2:
            ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
        for parameter in parameters:
            gradient = torch.linspace(-2, 1, 6).reshape(2, 3)
            parameter.grad = gradient.to_sparse(1) if name == "SparseAdam" else gradient
        theirs.step()
        ours.step()
        schedule.step()
    assert type(ours) is getattr(tristep.optim, name)
    torch.testing.assert_close(parameters[1], parameters[0], **CLOSE_IN_FLOAT32)
    assert tristep.lr_scheduler.from_torch("StepLR", step_size=1, base_lr=1.0)(2) == 0.1

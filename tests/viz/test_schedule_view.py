"""Schedules as pictures: the rates that are drawn, and what live training keeps to itself."""

import copy

import numpy as np
import pytest
import torch
from planted_runs import named_layers
from torch.optim import lr_scheduler as torchs

import tristep
from tristep import lr_scheduler
from tristep.viz import Line, Recorder, RefLine, ScheduleView
from tristep.viz.style import line_style


def _train(steps, **arguments):
    net = torch.nn.Linear(2, 1)
    trainer = tristep.Trainer(net, "sgd", arguments)
    recorder = Recorder(trainer)
    for _ in range(steps):
        trainer.zero_grad()
        loss = net(torch.ones(4, 2)).square().mean()
        loss.backward()
        trainer.step(1)
        recorder.step(loss=loss)
    return trainer, recorder


def test_rates_of_several_schedules_from_update_1_on():
    cosine = lr_scheduler.CosineScheduler(100, base_lr=0.5, warmup_steps=10)
    scene = ScheduleView({"cosine": cosine, "own": lambda n: 0.1 / n}, n_updates=120).scene()
    n = np.arange(1, 121)
    for name, expected in (("cosine", cosine(n)), ("own", 0.1 / n)):
        line = named_layers(scene, name)
        assert line.x.tolist() == n.tolist()
        np.testing.assert_allclose(line.y, expected, rtol=1e-6)
    assert scene.panels[0].y.low == 0 and scene.panels[0].y.high > 0.5  # noqa: PT018
    long = named_layers(ScheduleView(cosine, n_updates=10**6).scene(), "Cosine")
    assert len(long.x) == 2048
    assert long.x[-1] == 10**6
    assert ScheduleView(cosine).scene().panels[0].x.high == 100
    logarithmic = ScheduleView(cosine, scale="log").scene().panels[0].y
    assert (logarithmic.scale, 0 < logarithmic.low < 0.05) == ("log", True)
    view = ScheduleView(cosine)
    assert [control.name for control in view.scene().controls] == ["scale"]
    view.on_control("scale", "log", 0)
    assert view.scene().panels[0].y == logarithmic


TORCH = {
    "cosine": lambda o: torchs.CosineAnnealingLR(o, 30),
    "one cycle": lambda o: torchs.OneCycleLR(o, 0.5, total_steps=40),
    "lambda": lambda o: torchs.LambdaLR(o, lambda n: 0.9**n),
    "sequence": lambda o: torchs.SequentialLR(o, [torchs.ConstantLR(o, 0.5, 3), torchs.ExponentialLR(o, 0.8)], [5]),
    "chained": lambda o: torchs.ChainedScheduler([torchs.LinearLR(o, 0.1, total_iters=4), torchs.StepLR(o, 6)]),
    "ours": lambda o: lr_scheduler.to_torch(lr_scheduler.CosineScheduler(30, base_lr=0.4), o),
}


def test_schedules_by_name_end_where_the_picture_does():
    for given in ("cosine", {"cosine": "cosine", "a": "Poly"}):
        for arguments, end in (((300,), 300), ((), 1000)):
            scene = ScheduleView(given, *arguments).scene()
            lines = {line.name: line for line in scene.panels[0].layers if isinstance(line, Line)}
            for line, kind in zip(lines.values(), (lr_scheduler.CosineScheduler, lr_scheduler.PolyScheduler), strict=False):
                schedule = kind(end)
                np.testing.assert_allclose(line.y, [schedule(int(n)) for n in line.x], rtol=1e-6)
                assert line.x[-1] == end


@pytest.mark.parametrize("kind", TORCH)
@pytest.mark.parametrize("done", [0, 7])
def test_what_a_schedule_of_torchs_will_do_is_found_without_touching_it(kind, done):
    torch.manual_seed(1)
    net = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW([{"params": [net.weight]}, {"params": [net.bias], "lr": 0.01}], lr=0.3)
    schedule = TORCH[kind](optimizer)

    def step():
        optimizer.zero_grad()
        net(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        schedule.step()

    for _ in range(done):
        step()

    def everything():
        own = {k: v for k, v in vars(schedule).items() if isinstance(v, (int, float, list)) and k[0] != "_"}
        own.pop("lr_lambdas", None)
        groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        states = [{k: v.clone() for k, v in row.items()} for row in optimizer.state.values()]
        return copy.deepcopy([own, groups, states, [p.detach().clone() for p in net.parameters()]])

    before = everything()
    line = named_layers(ScheduleView({"torch": schedule}, n_updates=30).scene(), "torch")
    assert str(everything()) == str(before)
    rates = []
    for _ in range(30 - done):
        rates.append(optimizer.param_groups[0]["lr"])
        step()
    assert line.x.tolist() == list(range(done + 1, 31))
    np.testing.assert_allclose(line.y, rates, rtol=1e-6)


def test_a_live_trainer_has_a_past_and_a_future():
    schedule = lr_scheduler.PolyScheduler(60, base_lr=0.1, pwr=1)
    trainer, recorder = _train(20, lr_scheduler=schedule)
    view = ScheduleView(trainer, loss=recorder)
    scene = view.scene()
    past, future = named_layers(scene, "SGD"), named_layers(scene, "SGD, to come")
    np.testing.assert_allclose([past.x, past.y], [np.arange(1, 21), schedule(np.arange(1, 21))], rtol=1e-6)
    np.testing.assert_allclose([future.x, future.y], [np.arange(20, 61), schedule(np.arange(20, 61))], rtol=1e-5, atol=1e-9)
    solid, dashed = line_style(past.style), line_style(future.style)
    assert solid["color"] == dashed["color"]
    assert (solid["linestyle"], dashed["linestyle"] != "-") == ("-", True)
    (mark,) = (layer for layer in scene.panels[0].layers if isinstance(layer, RefLine))
    assert (mark.at.tolist(), mark.label) == ([20], "now")
    assert scene.panels[1].y.label == "loss"
    assert isinstance(scene.panels[1].layers[0], Line)
    np.testing.assert_allclose(scene.panels[1].layers[0].y, recorder.run.scalars["loss"].recent()[1], rtol=1e-6)
    assert "SGD, now after update 20: from 0.0983 to 0 up to update 60" in view.describe()


def test_schedules_of_other_settings_are_drawn_below_and_recorded():
    decay = lr_scheduler.CosineScheduler(10, base_lr=0.2)
    trainer, recorder = _train(4, learning_rate=0.1, schedules={"wd": decay, "momentum": lambda n: 0.9 - n / 100})
    recorder.poll()
    np.testing.assert_allclose(recorder.run.scalars["momentum"].curve().mean, [0.89, 0.88, 0.87, 0.86])
    view = ScheduleView({"SGD": trainer}, loss=recorder)
    panels = view.scene().panels
    assert [panel.y.label for panel in panels] == ["learning rate", "wd", "momentum", "loss"]
    assert [panel.row for panel in panels] == [0, 1, 2, 3]
    past, to_come = (layer for layer in panels[1].layers if isinstance(layer, Line))
    np.testing.assert_allclose(past.y, decay(np.arange(1, 5)), rtol=1e-6)
    assert to_come.x.tolist() == list(range(4, 11))  # as long as the longest schedule
    np.testing.assert_allclose(to_come.y, decay(np.arange(4, 11)), rtol=1e-6, atol=1e-8)
    assert "momentum of SGD, now after update 4: from 0.89 to 0.8" in view.describe()

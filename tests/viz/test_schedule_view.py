"""Schedules as pictures: the rates that are drawn, what live training keeps to itself, and knots that are dragged."""

import copy

import numpy as np
import pytest
import torch
from planted_runs import named_layers
from torch.optim import lr_scheduler as torchs

import tristep
from tristep import lr_scheduler
from tristep.viz import Click, Line, Points, Recorder, RefLine, ScheduleView
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


TORCH = {
    "cosine": lambda o: torchs.CosineAnnealingLR(o, 30),
    "one cycle": lambda o: torchs.OneCycleLR(o, 0.5, total_steps=40),
    "lambda": lambda o: torchs.LambdaLR(o, lambda n: 0.9**n),
    "sequence": lambda o: torchs.SequentialLR(o, [torchs.ConstantLR(o, 0.5, 3), torchs.ExponentialLR(o, 0.8)], [5]),
    "chained": lambda o: torchs.ChainedScheduler([torchs.LinearLR(o, 0.1, total_iters=4), torchs.StepLR(o, 6)]),
    "ours": lambda o: lr_scheduler.to_torch(lr_scheduler.CosineScheduler(30, base_lr=0.4), o),
}


def test_schedules_by_name_end_where_the_picture_does():
    with pytest.raises(TypeError):  # which needs more than its name
        ScheduleView("factor")
    for given in ("cosine", {"cosine": "cosine", "a": "Poly"}):
        for arguments, end in (((300,), 300), ((), 1000)):
            scene = ScheduleView(given, *arguments).scene()
            lines = {line.name: line for line in scene.panels[0].layers if isinstance(line, Line)}
            for line, kind in zip(lines.values(), (lr_scheduler.CosineScheduler, lr_scheduler.PolyScheduler), strict=False):
                schedule = kind(end)
                np.testing.assert_allclose(line.y, [schedule(int(n)) for n in line.x], rtol=1e-6)
                assert line.x[-1] == end
    for name, asked in (("factor", "step"), ("multifactor", "step"), ("interpolated", "step, rates")):
        with pytest.raises(TypeError, match=rf"'{name}' needs {asked}, .*create\('{name}', step=...") as refused:
            ScheduleView(name)
        assert "__init__" not in str(refused.value)
    with pytest.raises(ValueError, match="no scheduler is registered by that name.*Did you mean 'cosine'"):
        ScheduleView("cosinus")


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


@pytest.mark.parametrize("scale", ["linear", "log"])
def test_knots_make_a_schedule_whose_code_gives_the_same_rates(scale):
    view = ScheduleView(knots=[(0, 0.01), (100, 0.5), (1000, 0.001)], scale=scale)
    n = np.arange(0, 1100, 7)
    expected = np.interp(n, [0, 100, 1000], [0.01, 0.5, 0.001])
    if scale == "log":
        expected = np.exp(np.interp(n, [0, 100, 1000], np.log([0.01, 0.5, 0.001])))
    np.testing.assert_allclose(view.schedule(n), expected, rtol=1e-12)
    names = {}
    exec(view.code(), names)
    np.testing.assert_array_equal(names["schedule"](n), view.schedule(n))
    line = named_layers(view.scene(), "by hand")
    np.testing.assert_allclose(line.y, np.asarray(view.schedule(line.x.astype(int))), rtol=1e-5)
    later = ScheduleView(knots=[(10, 0.2), (20, 0.4)])
    assert [later.schedule(k) for k in (0, 10, 15, 20, 30)] == pytest.approx([0.2, 0.2, 0.3, 0.4, 0.4])


def test_knots_are_dragged_as_far_as_they_can_go():
    view = ScheduleView(knots=[(0, 0.01), (100, 0.5), (1000, 0.0)])
    points, chosen = (layer for layer in view.scene().panels[0].layers if isinstance(layer, Points))
    assert points.drag == "knot"
    assert (chosen.drag, chosen.x.tolist()) == (None, [0.0])
    np.testing.assert_allclose([points.x, points.y], [[0, 100, 1000], [0.01, 0.5, 0.0]])
    view.on_drag("knot", 1, 249.7, 0.3)
    assert view.knots == [(0, 0.01), (250, 0.3), (1000, 0.0)]
    assert view.schedule(250) == 0.3
    view.on_drag("knot", 1, 5000, -1)
    assert view.knots[1] == (999, 0.0)
    view.on_drag("knot", 1, -5, 0.2)
    assert view.knots[1] == (1, 0.2)
    view.on_drag("knot", 2, 2000.0, 0.1)
    assert view.scene().panels[0].x.high > 2000
    view.on_drag("another", 0, 5, 5)
    assert view.knots[0] == (0, 0.01)
    log = ScheduleView(knots=[(0, 0.01), (100, 0.5)], scale="log")
    log.move(0, 0, -3)
    assert 0 < log.knots[0][1] < 1e-5
    with pytest.raises(ValueError, match="number=3: there is no such knot; there are 3"):
        view.move(3, 0, 0)


def test_knots_are_added_and_removed():
    view = ScheduleView(knots=[(0, 0.02), (1000, 0.1)])
    assert not view.scene().buttons[0].enabled  # two are needed
    view.on_click("knot", 499.6, 0.123456)
    assert view.knots == [(0, 0.02), (500, 0.123), (1000, 0.1)]
    scene = view.scene()
    assert scene.panels[0].click == Click(event="knot", double=True, does="add a knot")
    control = scene.controls[0]
    assert control.words(control.index) == "2: 0.123 at update 500"
    assert "step=[500, 1000], rates=[0.123, 0.1], base_lr=0.02" in scene.listings[0].text
    assert view.add(2000.2, 0.5) == 3
    view.on_click("knot", 500, 0.3)  # where there is one
    assert view.knots == [(0, 0.02), (500, 0.3), (1000, 0.1), (2000, 0.5)]
    view.on_control("knot", "", 2)
    view.on_button("remove")
    assert view.knots == [(0, 0.02), (500, 0.3), (2000, 0.5)]
    view.on_drag("knot", 1, 500, 1 / 3)
    assert view.knots[1] == (500, 0.333)
    view.on_button("remove")  # the one that was dragged
    assert view.knots == [(0, 0.02), (2000, 0.5)]
    view.on_button("remove")
    with pytest.raises(ValueError, match="a schedule has two knots or more"):
        view.remove(0)
    with pytest.raises(ValueError, match="number=2: there is no such knot; there are 2"):
        view.remove(2)
    log = ScheduleView(knots=[(0, 0.01), (100, 0.5)], scale="log")
    log.add(50, -1.0)
    assert 0 < log.knots[1][1] < 1e-5
    with pytest.raises(ValueError, match="this view has no knots"):
        ScheduleView(lambda n: 0.1, 5).add(1, 1)


def test_a_schedule_by_hand_is_given_to_a_trainer_and_saved_with_it(tmp_path):
    trainer, _ = _train(5, learning_rate=0.7)
    view = ScheduleView(trainer, knots=[(0, 0.1), (10, 0.2), (20, 0.0)])
    assert trainer.learning_rate == 0.7  # not before it is asked for
    assert [(button.name, button.enabled) for button in view.scene().buttons] == [("remove", True), ("apply", True)]
    view.on_button("apply")
    assert [button.enabled for button in view.scene().buttons] == [True, False]  # it is in use
    assert trainer.learning_rate == pytest.approx(0.15)
    trainer.save_states(tmp_path / "states")
    other, _ = _train(1)
    other.load_states(tmp_path / "states")
    assert other.learning_rate == pytest.approx(0.15)
    assert other.optimizer.lr_scheduler == view.schedule
    with pytest.raises(TypeError, match="trainer must be a Trainer, got Linear"):
        view.apply(torch.nn.Linear(1, 1))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: ScheduleView(), ValueError, "schedules is empty: .*give a schedule, or knots"),
        (lambda: ScheduleView(0.1), TypeError, "schedules must be names, callables .*, got float for 'float'"),
        (lambda: ScheduleView(lambda n: 0.1), ValueError, "n_updates is missing: none of the schedules says how long"),
        (lambda: ScheduleView(lambda n: 0.1, 0), ValueError, "n_updates=0: must be 1 or more"),
        (lambda: ScheduleView(knots=[(0, 1)]), ValueError, "must be two or more"),
        (lambda: ScheduleView(knots=[(5, 1), (5, 2)]), ValueError, "numbers of updates must increase"),
        (lambda: ScheduleView(knots=[(0.5, 1), (5, 2)]), TypeError, r"knots\[0\]\[0\]=0.5: must be an integer"),
        (lambda: ScheduleView(knots=[(0, -1), (5, 2)]), ValueError, r"knots\[0\]\[1\]=-1: must be finite and 0 or more"),
        (lambda: ScheduleView(knots=3), TypeError, "knots=3: must be pairs"),
        (
            lambda: ScheduleView(knots=[(0, 0), (5, 2)], scale="log"),
            ValueError,
            "rates must all be above 0 with scale='log'",
        ),
        (lambda: ScheduleView(lambda n: 1, 5, loss=3), TypeError, "loss must be a Recorder, a Run or a LiveLoop, got int"),
        (lambda: ScheduleView(lambda n: 1, 5).schedule, ValueError, "this view has no knots"),
        (lambda: ScheduleView(lambda n: 1, 5).code(), ValueError, "this view has no knots"),
        (
            lambda: ScheduleView(torchs.ReduceLROnPlateau(torch.optim.SGD([torch.zeros(1)], lr=1.0)), 5),
            TypeError,
            "ReduceLROnPlateau needs losses",
        ),
    ],
)
def test_what_does_not_fit_is_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_it_can_be_drawn():
    trainer, recorder = _train(3, learning_rate=0.1)
    for view in (
        ScheduleView(trainer, 10, loss=recorder, knots=[(0, 0.1), (10, 0.0)]),
        ScheduleView(trainer, 1),
        ScheduleView(lambda n: 0.0, 1, scale="log"),
    ):
        figure = view.figure()
        figure.canvas.draw()
        assert figure.axes[0].get_ylabel() == "learning rate"
        view.scene().to_bytes()

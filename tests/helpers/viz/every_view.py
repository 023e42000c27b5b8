"""One of each kind of view, for tests of what all of them promise."""

import torch

import tristep
from tristep import viz


def every_view(run, other):
    """Return one view of each kind by name; the views of runs show `run` and `other`."""
    torch.manual_seed(0)
    net, loss = torch.nn.Linear(2, 2), torch.nn.functional.cross_entropy
    data = torch.randn(32, 2), torch.randint(0, 2, (32,))
    trainer = tristep.Trainer(net, "sgd", {"learning_rate": 0.1})
    loop = viz.LiveLoop.fit(net, loss, [data] * 20, trainer, mode="block").start()
    grid = {"learning_rate": [0.01, 0.1], "wd": [0.0, 0.1]}
    momenta = viz.simulate(
        viz.ill_conditioned_bowl(25),
        ["momentum", "nag"],
        steps=20,
        learning_rates=[0.02, 0.1],
        sweep={"momentum": [0.0, 0.8]},
    )
    return {
        "LossPlaneView": viz.LossPlaneView(viz.loss_plane(net, loss, data, directions="filter", n=11)),
        "TrajectoryView": viz.TrajectoryView("rosenbrock", steps=20),
        "Playground": viz.Playground("beale", "adam", steps=20),
        "SensitivityView": viz.SensitivityView("beale", ["sgd", "adam"], steps=20),
        "LossView": viz.LossView([run, other]),
        "LiveView": loop.view,
        "WeightsView": viz.WeightsView(run),
        "UpdateRatioView": viz.UpdateRatioView(run),
        "TensorHeatmap": viz.TensorHeatmap(run),
        "several heat maps": viz.TensorHeatmap([run, other]),
        "Dashboard": viz.Dashboard(run),
        "ScheduleView": viz.ScheduleView(trainer, 100, loss=run),
        "OrthogonalizationView": viz.OrthogonalizationView(shape=(16, 32)),
        "LRFinderView": viz.LRFinderView({"sgd": tristep.lr_find(trainer, (net, loss, [data]))}),
        "SweepView": viz.SweepView(tristep.sweep(lambda: torch.nn.Linear(2, 2), loss, [data] * 3, grid=grid)),
        "SweepView of trajectories": viz.SweepView(momenta),
    }

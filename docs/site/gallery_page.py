"""A page with a small picture of each view, drawn when the site is built, and where to read on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import text_pages
import torch
from sklearn.datasets import load_digits
from torch import nn

import tristep
from tristep import viz

__all__ = ["views", "write"]

HEAD = """\
# All views

Each picture is drawn by `tristep.viz`. In a notebook a view has sliders, and answers to the mouse and the keyboard;
[In a notebook](notebooks.md) says how to make one, and how to keep it as a picture or a page. A name leads to the reference.
"""


def write(tutorials: Path, pages: Path) -> str:
    """Write the page and its pictures; its path."""
    (pages / "gallery").mkdir()
    lessons = {path.stem: path.read_text(encoding="utf-8") for path in sorted(tutorials.glob("[0-9]*.py"))}
    figures = []
    for view in sorted(views(), key=lambda view: type(view).__name__):
        name, cls = type(view).__name__, type(view)
        view.figure().savefig(pages / "gallery" / f"{name}.png", dpi=60)
        view.close()
        first = " ".join((cls.__doc__ or "").split("\n\n")[0].split())
        links = [f"[{int(stem[:2])}](tutorials/{stem}.md)" for stem, text in lessons.items() if f"viz.{name}(" in text]
        read_on = f"Tutorials: {', '.join(links)}." if links else ""
        figures.append(
            f'<figure markdown="1">\n![{name}](gallery/{name}.png){{ loading=lazy }}\n<figcaption markdown="1">\n'
            f"[`{name}`][{cls.__module__}.{name}]: {first} {read_on}\n</figcaption>\n</figure>"
        )
    text = f'{HEAD}\n<div class="gallery" markdown="1">\n\n' + "\n\n".join(figures) + "\n\n</div>\n"
    (pages / "gallery.md").write_text(text_pages.page(text, "docs/site/gallery_page.py", text_pages.WIDE), encoding="utf-8")
    return "gallery.md"


def views() -> list[viz.View]:
    """One of each kind that `tristep.viz` exports, of a small training on handwritten digits or of a function."""
    torch.manual_seed(0)
    torch.set_num_threads(1)  # for such small networks threads cost more than they save
    digits = load_digits()
    x, y = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
    batches = [(x[k : k + 64], y[k : k + 64]) for k in range(0, 1280, 64)]
    loss_function = nn.CrossEntropyLoss()

    def network() -> nn.Module:
        return nn.Sequential(nn.Linear(64, 24), nn.ReLU(), nn.Linear(24, 10))

    def steps(net: nn.Module, trainer: tristep.Trainer, epochs: int = 1) -> Iterator[torch.Tensor]:
        for images, labels in batches * epochs:
            trainer.zero_grad()
            loss = loss_function(net(images), labels)
            loss.backward()
            trainer.step(1)
            yield loss

    recorders, paths = [], []
    for optimizer, rate in (("adam", 0.01), ("sgd", 0.2)):
        torch.manual_seed(0)
        net = network()
        trainer = tristep.Trainer(net, optimizer, {"learning_rate": rate})
        recorders.append(viz.Recorder(trainer, optimizer, histograms=["gradient"], activations=net))
        paths.append(viz.WeightPath(net, optimizer))
        for loss in steps(net, trainer, epochs=4):
            recorders[-1].step(loss=loss)
            paths[-1].step()
    other = network()
    trained = tristep.Trainer(other, "sgd")
    tried = steps(other, trained, epochs=20)
    loop = viz.LiveLoop(lambda: steps(other, trained), trainer=trained)
    bowl, rates, momenta = viz.ill_conditioned_bowl(25), [0.005 * k for k in range(1, 33)], [0.05 * k for k in range(20)]
    race = tristep.race(
        network, loss_function, batches, {"adamw": {}, "lion": {}}, target=0.3, eval_data=[(x[1280:], y[1280:])],
        steps=100, trials=4, seeds=5, progress=False,
    )  # fmt: skip
    loop.start()  # without a notebook it trains in the call
    return [
        viz.LossView(recorders),
        *(view(recorders[0]) for view in (viz.WeightsView, viz.UpdateRatioView, viz.ActivationsView, viz.TensorHeatmap)),
        viz.Dashboard(recorders[0]),
        viz.LiveView(loop),
        viz.LRFinderView({"sgd": tristep.lr_find(trained, lambda: next(tried))}),
        viz.ScheduleView({name: name for name in ("cosine", "poly", "onecycle")}, 1000),
        viz.OrthogonalizationView(),
        viz.TrajectoryView("himmelblau", start=(0, -1)),
        viz.Playground("beale", "adam"),
        viz.SensitivityView("rosenbrock", ["sgd", "adam"], steps=100),
        viz.SweepView(viz.simulate(bowl, "momentum", steps=100, learning_rates=rates, sweep={"momentum": momenta})),
        viz.LossPlaneView(viz.loss_plane(net, loss_function, (x[:1280], y[:1280]), paths, n=25)),
        viz.RaceView(race),
    ]

"""What a picture costs the kernel: drawn from scratch as notebooks do it, and redrawn by `viz.render.matplotlib.Picture`.

Both draw the same curves in figures of the same size and write a PNG file, in this process, turn by turn.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from itertools import count
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from tristep.viz.render.matplotlib import Picture
from tristep.viz.scene import Axis, Band, Control, Heatmap, Line, Panel, Scene


def rows(repeats: int = 40) -> list[dict[str, Any]]:
    """A row for each picture: milliseconds of the processor and by the clock, medians, and a ratio of the former.

    "anew" makes a figure and saves it with tight edges, as `interact` and most live plots do; "data" sets the data of one
    that is kept and saves it so; "ours" is a `Picture`, from another scene or state to the bytes of its PNG file.
    """
    found = []
    for name, scene, states, anew in (_live(), _sweep()):
        picture = Picture(*states[0])  # as widgets have it
        picture.png()
        turn = count()

        def ours(picture: Picture = picture, states: Any = states, turn: Any = turn) -> bytes:
            picture.show(*states[next(turn) % len(states)])
            return picture.png()

        fresh, kept = anew
        timed = {
            "anew": _timed(fresh, max(repeats // 4, 5)),
            "data": _timed(kept, max(repeats // 4, 5)),
            "ours": _timed(ours, repeats),
        }
        row: dict[str, Any] = {"picture": name, "inches": f"{scene.width:g} x {scene.height:g}", "bytes": len(ours())}
        for how, (processor, clock) in timed.items():
            row |= {f"{how}, ms of the processor": processor, f"{how}, ms": clock}
        row["anew / ours"] = timed["anew"][0] / timed["ours"][0]
        found.append(row)
    return found


def _live() -> Any:
    """A training's loss and learning rate, 6 x 3 inches, with a new loss every time."""
    n = 500
    steps = np.arange(n)
    rng = np.random.default_rng(0)

    def scene(i: int) -> Scene:
        loss = 3 * np.exp(-steps / 100) + 0.1 + 0.05 * rng.random(n)
        shown = np.where(steps < 100 + 5 * (i % 80), loss, np.nan)
        first = Panel(
            Axis("step", 0, n),
            Axis("loss", 0.05, 4, "log"),
            [Line(steps, shown, name="loss"), Band(steps, 0.8 * shown, 1.2 * shown)],
        )
        rate = np.where(np.isfinite(shown), 0.1 * np.cos(steps / n) ** 2, np.nan)
        second = Panel(
            Axis("step", 0, n), Axis("learning rate", 0, 0.12), [Line(steps, rate, style="ink", head=True)], column=1
        )
        return Scene([first, second], width=6, height=3, widths=(2, 1))

    scenes = [scene(i) for i in range(80)]

    def draw(figure: Figure, scene: Scene) -> list[Any]:
        first, second = figure.subplots(1, 2, width_ratios=(2, 1))
        line, band = scene.panels[0].layers
        lines = first.plot(line.x, line.y, label="loss")
        first.fill_between(line.x, band.low, band.high, alpha=0.2)
        first.set(yscale="log", ylim=(0.05, 4), xlabel="step", ylabel="loss")
        lines += second.plot(line.x, scene.panels[1].layers[0].y)
        second.set(xlabel="step", ylabel="learning rate")
        first.legend()
        return lines

    return "live loss", scenes[0], [(scene,) for scene in scenes], _peers(scenes[0], draw, scenes)


def _sweep() -> Any:
    """Eight paths on a landscape and their losses, 9 x 4.5 inches, with another learning rate every time."""
    rates = Control("lr", "learning rate", list(np.logspace(-3, 0, 41)))
    across = np.linspace(-2, 2, 100)
    x, y = np.meshgrid(across, across)
    t = np.linspace(0, 1, 201)
    factors = np.linspace(0.3, 1.2, 41)[:, None]
    paths = [(-1.5 + 2.5 * factors * t, 1.5 - factors * np.sin((2 + i / 4) * t)) for i in range(8)]
    losses = [np.log10(1.1 + (1 - px) ** 2 + 100 * (py - px**2) ** 2) for px, py in paths]
    land = np.log10(1.1 + (1 - x) ** 2 + 100 * (y - x**2) ** 2)
    layers = [Line(px, py, by=("lr",), style=i, name=f"optimizer {i}", head=True) for i, (px, py) in enumerate(paths)]
    first = Panel(Axis("x", -2, 2), Axis("y", -2, 2), [Heatmap(land, [-2, 2], [-2, 2]), *layers])
    curves = [Line(np.arange(201), loss, by=("lr",), style=i) for i, loss in enumerate(losses)]
    second = Panel(Axis("step", 0, 200), Axis.over("log loss", *losses), curves, column=1)
    scene = Scene([first, second], controls=[rates], width=9, height=4.5)

    def draw(figure: Figure, index: int) -> list[Any]:
        left, right = figure.subplots(1, 2)
        left.contourf(across, across, land, 30)
        lines = [left.plot(px[index], py[index])[0] for px, py in paths]
        lines += [right.plot(loss[index])[0] for loss in losses]
        right.legend([f"optimizer {i}" for i in range(8)])
        return lines

    return (
        "paths on a landscape",
        scene,
        [(None if i else scene, {"lr": i}) for i in range(41)],
        _peers(scene, draw, list(range(41))),
    )


def _peers(
    scene: Scene, draw: Callable[[Figure, Any], list[Any]], states: list[Any]
) -> tuple[Callable[[], bytes], Callable[[], bytes]]:
    turn = count()

    def saved(figure: Figure) -> bytes:
        file = io.BytesIO()
        figure.savefig(file, format="png", bbox_inches="tight")
        return file.getvalue()

    def started() -> Figure:
        figure = Figure((scene.width, scene.height), dpi=100)
        FigureCanvasAgg(figure)
        return figure

    def anew() -> bytes:
        figure = started()
        draw(figure, states[next(turn) % len(states)])
        return saved(figure)

    kept = started()
    lines = draw(kept, states[0])

    def data() -> bytes:
        for line in lines:
            line.set_ydata(line.get_ydata() * 0.999)
        return saved(kept)

    return anew, data


def _timed(call: Callable[[], Any], repeats: int) -> tuple[float, float]:
    """Milliseconds of the processor and by the clock, medians."""
    call()
    took = []
    for _ in range(repeats):
        processor, clock = time.thread_time(), time.perf_counter()
        call()
        took.append((1e3 * (time.thread_time() - processor), 1e3 * (time.perf_counter() - clock)))
    processor, clock = np.median(took, axis=0)
    return float(processor), float(clock)


if __name__ == "__main__":
    for row in rows():
        print({key: round(value, 2) if isinstance(value, float) else value for key, value in row.items()})

"""A recorded run with planted values, for tests of its views."""

import numpy as np

from tristep.viz import Run, Series

POWERS = 2.0 ** np.arange(-28, 3)
EDGES = np.array([*-POWERS[::-1], 0.0, 2.0**-126, *POWERS])
ZERO = 32  # the bin of zeros


def make_run(steps=120, tensors=4, name="run", names=None, every=1, histograms=True, loss=None):
    """A run whose tensor number i has the gradient norm 10**-i at every step, and a loss of 1 / step."""
    run = Run(name, names or [f"layer{i}.weight" for i in range(tensors)], EDGES)
    number = np.arange(1, steps + 1)
    run.scalars["loss"], run.scalars["learning_rate"] = Series(), Series()
    run.scalars["loss"].extend(number, 1 / number if loss is None else loss)
    run.scalars["learning_rate"].extend(number, 0.1 * number / steps)
    measured = number[::every]
    plane = np.ones((len(measured), tensors))
    levels = plane * 10.0 ** -np.arange(tensors)
    run.add_tensors(
        measured,
        {
            "weight_norm": plane,
            "gradient_norm": levels,
            "update_norm": plane * 1e-3,
            "update_ratio": plane * 1e-3,
            "cosine": plane * -0.5,
            "gradient_nonfinite": plane * 0,
        },
    )
    if histograms:
        counts = np.zeros((len(measured[::10]), tensors, 65))
        for i in range(
            tensors
        ):  # three fifths in [2**(i % 20 - 18), 2**(i % 20 - 17)), a fifth are their negatives, and zeros
            counts[:, i, 44 + i % 20], counts[:, i, 20 - i % 20], counts[:, i, ZERO] = 60, 20, 20
        run.add_tensors(measured[::10], {"gradient_histogram": counts})
    return run


def layers_of(scene, kind, panel=None):
    panels = scene.panels if panel is None else [scene.panels[panel]]
    return [layer for each in panels for layer in each.layers if isinstance(layer, kind)]


def named_layers(scene, name):
    (found,) = (layer for panel in scene.panels for layer in panel.layers if layer.name == name)
    return found


def mean_of_last_steps(losses, width, number=None):
    """The mean of those of the last `width` steps, by NumPy's mean."""
    number = np.arange(len(losses)) if number is None else number
    near = [(number > step - width) & (number <= step) & np.isfinite(losses) for step in number]
    return np.array([losses[each].mean() if each.any() else np.nan for each in near])

"""What Muon's lists make of singular values: the curves, the table, and what is refused."""

import numpy as np

from tristep.viz import Line, OrthogonalizationView

CUBIC = [(1.5, -0.5, 0.0)] * 3  # Newton and Schulz' own iteration, which converges to 1 from below


def test_the_curves_are_the_polynomials_step_by_step():
    view = OrthogonalizationView({"quintic": None, "own": CUBIC}, low=0.01, shape=(8, 12))
    scene = view.scene()
    (steps,) = scene.controls
    assert steps.values == [0, 1, 2, 3, 4, 5]
    (own,) = (layer for layer in scene.panels[0].layers if isinstance(layer, Line) and layer.name == "own, 3 steps")
    x = np.geomspace(0.01, 1.0, len(own.x))
    for k in range(6):  # after its last step it stays where it is
        np.testing.assert_allclose(own.chosen("y", scene.state(steps=k)), x, rtol=1e-6)
        x = 1.5 * x - 0.5 * x**3 if k < 3 else x


def test_the_table_has_the_least_and_the_largest():
    view = OrthogonalizationView({"own": CUBIC, "polar_express": None}, low=0.01, shape=(16, 32))
    own, best = view.found
    x = 0.01
    for _ in range(3):
        x = 1.5 * x - 0.5 * x**3
    np.testing.assert_allclose(own.spectrum, (x, 1.0), rtol=1e-9)
    assert (own.steps, own.products, best.steps, best.products) == (3, 6, 5, 15)
    assert 0.85 < best.gaussian[0] <= best.gaussian[1] < 1.15  # in 16 bits
    assert "| own | 3 | 6 | 0.034 to 1.000 |" in view.table()
    assert "own: 0.034 to 1.000 after 3 steps of 6 products." in view.describe()
    assert len(OrthogonalizationView(shape=(4, 4)).found) == 4
    assert OrthogonalizationView(["quintic"], steps=8, shape=(4, 4)).found[0].steps == 8

"""The scene module: what it draws where, in which colour and size, and that it follows updates and themes.

The oracle of a pixel's place is arithmetic on the axes, between the two lines of the frame, which are found in the picture;
of its colour, the style, or matplotlib's colormaps and norms.
"""

import matplotlib as mpl
import numpy as np
import pytest
from chromium import rgb
from matplotlib.colors import LinearSegmentedColormap, LogNorm, Normalize
from scene_cases import LIGHT, RIGHT, colour_at, one, pixel_at

from tristep.viz.scene import Arrows, Axis, Band, Control, Heatmap, Line, Panel, Points, Scene


def test_a_line_goes_through_its_points_in_its_colour_and_leaves_gaps(stage):
    x = np.array([0.4, 0.7, *np.linspace(1, 9, 9)])
    y = np.array([8, np.nan, 1, 5, 5, 5, np.nan, 2.5, 2.5, 8, 8])  # the first is between gaps
    scene = one(Line(x, y, style=0, width=3))
    stage.show(scene)
    pixels = stage.browser.pixels()
    for at in [(0.4, 8), (3, 5), (2.5, 5), (6.5, 2.5), (7.5, 5.25), (8.5, 8)]:
        assert colour_at(pixels, stage.place(scene, *at)) == LIGHT.colours[0]
    for at in [(4.6, 5.1), (5.4, 2.5), (5.1, 3.5), (8.5, 5.3)]:
        assert colour_at(pixels, stage.place(scene, *at)) == LIGHT.background
    stage.browser.keep("line")


def test_a_log_axis_a_downward_axis_and_the_other_way_round(stage):
    scene = one(
        Line([1e-3, 1e-1, 1e-1], [10, 10, 60], style=0, width=4),
        x=Axis("rate", 1e-4, 1, "log"),
        y=Axis("row", 0, 100, upwards=False),
    )
    stage.show(scene)
    pixels = stage.browser.pixels()
    for at in [(1.1e-3, 10), (1e-2, 10), (0.9e-1, 10), (1e-1, 35), (1e-1, 59)]:
        assert colour_at(pixels, stage.place(scene, *at)) == LIGHT.colours[0]
    _, top, _, bottom = stage.frame()
    assert stage.place(scene, 1e-2, 10)[1] < (top + bottom) / 2
    ink = (pixels == rgb(LIGHT.colours[0])).all(axis=2)
    assert not ink[: int(stage.place(scene, 1e-3, 10)[1]) - 4].any()
    assert not ink[:, : int(stage.place(scene, 1e-3, 10)[0]) - 2].any()


def test_points_that_are_far_away_lead_the_line_in_the_right_direction(stage):
    scene = one(Line([0, 5, 1e30], [5, 5, 5], style=1, width=3), Line([2, 2], [-1e25, 1e25], style=0, width=3))
    stage.show(scene)
    pixels = stage.browser.pixels()
    assert colour_at(pixels, stage.place(scene, 2, 8)) == LIGHT.colours[0]
    assert _share_of(pixels, stage, scene, (5.5, 9.5), 5, LIGHT.colours[1]) == pytest.approx(4.5 / 7, abs=0.07)


def test_upto_head_and_marker(stage):
    step = Control("step", "step", [0, 2, 4], 1)
    x = np.arange(5.0) + 1
    scene = one(
        Line(x, x * 0 + 8, style=0, upto="step", head=True, width=3),
        Line(x, x * 0 + 3, style=5, marker=True, width=1, alpha=0.99),
        controls=[step],
    )
    stage.show(scene)
    pixels = stage.browser.pixels()
    assert colour_at(pixels, stage.place(scene, 2.5, 8)) == LIGHT.colours[0]
    assert colour_at(pixels, stage.place(scene, 3.5, 8.3)) == LIGHT.background
    assert colour_at(pixels, stage.place(scene, 3.5, 8)) == LIGHT.grid
    px, py = stage.place(scene, 3, 8)
    assert colour_at(pixels, (px + 1, py - 4)) == LIGHT.colours[0]  # the dot is thicker than the line
    stage.browser.keys(stage.browser.find("input[type=range]"), RIGHT)
    pixels = stage.browser.pixels()
    assert colour_at(pixels, stage.place(scene, 4.5, 8)) == LIGHT.colours[0]
    assert colour_at(pixels, (px + 1, py - 4)) == LIGHT.background


def test_a_band_lets_through_what_is_behind_it(stage):
    x = np.linspace(0, 10, 11)
    low, high = np.full(11, 4.0), np.full(11, 6.0)
    high[5] = np.nan
    scene = one(Band(x, low, high, style=1, alpha=0.4))
    stage.show(scene)
    pixels = stage.browser.pixels()
    mixed = 0.4 * rgb(LIGHT.colours[1]) + 0.6 * rgb(LIGHT.background)
    np.testing.assert_allclose(pixel_at(pixels, stage.place(scene, 2.5, 5.3)), mixed, atol=1.5)
    for at in [(2.5, 6.5), (2.5, 3.5), (5, 5.3)]:
        assert colour_at(pixels, stage.place(scene, *at)) == LIGHT.background


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("palette", "scale", "colormap", "norm"),
    [
        ("sequential", "linear", "viridis", Normalize(-2, 3)),
        ("sequential", "log", "viridis", LogNorm(1e-3, 10)),
        ("quiet", "linear", None, Normalize(-2, 3)),
    ],
)
@pytest.mark.parametrize("upwards", [True, False])
def test_cells_of_an_image_have_matplotlibs_colours(stage, palette, scale, colormap, norm, upwards):
    rng = np.random.default_rng(0)
    values = 10 ** rng.uniform(-3, 1, (4, 6)) if scale == "log" else rng.uniform(norm.vmin, norm.vmax, (4, 6))
    values[1, 2] = np.nan
    scene = one(
        Heatmap(values, [0, 6], [0, 4], palette=palette, scale=scale, limits=(norm.vmin, norm.vmax), label="loss"),
        x=Axis("x", 0, 7),
        y=Axis("y", 0, 4, upwards=upwards),
        width=7.0,
    )
    stage.show(scene)
    pixels = stage.browser.pixels()
    if colormap is None:  # from the background to 35 % of the way to the quiet colour
        shades = [(1 - 0.35 * s) * rgb(LIGHT.background) / 255 + 0.35 * s * rgb(LIGHT.quiet) / 255 for s in (0, 1)]
        colours = LinearSegmentedColormap.from_list("quiet", shades)
    else:
        colours = mpl.colormaps[colormap]
    expected = 255 * colours(norm(values.astype(np.float32)))[..., :3]
    for row, column in np.ndindex(4, 6):
        found = pixel_at(pixels, stage.place(scene, column + 0.5, row + 0.5))
        if (row, column) == (1, 2):
            np.testing.assert_array_equal(found, rgb(LIGHT.background))
        else:
            np.testing.assert_allclose(found, expected[row, column], atol=6)  # one step of 256 colours
    np.testing.assert_array_equal(pixel_at(pixels, stage.place(scene, 6.5, 0.5)), rgb(LIGHT.background))
    _, top, right, bottom = stage.frame()
    bar = pixels[:, right + 19].astype(int)  # the colours' bar, from the last to the first
    ends = 255 * colours([1.0, 0.0])[:, :3]
    np.testing.assert_allclose(bar[[top + 1, bottom - 2]], ends, atol=6)
    stage.browser.keep(f"image-{palette}-{scale}-{'up' if upwards else 'down'}")


def test_an_image_follows_its_control_and_is_not_smeared(stage):
    c = Control("c", "c", ["a", "b"])
    cells = np.zeros((2, 2, 2), np.uint8)
    cells[1, 0, 1] = 1
    scene = one(Heatmap(cells, [0, 10], [0, 10], by=("c",)), controls=[c])
    first, last = ("#440154", "#fde725")  # of viridis
    stage.show(scene)
    inside, outside = (9.9, 4.8), (4.9, 4.8)
    assert colour_at(stage.browser.pixels(), stage.place(scene, *inside)) == first
    stage.browser.keys(stage.browser.find("input[type=range]"), RIGHT)
    pixels = stage.browser.pixels()
    assert colour_at(pixels, stage.place(scene, *inside)) == last
    assert colour_at(pixels, stage.place(scene, *outside)) == first


@pytest.mark.parametrize("columns", [5_000, 70_000])
def test_no_column_of_a_wide_map_is_lost(stage, columns):
    """A canvas has at most 65,535 pixels, and shrinks an image by leaving columns out."""
    cells = np.zeros((1, columns), np.uint8)
    for start in (columns // 4, 3 * columns // 4):
        cells[0, start : start + columns // 5_000] = 1
    scene = one(Heatmap(cells, [0, 10], [0, 10]))
    stage.show(scene)
    left, top, right, _ = stage.frame()
    row = stage.browser.pixels()[top + 20, left + 2 : right - 2].astype(int)
    ink = np.flatnonzero(np.abs(row - np.median(row, axis=0)).sum(axis=1))
    found = [group.mean() / (right - left - 4) for group in np.split(ink, np.flatnonzero(np.diff(ink) > 2) + 1)]
    assert found == pytest.approx([0.25, 0.75], abs=0.02)
    assert colour_at(stage.browser.pixels(), stage.place(scene, 5, 5)) == "#440154"


def test_points(stage):
    for marker in ("dot", "ring"):
        scene = one(Points([3, 7], [4, 6], style=4, size=20, marker=marker))
        stage.show(scene)
        ink = (stage.browser.pixels() == rgb(LIGHT.colours[4])).all(axis=2)
        stage.browser.keep(f"points-{marker}")
        for x, y in [(3, 4), (7, 6)]:
            px, py = stage.place(scene, x, y)
            rows, columns = np.nonzero(ink[int(py) - 20 : int(py) + 20, int(px) - 20 : int(px) + 20])
            assert rows.size > 40, marker
            assert abs(columns.mean() - 20) < 1.5, marker
            assert abs(rows.mean() - 20) < 2, marker
            filled = ink[int(py) - 1 : int(py) + 2, int(px) - 1 : int(px) + 2].sum()
            assert filled == 0 if marker == "ring" else filled >= 5, marker
        assert not ink[:, int(stage.place(scene, 5, 5)[0])].any(), marker


def test_arrows_end_where_their_amounts_lead(stage):
    scene = one(Arrows([2, np.nan], [2, 2], [6, 1], [0, 1], style=6, width=3))
    stage.show(scene)
    ink = (stage.browser.pixels() == rgb(LIGHT.colours[6])).all(axis=2)
    columns = np.nonzero(ink)[1]
    assert columns.min() == pytest.approx(stage.place(scene, 2, 2)[0], abs=1)
    assert columns.max() == pytest.approx(stage.place(scene, 8, 2)[0], abs=4)  # a pointed end
    middle = int(stage.place(scene, 4, 2)[0])
    assert ink[:, middle].sum() == pytest.approx(4, abs=1)  # 3 points of 1/72 inch are 4 pixels of 1/96
    head = int(stage.place(scene, 8, 2)[0]) - 14
    assert ink[:, head].sum() > 8


def test_words_are_never_markup(stage):
    evil = '<img src=x onerror="window.broken = true">&amp;</script>'
    scene = Scene(
        [Panel(Axis(evil, 0, 1), Axis(evil, 0, 1), [Line([0, 1], [0, 1], name=evil)], title=evil)],
        title=evil,
        controls=[Control("a", evil, [evil, "b"], kind="choice")],
        description=evil,
    )
    stage.show(scene)
    stage.pointer(("move", *stage.place(scene, 0.5, 0.5)))
    assert stage.browser.find(".tristep-title").text == evil
    assert stage.browser.find(".tristep-readout b").get_attribute("textContent") == evil
    assert stage.browser.run("return document.querySelectorAll('#stage img').length + Boolean(window.broken)") == 0


def _share_of(pixels, stage, scene, ends, y, colour):
    """How much of a horizontal stretch has this colour, or more of it than of the background."""
    (x0, row), (x1, _) = stage.place(scene, ends[0], y), stage.place(scene, ends[1], y)
    stretch = pixels[int(row), int(x0) : int(x1)].astype(float)
    way = rgb(colour).astype(float) - rgb(LIGHT.background)
    shares = (stretch - rgb(LIGHT.background)) @ way / (way @ way)
    return float(np.clip(shares, 0, 1).mean())

"""scene.js by itself: what it decodes, its ticks, what it draws where and in which colour, and what it tells of a person.

The oracle of a pixel's place is arithmetic on the axes, between the two lines of the frame, which are found in the picture;
of its colour, the style, or matplotlib's colormaps and norms.
"""

import base64
import json

import numpy as np
import pytest

mpl = pytest.importorskip("matplotlib")  # `make gpu` uses what a machine has
pytest.importorskip("anywidget")

from matplotlib.colors import LinearSegmentedColormap, LogNorm, Normalize  # noqa: E402
from matplotlib.ticker import LogLocator, MaxNLocator  # noqa: E402

from tristep.viz.render.canvas import page  # noqa: E402
from tristep.viz.scene import Arrows, Axis, Band, Button, Click, Control, Heatmap, Line, Panel, Points, RefLine, Scene, Text  # noqa: E402
from tristep.viz.style import THEMES  # noqa: E402

LEFT, RIGHT, UP, DOWN, ENTER, ESCAPE = "\ue012", "\ue014", "\ue013", "\ue015", "\ue007", "\ue00c"
LIGHT = THEMES["light"]


def one(*layers, x=None, y=None, controls=(), buttons=(), width=5.0, height=4.0, **panel):
    """A scene of one panel."""
    panels = [Panel(x or Axis("x", 0, 10), y or Axis("y", 0, 10), layers, **panel)]
    return Scene(panels, controls=controls, buttons=buttons, width=width, height=height)


# ---- Data


def test_decoded_arrays_are_those_of_the_scene_for_every_state(stage):
    rng = np.random.default_rng(0)
    a, b = Control("a", "a", [1, 2, 3]), Control("b", "b", ["u", "v"])
    values = {dtype: rng.integers(0, 100, (3, 2, 4, 5)).astype(dtype) for dtype in ("uint8", "int16", "int32", "float32")}
    layers = [Heatmap(each, [0, 1], [0, 1], by=("a", "b")) for each in values.values()]
    line = Line(np.arange(7.0), rng.standard_normal((2, 7)), by=("b",))
    scene = one(*layers, line, controls=[a, b])
    for state in (scene.state(), scene.state(a=2, b=1), scene.state(a=1)):
        # The bytes lie at an odd place, as they do in a message of a notebook.
        found = stage.browser.run(
            "const all = new Uint8Array(bytes(arguments[0])), odd = new Uint8Array(all.length + 3); odd.set(all, 3);"
            "const scene = decode(new DataView(odd.buffer, 3));"
            "return scene.panels[0].layers.map((layer) =>"
            "  [...part(layer, layer.kind === 'line' ? 'y' : 'values', arguments[1])])",
            base64.b64encode(scene.to_bytes()).decode(),
            state,
        )
        for layer, got in zip(layers, found, strict=False):
            np.testing.assert_array_equal(got, layer.chosen("values", state).ravel())
        np.testing.assert_array_equal(np.float32(found[-1]), line.chosen("y", state))


def test_a_view_of_the_bytes_is_taken_not_a_copy(stage):
    c = Control("c", "c", [1, 2])
    payload = one(Line([0, 1], [[1, 2], [3, 4]], by=("c",)), controls=[c]).to_bytes()
    shared = stage.browser.run(
        "const all = bytes(arguments[0]), layer = decode(all).panels[0].layers[0];"
        "return part(layer, 'y', {c: 1}).buffer === all && part(layer, 'x', {c: 1}).buffer === all",
        base64.b64encode(payload).decode(),
    )
    assert shared


# ---- Ticks and numbers


@pytest.mark.parametrize("most", [2, 5, 9])
def test_linear_ticks_are_matplotlibs(stage, most):
    rng = np.random.default_rng(most)
    ranges = [(-2.0, 2.0), (0.0, 1.0), (0.0, 1e7), (1e-7, 9e-7), (-1e-3, 3e-3), (99.98, 100.01)]
    low = rng.uniform(-5, 5, 30)
    ranges += [*zip(low, low + 10 ** rng.uniform(-3, 3, 30), strict=True)]
    axes = [{"low": low, "high": high, "scale": "linear", "ticks": None} for low, high in ranges]
    found = stage.browser.run("return arguments[0].map((axis) => ticks(axis, 100 * arguments[1], 100).major)", axes, most)
    locator = MaxNLocator(most, steps=[1, 2, 5, 10], min_n_ticks=1)
    for (low, high), got in zip(ranges, found, strict=True):
        expected = [
            v for v in locator.tick_values(low, high) if low - 1e-9 * (high - low) <= v <= high + 1e-9 * (high - low)
        ]
        np.testing.assert_allclose([tick["value"] for tick in got], expected, rtol=1e-9, atol=1e-9 * (high - low))
        np.testing.assert_allclose([_parsed(tick) for tick in got], expected, rtol=1e-9, atol=1e-9 * (high - low))


def test_logarithmic_ticks_are_powers_of_ten_and_their_words_are_their_values(stage):
    for low, high in [(1e-4, 1.0), (3e-8, 2e5), (0.5, 2e3), (1e-30, 1e30)]:
        axis = {"low": low, "high": high, "scale": "log", "ticks": None}
        major = stage.browser.run("return ticks(arguments[0], 400, 40).major", axis)
        powers = [v for v in LogLocator(numticks=99).tick_values(low, high) if low * (1 - 1e-9) <= v <= high * (1 + 1e-9)]
        values = [tick["value"] for tick in major]
        assert 3 <= len(values) <= 11
        assert set(np.round(np.log10(values), 9)) <= set(np.round(np.log10(powers), 9))
        assert len({round(step, 6) for step in np.diff(np.log10(values))}) == 1
        np.testing.assert_allclose([_parsed(tick) for tick in major], values)


def test_a_short_logarithmic_axis_has_ticks_between_the_powers(stage):
    axis = {"low": 0.15, "high": 6, "scale": "log", "ticks": None}
    assert [t["value"] for t in stage.browser.run("return ticks(arguments[0], 400, 40).major", axis)] == [0.2, 0.5, 1, 2, 5]
    axis = {"low": 0.31, "high": 0.46, "scale": "log", "ticks": None}
    assert [t["value"] for t in stage.browser.run("return ticks(arguments[0], 200, 40).major", axis)] == [0.35, 0.4, 0.45]


def test_given_ticks_are_dropped_until_there_is_room(stage):
    axis = {"low": 0, "high": 20, "scale": "linear", "ticks": [[k, f"layer {k}"] for k in range(25)]}
    found = stage.browser.run("return ticks(arguments[0], 200, 20).major", axis)
    assert [tick["words"] for tick in found] == [f"layer {k}" for k in range(0, 21, 3)]


def test_numbers_in_words(stage):
    values = [0, 1, -2.5, 0.00012346, 12345.678, 1234567, 2.5e9, -3.2e-9, 99.996]
    expected = ["0", "1", "−2.5", "0.0001235", "12,345.7", "1,234,567", "2.5×10⁹", "−3.2×10⁻⁹", "100"]
    assert stage.browser.run("return arguments[0].map(number)", values) == expected
    assert stage.browser.run("return [NaN, Infinity].map(number)") == ["not a number", "∞"]


# ---- What is drawn where


def test_a_line_goes_through_its_points_in_its_colour_and_leaves_gaps(stage):
    x = np.linspace(1, 9, 9)
    y = np.array([1, 5, 5, 5, np.nan, 2.5, 2.5, 8, 8])
    scene = one(Line(x, y, style=0, width=3))
    stage.show(scene)
    pixels = stage.browser.pixels()
    for at in [(3, 5), (2.5, 5), (6.5, 2.5), (7.5, 5.25), (8.5, 8)]:
        assert _colour(pixels, stage.place(scene, *at)) == LIGHT.colours[0]
    for at in [(4.6, 5.1), (5.4, 2.5), (5.1, 3.5), (8.5, 5.3)]:
        assert _colour(pixels, stage.place(scene, *at)) == LIGHT.background
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
        assert _colour(pixels, stage.place(scene, *at)) == LIGHT.colours[0]
    _, top, _, bottom = stage.frame()
    assert stage.place(scene, 1e-2, 10)[1] < (top + bottom) / 2
    ink = (pixels == _rgb(LIGHT.colours[0])).all(axis=2)
    assert not ink[: int(stage.place(scene, 1e-3, 10)[1]) - 4].any()
    assert not ink[:, : int(stage.place(scene, 1e-3, 10)[0]) - 2].any()


@pytest.mark.parametrize("style", range(5))
def test_dashes_are_those_of_the_style(stage, style):
    scene = one(Line([1, 9], [5.2, 5.2], style=style, width=3))
    stage.show(scene)
    on_off = scene.to_bytes()  # the pattern is in the header
    header = json.loads(on_off[4 : 4 + int.from_bytes(on_off[:4], "little")])
    dashes = header["style"]["dashes"][style]
    expected = sum(dashes[::2]) / sum(dashes) if dashes else 1
    found = _share_of(stage.browser.pixels(), stage, scene, (1.05, 8.95), 5.2, LIGHT.colours[style])
    assert found == pytest.approx(expected, abs=0.06)


def test_points_that_are_far_away_lead_the_line_in_the_right_direction(stage):
    scene = one(Line([0, 5, 1e30], [5, 5, 5], style=1, width=3), Line([2, 2], [-1e25, 1e25], style=0, width=3))
    stage.show(scene)
    pixels = stage.browser.pixels()
    assert _colour(pixels, stage.place(scene, 2, 8)) == LIGHT.colours[0]
    assert _share_of(pixels, stage, scene, (5.5, 9.5), 5, LIGHT.colours[1]) == pytest.approx(0.8, abs=0.07)


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
    assert _colour(pixels, stage.place(scene, 2.5, 8)) == LIGHT.colours[0]
    assert _colour(pixels, stage.place(scene, 3.5, 8.3)) == LIGHT.background
    assert _colour(pixels, stage.place(scene, 3.5, 8)) == LIGHT.grid
    px, py = stage.place(scene, 3, 8)
    assert _colour(pixels, (px + 1, py - 4)) == LIGHT.colours[0]  # the dot is thicker than the line
    stage.browser.keys(stage.browser.find("input[type=range]"), RIGHT)
    pixels = stage.browser.pixels()
    assert _colour(pixels, stage.place(scene, 4.5, 8)) == LIGHT.colours[0]
    assert _colour(pixels, (px + 1, py - 4)) == LIGHT.background


def test_a_band_lets_through_what_is_behind_it(stage):
    x = np.linspace(0, 10, 11)
    low, high = np.full(11, 4.0), np.full(11, 6.0)
    high[5] = np.nan
    scene = one(Band(x, low, high, style=1, alpha=0.4))
    stage.show(scene)
    pixels = stage.browser.pixels()
    mixed = 0.4 * _rgb(LIGHT.colours[1]) + 0.6 * _rgb(LIGHT.background)
    np.testing.assert_allclose(_at(pixels, stage.place(scene, 2.5, 5.3)), mixed, atol=1.5)
    for at in [(2.5, 6.5), (2.5, 3.5), (5, 5.3)]:
        assert _colour(pixels, stage.place(scene, *at)) == LIGHT.background


@pytest.mark.parametrize(
    ("palette", "scale", "colormap", "norm"),
    [
        ("sequential", "linear", "viridis", Normalize(-2, 3)),
        ("sequential", "log", "viridis", LogNorm(1e-3, 10)),
        ("diverging", "linear", "RdBu_r", Normalize(-3, 3)),
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
        shades = [(1 - 0.35 * s) * _rgb(LIGHT.background) / 255 + 0.35 * s * _rgb(LIGHT.quiet) / 255 for s in (0, 1)]
        colours = LinearSegmentedColormap.from_list("quiet", shades)
    else:
        colours = mpl.colormaps[colormap]
    expected = 255 * colours(norm(values.astype(np.float32)))[..., :3]
    for row, column in np.ndindex(4, 6):
        found = _at(pixels, stage.place(scene, column + 0.5, row + 0.5))
        if (row, column) == (1, 2):
            np.testing.assert_array_equal(found, _rgb(LIGHT.background))
        else:
            np.testing.assert_allclose(found, expected[row, column], atol=6)  # one step of 256 colours
    np.testing.assert_array_equal(_at(pixels, stage.place(scene, 6.5, 0.5)), _rgb(LIGHT.background))
    _, top, right, bottom = stage.frame()
    bar = pixels[:, right + 19].astype(int)  # the colours' bar, from the last to the first
    ends = 255 * colours([1.0, 0.0])[:, :3]
    np.testing.assert_allclose(bar[[top + 1, bottom - 2]], ends, atol=6)
    stage.browser.keep(f"image-{palette}-{scale}-{'up' if upwards else 'down'}")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_categories_have_the_colours_of_lines(stage, theme):
    values = np.array([[-1, 0, 1], [2, 3, 7]], dtype=np.int16)
    scene = one(
        Heatmap(values, [0, 10], [0, 10], palette="categories", words=["left", "right"], label="ends at", style="ink"),
    )
    stage.show(scene, theme=theme)
    left, top, right, bottom = stage.frame(quiet=THEMES[theme].quiet)
    pixels = stage.browser.pixels()
    for (row, column), value in np.ndenumerate(values):
        found = pixels[int(bottom - (row + 0.5) / 2 * (bottom - top)), int(left + (column + 0.5) / 3 * (right - left))]
        expected = THEMES[theme].background if value < 0 else THEMES[theme].colours[value]
        np.testing.assert_array_equal(found, _rgb(expected))


def test_an_image_follows_its_control_and_is_not_smeared(stage):
    c = Control("c", "c", ["a", "b"])
    cells = np.zeros((2, 2, 2), np.uint8)
    cells[1, 0, 1] = 1
    scene = one(Heatmap(cells, [0, 10], [0, 10], palette="categories", by=("c",)), controls=[c])
    stage.show(scene)
    inside, outside = (9.9, 4.8), (4.9, 4.8)
    assert _colour(stage.browser.pixels(), stage.place(scene, *inside)) == LIGHT.colours[0]
    stage.browser.keys(stage.browser.find("input[type=range]"), RIGHT)
    pixels = stage.browser.pixels()
    assert _colour(pixels, stage.place(scene, *inside)) == LIGHT.colours[1]
    assert _colour(pixels, stage.place(scene, *outside)) == LIGHT.colours[0]


@pytest.mark.parametrize("marker", ["dot", "ring", "cross", "star"])
def test_points(stage, marker):
    scene = one(Points([3, 7], [4, 6], style=4, size=20, marker=marker))
    stage.show(scene)
    pixels = stage.browser.pixels()
    ink = (pixels == _rgb(LIGHT.colours[4])).all(axis=2)
    for x, y in [(3, 4), (7, 6)]:
        px, py = stage.place(scene, x, y)
        rows, columns = np.nonzero(ink[int(py) - 20 : int(py) + 20, int(px) - 20 : int(px) + 20])
        assert rows.size > 40
        assert abs(columns.mean() - 20) < 1.5
        assert abs(rows.mean() - 20) < 2
        filled = ink[int(py) - 1 : int(py) + 2, int(px) - 1 : int(px) + 2].sum()
        assert filled == 0 if marker == "ring" else filled >= 5
    assert not ink[:, int(stage.place(scene, 5, 5)[0])].any()
    stage.browser.keep(f"points-{marker}")


def test_arrows_end_where_their_amounts_lead(stage):
    scene = one(Arrows([2, np.nan], [2, 2], [6, 1], [0, 1], style=6, width=3))
    stage.show(scene)
    ink = (stage.browser.pixels() == _rgb(LIGHT.colours[6])).all(axis=2)
    columns = np.nonzero(ink)[1]
    assert columns.min() == pytest.approx(stage.place(scene, 2, 2)[0], abs=1)
    assert columns.max() == pytest.approx(stage.place(scene, 8, 2)[0], abs=4)  # a pointed end
    middle = int(stage.place(scene, 4, 2)[0])
    assert ink[:, middle].sum() == pytest.approx(4, abs=1)  # 3 points of 1/72 inch are 4 pixels of 1/96
    head = int(stage.place(scene, 8, 2)[0]) - 14
    assert ink[:, head].sum() > 8


@pytest.mark.parametrize("axis", ["x", "y"])
def test_reference_lines_cross_the_panel_and_have_their_label_next_to_them(stage, axis):
    scene = one(RefLine([6.1], axis=axis, label="here", style=0, width=1.5), RefLine([20], axis=axis, style=0))
    stage.show(scene)
    pixels = stage.browser.pixels()
    ink = (pixels == _rgb(LIGHT.colours[0])).all(axis=2)
    left, top, right, bottom = stage.frame()
    px, py = stage.place(scene, 6.1, 6.1)
    line = ink[top:bottom, int(px) - 1 : int(px) + 2] if axis == "x" else ink[int(py) - 1 : int(py) + 2, left:right].T
    assert (line.sum(axis=1) >= 2).mean() > 0.98  # 1.5 points of 1/72 inch are 2 pixels of 1/96
    assert ink[top:bottom, left:right].all(axis=0 if axis == "x" else 1).sum() <= 2  # the other one is outside
    if axis == "x":
        label = pixels[top + 3 : top + 18, int(px) + 4 : int(px) + 40]
    else:
        label = pixels[int(py) - 17 : int(py) - 3, right - 40 : right - 2]
    bluest = label[..., 2].astype(int) - label[..., 0]
    assert (bluest > 100).sum() > 30  # letters are thin: few pixels have all of their colour


def test_words_stand_where_they_are_to_stand(stage):
    scene = one(Text("first\nsecond", 0.5, 0.75, style="ink", align="center", size=14), frame=False)
    stage.show(scene)
    ink = (stage.browser.pixels() == _rgb(LIGHT.ink)).all(axis=2)
    rows, columns = np.nonzero(ink)
    height, width = ink.shape
    assert (columns.min() + columns.max()) / 2 == pytest.approx(width / 2, abs=5)
    assert (rows.min() + rows.max()) / 2 == pytest.approx(height * 0.25, abs=8)
    assert np.ptp(rows) > 14 * 96 / 72  # two lines


def test_words_follow_their_control(stage):
    c = Control("c", "c", [1, 2])
    scene = one(Text(["M", "Many long words"], 0.1, 0.5, by=("c",), style="ink", size=16), controls=[c], frame=False)
    stage.show(scene)
    before = np.nonzero((stage.browser.pixels() < 160).all(axis=2))[1]
    stage.browser.keys(stage.browser.find("input[type=range]"), RIGHT)
    after = np.nonzero((stage.browser.pixels() < 160).all(axis=2))[1]
    assert after.max() > before.max() + 80
    assert after.min() == pytest.approx(before.min(), abs=2)


def test_units_of_equal_length(stage):
    scene = one(Line([0, 1], [0, 1]), x=Axis("x", -2, 2), y=Axis("y", 0, 1), equal=True)
    stage.show(scene)
    left, top, right, bottom = stage.frame()
    assert (right - left) / (bottom - top) == pytest.approx(4, rel=0.02)


def test_frames_of_a_grid_are_aligned(stage):
    panels = [
        Panel(Axis("x", 0, 1), Axis(f"y{row}", 0, 10.0 ** (3 * row)), [RefLine([0.5], style=0)], row=row, column=column)
        for row in (0, 1)
        for column in (0, 1)
    ]
    stage.show(Scene(panels, width=8, height=6, widths=[2, 1]))
    ink = (stage.browser.pixels() == _rgb(LIGHT.colours[0])).all(axis=2)
    middles = [np.unique(np.nonzero(half.sum(axis=0) > 50)[0]) for half in np.array_split(ink, 2)]
    np.testing.assert_array_equal(*middles)  # of each column in both rows
    assert len(middles[0]) in (2, 4)


def test_pixels_of_a_finer_screen_are_used(stage):
    metrics = {"width": 1400, "height": 1000, "deviceScaleFactor": 2, "mobile": False}
    stage.browser.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    try:
        stage.show(one(Line([0, 10], [0, 10]), width=5, height=4))
        assert stage.browser.pixels().shape == (2 * 4 * 96, 2 * 5 * 96, 3)
    finally:
        stage.browser.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_a_canvas_within_pixels_of_the_screen_has_as_many_as_it_covers(stage):
    """As on a page that is zoomed to 80 or 150 %; else the browser would scale what is drawn, and words get blurred."""
    stage.browser.run("document.getElementById('stage').style = 'width: 333.3px; margin-left: 0.4px'")
    stage.show(one(Line([0, 10], [0, 10]), width=5, height=4))
    covered = stage.browser.driver.execute_async_script(
        "const [done] = arguments;"
        "const tell = ([{ devicePixelContentBoxSize: [box] }]) => done([box.blockSize, box.inlineSize]);"
        "new ResizeObserver(tell).observe(document.querySelector('canvas'), { box: 'device-pixel-content-box' })"
    )
    assert covered[1] == 314  # from 10.4 to 323.7
    assert list(stage.browser.pixels().shape[:2]) == covered


def test_a_narrow_place_keeps_the_proportions(stage):
    stage.browser.run("document.getElementById('stage').style.width = '320px'")
    stage.show(one(Line([0, 10], [0, 10]), width=5, height=4))
    height, width, _ = stage.browser.pixels().shape
    assert width == 300  # less the padding
    assert height == 240
    stage.browser.run("document.getElementById('stage').style.width = '420px'")
    assert stage.browser.pixels().shape[:2] == (320, 400)


# ---- What a person does


def swept(kind="slider", **control):
    """A line that lies as high as the control says."""
    rate = Control("rate", "learning rate", [1, 2, 4, 8], 1, kind=kind, **control)
    return one(Line([0, 10], [[v, v] for v in rate.values], by=("rate",), style=0, width=3, name="loss"), controls=[rate])


def test_a_key_on_the_slider_changes_the_picture_and_back_gives_the_same(stage):
    scene = swept(unit="per step")
    stage.show(scene)
    slider = stage.browser.find("input[type=range]")
    assert slider.accessible_name == "learning rate"
    assert slider.get_attribute("aria-valuetext") == "2 per step"
    before = stage.browser.digest()
    stage.browser.keys(slider, RIGHT)
    assert stage.browser.digest() != before
    assert slider.get_attribute("aria-valuetext") == "4 per step"
    assert stage.browser.find("output").text == "4 per step"
    pixels = stage.browser.pixels()
    assert _colour(pixels, stage.place(scene, 5, 4)) == LIGHT.colours[0]
    assert _colour(pixels, stage.place(scene, 5, 2)) == LIGHT.grid
    stage.browser.keys(slider, LEFT)
    assert stage.browser.digest() == before
    assert stage.sent("control")[0] == {"kind": "control", "name": "rate", "index": 2}


def test_python_gets_the_last_of_many_changes(stage):
    stage.show(swept())
    stage.browser.keys(stage.browser.find("input[type=range]"), LEFT, RIGHT, RIGHT, RIGHT, LEFT, RIGHT)
    stage.browser.until(lambda: stage.sent("control")[-1]["index"] == 3, "the last change")
    assert stage.sent("control")[0]["index"] == 0


def test_keys_stay_with_the_picture(stage):
    stage.show(swept())
    stage.browser.run("window.keys = []; document.addEventListener('keydown', (event) => keys.push(event.key))")
    stage.browser.keys(stage.browser.find("input[type=range]"), RIGHT)
    stage.browser.keys(stage.browser.find("canvas"), DOWN, ENTER)
    assert stage.browser.run("return keys") == []


def test_a_choice(stage):
    c = Control("f", "function", ["bowl", "saddle"], kind="choice")
    scene = one(Line([0, 10], [[2, 2], [8, 8]], by=("f",), style=0, width=3), controls=[c])
    stage.show(scene)
    choice = stage.browser.find("select")
    assert choice.accessible_name == "function"
    stage.browser.keys(choice, DOWN)
    assert _colour(stage.browser.pixels(), stage.place(scene, 5, 8)) == LIGHT.colours[0]
    assert stage.sent("control") == [{"kind": "control", "name": "f", "index": 1}]


def test_play_goes_to_the_end_and_stops(stage):
    stage.show(swept("play", seconds=0.2))
    button = stage.browser.find("button[data-play]")
    assert button.accessible_name == "Play learning rate"
    button.click()
    assert button.accessible_name == "Pause learning rate" or stage.browser.find("output").text == "8"
    stage.browser.until(lambda: stage.browser.find("output").text == "8", "the end")
    assert button.accessible_name == "Play learning rate"


def test_nothing_plays_by_itself(stage):
    stage.show(swept("play", seconds=0.05))
    stage.browser.pixels()
    stage.browser.pixels()
    assert stage.browser.find("output").text == "2"


def test_what_only_python_acts_on_is_there_only_with_python(stage):
    controls = [Control("rate", "rate", [1, 2], remote=True), Control("step", "step", [1, 2])]
    scene = one(Line([0, 1], [0, 1]), controls=controls, buttons=[Button("pause", "Pause")])
    stage.show(scene, remote=False)
    assert [each.accessible_name for each in stage.browser.driver.find_elements("css selector", "input")] == ["step"]
    assert stage.browser.driver.find_elements("css selector", ".tristep-controls button") == []
    stage.show(scene)
    assert [each.accessible_name for each in stage.browser.driver.find_elements("css selector", "input")] == ["rate", "step"]
    stage.browser.find("button[data-button=pause]").click()
    assert stage.sent("button") == [{"kind": "button", "name": "pause"}]


def test_the_legend_hides_and_shows_by_mouse_and_keyboard(stage):
    scene = one(
        Line([0, 10], [3, 3], style=0, width=3, name="SGD"),
        Points([5], [8], style=0, size=12, name="SGD"),
        Line([0, 10], [6, 6], style=5, width=3, name="Adam"),
    )
    stage.show(scene)
    before = stage.browser.digest()
    entries = stage.browser.driver.find_elements("css selector", ".tristep-legend button")
    assert [entry.text for entry in entries] == ["SGD", "Adam"]
    entries[0].click()
    pixels = stage.browser.pixels()
    assert _colour(pixels, stage.place(scene, 5, 3)) == LIGHT.background
    assert _colour(pixels, stage.place(scene, 5, 8)) == LIGHT.grid
    assert _colour(pixels, stage.place(scene, 5, 6)) == LIGHT.colours[5]
    entry = stage.browser.find(".tristep-legend button")
    assert entry.get_attribute("aria-pressed") == "false"
    stage.browser.keep("legend")
    entry.send_keys(ENTER)
    assert stage.browser.digest() == before
    assert stage.browser.run("return document.activeElement.textContent") == "SGD"


def test_a_click_on_the_legend_counts_while_the_picture_changes(stage):
    scene = one(Line([0, 10], [3, 3], style=0, width=3, name="SGD"))
    stage.show(scene)
    from selenium.webdriver.common.action_chains import ActionChains

    entry = stage.browser.find(".tristep-legend button")
    mouse = ActionChains(stage.browser.driver)
    mouse.click_and_hold(entry).perform()
    stage.update(one(Line([0, 10], [4, 4], style=0, width=3, name="SGD")))
    mouse.release().perform()
    assert stage.browser.find(".tristep-legend button").get_attribute("aria-pressed") == "false"


@pytest.mark.parametrize("scale", ["linear", "log"])
def test_a_click_tells_the_place_in_the_axes_units(stage, scale):
    x = Axis("rate", 1e-4, 1, "log") if scale == "log" else Axis("x", -4, 4)
    scene = one(Line([0.1, 1], [0, 10]), x=x, click=Click(event="start"))
    stage.show(scene)
    wanted = (1e-2 if scale == "log" else 2.5, 7.5)
    stage.click(*stage.place(scene, *wanted))
    (event,) = stage.sent("click")
    assert event["name"] == "start"
    assert event["x"] == (pytest.approx(2.5, abs=0.02) if scale == "linear" else pytest.approx(1e-2, rel=0.02))
    assert event["y"] == pytest.approx(7.5, abs=0.05)


def test_a_click_sets_the_control_that_is_nearest(stage):
    rates = [1e-3, 1e-2, 1e-1]
    c = Control("rate", "rate", rates)
    scene = one(
        RefLine([[rate] for rate in rates], by=("rate",), style=0, width=2),
        x=Axis("rate", 1e-4, 1, "log"),
        controls=[c],
        click=Click(control="rate"),
    )
    stage.show(scene, remote=False)
    stage.click(*stage.place(scene, 0.04, 5))  # 0.04 is nearer to 0.1 by its logarithm
    assert stage.browser.find("output").text == "0.1"
    assert _colour(stage.browser.pixels(), stage.place(scene, 0.1, 5)) == LIGHT.colours[0]
    # Dragging along the panel sets it all the way.
    (x0, y0), (x1, y1) = stage.place(scene, 0.1, 5), stage.place(scene, 1e-3, 4)
    stage.pointer(("down", x0, y0), ("move", (x0 + x1) / 2, y0), ("move", x1, y1), ("up", x1, y1))
    assert stage.browser.find("output").text == "0.001"


def test_a_click_on_a_map_sets_the_controls_of_both_its_sides(stage):
    across, up = Control("rate", "rate", ["0.1", "0.2", "0.3"]), Control("decay", "decay", ["0", "1e-3"])
    x, y = np.meshgrid(np.arange(3), np.arange(2))
    here = Points(x[..., None], y[..., None], by=("decay", "rate"), style=0, size=12)
    scene = one(
        here,
        x=Axis("rate", -0.5, 2.5),
        y=Axis("decay", -0.5, 1.5),
        controls=[across, up],
        click=Click(control="rate", along="x", other="decay"),
    )
    stage.show(scene, remote=False)
    stage.click(*stage.place(scene, 1.8, 0.7))  # nearest to (2, 1)
    assert [each.text for each in stage.browser.driver.find_elements("css selector", "output")] == ["0.3", "1e-3"]
    assert _colour(stage.browser.pixels(), stage.place(scene, 2, 1)) == LIGHT.colours[0]


def test_points_are_moved_by_mouse_and_by_keyboard(stage):
    scene = one(Points([2, 5], [2, 5], style=0, size=12, drag="knot"))
    stage.show(scene)
    start, end = stage.place(scene, 2, 2), stage.place(scene, 4, 8)
    stage.pointer(("down", *start), ("move", start[0] + 20, start[1]), ("move", *end), ("up", *end))
    last = stage.browser.until(lambda: [each for each in stage.sent("drag") if abs(each["y"] - 8) < 0.1], "the drop")[-1]
    assert {name: last[name] for name in ("kind", "name", "number")} == {"kind": "drag", "name": "knot", "number": 0}
    assert last["x"] == pytest.approx(4, abs=0.05)
    pixels = stage.browser.pixels()
    assert _colour(pixels, end) == LIGHT.colours[0]
    assert _colour(pixels, start) == LIGHT.grid
    # The cursor begins in the middle, where the other point is; Enter takes it and lets it go.
    stage.browser.keys(stage.browser.find("canvas"), RIGHT, ENTER, RIGHT, RIGHT, ENTER, RIGHT)
    last = stage.browser.until(lambda: [each for each in stage.sent("drag") if each["x"] > 5.35], "the drop")[-1]
    assert last["number"] == 1
    assert last["x"] == pytest.approx(5.4, abs=0.03)  # steps of a fiftieth of the panel
    assert last["y"] == pytest.approx(5, abs=0.03)


def test_a_point_is_where_python_says_as_soon_as_it_has_answered(stage):
    """Also where nothing new is to be shown, since a point could not be moved any farther."""
    scene = one(Points([2, 5], [2, 5], style=0, size=12, drag="knot"))
    stage.show(scene)
    start, end = stage.place(scene, 2, 2), stage.place(scene, 8, 2)
    stage.pointer(("down", *start), ("move", start[0] + 20, start[1]), ("move", *end))
    assert "8" in stage.browser.find(".tristep-readout").text  # which goes along
    stage.pointer(("up", *end))
    assert _colour(stage.browser.pixels(), end) == LIGHT.colours[0]
    stage.browser.run("shown.answered()")
    pixels = stage.browser.pixels()
    assert _colour(pixels, start) == LIGHT.colours[0]
    assert _colour(pixels, end) == LIGHT.grid


def test_silence_of_python_is_told_until_it_answers(stage):
    stage.show(swept(remote=True))
    silence = stage.browser.find(".tristep-silence")
    assert not silence.is_displayed()
    stage.browser.keys(stage.browser.find("input"), RIGHT)
    stage.browser.until(silence.is_displayed, "words about it")
    assert "kernel has been restarted" in silence.text
    stage.browser.run("shown.answered()")
    assert not silence.is_displayed()


def test_without_python_points_stay(stage):
    scene = one(Points([2], [2], style=0, size=12, drag="knot"))
    stage.show(scene, remote=False)
    start, end = stage.place(scene, 2, 2), stage.place(scene, 4, 2.2)
    stage.pointer(("down", *start), ("move", *end), ("up", *end))
    assert _colour(stage.browser.pixels(), start) == LIGHT.colours[0]


def test_the_keyboards_cursor_clicks_and_speaks(stage):
    scene = one(Line([0, 10], [5, 5], name="loss"), click=Click(event="start"))
    stage.show(scene)
    canvas = stage.browser.find("canvas")
    stage.browser.keys(canvas, RIGHT, UP, UP, RIGHT, ENTER)
    (event,) = stage.sent("click")
    assert (event["x"], event["y"]) == (pytest.approx(5.2, abs=0.02), pytest.approx(5.4, abs=0.02))
    assert stage.browser.run("return document.querySelector('[aria-live]').textContent").startswith("loss, x ")
    stage.browser.keep("cursor")
    canvas.send_keys(ESCAPE)
    assert stage.browser.run("return document.activeElement === document.body")


def test_the_order_of_the_tab_key(stage):
    scene = Scene(
        [Panel(Axis("x", 0, 1), Axis("y", 0, 1), [Line([0, 1], [0, 1], name="loss")])],
        controls=[Control("a", "a", [1, 2]), Control("b", "b", ["u", "v"], kind="choice")],
        buttons=[Button("go", "Go")],
    )
    stage.show(scene)
    met = []
    stage.browser.run("document.activeElement.blur()")
    for _ in range(5):
        stage.browser.driver.switch_to.active_element.send_keys("\ue004")
        met.append(stage.browser.run("return document.activeElement.tagName"))
    assert met == ["BUTTON", "CANVAS", "INPUT", "SELECT", "BUTTON"]


def test_the_readout_names_the_nearest_line_the_cell_and_the_point(stage):
    scene = one(
        Heatmap(np.array([[1.0, 2.0], [3.0, 1234.5]]), [0, 10], [0, 10], label="loss"),
        Line([0, 5, 10], [1, 1, 2], name="Adam", style=2),
        Points([8], [8], words=["the minimum"], style=1),
        x=Axis("rate", 0, 10),
        y=Axis("row", 0, 10, ticks=[(2.5, "first layer"), (7.5, "second layer")]),
    )
    stage.show(scene)
    readout = stage.browser.find(".tristep-readout")
    stage.pointer(("move", *stage.place(scene, 4.5, 1.2)))
    assert readout.text == "Adam\nrate 5\nrow 1"
    stage.pointer(("move", *stage.place(scene, 2.5, 1.2)))  # far from both ends
    name, rate, row = readout.text.split("\n")
    assert (name, row) == ("Adam", "row 1")
    assert float(rate.split()[1]) == pytest.approx(2.5, abs=0.03)
    stage.pointer(("move", *stage.place(scene, 6, 6)))
    assert readout.text == "loss 1235\nrate 7.5\nrow second layer"
    stage.browser.keep("readout")
    stage.pointer(("move", *stage.place(scene, 8.05, 8.05)))
    assert readout.text == "the minimum\nrate 8\nrow 8"
    stage.pointer(("move", 2, 2))
    assert not readout.is_displayed()


def test_a_rectangle_is_looked_at_closely_until_a_double_click(stage):
    scene = one(Line([0, 10], [5, 5], style=0, width=3), Points([2.5], [7.5], style=4, size=10))
    stage.show(scene)
    before = stage.browser.digest()
    start, end = stage.place(scene, 2, 8), stage.place(scene, 3, 7)
    stage.pointer(("down", *start), ("move", start[0] + 9, start[1] + 9), ("move", *end), ("up", *end))
    pixels = stage.browser.pixels()
    left, top, right, bottom = stage.frame()
    ink = np.nonzero((pixels == _rgb(LIGHT.colours[4])).all(axis=2))
    assert ink[1].mean() == pytest.approx((left + right) / 2, abs=12)
    assert ink[0].mean() == pytest.approx((top + bottom) / 2, abs=12)
    stage.browser.keep("closer")
    middle = ((left + right) / 2, (top + bottom) / 2)
    stage.pointer(("down", *middle), ("up", *middle), ("down", *middle), ("up", *middle))
    stage.pointer(("move", 2, 2))
    assert stage.browser.digest() == before


def test_a_double_click_is_no_click(stage):
    scene = one(Line([0, 10], [5, 5], style=0, width=3), click=Click(event="start"))
    stage.show(scene)
    start, end = stage.place(scene, 2, 8), stage.place(scene, 4, 4)
    stage.pointer(("down", *start), ("move", start[0] + 9, start[1] + 9), ("move", *end), ("up", *end))
    stage.pointer(*2 * [("down", *start), ("up", *start)])
    stage.pointer(("down", *end), ("up", *end))  # the picture is whole again
    (sent,) = stage.browser.until(lambda: stage.sent("click"), "the click")
    assert [sent["x"], sent["y"]] == pytest.approx([4, 4], abs=0.05)


# ---- Updates, themes, words


def test_an_update_keeps_what_is_set_unless_the_scene_sets_it(stage):
    stage.show(swept())
    stage.browser.keys(stage.browser.find("input[type=range]"), RIGHT, RIGHT)
    scene = swept()
    stage.update(scene)
    assert stage.browser.find("output").text == "8"
    assert _colour(stage.browser.pixels(), stage.place(scene, 5, 8)) == LIGHT.colours[0]
    other = Control("rate", "learning rate", [1, 2, 4, 8], 0)
    stage.update(one(Line([0, 10], [[v, v] for v in other.values], by=("rate",)), controls=[other]))
    assert stage.browser.find("output").text == "1"
    longer = Control("rate", "learning rate", [1, 2, 4, 8, 9], 4)
    stage.update(one(Line([0, 10], [[v, v] for v in longer.values], by=("rate",)), controls=[longer]))
    assert stage.browser.find("output").text == "9"


def test_the_slider_stays_under_the_hand_while_the_picture_changes(stage):
    stage.show(swept())
    slider = stage.browser.find("input[type=range]")
    stage.browser.keys(slider, RIGHT)
    stage.update(swept())
    assert stage.browser.run("return document.activeElement === arguments[0]", slider)


def test_colours_follow_the_system_and_jupyterlab_at_once(stage):
    scene = one(Line([0, 10], [5, 5], style=0, width=3, name="loss"), title="A panel")
    stage.show(scene)
    light = stage.browser.digest()

    def becomes(theme):
        background = THEMES[theme].background
        stage.browser.until(lambda: _colour(stage.browser.pixels(), (1, 1)) == background, f"the {theme} background")

    stage.browser.theme("dark")
    becomes("dark")
    assert (stage.browser.pixels() == _rgb(THEMES["dark"].colours[0])).all(axis=2).sum() > 300
    stage.browser.keep("dark")
    stage.browser.run("document.body.dataset.jpThemeLight = 'true'")
    becomes("light")
    stage.browser.run("document.body.dataset.jpThemeLight = 'false'")
    becomes("dark")
    stage.browser.run("delete document.body.dataset.jpThemeLight")
    stage.browser.theme("light")
    becomes("light")
    assert stage.browser.digest() == light


def test_the_picture_in_words(stage):
    scene = Scene(
        [Panel(Axis("step", 0, 2), Axis("loss", 0, 1), [Line([0, 1, 2], [1, 0.5, 0.25], name="Adam")])],
        title="Loss",
        description="It falls.",
    )
    stage.show(scene)
    canvas = stage.browser.find("canvas")
    assert (canvas.aria_role, canvas.accessible_name) in [("img", "Loss. It falls."), ("image", "Loss. It falls.")]
    cells = "return [...document.querySelectorAll('td')].map((cell) => cell.textContent)"
    assert stage.browser.until(lambda: stage.browser.run(cells), "the table") == ["Adam", "loss", "0.25"]


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


# ---- The page


def test_a_page_works_from_a_file_and_asks_nothing_of_a_network(browser, tmp_path):
    evil = "</script><b>loss & more</b>"
    scene = swept(unit=evil)
    file = tmp_path / "page.html"
    file.write_text(page(scene.to_bytes(), f"A {evil}", f"It says {evil}"), encoding="utf-8")
    browser.driver.get(file.as_uri())
    slider = browser.find("input[type=range]")
    assert browser.driver.title == f"A {evil}"
    assert slider.get_attribute("aria-valuetext") == f"2 {evil}"
    before = browser.digest()
    browser.keys(slider, RIGHT)
    assert browser.digest() != before
    browser.keys(slider, LEFT)
    assert browser.digest() == before
    assert browser.run("return performance.getEntriesByType('resource').length") == 0
    browser.keep("page")


def test_a_page_holds_the_numbers_of_the_scene(browser, tmp_path):
    rng = np.random.default_rng(0)
    rate = Control("rate", "rate", list(range(7)))
    exact = np.array([0, 131073, 262145, np.nan, np.inf], np.float32)  # integers stay exact
    close = (1000 + rng.uniform(0, 0.01, 5)).astype(np.float32)  # so do those that differ in their last digits only
    free = rng.standard_normal((7, 300)).astype(np.float32)
    cells = rng.integers(0, 255, (5, 7), dtype=np.uint8)
    scene = one(
        Line(exact, close),
        Line(np.linspace(0, 1, 300), free, by=("rate",)),
        Heatmap(cells, [0, 1], [0, 1]),
        controls=[rate],
    )
    text = page(scene.to_bytes(), "t", "d")
    file = tmp_path / "page.html"  # which keeps the scene to look at, in place of showing it
    file.write_text(text.replace('mount(document.getElementById("scene"), ', "window.found = decode("), encoding="utf-8")
    browser.driver.get(file.as_uri())
    layers = browser.until(
        lambda: browser.run(
            "const texts = (array) => array && [...array.data].map(String);"
            "return window.found?.panels[0].layers.map(({x, y, values}) =>"
            " ({x: texts(x), y: texts(y), values: texts(values)}))"
        ),
        "the scene",
    )
    as_floats = lambda values: np.array([float(value) for value in values], np.float32)  # noqa: E731
    np.testing.assert_array_equal(as_floats(layers[0]["x"]), exact)
    np.testing.assert_array_equal(as_floats(layers[0]["y"]), close)
    np.testing.assert_allclose(as_floats(layers[1]["y"]).reshape(7, 300), free, rtol=1e-5)
    np.testing.assert_array_equal(as_floats(layers[2]["values"]), cells.ravel())


def _rgb(colour):
    return np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)], dtype=np.uint8)


def _at(pixels, place):
    return pixels[int(place[1]), int(place[0])]


def _colour(pixels, place):
    return "#" + "".join(f"{value:02x}" for value in _at(pixels, place))


def _share_of(pixels, stage, scene, ends, y, colour):
    """How much of a horizontal stretch has this colour, or more of it than of the background."""
    (x0, row), (x1, _) = stage.place(scene, ends[0], y), stage.place(scene, ends[1], y)
    stretch = pixels[int(row), int(x0) : int(x1)].astype(float)
    way = _rgb(colour).astype(float) - _rgb(LIGHT.background)
    shares = (stretch - _rgb(LIGHT.background)) @ way / (way @ way)
    return float(np.clip(shares, 0, 1).mean())


def _parsed(tick):
    words = tick["words"].replace("−", "-").replace(",", "")
    if "power" in tick and tick["power"] is not None:
        factor = words[:-2].rstrip("×")
        return float(factor or 1) * 10.0 ** tick["power"]
    return float(words)

"""The scene module by itself: the arrays that it decodes, its ticks and numbers, and pages that work without Python.

The oracle of ticks is matplotlib's locators; of arrays, the scene that they were written from.
"""

import base64

import numpy as np
from matplotlib.ticker import LogLocator, MaxNLocator
from scene_cases import LEFT, RIGHT, one, swept

from tristep.viz.render.canvas import page
from tristep.viz.scene import Control, Heatmap, Line


def test_decoded_arrays_are_those_of_the_scene_for_every_state(stage):
    rng = np.random.default_rng(0)
    a, b = Control("a", "a", [1, 2, 3]), Control("b", "b", ["u", "v"])
    values = {dtype: rng.integers(0, 100, (3, 2, 4, 5)).astype(dtype) for dtype in ("uint8", "int16", "int32", "float32")}
    layers = [Heatmap(each, [0, 1], [0, 1], by=("a", "b")) for each in values.values()]
    line = Line(np.arange(7.0), rng.standard_normal((2, 7)), by=("b",))
    scene = one(*layers, line, controls=[a, b])
    payload = base64.b64encode(scene.to_bytes()).decode()
    for state in (scene.state(), scene.state(a=2, b=1), scene.state(a=1)):
        # The bytes lie at an odd place, as they do in a message of a notebook.
        found = stage.browser.run(
            "const all = new Uint8Array(bytes(arguments[0])), odd = new Uint8Array(all.length + 3); odd.set(all, 3);"
            "const scene = decode(new DataView(odd.buffer, 3));"
            "return scene.panels[0].layers.map((layer) =>"
            "  [...part(layer, layer.kind === 'line' ? 'y' : 'values', arguments[1])])",
            payload,
            state,
        )
        for layer, got in zip(layers, found, strict=False):
            np.testing.assert_array_equal(got, layer.chosen("values", state).ravel())
        np.testing.assert_array_equal(np.float32(found[-1]), line.chosen("y", state))
    # Where the place is even, they are no copies.
    shared = "const all = bytes(arguments[0]), layer = decode(all).panels[0].layers.at(-1);"
    shared += "return part(layer, 'y', {b: 1}).buffer === all && part(layer, 'x', {b: 1}).buffer === all"
    assert stage.browser.run(shared, payload)


def test_linear_ticks_are_matplotlibs(stage):
    for most in (2, 5, 9):
        rng = np.random.default_rng(most)
        ranges = [(-2.0, 2.0), (0.0, 1.0), (0.0, 1e7), (1e-7, 9e-7), (-1e-3, 3e-3), (99.98, 100.01)]
        lows = rng.uniform(-5, 5, 30)
        ranges += [*zip(lows, lows + 10 ** rng.uniform(-3, 3, 30), strict=True)]
        axes = [{"low": low, "high": high, "scale": "linear", "ticks": None} for low, high in ranges]
        found = stage.browser.run(
            "return arguments[0].map((axis) => ticks(axis, 100 * arguments[1], 100).major)", axes, most
        )
        locator = MaxNLocator(most, steps=[1, 2, 5, 10], min_n_ticks=2)
        for (low, high), got in zip(ranges, found, strict=True):
            near = 1e-9 * (high - low)
            expected = [v for v in locator.tick_values(low, high) if low - near <= v <= high + near]
            np.testing.assert_allclose([tick["value"] for tick in got], expected, rtol=1e-9, atol=near)
            np.testing.assert_allclose([_parsed(tick) for tick in got], expected, rtol=1e-9, atol=near)


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


def test_numbers_in_words(stage):
    values = [0, 1, -2.5, 0.00012346, 12345.678, 1234567, 2.5e9, -3.2e-9, 99.996]
    expected = ["0", "1", "−2.5", "0.0001235", "12,345.7", "1,234,567", "2.5×10⁹", "−3.2×10⁻⁹", "100"]
    assert stage.browser.run("return arguments[0].map(number)", values) == expected
    assert stage.browser.run("return [NaN, Infinity].map(number)") == ["not a number", "∞"]


def test_a_page_works_from_a_file_and_asks_nothing_of_a_network(browser, tmp_path):
    evil = "</script><b>loss & more</b>"
    scene = swept(texts=[f"{rate} {evil}" for rate in (1, 2, 4, 8)])
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


def _parsed(tick):
    words = tick["words"].replace("−", "-").replace(",", "")
    if "power" in tick and tick["power"] is not None:
        factor = words[:-2].rstrip("×")
        return float(factor or 1) * 10.0 ** tick["power"]
    return float(words)

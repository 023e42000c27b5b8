"""From a key on a slider to the new picture, in a real browser: a scene on our canvas beside `interact` and matplotlib.

    python benchmarks/notebook_browser.py               all of it, about two minutes; an idle machine, please
    python benchmarks/notebook_browser.py --keys 5      fewer keys
    python benchmarks/notebook_browser.py --out FILE    where the JSON goes

The picture is the same for all, 9 x 4.5 inches: a function of two variables as colours with 8 paths of 201 points on it, and
8 curves beside. A slider chooses one of 41 rates. It is shown

- by `SceneWidget` in JupyterLab, which has all 41 in the browser;
- by `page`, from a file;
- by `ipywidgets.interact` with matplotlib's inline figures in the same JupyterLab, drawn anew for each value, which is how
  a notebook usually does it.

The time is from the keydown event to the last thing that is painted for it: the last call that draws on a canvas, or the
last new picture that is there in full. Each key waits until nothing has been painted for a while. What the screen adds, at
most one frame, is not in it, and is the same for all. Chromium draws in software, on the cores that also run the kernel.
It needs Debian's chromium and chromium-driver, and what `make test` installs.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from run import machine, write

from tristep.viz.canvas import page
from tristep.viz.scene import Axis, Control, Image, Line, Panel, Scene

RESULTS = Path(__file__).parent / "results" / "notebook_browser_cpu.json"
LEFT, RIGHT = "\ue012", "\ue014"

# Both ways get their numbers from here; this is also the first cell of the notebook.
NUMBERS = """
import numpy as np

rates = np.logspace(-4, 0, 41)
t = np.linspace(0, 1, 201)
across, up = np.meshgrid(np.linspace(-2, 2, 128), np.linspace(-1.5, 1.5, 96))
height = across**2 + 4 * up**2 + 0.01
speed = 6 * np.sqrt(rates)[:, None]
paths = [
    (-1.6 * np.exp(-k * speed * t) * np.cos(6 * t * k**0.2), 1.2 * np.exp(-0.7 * k * speed * t) * np.cos(k + 3 * t))
    for k in range(1, 9)
]
losses = [x**2 + 4 * y**2 + 0.01 for x, y in paths]
"""

INTERACT = """
%matplotlib inline
import ipywidgets
import matplotlib.pyplot as plt

def show(k):
    figure, (plane, curves) = plt.subplots(1, 2, figsize=(9, 4.5))
    plane.contourf(across, up, np.log10(height), 30)
    for (x, y), loss in zip(paths, losses):
        plane.plot(x[k], y[k])
        curves.plot(loss[k])
    curves.set_yscale("log")
    plt.show()

ipywidgets.interact(show, k=ipywidgets.IntSlider(20, 0, 40))
"""

# Set up in the page: when the key went down, and when something was last painted for it.
PROBE = """
window.keyAt = window.paintAt = 0;
document.addEventListener("keydown", () => { window.keyAt = performance.now(); window.paintAt = 0; }, true);
const paint = () => { window.paintAt = performance.now(); };
for (const name of ["drawImage", "stroke", "fill", "fillText", "putImageData"]) {
  const real = CanvasRenderingContext2D.prototype[name];
  CanvasRenderingContext2D.prototype[name] = function (...all) {
    real.apply(this, all);
    paint();
  };
}
new MutationObserver((changes) => {
  for (const { addedNodes, target } of changes) {
    const elements = [target, ...addedNodes].filter((node) => node.querySelectorAll);
    const images = elements.flatMap((element) => [element, ...element.querySelectorAll("img")]);
    for (const image of images.filter(({ tagName }) => tagName === "IMG")) image.decode().then(paint, () => {});
  }
}).observe(document.body, { childList: true, subtree: true, attributes: true, attributeFilter: ["src"] });
"""

SETTLED = """
const done = arguments[0];
const look = () => (paintAt && performance.now() - paintAt > 400 ? done(paintAt - keyAt) : setTimeout(look, 20));
look();
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keys", type=int, default=15, help="how many keys are timed for each")
    parser.add_argument("--out", type=Path, default=RESULTS, help="JSON file to write")
    arguments = parser.parse_args()

    tools = _browser_tools()
    with tempfile.TemporaryDirectory(prefix="tristep-browser-") as name:
        folder = Path(name)
        browser = tools.start(folder)
        lab = tools.Lab(folder / "lab")
        try:
            found = {
                "canvas, JupyterLab": _in_lab(tools, lab, browser, _canvas_cell(), "canvas", arguments.keys),
                "interact, JupyterLab": _in_lab(tools, lab, browser, INTERACT, "interact", arguments.keys),
                "canvas, page": _on_page(browser, folder / "page.html", arguments.keys),
            }
        finally:
            lab.end()
            browser.driver.quit()
    version = f"Chromium {browser.driver.capabilities['browserVersion']}"
    results: dict[str, Any] = {"machine": f"{machine('cpu')}, {version}", "keys": arguments.keys, "found": found}
    peer, ours = found["interact, JupyterLab"]["ms"], found["canvas, JupyterLab"]["ms"]
    results["interact / canvas"] = round(peer / ours, 1)
    for what, row in found.items():
        print(f"{what:22s} {row['ms']:7.1f} ms, at most {row['most ms']:.1f}")
    print(f"interact takes {results['interact / canvas']} times as long")
    write(arguments.out, results)


def picture() -> Scene:
    """The picture as a scene."""
    numbers: dict[str, Any] = {}
    exec(NUMBERS, numbers)
    rate = Control("rate", "learning rate", [float(rate) for rate in numbers["rates"]], 20)
    plane = [Image(numbers["height"], [-2, 2], [-1.5, 1.5], scale="log", label="height")]
    plane += [Line(x, y, by=("rate",), style=k, name=f"path {k}") for k, (x, y) in enumerate(numbers["paths"])]
    steps = np.arange(201)
    curves = [Line(steps, loss, by=("rate",), style=k, name=f"path {k}") for k, loss in enumerate(numbers["losses"])]
    panels = [
        Panel(Axis("x", -2, 2), Axis("y", -1.5, 1.5), plane),
        Panel(Axis("step", 0, 200), Axis("loss", 0.01, 10, "log"), curves, column=1),
    ]
    return Scene(panels, controls=[rate], width=9, height=4.5)


def _canvas_cell() -> str:
    return (
        f"import sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})\nimport notebook_browser\n"
        "from tristep.viz.canvas import SceneWidget\nSceneWidget(notebook_browser.picture().to_bytes())"
    )


def _in_lab(tools: Any, lab: Any, browser: Any, cell: str, name: str, keys: int) -> dict[str, Any]:
    book = tools.Notebook(lab, browser, name, [NUMBERS, cell])
    book.run_all()
    found = _timed(browser, ".tristep input[type=range]" if name == "canvas" else ".noUi-handle", keys)
    book.close()
    return found


def _on_page(browser: Any, file: Path, keys: int) -> dict[str, Any]:
    file.write_text(page(picture().to_bytes(), "A sweep", "8 paths"), encoding="utf-8")
    browser.driver.get(file.as_uri())
    return _timed(browser, ".tristep input[type=range]", keys)


def _timed(browser: Any, selector: str, keys: int) -> dict[str, Any]:
    handle = browser.find(selector)
    browser.run(PROBE)
    times = []
    for k in range(keys + 1):
        browser.keys(handle, RIGHT if k % 4 < 2 else LEFT)
        times.append(round(browser.driver.execute_async_script(SETTLED), 2))
    times = times[1:]  # the first one also pays for what is made once
    return {"ms": round(statistics.median(times), 2), "most ms": max(times), "every": times}


def _browser_tools() -> Any:
    """The browser and the JupyterLab of the tests."""
    path = Path(__file__).parents[1] / "tests" / "browser" / "conftest.py"
    spec = importlib.util.spec_from_file_location("browser_tools", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main()

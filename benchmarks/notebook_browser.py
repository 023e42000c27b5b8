"""From a key on a slider to the new picture, in a real browser: a scene by both renderers against `interact` and matplotlib.

    python benchmarks/notebook_browser.py               all of it, about three minutes; an idle machine, please
    python benchmarks/notebook_browser.py --keys 5      fewer keys
    python benchmarks/notebook_browser.py --out FILE    where the JSON goes

The picture is the same for all, 9 x 4.5 inches: a function of two variables as colours with 8 paths of 201 points on it, and
8 curves next to it. A slider chooses one of 41 rates. It is shown

- by `SceneWidget` in JupyterLab, which has all 41 in the browser, as `viz.set_renderer("canvas")` shows it;
- by `SceneBox` in JupyterLab, as `viz.set_renderer("ipywidgets")` shows it, in ipywidgets alone: with 41 pictures in the
  browser (frames), and with one that the kernel draws again for each value (image), as where there are too many for that;
- by a slider and an image of ipywidgets alone, with pictures that were drawn beforehand in the kernel (floor): what of
  "image" is the way to the kernel and back, and what the browser does with a picture;
- by `ipywidgets.interact` with matplotlib's inline figures in the same JupyterLab, drawn again for each value, which is how
  a notebook usually does it;
- by `page`, from a file.

The time is from the keydown event to the last thing that is painted for it: the last call that draws on a canvas, or the
last new picture that has been decoded. Each key waits until nothing has been painted for a while, and must have given
another picture. Next to it is the time to the end of the browser's next frame, with which it goes to the screen. Chromium
draws in software, on the cores that also run the kernel. It needs Debian's chromium and chromium-driver, and what
`make test` installs.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from environment import machine
from timing import write

from tristep.viz.render.canvas import page
from tristep.viz.scene import Axis, Control, Heatmap, Line, Panel, Scene

RESULTS = Path(__file__).parent / "results" / "notebook_browser_cpu.json"
RIGHT = "\ue014"

# All ways get their numbers from here; this is also the first cell of the notebook.
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

CANVAS = """
from tristep.viz.render.canvas import SceneWidget
SceneWidget(notebook_browser.picture().to_bytes())
"""
FRAMES = """
from tristep.viz.render.ipywidgets import SceneBox
SceneBox(notebook_browser.picture())
"""
# After another scene, pictures are no longer made beforehand.
IMAGE = """
from tristep.viz.render.ipywidgets import SceneBox
box = SceneBox(notebook_browser.picture())
box.show(notebook_browser.picture())
box
"""
# The same, drawn beforehand in the kernel, which does nothing but send one: what is left is the way there and back.
FLOOR = """
import ipywidgets
from tristep.viz.render.matplotlib import Picture
picture = Picture(notebook_browser.picture())
pngs = []
for k in range(41):
    picture.show(state={"rate": k})
    pngs.append(picture.png())
image = ipywidgets.Image(value=pngs[20], layout={"width": "900px", "max_width": "100%"})
slider = ipywidgets.IntSlider(20, 0, 40)
slider.observe(lambda change: setattr(image, "value", pngs[change["new"]]), names="value")
ipywidgets.VBox([image, slider])
"""
CELLS = {"canvas": CANVAS, "frames": FRAMES, "image": IMAGE, "floor": FLOOR, "interact": INTERACT}

# Set up in the page: when the key went down, when something was last painted for it, and when the frame after that ended.
PROBE = """
window.keyAt = window.paintAt = window.frameAt = 0;
document.addEventListener("keydown", () => { window.keyAt = performance.now(); window.paintAt = 0; }, true);
const frames = new MessageChannel();
frames.port1.onmessage = () => { window.frameAt = performance.now(); };
let waiting = false;
const paint = () => {
  window.paintAt = performance.now();
  if (!waiting) requestAnimationFrame(() => { waiting = false; frames.port2.postMessage(0); });
  waiting = true;
};
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
const look = () => {
  if (paintAt && performance.now() - paintAt > 400) done([paintAt - keyAt, frameAt - keyAt]);
  else setTimeout(look, 20);
};
look();
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keys", type=int, default=15, help="how many keys are timed for each, 19 at most")
    parser.add_argument("--only", nargs="+", choices=tuple(CELLS), help="these in JupyterLab, and nothing written")
    parser.add_argument("--out", type=Path, default=RESULTS, help="JSON file to write")
    arguments = parser.parse_args()

    chromium, lab_notebooks = _browser_tools()
    with tempfile.TemporaryDirectory(prefix="tristep-browser-") as name:
        folder = Path(name)
        browser = chromium.start(folder)
        lab = lab_notebooks.Lab(folder / "lab")
        try:
            names = arguments.only or CELLS
            found = {f"{name}, JupyterLab": _in_lab(lab_notebooks, lab, browser, name, arguments.keys) for name in names}
            if not arguments.only:
                found["canvas, page"] = _on_page(browser, folder / "page.html", arguments.keys)
        finally:
            lab.end()
            browser.driver.quit()
    version = f"Chromium {browser.driver.capabilities['browserVersion']}"
    results: dict[str, Any] = {"machine": f"{machine('cpu')}, {version}", "keys": arguments.keys, "found": found}
    peer = found.get("interact, JupyterLab", {}).get("ms", np.nan)
    print(f"{'ms from a key':22}{'painted':>9}{'at most':>9}{'frame':>9}   interact takes so many times as long")
    for what, row in found.items():
        row["interact / it"] = round(peer / row["ms"], 1)
        print(f"{what:22}{row['ms']:9.1f}{row['most ms']:9.1f}{row['frame ms']:9.1f}{row['interact / it']:7.1f}")
    if not arguments.only:
        write(arguments.out, results)


def picture() -> Scene:
    """The picture as a scene."""
    numbers: dict[str, Any] = {}
    exec(NUMBERS, numbers)
    rate = Control("rate", "learning rate", [float(rate) for rate in numbers["rates"]], 20)
    plane = [Heatmap(numbers["height"], [-2, 2], [-1.5, 1.5], scale="log", label="height")]
    plane += [Line(x, y, by=("rate",), style=k, name=f"path {k}") for k, (x, y) in enumerate(numbers["paths"])]
    steps = np.arange(201)
    curves = [Line(steps, loss, by=("rate",), style=k, name=f"path {k}") for k, loss in enumerate(numbers["losses"])]
    panels = [
        Panel(Axis("x", -2, 2), Axis("y", -1.5, 1.5), plane),
        Panel(Axis("step", 0, 200), Axis("loss", 0.01, 10, "log"), curves, column=1),
    ]
    return Scene(panels, controls=[rate], width=9, height=4.5)


def _in_lab(lab_notebooks: Any, lab: Any, browser: Any, name: str, keys: int) -> dict[str, Any]:
    here = f"import sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})\nimport notebook_browser"
    book = lab_notebooks.Notebook(lab, browser, name, [NUMBERS, here, CELLS[name]])
    book.run_all()
    found = _timed(browser, name, keys)
    book.close()
    return found


def _on_page(browser: Any, file: Path, keys: int) -> dict[str, Any]:
    file.write_text(page(picture().to_bytes(), "A sweep", "8 paths"), encoding="utf-8")
    browser.driver.get(file.as_uri())
    return _timed(browser, "canvas", keys)


def _timed(browser: Any, name: str, keys: int) -> dict[str, Any]:
    handle = browser.find(".tristep input[type=range]" if name == "canvas" else ".noUi-handle")

    def shown() -> str:
        return str(browser.digest() if name == "canvas" else browser.image(".jp-OutputArea-output img"))

    before = browser.until(shown, "a picture")
    browser.run(PROBE)
    painted, frames = [], []
    for k in range(keys + 1):
        browser.keys(handle, RIGHT)  # to pictures that have not been asked for
        times = browser.driver.execute_async_script(SETTLED)
        after = shown()
        if after in ("", before):
            raise RuntimeError(f"{name}: key {k + 1} has not changed the picture")
        before = after
        if k:  # the first one also pays for what is made once
            painted.append(round(times[0], 2))
            frames.append(round(times[1], 2))
    return {
        "ms": round(statistics.median(painted), 2),
        "most ms": max(painted),
        "frame ms": round(statistics.median(frames), 2),
        "every": painted,
        "every frame": frames,
    }


def _browser_tools() -> tuple[Any, Any]:
    """The browser and the JupyterLab of the tests."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers" / "viz"))
    return importlib.import_module("chromium"), importlib.import_module("lab_notebooks")


if __name__ == "__main__":
    main()

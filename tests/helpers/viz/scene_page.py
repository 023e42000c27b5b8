"""A page with the functions of the joined scene module in its window, on which tests show scenes."""

import base64
from pathlib import Path
from typing import Any

import numpy as np
from chromium import Browser, rgb

from tristep.viz.render.joined import scene_module

MOST_LETTERS = 8  # pixels of one colour below each other that letters may have; a frame has more


# Notes of everything that is written on a canvas where it is, and whether a part of that is cut off.
RECORDED = """
window.written = new Map();
const plain = CanvasRenderingContext2D.prototype;
for (const name of ["fillText", "clip", "rect", "restore", "setTransform"]) {
  const before = plain[name];
  plain[name] = function (...given) {
    if (name === "rect") this.lastRect = given;
    if (name === "clip") this.clipped = this.lastRect;
    if (name === "restore") this.clipped = null;
    if (name === "setTransform") written.delete(this.canvas); // with which a canvas is begun anew
    if (name === "fillText") {
      const { width, fontBoundingBoxAscent: up, fontBoundingBoxDescent: down } = this.measureText(given[0]);
      const left = given[1] - width * { left: 0, start: 0, center: 0.5, right: 1, end: 1 }[this.textAlign];
      const unit = window.devicePixelRatio;
      const corners = [[left, given[2] - 0.6 * up], [left + width, given[2]]].map(([x, y]) => {
        const at = this.getTransform().transformPoint(new DOMPoint(x, y));
        return [at.x / unit, at.y / unit];
      });
      const [xs, ys] = [0, 1].map((k) => corners.map((corner) => corner[k]).sort((a, b) => a - b));
      const [x, y, wide, high] = this.clipped ?? [];
      const clip = this.clipped && [x, y, x + wide, y + high];
      if (!written.has(this.canvas)) written.set(this.canvas, []);
      written.get(this.canvas).push([given[0], xs[0], ys[0], xs[1], ys[1], clip]);
    }
    return before.apply(this, given);
  };
}
"""


# As the page was when it was loaded, but for functions of the browser that a test has replaced: `later` is of one of these.
AS_NEW = """
if (!window.mount || window.later !== undefined || arguments[0]) return false;
window.shown?.destroy();
document.activeElement.blur();
getSelection().removeAllRanges();
for (const each of [document.body, document.getElementById("stage")])
  for (const { name } of [...each.attributes]) if (name !== "id") each.removeAttribute(name);
Object.assign(window, { shown: null, sent: [] });
written.clear();
scrollTo(0, 0);
return true;
"""


class Stage:
    """A page with the module's functions in its window, on which scenes are shown; it is loaded anew only if it must be."""

    def __init__(self, browser: Browser, folder: Path, anew: bool = False) -> None:
        self.browser = browser
        self.frame, self.pointer, self.click = browser.frame, browser.pointer, browser.click
        if browser.run(AS_NEW, anew):
            return
        browser.driver.get("about:blank")
        browser.complaints()  # of the page that was left
        names = "decode, part, drawn, number, words, ticks, mount"
        file = folder / "stage.html"
        file.write_text(
            '<!DOCTYPE html><meta charset="utf-8"><link rel="icon" href="data:,">'
            "<style>#stage { width: var(--wide) }</style>"
            '<body><div id="stage"></div>'
            f'<script type="module">{scene_module()}\nObject.assign(window, {{ {names} }});\n'
            "window.bytes = (text) => Uint8Array.from(atob(text), (sign) => sign.charCodeAt(0)).buffer;\n"
            f"window.sent = [];\n{RECORDED}</script>",
            encoding="utf-8",
        )
        browser.driver.get(file.as_uri())

    def show(self, scene: Any, remote: bool = True, theme: str = "auto") -> None:
        """Show a scene at its own size, in 96 pixels an inch, unless a test has given the stage a width."""
        self.browser.run(
            "document.getElementById('stage').style.setProperty('--wide', `${arguments[3]}px`);"
            "window.sent = []; window.shown?.destroy(); written.clear();"
            "window.shown = mount(document.getElementById('stage'), bytes(arguments[0]),"
            " {send: arguments[1] ? (message) => sent.push(message) : null, theme: arguments[2]})",
            base64.b64encode(scene.to_bytes()).decode(),
            remote,
            theme,
            96 * scene.width + 20,
        )

    def update(self, scene: Any) -> None:
        self.browser.run("shown.update(bytes(arguments[0]))", base64.b64encode(scene.to_bytes()).decode())
        self.browser.pixels()  # it is shown from the next frame on

    def sent(self, kind: str) -> list[dict[str, Any]]:
        """What Python would have been told of this kind."""
        return [message for message in self.browser.run("return window.sent") if message["kind"] == kind]

    def frames(self, quiet: str = "#63666f") -> list[tuple[int, int, int, int]]:
        """Left, top, right and bottom of all panels that have a frame, from the first row on: corners of two long lines."""
        ink = (self.browser.pixels() == rgb(quiet)).all(axis=2)
        across = {int(y): _runs(ink[y], 40) for y in np.flatnonzero(ink.sum(axis=1) >= 40)}
        found = []
        for x in np.flatnonzero(ink.sum(axis=0) >= MOST_LETTERS):
            for top, end in _runs(ink[:, x], MOST_LETTERS):
                rows = [(y, run) for y, runs in across.items() if top <= y <= end for run in runs]
                lines = [(y, right) for y, (left, right) in rows if left <= x <= left + 6]
                if lines and not any(abs(x - other[0]) < 3 and abs(lines[-1][0] - other[3]) < 3 for other in found):
                    found.append((int(x), top, lines[-1][1], lines[-1][0]))
        return sorted(found, key=lambda frame: (frame[1], frame[0]))

    def written(self) -> list[list[Any]]:
        """What is written on the picture: words, left, top, right, bottom, and what it is clipped to, or None."""
        self.browser.pixels()
        return list(self.browser.run("return [...written.values()].flat()"))

    def words_are_whole(self) -> list[list[Any]]:
        """What is written; no word is cut by the edge of the picture or of its panel."""
        high, wide, _ = self.browser.pixels().shape
        ratio = self.browser.run("return devicePixelRatio")
        found = self.written()
        for words, left, top, right, bottom, clip in found:
            x0, y0, x1, y1 = clip or (0, 0, wide / ratio, high / ratio)
            assert left >= x0 - 1, words
            assert top >= y0 - 1, words
            assert right <= x1 + 1, words
            assert bottom <= y1 + 1, words
        return found

    def place(self, scene: Any, x: float, y: float) -> tuple[float, float]:
        """The pixel of a place in the panel of a scene of one, by arithmetic on its axes."""
        left, top, right, bottom = self.frame()
        panel = scene.panels[0]
        across, up = _share(panel.x, x), _share(panel.y, y)
        return left + across * (right - left), bottom - up * (bottom - top)


def _share(axis: Any, value: float) -> float:
    low, high = axis.low, axis.high
    if axis.scale == "log":
        low, high, value = np.log10([low, high, value])
    share = (value - low) / (high - low)
    return float(share if axis.upwards else 1 - share)


def _runs(row: np.ndarray, least: int) -> list[tuple[int, int]]:
    """Where at least so many of these are true, without a gap: from, to."""
    ends = np.flatnonzero(np.diff(np.concatenate([[False], row, [False]]).astype(np.int8))).reshape(-1, 2)
    return [(int(a), int(b) - 1) for a, b in ends if b - a >= least]

"""A page with the functions of scene.js in its window, on which tests show scenes."""

import base64
from pathlib import Path
from typing import Any

import numpy as np
from chromium import Browser

MODULE = Path(__file__).parents[1] / "viz" / "render" / "static" / "scene.js"


class Stage:
    """A page with the module's functions in its window, on which scenes are shown."""

    def __init__(self, browser: Browser, folder: Path) -> None:
        self.browser = browser
        self.frame, self.pointer, self.click = browser.frame, browser.pointer, browser.click
        names = "decode, part, drawn, number, words, ticks, mount"
        module = MODULE.read_text(encoding="utf-8")
        file = folder / "stage.html"
        file.write_text(
            '<!DOCTYPE html><meta charset="utf-8"><link rel="icon" href="data:,"><body><div id="stage"></div>'
            f'<script type="module">{module}\nObject.assign(window, {{ {names} }});\n'
            "window.bytes = (text) => Uint8Array.from(atob(text), (sign) => sign.charCodeAt(0)).buffer;\n"
            "window.sent = [];\n</script>",
            encoding="utf-8",
        )
        browser.driver.get(file.as_uri())

    def show(self, scene: Any, remote: bool = True, theme: str = "auto") -> None:
        self.browser.run(
            "window.sent = []; window.shown?.destroy();"
            "window.shown = mount(document.getElementById('stage'), bytes(arguments[0]),"
            " {send: arguments[1] ? (message) => sent.push(message) : null, theme: arguments[2]})",
            base64.b64encode(scene.to_bytes()).decode(),
            remote,
            theme,
        )

    def update(self, scene: Any) -> None:
        self.browser.run("shown.update(bytes(arguments[0]))", base64.b64encode(scene.to_bytes()).decode())
        self.browser.pixels()  # it is shown from the next frame on

    def sent(self, kind: str) -> list[dict[str, Any]]:
        """What Python would have been told of this kind."""
        return [message for message in self.browser.run("return window.sent") if message["kind"] == kind]

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

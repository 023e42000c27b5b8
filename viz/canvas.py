"""A scene in a browser: as a widget of a notebook, and as a page that needs neither kernel nor network.

Both are drawn by static/scene.js. This file hands it the scene and takes what a person does with it.
"""

from __future__ import annotations

import base64
import html
import math
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anywidget
import traitlets

__all__ = ["SceneWidget", "page"]

MODULE = Path(__file__).parent / "static" / "scene.js"
Event = dict[str, Any]

# What a browser may tell, and which fields it then has.
EVENTS: dict[str, dict[str, type]] = {
    "control": {"name": str, "index": int},  # a control was set to its value of this number
    "button": {"name": str},
    "click": {"name": str, "x": float, "y": float},  # a place in a panel; name is Click.event
    "drag": {"name": str, "number": int, "x": float, "y": float},  # name is Points.drag
}


class SceneWidget(anywidget.AnyWidget):
    """A scene on a canvas in a notebook's cell.

    Setting `payload` shows another scene in its place; controls that are in both, with as many values, stay as they are set.

    Args:
        payload: of `Scene.to_bytes`.
        on_event: called with what a person does, a dictionary: "kind" is "control" (with "name" and "index"), "button"
            ("name"), "click" ("name", "x", "y") or "drag" ("name", "number", "x", "y"). None: nobody is told.

    Example:
        >>> from tristep.viz.canvas import SceneWidget
        >>> from tristep.viz.scene import Axis, Line, Panel, Scene
        >>> scene = Scene([Panel(Axis("step", 0, 2), Axis("loss", 0, 1), [Line([0, 1, 2], [1, 0.5, 0.2])])])
        >>> widget = SceneWidget(scene.to_bytes(), print)
        >>> widget.payload[4:16]
        b'{"format":1,'
    """

    _esm = MODULE
    payload = traitlets.Bytes().tag(sync=True)

    def __init__(self, payload: bytes, on_event: Callable[[Event], object] | None = None) -> None:
        super().__init__(payload=payload)
        self._on_event = on_event
        self.on_msg(self._receive)

    def _receive(self, _widget: object, message: object, _buffers: object) -> None:
        event = checked(message)
        if event is not None and self._on_event is not None:
            self._on_event(event)


def checked(message: object) -> Event | None:
    """The event that a message from a browser tells, with nothing else in it; None where it is not one of ours."""
    if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
        return None
    asked = EVENTS.get(message["kind"])
    if asked is None:
        return None
    event: Event = {"kind": message["kind"]}
    for name, kind in asked.items():
        value = message.get(name)
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)  # JSON does not tell 1.0 from 1
        if not isinstance(value, kind) or isinstance(value, bool):
            return None
        if (isinstance(value, float) and not math.isfinite(value)) or (isinstance(value, int) and value < 0):
            return None
        event[name] = value
    return event


def page(payload: bytes, title: str, description: str) -> str:
    """A file that shows a scene by itself, opened from a disk or sent by mail: HTML with the module and the scene in it.

    Args:
        payload: of `Scene.to_bytes`.
        title: of the page.
        description: the picture in words, for where scripts do not run.
    """
    data = base64.b64encode(zlib.compress(payload, 9)).decode("ascii")
    return PAGE.format(
        title=html.escape(title),
        description=html.escape(description).replace("\n", "<br>"),
        data=data,
        module=MODULE.read_text(encoding="utf-8"),
    )


# The policy keeps the page from the network. Base64 has no "<", so that nothing in a scene ends the script that holds it.
PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'">
<title>{title}</title>
<link rel="icon" href="data:,">
<style>
body {{ margin: 24px; background: light-dark(#ffffff, #111318); }}
body > * {{ max-width: 1180px; margin: 0 auto; font-family: system-ui, sans-serif; }}
</style>
</head>
<body>
<main id="scene"><noscript>{description}</noscript></main>
<script type="text/plain" id="payload">{data}</script>
<script type="module">
{module}
const packed = Uint8Array.from(atob(document.getElementById("payload").textContent), (sign) => sign.charCodeAt(0));
const unpacked = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
mount(document.getElementById("scene"), await new Response(unpacked).arrayBuffer());
</script>
</body>
</html>
"""

"""A scene in a browser: as a widget of a notebook, and as a page that needs neither kernel nor network.

Both are drawn by static/scene.js. This file hands it the scene and takes what a person does with it.
"""

from __future__ import annotations

import base64
import html
import json
import math
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anywidget
import numpy as np
import traitlets

from ..style import THEMES

__all__ = ["Event", "SceneWidget", "checked", "page"]

MODULE = Path(__file__).parent / "static" / "scene.js"
Event = dict[str, Any]
# What a browser may tell, and which fields it then has.
EVENTS: dict[str, dict[str, type]] = {
    "control": {"name": str, "index": int},  # a control was set to its value of this number
    "button": {"name": str},
    "click": {"name": str, "x": float, "y": float},  # a place in a panel; name is Click.event
    "drag": {"name": str, "number": int, "x": float, "y": float},  # name is Points.drag
    "entry": {"name": str, "text": str},  # typed into the field of a control
    "seen": {},  # a page has got what there is to be seen; told every few seconds at most
}


class SceneWidget(anywidget.AnyWidget):
    """A scene on a canvas in a notebook's cell.

    Setting `payload` shows another scene in its place; controls that are in both, with as many values, stay as they are set.

    Args:
        payload: of `Scene.to_bytes`.
        on_event: called with what a person does, a dictionary: "kind" is "control" (with "name" and "index"), "button"
            ("name"), "click" ("name", "x", "y"), "drag" ("name", "number", "x", "y") or "entry" ("name", "text"); and with
            what a page does, "seen". None: nobody is told.

    Example:
        >>> from tristep.viz.render.canvas import SceneWidget
        >>> from tristep.viz.scene import Axis, Line, Panel, Scene
        >>> scene = Scene([Panel(Axis("step", 0, 2), Axis("loss", 0, 1), [Line([0, 1, 2], [1, 0.5, 0.2])])])
        >>> widget = SceneWidget(scene.to_bytes(), print)
        >>> widget.payload[4:16]
        b'{"format":1,'
    """

    _esm = MODULE
    payload = traitlets.Bytes().tag(sync=True)
    pictured = traitlets.Bool(False).tag(sync=True)  # whether the output that follows is a picture of this, to be hidden

    def __init__(self, payload: bytes, on_event: Callable[[Event], object] | None = None) -> None:
        super().__init__(payload=payload)
        self._on_event = on_event
        self.on_msg(self._receive)

    def _receive(self, _widget: object, message: object, _buffers: object) -> None:
        event = checked(message)
        if event is not None:
            try:
                if self._on_event is not None:
                    self._on_event(event)
            finally:
                if event["kind"] != "seen":
                    self.send({"kind": "answered"})  # it would tell of silence otherwise


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

    Numbers are kept to five digits where that cannot be seen: not in arrays of integers, nor where all are close to
    one another. A sweep of 41 rates, 8 optimizers and 200 steps then takes 0.2 to 0.3 MB.

    Args:
        payload: of `Scene.to_bytes`.
        title: of the page.
        description: the picture in words, for where scripts do not run.
    """
    data = base64.b64encode(zlib.compress(_packed(payload), 9)).decode("ascii")
    return PAGE.format(
        title=html.escape(title),
        description=html.escape(description).replace("\n", "<br>"),
        light=THEMES["light"].background,
        dark=THEMES["dark"].background,
        data=data,
        module=MODULE.read_text(encoding="utf-8"),
    )


def _packed(payload: bytes) -> bytes:
    """The scene for a page: `unpack` of scene.js is the way back.

    Of its arrays every word of 4 bytes is stored as the difference from the one before, and of these first all first bytes,
    then all second bytes, and so on. Numbers of a curve differ in their last bytes only, and so most of what there is to
    compress is the same byte over and over.
    """
    (length,) = struct.unpack_from("<I", payload)
    start = -(-(4 + length) // 8) * 8
    body = bytearray(payload[start:])
    for each in json.loads(payload[4 : 4 + length])["arrays"]:
        if each["dtype"] == "float32":
            array = np.frombuffer(body, np.float32, math.prod(each["shape"]), each["start"])
            array[...] = _rounded(array)
    words = np.frombuffer(body, np.uint32)
    steps = np.diff(words, prepend=np.uint32(0))  # modulo 2**32
    return payload[:start] + steps.view(np.uint8).reshape(-1, 4).T.tobytes()


def _rounded(array: np.ndarray) -> np.ndarray:
    """float32 [n] with the last 7 of 23 binary places zero, if that moves none by a 50,000th of what they span."""
    there = np.isfinite(array)
    finite = array[there]
    if not finite.size or (finite == np.round(finite)).all():
        return array
    near = ((array.view(np.uint32) + 64) & ~np.uint32(127)).view(np.float32)
    near = np.where(there & np.isfinite(near), near, array)
    moved = np.abs(near[there].astype(np.float64) - finite).max()
    return near if moved < np.ptp(finite.astype(np.float64)) / 50_000 else array


# The policy keeps the page from the network. Base64 has no "<", so that nothing in a scene ends the script that holds it.
PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy"
      content="default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:">
<title>{title}</title>
<link rel="icon" href="data:,">
<style>
body {{ margin: 16px; background: light-dark({light}, {dark}); font-family: system-ui, sans-serif; }}
.tristep {{ margin: 0 auto; }}
</style>
</head>
<body>
<main id="scene"><noscript>{description}</noscript></main>
<script type="text/plain" id="payload">{data}</script>
<script type="module">
{module}
const packed = Uint8Array.from(atob(document.getElementById("payload").textContent), (sign) => sign.charCodeAt(0));
const unpacked = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
mount(document.getElementById("scene"), unpack(await new Response(unpacked).arrayBuffer()));
</script>
</body>
</html>
"""

"""Show a scene in a browser: as a notebook widget, and as a page that needs neither kernel nor network.

The modules in static/ draw both. This file passes them the scene, and receives the user's events.
"""

from __future__ import annotations

import base64
import html
import json
import math
import struct
import zlib
from collections.abc import Callable
from typing import Any

import anywidget
import numpy as np
import traitlets

from ..scene import Scene
from ..style import THEMES
from .joined import scene_module

__all__ = ["Event", "SceneWidget", "checked", "page"]

Event = dict[str, Any]
# The kinds of events that a browser sends, and their fields.
EVENTS: dict[str, dict[str, type]] = {
    "control": {"name": str, "index": int},  # a control was set to its value of this index
    "button": {"name": str},
    "click": {"name": str, "x": float, "y": float},  # a position in a panel; name is Click.event
    "drag": {"name": str, "number": int, "x": float, "y": float},  # point `number` was moved; name is Points.drag
    "entry": {"name": str, "text": str},  # a text was typed into a control's field
    "runs": {"shown": list},  # the runs of these numbers are drawn
    "waiting": {},  # nothing has come for a while from a scene that changes by itself; asks for an answer only
}


class SceneWidget(anywidget.AnyWidget):
    """A scene on a canvas in the output of a notebook's cell; `on_event` is called with each event, see `EVENTS`.

    Set `payload`, from `Scene.to_bytes`, to show another scene. A control keeps its value if the new scene has a control of
    the same name with as many values.
    """

    _esm = scene_module()
    payload = traitlets.Bytes().tag(sync=True)
    pictured = traitlets.Bool(False).tag(
        sync=True
    )  # whether the next output is a static picture of this scene, to be hidden

    def __init__(self, payload: bytes, on_event: Callable[[Event], object] | None = None) -> None:
        super().__init__(payload=payload)
        self._on_event = on_event
        self.on_msg(self._receive)

    def show(self, scene: Scene, live: bool = False) -> None:
        """`live` makes no difference here, where axes follow the data at no cost."""
        self.payload = scene.to_bytes()

    def hide_picture(self) -> None:
        """Hide the next output of the cell, a static picture of this scene, while the widget is visible."""
        self.pictured = True

    def _receive(self, _widget: object, message: object, _buffers: object) -> None:
        event = checked(message)
        if event is not None:
            try:
                if self._on_event is not None and event["kind"] != "waiting":
                    self._on_event(event)
            finally:
                self.send({"kind": "answered"})  # without it the page says that Python does not answer


def checked(message: object) -> Event | None:
    """Validate a message from a browser. Returns the event, with the fields of its kind only; None if it is invalid."""
    if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
        return None
    event_fields = EVENTS.get(message["kind"])
    if event_fields is None:
        return None
    event: Event = {"kind": message["kind"]}
    for name, kind in event_fields.items():
        value = message.get(name)
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)  # JSON writes 1.0 as 1
        if not isinstance(value, kind) or isinstance(value, bool):
            return None
        if isinstance(value, list) and not all(type(each) is int and each >= 0 for each in value):
            return None
        if (isinstance(value, float) and not math.isfinite(value)) or (isinstance(value, int) and value < 0):
            return None
        event[name] = value
    return event


def page(payload: bytes, title: str, description: str) -> str:
    """Return an HTML page that shows a scene by itself, also from a disk: it contains the script and the data.

    In a frame it posts {tristepHeight: pixels} to the page around whenever its height changes. `description` is shown where
    scripts do not run.

    Arrays are rounded to five digits where that is not visible: integers are not, nor are values that lie close together. A
    sweep of 41 rates, 8 optimizers and 200 steps takes 0.2 to 0.3 MB.
    """
    data = base64.b64encode(zlib.compress(_packed(payload), 9)).decode("ascii")
    return PAGE.format(
        title=html.escape(title),
        description=html.escape(description).replace("\n", "<br>"),
        light=THEMES["light"].background,
        dark=THEMES["dark"].background,
        data=data,
        module=scene_module(),
    )


def _packed(payload: bytes) -> bytes:
    """Rearrange the arrays of a payload so that they compress well; `unpack` in static/data.js is the inverse.

    Each 4-byte word is replaced by its difference to the word before. Then all first bytes of the words are stored, then all
    second bytes, and so on. Neighbours on a curve differ in their last bytes only, so most bytes repeat.
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
    """Round float32 [n] to 16 bits of mantissa, unless that moves a value by 1/50,000 of their range."""
    is_finite = np.isfinite(array)
    finite = array[is_finite]
    if not finite.size or (finite == np.round(finite)).all():
        return array
    near = ((array.view(np.uint32) + 64) & ~np.uint32(127)).view(np.float32)
    near = np.where(is_finite & np.isfinite(near), near, array)
    moved = np.abs(near[is_finite].astype(np.float64) - finite).max()
    return near if moved < np.ptp(finite.astype(np.float64)) / 50_000 else array


# The policy blocks the network. Base64 has no "<", so no scene can end the script element that holds it.
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
if (parent !== window) {{ // in a frame, whose page may make it as high as this is
  const all = document.documentElement;
  const tell = () => parent.postMessage({{ tristepHeight: Math.ceil(all.getBoundingClientRect().height) }}, "*");
  new ResizeObserver(tell).observe(all);
}}
</script>
</body>
</html>
"""

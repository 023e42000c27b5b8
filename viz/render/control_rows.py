"""Core ipywidgets for the controls of a scene."""

from __future__ import annotations

import html
import math
from collections.abc import Callable
from typing import Any

import ipywidgets

from ..scene import Control, Listing, RunTable, Scene, State

__all__ = ["ControlRows", "close_all", "structure_of"]


class ControlRows:
    """Widgets for the controls, buttons, clicks, listings and the message of a scene.

    `select` is called with the name of a control and its new index, `tell` with all other events, in the form of
    `render.canvas.EVENTS`.

    Attributes:
        widgets: rows of widgets for controls, buttons and clicks.
        about: widgets for listings and the message.
        selectors: the widget that chooses each control's value, by the control's name.
        links: links between widgets that work in the browser, without Python.
    """

    def __init__(
        self, scene: Scene, state: State, select: Callable[[str, int | None], None], tell: Callable[[dict[str, Any]], object]
    ) -> None:
        self.widgets: list[Any] = []
        self.selectors: dict[str, Any] = {}
        self.links: list[Any] = []
        self._select, self._tell = select, tell
        self._fields: dict[str, Any] = {}
        self._filling = False
        self.widgets += [self._row(control, state) for control in scene.controls if _is_set(control)]
        if scene.runs is not None:
            self.widgets.append(self._runs(scene.runs))
        self._buttons = [self._button(button.name, button.label) for button in scene.buttons]
        if self._buttons:
            self.widgets.append(ipywidgets.HBox(self._buttons, layout=ipywidgets.Layout(flex_flow="row wrap")))
        for panel in scene.panels:
            if panel.click is not None and panel.click.event is not None:
                self.widgets.append(self._place(panel.click.event, panel.x.label, panel.y.label))
        self._listings = [_Listing(listing) for listing in scene.listings]
        self._messages = [ipywidgets.HTML()] if _says(scene) else []
        self.about = [*self._listings, *self._messages]
        self.fill(scene, state)

    def fill(self, scene: Scene, state: State) -> None:
        """Update the widgets for another scene, which must have the same `structure_of`."""
        for button, widget in zip(scene.buttons, self._buttons, strict=True):
            widget.disabled = not button.enabled
        for listing, shown in zip(scene.listings, self._listings, strict=True):
            shown.fill(listing)
        self._filling = True
        for control in scene.controls:
            if control.name in self._fields:
                self._fields[control.name].value = control.words(state[control.name])
        self._filling = False
        for shown in self._messages:
            text = "<br>".join(html.escape(each) for each in (*scene.notes, scene.message) if each)
            shown.value = f"<span role='status'>{text}</span>" if text else ""

    def close(self) -> None:
        for link in self.links:
            link.close()
        for widget in (*self.widgets, *self.about):
            close_all(widget)

    def _button(self, name: str, label: str) -> Any:
        button = ipywidgets.Button(description=label, tooltip=label, layout=ipywidgets.Layout(width="auto"))
        button.on_click(lambda _: self._tell({"kind": "button", "name": name}))
        return button

    def _field(self, control: Control, **look: Any) -> Any:
        field = ipywidgets.Text(continuous_update=False, tooltip=control.label, **look)
        self._fields[control.name] = field

        def typed(change: Any) -> None:
            if not self._filling:
                self._tell({"kind": "entry", "name": control.name, "text": change["new"]})

        field.observe(typed, names="value")
        return field

    def _row(self, control: Control, state: State) -> Any:
        if control.kind == "text":
            return self._field(control, description=control.label, style={"description_width": "initial"})
        options = [(control.words(i), i) for i in range(len(control.values))]
        look: dict[str, Any] = {
            "options": options,
            "index": state[control.name],
            "description": control.label,
            "tooltip": control.label,
            "style": {"description_width": "initial"},
        }
        if control.kind == "choice":
            selector = ipywidgets.Dropdown(**look)
        else:
            # Without it, a long label leaves no room for the slider.
            width = f"calc({12 if control.typed else 24}em + {len(control.label)}ch)"
            layout = ipywidgets.Layout(width=width, max_width="100%")
            selector = ipywidgets.SelectionSlider(**look, layout=layout, readout=not control.typed)
        self.selectors[control.name] = selector
        selector.observe(lambda change: self._select(control.name, change["new"]), names="index")
        if control.typed:
            field = self._field(control, layout=ipywidgets.Layout(width="6em"))
            return ipywidgets.HBox([selector, field], layout=ipywidgets.Layout(flex_flow="row nowrap", max_width="100%"))
        if control.kind != "play":
            return selector
        n = len(control.values)
        each = 1000 * control.seconds / n
        step = max(1, math.ceil(50 / each))  # browsers do not keep up with more than 20 steps a second
        play = ipywidgets.Play(
            min=0, max=n - 1, value=state[control.name], step=step, interval=round(each * step), tooltip=control.label
        )
        self.links.append(ipywidgets.jslink((play, "value"), (selector, "index")))
        return ipywidgets.HBox([play, selector], layout=ipywidgets.Layout(flex_flow="row wrap"))

    def _runs(self, runs: RunTable) -> Any:
        shown, label = tuple(runs.shown), f"runs, {len(runs.names)}"
        entries = [f"{name}: {_in_words(runs, k)}" for k, name in enumerate(runs.names)]
        options = list(zip(entries, range(len(entries)), strict=True))
        layout = ipywidgets.Layout(width="100%", max_width="40em")
        several = ipywidgets.SelectMultiple(
            options=options, value=shown, rows=min(len(entries), 12), description=label, tooltip=label, layout=layout
        )
        several.observe(lambda change: self._tell({"kind": "runs", "shown": sorted(change["new"])}), names="value")
        return several

    def _place(self, event: str, x_label: str, y_label: str) -> Any:
        """Make two number fields and a button that do what a click does."""
        style = {"description_width": "initial"}
        layout = ipywidgets.Layout(width="12em")
        x, y = (
            ipywidgets.FloatText(description=each, tooltip=each, style=style, layout=layout) for each in (x_label, y_label)
        )
        chosen = ipywidgets.Button(description=event, tooltip=event)
        chosen.on_click(lambda _: self._tell({"kind": "click", "name": event, "x": x.value, "y": y.value}))
        return ipywidgets.HBox([x, y, chosen], layout=ipywidgets.Layout(flex_flow="row wrap"))


class _Listing(ipywidgets.Accordion):
    """A `Listing` as text that can be copied and folded."""

    def __init__(self, listing: Listing) -> None:
        self._text = ipywidgets.Textarea(disabled=True, layout=ipywidgets.Layout(width="100%"))
        super().__init__([self._text], selected_index=None, layout=ipywidgets.Layout(width="100%"))
        self.set_title(0, listing.title)
        self.fill(listing)

    def fill(self, listing: Listing) -> None:
        self._text.value, self._text.rows = listing.text, listing.text.count("\n") + 1


def _in_words(runs: RunTable, k: int) -> str:
    each = ((heading, values[k]) for heading, values in runs.columns.items())
    return ", ".join(f"{heading} {value if isinstance(value, str) else format(value, '.4g')}" for heading, value in each)


def structure_of(scene: Scene) -> list[Any]:
    """Return what determines a scene's widgets: scenes with equal structures can share them."""
    controls = [
        # A field's text may change, so it is no part of the structure.
        (c.name, c.label, [] if c.kind == "text" else [c.words(i) for i in range(len(c.values))], c.kind, c.remote, c.typed)
        for c in scene.controls
    ]
    clicks = [(panel.click.event, panel.x.label, panel.y.label) for panel in scene.panels if panel.click is not None]
    listings = [listing.title for listing in scene.listings]
    runs = None if scene.runs is None else scene.runs.names
    return [controls, [(button.name, button.label) for button in scene.buttons], clicks, listings, _says(scene), runs]


def _says(scene: Scene) -> bool:
    """Return whether the scene has notes or can get a message, and so needs a widget for them."""
    return bool(scene.notes or scene.message) or any(control.typed or control.kind == "text" for control in scene.controls)


def close_all(widget: Any) -> None:
    for child in getattr(widget, "children", ()):
        close_all(child)
    widget.close()


def _is_set(control: Control) -> bool:
    """Return whether the control offers a choice."""
    return len(control.values) > 1 or control.kind == "text" or control.typed

// Legends: that of the picture, and those of panels that have their own.

import { keysOf, named, valueAt } from "./data.js";
import { focusOf, make, svg } from "./elements.js";
import { BEFORE, keysHeight } from "./layout.js";
import { colourOf, dashesOf } from "./pen.js";

/** @import { Picture } from "./picture.js" */
/** @import { Shown } from "./shown.js" */

const LOOKS = ["kind", "name", "style", "alpha", "marker", "head"]; // fields of a layer that its entry depends on

export class Legends {
  /**
   * @param {Shown} shown
   * @param {Picture} picture
   */
  constructor(shown, picture) {
    this.shown = shown;
    this.picture = picture;
    this.boxes = [box("tristep-legend", "Legend: what is shown")]; // that of the picture, and those of panels
    /** @type {WeakMap<HTMLElement, string>} what they were filled for */
    this.filledFor = new WeakMap();
    /** @type {Set<string>} controls whose values are in a legend */
    this.controls = new Set();
  }

  get element() {
    return this.boxes[0];
  }

  fill() {
    const { scene } = this.shown;
    const own = scene.panels.filter(({ legend }) => legend !== null);
    while (this.boxes.length > own.length + 1) this.boxes.pop()?.remove();
    while (this.boxes.length < own.length + 1) {
      this.boxes.push(box("tristep-legend tristep-own", "Legend of a panel"));
      this.picture.element.append(this.boxes[this.boxes.length - 1]);
    }
    this.controls = new Set(own.length ? scene.controls.map(({ name }) => name) : []);
    const panels = [scene.panels.filter(({ legend }) => legend === null), ...own.map((panel) => [panel])];
    panels.forEach((several, k) => this.fillBox(this.boxes[k], several));
  }

  /** @type {(box: HTMLElement, panels: Panel[]) => void} */
  fillBox(box, panels) {
    const { scene, state, hidden } = this.shown;
    const layers = keysOf(scene, panels);
    const wanted = JSON.stringify([this.picture.theme, scene.style]) + JSON.stringify(layers, LOOKS);
    if (wanted !== this.filledFor.get(box)) { // else it is left alone, for somebody may be about to release a button
      const focused = [...box.children].findIndex((child) => child === focusOf(box));
      box.replaceChildren(...layers.map((layer) => this.entry(layer)));
      box.hidden = !layers.length;
      box.style.display = layers.length ? "" : "none";
      if (focused >= 0) /** @type {HTMLElement | undefined} */ (box.children[focused])?.focus();
      this.filledFor.set(box, wanted);
    }
    layers.forEach((layer, k) => {
      if (layer.legend_by !== null) this.controls.add(layer.legend_by);
      const button = /** @type {HTMLElement} */ (box.children[k]);
      button.setAttribute("aria-pressed", String(!hidden.has(layer.name)));
      const [, name, value] = button.children;
      name.textContent = named(scene, layer, state);
      value.textContent = valueAt(scene, layer, state, panels[0].legend);
      button.title = `${name.textContent} ${value.textContent}`.trim();
    });
  }

  /**
   * Put legends of panels above these.
   * @param {Pen} pen
   */
  place(pen) {
    this.picture.places.filter(({ panel }) => panel.legend !== null).forEach(({ panel, frame }, k) => {
      const titled = panel.title ? 16 * pen.titleLines(panel, frame.width).length * pen.scale : 0;
      const { style } = this.boxes[k + 1];
      const left = Math.max(0, frame.x - BEFORE);
      [style.left, style.width] = [`${left}px`, `${frame.x + frame.width + 12 - left}px`];
      style.top = `${frame.y - 5 - titled - keysHeight(panel, frame.width)}px`;
    });
  }

  /** @param {Layer} layer */
  entry(layer) {
    const { scene, hidden } = this.shown;
    const button = make("button");
    button.append(swatch(layer, scene.style, this.picture.theme), make("span", "", layer.name), make("b"));
    button.type = "button";
    button.addEventListener("click", () => {
      if (!hidden.delete(layer.name)) hidden.add(layer.name);
      this.fill();
      this.picture.changed({ back: true });
    });
    return button;
  }
}

/** @type {(name: string, label: string) => HTMLDivElement} */
function box(name, label) {
  const made = make("div", name);
  made.setAttribute("role", "group");
  made.setAttribute("aria-label", label);
  return made;
}

/**
 * How a layer looks, next to its name in the legend.
 * @type {(layer: Layer, style: Style, theme: Theme) => SVGElement}
 */
export function swatch(layer, style, theme) {
  const colour = layer.kind === "heatmap" ? `#${layer.colours[theme].slice(-6)}` : colourOf(style[theme], layer.style);
  const parts = [];
  if (layer.kind === "band" || layer.kind === "heatmap") {
    const opacity = layer.kind === "band" ? Math.max(0.25, layer.alpha) : 1;
    parts.push(svg("rect", { x: 1, y: 2, width: 32, height: 8, fill: colour, "fill-opacity": opacity }));
  } else if (layer.kind === "points") {
    const isRing = layer.marker === "ring";
    if (layer.marker === "cross") parts.push(svg("path", { d: "M9 2l8 8M17 2l-8 8", stroke: colour, "stroke-width": 2 }));
    else if (layer.marker === "star") parts.push(svg("path", { d: "M13 0l1.6 4 4.4.2-3.4 2.7 1.2 4.2-3.8-2.4-3.8 2.4 1.2-4.2L7 4.2 11.4 4z", fill: colour }));
    else parts.push(svg("circle", { cx: 13, cy: 6, r: 4, fill: isRing ? "none" : colour, stroke: colour, "stroke-width": isRing ? 2 : 0 }));
  } else if (layer.kind === "arrows") {
    parts.push(svg("path", { d: "M1 6h17", stroke: colour, "stroke-width": 2.4 }), svg("path", { d: "M17 1.5l8 4.5-8 4.5z", fill: colour }));
  } else {
    const width = layer.kind === "refline" ? 1.4 : 2.4;
    const dashes = dashesOf(style, layer.style).map((length) => length * width).join(" ");
    parts.push(svg("path", { d: "M1 6h32", stroke: colour, "stroke-width": width, "stroke-dasharray": dashes }));
    const { marker, head } = layer.kind === "line" ? layer : { marker: false, head: false };
    if (marker || head) parts.push(svg("circle", { cx: head && !marker ? 31 : 17, cy: 6, r: 3, fill: colour }));
  }
  return svg("svg", { width: 34, height: 12, viewBox: "0 0 34 12", "aria-hidden": "true" }, ...parts);
}

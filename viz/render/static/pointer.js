// What a person does with the picture itself, by a pointer or the keys: points, clicks, drags, zooms.

import { make } from "./elements.js";
import { lookAt, rectangle, said, spoken } from "./hit.js";
import { part } from "./data.js";

/** @import { Picture } from "./picture.js" */
/** @import { Python } from "./python.js" */
/** @import { Shown } from "./shown.js" */

/**
 * What a pointer changes of the view.
 * @typedef {object} Effects
 * @property {(name: string, index: number) => void} set a control
 * @property {(part: Zoomed | null, k: number) => void} zoom a panel
 * @property {(words: string) => void} say to those who do not see
 */

const DOUBLE_CLICK = 400; // milliseconds
const FAR = 5; // pixels from which a press is no click
const CLOSEST = 1e-10; // of an axis' numbers, how far its ends are apart at least
const GRIP = 14; // pixels from a point at which it can be held

/** @type {Record<string, [number, number] | undefined>} */
const ARROWS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };

export class Pointer {
  /**
   * @param {Shown} shown
   * @param {Picture} picture
   * @param {Python} python
   * @param {Effects} effects
   */
  constructor(shown, picture, python, effects) {
    this.shown = shown;
    this.picture = picture;
    this.python = python;
    this.effects = effects;
    this.readout = make("div", "tristep-readout");
    this.readout.hidden = true;
    /** @type {Grip | null} the point that is being moved */
    this.held = null;
    /** @type {Pressed | null} where a pointer went down */
    this.pressed = null;
    /** @type {ReturnType<typeof setTimeout> | undefined} */
    this.clickTimer = undefined;
    picture.element.append(this.readout);
    const { front } = picture;
    front.addEventListener("pointerdown", (event) => this.down(event));
    front.addEventListener("pointermove", (event) => (this.pressed ? this.drag(event, this.pressed) : this.hover(event)));
    front.addEventListener("pointerup", (event) => this.up(event));
    front.addEventListener("pointercancel", () => this.release());
    front.addEventListener("pointerleave", (event) => this.pressed || isTouch(event) || this.quiet());
    front.addEventListener("dblclick", (event) => this.doubleClick(event));
    front.addEventListener("keydown", (event) => this.key(event));
    front.addEventListener("blur", () => this.leave());
  }

  /**
   * Where an event is on the picture, which may be scaled by the page around.
   * @type {(event: MouseEvent) => [number, number]}
   */
  place({ clientX, clientY }) {
    const { front, width, height } = this.picture;
    const box = front.getBoundingClientRect();
    return [((clientX - box.left) * width) / box.width, ((clientY - box.top) * height) / box.height];
  }

  /** @param {PointerEvent} event */
  down(event) {
    const [x, y] = this.place(event);
    const k = this.picture.panelAt(x, y);
    if (k < 0) return this.quiet();
    if (event.button) return;
    this.picture.cursor = null;
    this.hold(this.grip(k, x, y));
    this.pressed = { k, x, y, far: false, pointer: event.pointerId };
    this.picture.front.setPointerCapture(event.pointerId);
    if (isTouch(event)) this.tellOf(k, x, y, { above: true });
  }

  /** @param {PointerEvent} event */
  hover(event) {
    const { front, places, pen } = this.picture;
    const [x, y] = this.place(event);
    const k = this.picture.panelAt(x, y);
    front.style.cursor = k >= 0 && this.grip(k, x, y) ? "grab" : k >= 0 && places[k].panel.click ? "crosshair" : "default";
    if (k < 0 || !pen) this.quiet();
    else this.tellOf(k, x, y);
  }

  /** @type {(event: PointerEvent, pressed: Pressed) => void} */
  drag(event, pressed) {
    const { picture } = this;
    const { k } = pressed;
    const [x, y] = this.place(event);
    pressed.far ||= Math.hypot(x - pressed.x, y - pressed.y) > FAR;
    if (this.held) {
      picture.front.style.cursor = "grabbing";
      this.move(this.held, x, y);
      this.tellOf(this.held.k, ...picture.within(this.held.k, x, y));
    } else if (pressed.far && picture.places[k].panel.click?.control) {
      this.click(k, ...picture.within(k, x, y));
    } else if (isTouch(event)) {
      this.tellOf(k, ...picture.within(k, x, y), { above: true }); // a finger reads values along a line, and zooms nothing
    } else if (pressed.far) {
      picture.selected = rectangle(picture.places[k], pressed, ...picture.within(k, x, y));
      this.quiet();
    }
  }

  /** @param {PointerEvent} event */
  up(event) {
    if (!this.pressed) return;
    const { picture } = this;
    const [x, y] = this.place(event);
    const { k, far } = this.pressed;
    clearTimeout(this.clickTimer);
    if (!this.held && !far) {
      const click = () => this.click(k, x, y);
      if (this.shown.zoomed[k]) this.clickTimer = setTimeout(click, DOUBLE_CLICK); // unless it is the first of a double click
      else click();
    }
    const { selected } = picture;
    const part = selected && selected.width > 8 && selected.height > 8 ? partOf(picture.places[k], selected) : null;
    if (part) this.effects.zoom(part, k);
    this.release();
    if (isTouch(event)) this.tellOf(k, ...picture.within(k, x, y), { above: true }); // what was read stays
  }

  release() {
    this.hold(null);
    this.pressed = this.picture.selected = null;
    this.quiet();
  }

  /** @param {MouseEvent} event */
  doubleClick(event) {
    const k = this.picture.panelAt(...this.place(event));
    if (k < 0 || !this.shown.zoomed[k]) return;
    clearTimeout(this.clickTimer);
    this.effects.zoom(null, k);
  }

  /** @param {KeyboardEvent} event */
  key(event) {
    const { picture } = this;
    const framed = picture.places.flatMap(({ panel }, k) => (panel.frame ? [k] : []));
    if (!framed.length || event.ctrlKey || event.metaKey || event.altKey) return;
    const way = ARROWS[event.key];
    if (event.key === "Escape") {
      this.leave();
      picture.front.blur();
      event.preventDefault();
      return;
    }
    if (way) {
      picture.cursor = picture.cursor ? this.moved(picture.cursor, way, event.shiftKey ? 0.1 : 0.02) : this.centre(framed[0]);
    } else if (event.key === "PageDown" || event.key === "PageUp") {
      const now = picture.cursor ? framed.indexOf(picture.cursor.k) : event.key === "PageDown" ? -1 : 0;
      picture.cursor = this.centre(framed[(now + (event.key === "PageDown" ? 1 : framed.length - 1)) % framed.length]);
      this.hold(null);
    } else if (event.key === "Enter" && picture.cursor) {
      const { k, x, y } = picture.cursor;
      if (this.held) this.hold(null);
      else {
        this.hold(this.grip(k, x, y));
        if (!this.held) this.click(k, x, y);
      }
    } else {
      return;
    }
    event.preventDefault();
    if (picture.cursor) this.tellOf(picture.cursor.k, picture.cursor.x, picture.cursor.y, { aloud: true });
  }

  /**
   * The cursor a step further, with the point that it holds.
   * @type {(cursor: Cursor, way: [number, number], step: number) => Cursor}
   */
  moved({ k, x, y }, [dx, dy], step) {
    const { frame } = this.picture.places[k];
    const to = this.picture.within(k, x + dx * step * frame.width, y + dy * step * frame.height);
    if (this.held) this.move(this.held, ...to);
    return { k, x: to[0], y: to[1] };
  }

  /** @param {number} k */
  centre(k) {
    const { frame } = this.picture.places[k];
    return { k, x: frame.x + frame.width / 2, y: frame.y + frame.height / 2 };
  }

  /**
   * Show the cursor at a value of x, in the first panel that has it.
   * @param {number} value
   */
  goTo(value) {
    const { front, places } = this.picture;
    const k = places.findIndex(({ panel: { frame, x } }) => frame && value >= x.low && value <= x.high);
    if (k < 0) return;
    front.focus();
    const cursor = { ...this.centre(k), x: places[k].x.at(value) };
    this.picture.cursor = cursor;
    this.tellOf(k, cursor.x, cursor.y, { aloud: true });
  }

  leave() {
    this.hold(null);
    this.picture.cursor = null;
    this.quiet();
  }

  /** @param {Grip | null} grip */
  hold(grip) {
    this.held = grip;
    this.picture.isHeld = grip !== null;
  }

  /**
   * The scene is another one: go on holding the same point, if there is one.
   * @param {Scene} before
   */
  replaced(before) {
    const { scene } = this.shown;
    if (this.held) {
      const { k, layer } = this.held;
      const other = scene.panels[k]?.layers[before.panels[k].layers.indexOf(layer)];
      this.hold(other?.kind === "points" && other.drag === layer.drag ? { ...this.held, layer: other } : null);
    }
    if (this.picture.places.length !== scene.panels.length) this.picture.cursor = this.picture.selected = this.pressed = null;
  }

  /**
   * A click, or Enter.
   * @type {(k: number, x: number, y: number) => void}
   */
  click(k, x, y) {
    const { panel, x: X, y: Y } = this.picture.places[k];
    if (!panel.click) return;
    const { control, other, along, event } = panel.click;
    if (event !== null) this.python.tell({ kind: "click", name: event, x: X.value(x), y: Y.value(y) });
    /** @type {[Direction, number][]} */
    const ways = along === "x" ? [[X, x], [Y, y]] : [[Y, y], [X, x]];
    if (control !== null) this.effects.set(control, this.nearest(control, ...ways[0]));
    if (other !== null) this.effects.set(other, this.nearest(other, ...ways[1]));
  }

  /**
   * The number of a control's value that is nearest to a place on an axis; words are numbered.
   * @type {(name: string, way: Direction, at: number) => number}
   */
  nearest(name, way, at) {
    const { values } = this.shown.control(name);
    const distances = values.map((value, index) => Math.abs(way.at(typeof value === "string" ? index : value) - at));
    return distances.indexOf(Math.min(...distances));
  }

  /**
   * The point here that can be moved.
   * @type {(k: number, x: number, y: number) => Grip | null}
   */
  grip(k, x, y) {
    if (!this.python.send) return null;
    const { panel, x: X, y: Y } = this.picture.places[k];
    /** @type {Grip | null} */
    let best = null;
    for (const layer of panel.layers) {
      if (layer.kind !== "points" || layer.drag === null || !this.shown.isDrawn(layer)) continue;
      const [xs, ys] = [part(layer, "x", this.shown.state), part(layer, "y", this.shown.state)];
      for (let number = 0; number < xs.length; number++) {
        const [vx, vy] = this.shown.placeOf(layer, number, xs, ys);
        const far = Math.hypot(X.at(vx) - x, Y.at(vy) - y);
        if (far < GRIP && (!best || far < best.far)) best = { k, layer, number, far };
      }
    }
    return best;
  }

  /** @type {(held: Grip, x: number, y: number) => void} */
  move({ k, layer, number }, x, y) {
    const { moved } = this.shown;
    const { x: X, y: Y } = this.picture.places[k];
    [x, y] = this.picture.within(k, x, y);
    const to = { x: X.value(x), y: Y.value(y) };
    moved.set(layer, { ...moved.get(layer), [number]: [to.x, to.y] });
    this.python.tell({ kind: "drag", name: layer.drag, number, ...to }, `drag ${layer.drag} ${number}`);
    this.picture.changed();
  }

  /**
   * Show what is here, `above` a finger; `aloud` also says it, and where nothing is, the place.
   * @type {(k: number, x: number, y: number, how?: { aloud?: boolean, above?: boolean }) => void}
   */
  tellOf(k, x, y, { aloud = false, above = false } = {}) {
    const { picture, readout } = this;
    const { pen } = picture;
    const place = picture.places[k];
    const found = lookAt(place, x, y, this.shown.look());
    picture.paintOver(found, place);
    const here = [spoken(place.panel.x, place.x.value(x), 0), spoken(place.panel.y, place.y.value(y), 0)];
    const words = found ? said(place, found) : aloud ? { title: "", lines: here } : null;
    readout.hidden = !words;
    if (!words) return;
    const parts = words.title ? [make("b", "", words.title)] : [];
    if (found && !found.cell && pen) {
      const colour = make("i");
      colour.style.background = pen.colour(found.layer.style);
      parts.unshift(colour);
    }
    readout.replaceChildren(...parts, make("div", "", words.lines.join("\n")));
    const { offsetWidth: wide, offsetHeight: high } = readout;
    const left = x + 14 + wide > picture.width ? Math.max(0, x - 14 - wide) : x + 14;
    const over = Math.max(0, y - (above ? 40 : 10) - high);
    const top = above || y + 14 + high > picture.height ? over : y + 14;
    readout.style.transform = `translate(${Math.round(left)}px, ${Math.round(top)}px)`;
    if (aloud) this.effects.say([words.title, ...words.lines].filter(Boolean).join(", "));
  }

  quiet() {
    this.readout.hidden = true;
    this.picture.paintOver();
  }

  destroy() {
    clearTimeout(this.clickTimer);
  }
}

/** @param {PointerEvent} event */
function isTouch({ pointerType }) {
  return pointerType === "touch";
}

/**
 * What a rectangle on a panel shows of it; null where the numbers have too few digits for a closer look.
 * @type {(place: Place, seen: Frame) => Zoomed | null}
 */
export function partOf({ panel, x: X, y: Y }, seen) {
  const x = between(panel.x, X, seen.x, seen.x + seen.width);
  const y = between(panel.y, Y, seen.y, seen.y + seen.height);
  return x && y && { x, y };
}

/** @type {(axis: Axis, way: Direction, from: number, to: number) => Axis | null} */
function between(axis, way, from, to) {
  const [low, high] = [way.value(from), way.value(to)].sort((a, b) => a - b);
  return high - low > CLOSEST * Math.max(Math.abs(low), Math.abs(high)) ? { ...axis, low, high } : null;
}

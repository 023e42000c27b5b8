// The picture: canvases of the size of the page, on which the panels are laid out and drawn, at most once a frame.

import { drawAxes, drawBar, drawFrame } from "./axes.js";
import { make } from "./elements.js";
import { inFrame } from "./hit.js";
import { contextOf } from "./images.js";
import { arrange, isNarrow, PIXELS_PER_INCH } from "./layout.js";
import { dot, drawLayer } from "./layers.js";
import { penFor } from "./pen.js";

/** @import { Shown } from "./shown.js" */

/**
 * What others do with a picture.
 * @typedef {object} Events
 * @property {() => void} beforeFrame a frame begins that was asked for
 * @property {(isHigher: boolean) => void} laidOut panels stand elsewhere, and perhaps the picture has another height
 * @property {() => void} painted
 */

export class Picture {
  /**
   * @param {Shown} shown
   * @param {Events} events
   */
  constructor(shown, events) {
    this.shown = shown;
    this.events = events;
    this.element = make("div", "tristep-picture");
    this.front = make("canvas");
    this.over = make("canvas");
    this.back = make("canvas"); // what no control changes; in no page
    this.front.tabIndex = 0;
    this.front.setAttribute("role", "img");
    this.over.setAttribute("aria-hidden", "true");
    this.element.append(this.front, this.over);

    /** @type {Place[]} of the panels on the canvas */
    this.places = [];
    this.width = 0;
    this.height = 0;
    this.ratio = 1; // pixels of the screen in one of the page
    this.most = Infinity; // pixels that it may be high
    /** @type {[number, number] | null} pixels of the screen, as only the browser knows them; null: not known yet */
    this.covered = null;
    /** @type {Theme} */
    this.theme = "light";
    /** @type {Pen | null} */
    this.pen = null;
    this.isBackOld = true;
    this.frameAsked = 0;

    /** @type {Cursor | null} that of the keyboard */
    this.cursor = null;
    /** @type {Frame | null} the rectangle of a zoom */
    this.selected = null;
    this.isHeld = false; // whether a point is being moved
  }

  /** Draw in the next frame; with `back`, also what no control changes. */
  changed({ back = false } = {}) {
    this.isBackOld ||= back;
    this.frameAsked ||= requestAnimationFrame(() => {
      this.frameAsked = 0;
      this.events.beforeFrame();
      this.paint();
    });
  }

  /**
   * Take another size, at once: a canvas that has got a new size is empty.
   * @type {(width: number, most: number, ratio: number) => void}
   */
  resize(width, most, ratio) {
    [this.width, this.most, this.ratio] = [width, most, ratio];
    this.covered = this.cursor = null;
    this.isBackOld = true;
    this.paint();
  }

  /**
   * Where a page is zoomed, a canvas may begin and end within a pixel of the screen: how many it has, only the browser knows.
   * @type {(wide: number, high: number) => void}
   */
  sharpen(wide, high) {
    const isNear = Math.abs(wide - this.width * this.ratio) < 2 && Math.abs(high - this.height * this.ratio) < 2;
    if (!isNear || (wide === this.front.width && high === this.front.height)) return;
    this.covered = [wide, high];
    this.isBackOld = true;
    this.paint();
  }

  /** Put the panels in their places, and give the canvases the pixels that these take. */
  layOut() {
    const { width, ratio } = this;
    const { scene, zoomed } = this.shown;
    const scale = isNarrow(scene, width) ? 1 : Math.max(0.9, Math.min(1, width / (scene.width * PIXELS_PER_INCH)));
    const pen = penFor(contextOf(this.back), scene.style, this.theme, scale, ratio);
    // While a point is held the panels do not move under the hand, however long the numbers next to them get.
    const { places, height } = arrange(scene, width, this.most, pen, zoomed, this.isHeld ? this.places[0].least : {});
    [this.pen, this.places] = [pen, places];
    const isHigher = height !== this.height;
    if (isHigher) {
      this.height = height;
      this.covered = this.cursor = null;
      for (const canvas of [this.front, this.over]) canvas.style.height = `${height}px`;
    }
    const [wide, high] = this.covered ?? [Math.round(width * ratio), Math.round(height * ratio)];
    for (const canvas of [this.front, this.over, this.back]) {
      if (canvas.width !== wide || canvas.height !== high) [canvas.width, canvas.height] = [wide, high];
    }
    this.events.laidOut(isHigher);
    return pen;
  }

  paint() {
    if (!this.width) return;
    if (this.isBackOld || !this.pen) this.paintBack(this.layOut());
    this.isBackOld = false;
    const context = contextOf(this.front);
    context.setTransform(1, 0, 0, 1, 0, 0);
    context.drawImage(this.back, 0, 0);
    context.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
    const pen = /** @type {Pen} */ (this.pen);
    const still = pen.context;
    pen.context = context;
    for (const place of this.places) {
      const moving = place.panel.layers.slice(place.still);
      if (!moving.length) continue;
      this.drawLayers(pen, place, moving, [...place.taken]);
      drawFrame(pen, place);
    }
    pen.context = still;
    this.paintOver();
    this.events.painted();
  }

  /** @param {Pen} pen */
  paintBack(pen) {
    pen.context.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
    pen.context.fillStyle = pen.background;
    pen.context.fillRect(0, 0, this.width + 1, this.height + 1);
    for (const place of this.places) {
      drawAxes(pen, place);
      place.bars.forEach((bar) => drawBar(pen, bar));
      this.drawLayers(pen, place, place.panel.layers.slice(0, place.still), place.taken);
      if (place.still === place.panel.layers.length) drawFrame(pen, place);
    }
  }

  /** @type {(pen: Pen, place: Place, layers: Layer[], taken: Box[]) => void} */
  drawLayers(pen, place, layers, taken) {
    const { context } = pen;
    const { x, y, width, height } = place.frame;
    for (const layer of layers) {
      if (!this.shown.isDrawn(layer)) continue;
      context.save();
      if (layer.kind !== "points" && layer.kind !== "text") { // these are whole also where they lie on the edge
        context.beginPath();
        context.rect(x, y - 1, width + 1, height + 2);
        context.clip();
      }
      drawLayer(pen, layer, place, this.shown.look(taken));
      context.restore();
    }
  }

  /**
   * The cursor, the rectangle of a zoom, and what is pointed at.
   * @type {(found?: Found | null, place?: Place | null) => void}
   */
  paintOver(found = null, place = null) {
    const { pen, cursor, selected } = this;
    const context = contextOf(this.over);
    context.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
    context.clearRect(0, 0, this.width, this.height);
    if (!pen) return;
    context.strokeStyle = pen.quiet;
    context.lineWidth = 1;
    if (cursor) {
      const { frame } = this.places[cursor.k];
      const [x, y] = [pen.crisp(cursor.x), pen.crisp(cursor.y)];
      context.setLineDash([4, 3]);
      context.beginPath();
      context.moveTo(x, frame.y);
      context.lineTo(x, frame.y + frame.height);
      context.moveTo(frame.x, y);
      context.lineTo(frame.x + frame.width, y);
      context.stroke();
      context.setLineDash([]);
    }
    if (selected) {
      const { x, y, width, height } = selected;
      context.fillStyle = pen.quiet;
      context.globalAlpha = 0.15;
      context.fillRect(x, y, width, height);
      context.globalAlpha = 1;
      context.strokeRect(pen.crisp(x), pen.crisp(y), width, height);
    }
    if (!found || !place) return;
    if (found.cell) {
      const [wide, high] = [Math.abs(found.cell.wide), Math.abs(found.cell.high)];
      if (Math.min(wide, high) < 5) return;
      context.strokeStyle = pen.ink;
      context.lineWidth = 1.5;
      context.strokeRect(found.px - wide / 2, found.py - high / 2, wide, high);
    } else if (inFrame(place, found.px, found.py)) {
      context.fillStyle = pen.colour(found.layer.style);
      dot({ ...pen, context }, found.px, found.py, 4.5, true);
    }
  }

  /**
   * The number of the panel with axes at a place; -1: none.
   * @type {(x: number, y: number) => number}
   */
  panelAt(x, y) {
    return this.places.findIndex((place) => place.panel.frame && inFrame(place, x, y));
  }

  /**
   * The place in a panel's frame that is nearest to this one.
   * @type {(k: number, x: number, y: number) => [number, number]}
   */
  within(k, x, y) {
    const { frame } = this.places[k];
    return [Math.max(frame.x, Math.min(frame.x + frame.width, x)), Math.max(frame.y, Math.min(frame.y + frame.height, y))];
  }

  destroy() {
    cancelAnimationFrame(this.frameAsked);
  }
}

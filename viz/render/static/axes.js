// Axes: titles, grids, ticks, labels and colour bars.

import { blank, contextOf, palette } from "./images.js";
import { direction } from "./layout.js";
import { minus } from "./numbers.js";
import { shortened } from "./pen.js";

/** @type {(pen: Pen, place: Place) => void} */
export function drawAxes(pen, { panel, frame, edge, x, y, xTicks, yTicks }) {
  const { context, scale } = pen;
  const { x: left, y: top, width, height } = frame;
  const [right, bottom] = [left + width, top + height];
  context.textBaseline = "alphabetic";
  if (panel.title) {
    const lines = pen.titleLines(panel, width);
    context.fillStyle = pen.ink;
    context.textAlign = "left";
    lines.forEach((line, k) => context.fillText(line, left, top - (9 + 16 * (lines.length - 1 - k)) * scale));
  }
  if (!panel.frame) return;
  context.lineWidth = 1;
  context.setLineDash([]);
  context.strokeStyle = pen.grid;
  if (!panel.layers.some(({ kind }) => kind === "heatmap")) {
    context.beginPath();
    for (const { value } of xTicks.major) {
      const at = pen.crisp(x.at(value));
      context.moveTo(at, top);
      context.lineTo(at, bottom);
    }
    for (const { value } of yTicks.major) {
      const at = pen.crisp(y.at(value));
      context.moveTo(left, at);
      context.lineTo(right, at);
    }
    context.stroke();
  }
  context.fillStyle = pen.quiet;
  context.textAlign = "center";
  for (const tick of xTicks.major) drawTick(pen, tick, x.at(tick.value) - pen.tickWidth(tick) / 2, bottom + 7 + 10 * scale);
  for (const tick of yTicks.major) drawTick(pen, tick, left - 8 - pen.tickWidth(tick), y.at(tick.value) + 4 * scale);
  context.fillStyle = pen.ink;
  pen.font(11.5);
  context.textAlign = "center";
  if (panel.x.label) context.fillText(shortened(context, panel.x.label, width), left + width / 2, bottom + 7 + 28 * scale);
  if (panel.y.label) sideways(pen, panel.y.label, left - edge + 12 * scale, top + height / 2, height + 16);
}

/**
 * The frame's two lines and small ticks, above what is drawn in it.
 * @type {(pen: Pen, place: Place) => void}
 */
export function drawFrame(pen, { panel, frame, x, y, xTicks, yTicks }) {
  if (!panel.frame) return;
  const { context } = pen;
  const { x: left, y: top, width, height } = frame;
  const [edge, base] = [pen.crisp(left) - 0.5, pen.crisp(top + height) - 0.5];
  context.fillStyle = pen.quiet; // rectangles: their edges are exact
  context.fillRect(edge, top, 1, base + 1 - top);
  context.fillRect(edge, base, left + width - edge, 1);
  for (const [value, length] of lengths(xTicks)) context.fillRect(pen.crisp(x.at(value)) - 0.5, base, 1, length + 1);
  for (const [value, length] of lengths(yTicks)) context.fillRect(edge - length, pen.crisp(y.at(value)) - 0.5, length, 1);
}

/**
 * Values at which an axis has a small tick, with its length in pixels.
 * @param {Ticks} ticks
 */
function lengths({ major, minor }) {
  return [...major.map(({ value }) => [value, 4]), ...minor.map((value) => [value, 2])];
}

/** @type {(pen: Pen, tick: Tick, x: number, y: number) => void} */
function drawTick(pen, { words, power }, x, y) {
  const { context } = pen;
  pen.font(11);
  context.textAlign = "left";
  context.fillText(words, x, y);
  if (power === undefined) return;
  const width = context.measureText(words).width;
  pen.font(8.5);
  context.fillText(minus(String(power)), x + width + 1, y - 4.5 * pen.scale);
}

/** @type {(pen: Pen, words: string, x: number, y: number, room: number) => void} */
function sideways(pen, words, x, y, room) {
  const { context } = pen;
  context.save();
  context.translate(x, y);
  context.rotate(-Math.PI / 2);
  context.textAlign = "center";
  context.fillText(shortened(context, words, room), 0, 0);
  context.restore();
}

/** @type {(pen: Pen, bar: Bar) => void} */
export function drawBar(pen, bar) {
  const { context, scale } = pen;
  const { layer, x, y, width, height } = bar;
  context.save();
  context.textAlign = "left";
  context.fillStyle = pen.ink;
  pen.font(11.5);
  sideways(pen, layer.label, x + width + 8 + bar.words + 15 * scale, y + height / 2, height + 16);
  const up = direction(bar.axis, y + height, y);
  context.fillStyle = pen.quiet;
  for (const tick of bar.ticks.major) drawTick(pen, tick, x + width + 6, up.at(tick.value) + 4 * scale);
  context.imageSmoothingEnabled = false;
  context.drawImage(gradient(pen, layer), x, y, width, height);
  context.strokeStyle = pen.grid; // an end may be as light as the background
  context.lineWidth = 1;
  context.strokeRect(x - 0.5, y - 0.5, width + 1, height + 1);
  context.restore();
}

/** @type {(pen: Pen, layer: HeatmapLayer) => HTMLCanvasElement} */
function gradient(pen, layer) {
  const table = palette(pen, layer).reverse();
  const canvas = blank(1, table.length);
  const pixels = new ImageData(1, table.length);
  new Uint32Array(pixels.data.buffer).set(table);
  contextOf(canvas).putImageData(pixels, 0, 0);
  return canvas;
}

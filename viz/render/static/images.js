// Images of heatmaps.

import { part } from "./data.js";

/** @type {(width: number, height: number) => HTMLCanvasElement} */
export function blank(width, height) {
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [width, height];
  return canvas;
}

/** @param {HTMLCanvasElement} canvas */
export function contextOf(canvas) {
  return /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
}

/**
 * The colours of an image as words of pixels.
 * @type {(pen: Pen, layer: HeatmapLayer) => Uint32Array}
 */
export function palette(pen, layer) {
  return Uint32Array.from(layer.colours[pen.theme].match(/.{6}/g) ?? [], (hex) => {
    const value = parseInt(hex, 16);
    return ((255 << 24) | ((value & 255) << 16) | (value & 0xff00) | (value >> 16)) >>> 0; // as a little-endian word holds it
  });
}

/**
 * Cells of a map along one axis that are seen, in `n` groups of neighbours: cells from `from` up to, but without, `to`.
 *
 * @typedef {{ from: number, to: number, n: number }} Span
 */

/**
 * The cells that are seen of `count` that lie between two places, with no more groups than there are pixels.
 * @type {(count: number, start: number, end: number, low: number, high: number, ratio: number) => Span}
 */
export function spanOf(count, start, end, low, high, ratio) {
  const size = (end - start) / count; // of a cell; negative on an axis that goes the other way
  const edges = [(low - start) / size, (high - start) / size].sort((a, b) => a - b);
  const from = Math.max(0, Math.min(count - 1, Math.floor(edges[0])));
  const to = Math.max(from + 1, Math.min(count, Math.ceil(edges[1])));
  return { from, to, n: Math.max(1, Math.min(to - from, Math.ceil((to - from) * Math.abs(size) * ratio))) };
}

/**
 * A group of colours as one: the mean of those that are seen, as thin as the share of those that are not.
 * @type {(reds: number, greens: number, blues: number, seen: number, all: number) => number}
 */
function mean(reds, greens, blues, seen, all) {
  const share = (/** @type {number} */ sum) => Math.round(sum / seen);
  return ((Math.round((255 * seen) / all) << 24) | (share(blues) << 16) | (share(greens) << 8) | share(reds)) >>> 0;
}

/** @type {WeakMap<HeatmapLayer, { canvas: HTMLCanvasElement, key: string }>} the last cells that were coloured, and for what */
const pictures = new WeakMap();

/** @type {(pen: Pen, layer: HeatmapLayer, state: State, across: Span, up: Span) => HTMLCanvasElement} */
export function coloured(pen, layer, state, across, up) {
  const values = part(layer, "values", state);
  const key = JSON.stringify([values.byteOffset, pen.theme, across, up]);
  const known = pictures.get(layer);
  if (known?.key === key) return known.canvas;
  const columns = layer.values.shape[layer.values.shape.length - 1];
  const pixels = new ImageData(across.n, up.n);
  const out = new Uint32Array(pixels.data.buffer); // zero: not seen
  const table = palette(pen, layer);
  const log = layer.scale === "log";
  const [low, high] = log ? layer.limits.map(Math.log10) : layer.limits;
  const unit = table.length / (high - low);
  const colourOf = (/** @type {number} */ at) => {
    const value = log ? Math.log10(values[at]) : values[at];
    return Number.isFinite(value) ? table[Math.max(0, Math.min(table.length - 1, Math.floor((value - low) * unit)))] : 0;
  };
  const edge = (/** @type {Span} */ { from, to, n }, /** @type {number} */ k) => from + Math.floor((k * (to - from)) / n);
  for (let i = 0; i < up.n; i++) {
    const [bottom, top] = [edge(up, i), edge(up, i + 1)];
    for (let j = 0; j < across.n; j++) {
      const [left, right] = [edge(across, j), edge(across, j + 1)];
      if (right - left === 1 && top - bottom === 1) {
        out[i * across.n + j] = colourOf(bottom * columns + left);
        continue;
      }
      let [reds, greens, blues, seen] = [0, 0, 0, 0];
      for (let row = bottom; row < top; row++) {
        for (let column = left; column < right; column++) {
          const colour = colourOf(row * columns + column);
          if (!colour) continue;
          reds += colour & 255;
          greens += (colour >> 8) & 255;
          blues += (colour >> 16) & 255;
          seen++;
        }
      }
      if (seen) out[i * across.n + j] = mean(reds, greens, blues, seen, (right - left) * (top - bottom));
    }
  }
  const canvas = known?.canvas ?? blank(across.n, up.n);
  if (canvas.width !== across.n || canvas.height !== up.n) [canvas.width, canvas.height] = [across.n, up.n];
  contextOf(canvas).putImageData(pixels, 0, 0);
  pictures.set(layer, { canvas, key });
  return canvas;
}

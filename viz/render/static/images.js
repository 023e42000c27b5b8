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

const pictures = new WeakMap(); // by layer: the last cells that were coloured, and for what

/** @type {(pen: Pen, layer: HeatmapLayer, state: State) => HTMLCanvasElement} */
export function coloured(pen, layer, state) {
  const values = part(layer, "values", state);
  const known = pictures.get(layer);
  if (known && known.start === values.byteOffset && known.theme === pen.theme) return known.canvas;
  const [rows, columns] = layer.values.shape.slice(-2);
  const canvas = known?.canvas ?? blank(columns, rows);
  const pixels = new ImageData(columns, rows);
  const out = new Uint32Array(pixels.data.buffer); // zero: not seen
  const table = palette(pen, layer);
  const log = layer.scale === "log";
  const [low, high] = log ? layer.limits.map(Math.log10) : layer.limits;
  const unit = table.length / (high - low);
  for (let k = 0; k < values.length; k++) {
    const value = log ? Math.log10(values[k]) : values[k];
    if (Number.isFinite(value)) out[k] = table[Math.max(0, Math.min(table.length - 1, Math.floor((value - low) * unit)))];
  }
  contextOf(canvas).putImageData(pixels, 0, 0);
  pictures.set(layer, { canvas, start: values.byteOffset, theme: pen.theme });
  return canvas;
}

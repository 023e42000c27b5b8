// What lies under the pointer, and what is said of it.

import { drawn, part } from "./data.js";
import { number } from "./numbers.js";

const REACH = 22; // pixels from a line at which it is pointed at

/**
 * @type {(x: number, y: number, x0: number, y0: number, x1: number, y1: number) => { x: number, y: number, far: number }}
 */
function nearestOnSegment(x, y, x0, y0, x1, y1) {
  const [dx, dy] = [x1 - x0, y1 - y0];
  const share = dx || dy ? Math.max(0, Math.min(1, ((x - x0) * dx + (y - y0) * dy) / (dx * dx + dy * dy))) : 0;
  const at = { x: x0 + share * dx, y: y0 + share * dy };
  return { ...at, far: Math.hypot(x - at.x, y - at.y) };
}

/**
 * The point of a draggable or spoken-of layer, or of a line, nearest to a place; else the image's cell; else null.
 * @type {(place: Place, x: number, y: number, look: Look) => Found | null}
 */
export function lookAt(place, x, y, look) {
  /** @type {Found | null} */
  let best = null;
  /** @type {Found | null} */
  let cell = null;
  for (const layer of place.panel.layers) {
    if (!look.isDrawn(layer)) continue;
    if (layer.kind === "heatmap") cell = cellAt(place, layer, x, y, look) ?? cell;
    let found = null;
    if (layer.kind === "points" && (layer.words.length || layer.drag !== null)) found = nearestPoint(place, layer, x, y, look);
    if (layer.kind === "line") found = nearestOnLine(place, layer, x, y, look);
    if (found && (!best || found.far < best.far)) best = found;
  }
  return best ?? cell;
}

/** @type {(place: Place, layer: PointsLayer, x: number, y: number, look: Look) => Found | null} */
function nearestPoint(place, layer, x, y, { state, moved }) {
  const [xs, ys] = [part(layer, "x", state), part(layer, "y", state)];
  /** @type {Found | null} */
  let best = null;
  for (let k = 0; k < xs.length; k++) {
    const [vx, vy] = moved.get(layer)?.[k] ?? [xs[k], ys[k]];
    const [px, py] = [place.x.at(vx), place.y.at(vy)];
    const far = Math.hypot(px - x, py - y) - 8; // points before lines
    if (far < 4 && (!best || far < best.far)) best = { layer, far, vx, vy, px, py, title: layer.words[k] || layer.name };
  }
  return best;
}

/** @type {(place: Place, layer: LineLayer, x: number, y: number, look: Look) => Found | null} */
function nearestOnLine(place, layer, x, y, { scene, state }) {
  const [xs, ys, n] = [part(layer, "x", state), part(layer, "y", state), drawn(scene, layer, state)];
  /** @type {Found | null} */
  let best = null;
  let [px, py] = [NaN, NaN];
  for (let k = 0; k < n; k++) {
    const [qx, qy] = [place.x.at(xs[k]), place.y.at(ys[k])];
    const from = Number.isFinite(px + py) ? k - 1 : k;
    const near = nearestOnSegment(x, y, from < k ? px : qx, from < k ? py : qy, qx, qy);
    if (near.far < REACH && (!best || near.far < best.far)) {
      const at = from < k && Math.hypot(near.x - px, near.y - py) < Math.hypot(near.x - qx, near.y - qy) ? from : k;
      const [vx, vy] = [xs[at], ys[at]];
      best = { layer, far: near.far, vx, vy, px: place.x.at(vx), py: place.y.at(vy), title: layer.name };
      // Where points are far apart, it is the line between them that is pointed at.
      const between = { px: near.x, py: near.y, vx: place.x.value(near.x), vy: place.y.value(near.y) };
      if (Math.hypot(best.px - near.x, best.py - near.y) >= REACH) best = { ...best, ...between };
    }
    [px, py] = [qx, qy];
  }
  return best;
}

/** @type {(place: Place, layer: HeatmapLayer, x: number, y: number, look: Look) => Found | null} */
function cellAt(place, layer, x, y, { state }) {
  const [rows, columns] = layer.values.shape.slice(-2);
  const [ends, heights] = [part(layer, "x", state), part(layer, "y", state)];
  const [x0, x1, y0, y1] = [place.x.at(ends[0]), place.x.at(ends[1]), place.y.at(heights[0]), place.y.at(heights[1])];
  const [column, row] = [Math.floor(((x - x0) / (x1 - x0)) * columns), Math.floor(((y - y0) / (y1 - y0)) * rows)];
  if (column < 0 || column >= columns || row < 0 || row >= rows) return null;
  const value = part(layer, "values", state)[row * columns + column];
  const [wide, high] = [(x1 - x0) / columns, (y1 - y0) / rows];
  const [px, py] = [x0 + (column + 0.5) * wide, y0 + (row + 0.5) * high];
  const says = `${layer.label ? `${layer.label} ` : ""}${number(value)}`;
  return { layer, far: 0, px, py, vx: place.x.value(px), vy: place.y.value(py), cell: { wide, high }, title: layer.name, says };
}

/**
 * The value of a coordinate in words: those of a given tick where there is one.
 * @type {(axis: Axis, value: number, reach: number) => string}
 */
export function spoken(axis, value, reach) {
  const tick = axis.ticks?.find(([at]) => Math.abs(at - value) <= reach);
  return `${axis.label ? `${axis.label} ` : ""}${tick ? tick[1] : number(value)}`;
}

/**
 * What is to be said of something found: a title and lines.
 * @type {(place: Place, found: Found) => Said}
 */
export function said(place, found) {
  const { layer, cell, vx, vy } = found;
  const half = (/** @type {Direction} */ way, /** @type {number | undefined} */ size) =>
    size && way.axis.scale === "linear" ? Math.abs(size / way.unit) / 2 : 0;
  const lines = [
    spoken(place.panel.x, vx, half(place.x, cell?.wide)),
    spoken(place.panel.y, vy, half(place.y, cell?.high)),
  ];
  if (layer.kind === "points" && layer.words.length) return { title: found.title, lines };
  return { title: found.says ?? found.title, lines };
}

/** @type {(place: Place, x: number, y: number) => boolean} */
export function inFrame({ frame }, x, y) {
  return x >= frame.x - 1 && x <= frame.x + frame.width + 1 && y >= frame.y - 1 && y <= frame.y + frame.height + 1;
}

/** @type {(place: Place, from: { x: number, y: number }, x: number, y: number) => Frame} */
export function rectangle({ panel, frame }, from, x, y) {
  const made = { x: Math.min(from.x, x), y: Math.min(from.y, y), width: Math.abs(x - from.x), height: Math.abs(y - from.y) };
  if (panel.equal) { // what is seen keeps the frame's proportions
    const share = Math.max(made.width / frame.width, made.height / frame.height);
    [made.width, made.height] = [share * frame.width, share * frame.height];
    made.x = Math.min(made.x, frame.x + frame.width - made.width);
    made.y = Math.min(made.y, frame.y + frame.height - made.height);
  }
  return made;
}

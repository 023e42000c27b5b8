// Where everything goes: the frames of the panels on a canvas, their axes, ticks and legends.

import { controlOf, keysOf } from "./data.js";
import { words } from "./numbers.js";
import { ticks } from "./ticks.js";

export const PIXELS_PER_INCH = 96;
const NARROW = 240; // pixels of a panel with its words, below which panels stand one below the other
const LEAST = 108; // pixels of a panel's height
const SHRUNK = 0.75; // of their heights that panels one below the other keep where they are to be lower
const GAP = 18; // pixels between panels with their words
export const KEY = 17; // pixels of a row of a panel's own legend
export const FINGER = 44; // pixels of what a finger is to meet
export const BEFORE = 44; // pixels that it begins left of the panel

/**
 * From values of an axis to pixels and back.
 * @type {(axis: Axis, from: number, to: number) => Direction}
 */
export function direction(axis, from, to) {
  if (!axis.upwards) [from, to] = [to, from];
  if (axis.scale === "log") {
    const low = Math.log10(axis.low);
    const unit = (to - from) / (Math.log10(axis.high) - low);
    return { axis, unit, at: (value) => from + (Math.log10(value) - low) * unit, value: (at) => 10 ** (low + (at - from) / unit) };
  }
  const unit = (to - from) / (axis.high - axis.low);
  return { axis, unit, at: (value) => from + (value - axis.low) * unit, value: (at) => axis.low + (at - from) / unit };
}

/**
 * The shares of the scene's columns and rows, and how large each panel is with its words, in inches, where all have room.
 * @type {(scene: Scene) => { across: number[], down: number[], sizes: Size[] }}
 */
function gridOf({ panels, widths, heights, width, height }) {
  const across = shares(widths, Math.max(...panels.map((panel) => panel.column + panel.columns)));
  const down = shares(heights, Math.max(...panels.map((panel) => panel.row + panel.rows)));
  const sizes = panels.map((panel) => ({
    width: width * total(across, panel.column, panel.columns),
    height: height * total(down, panel.row, panel.rows),
  }));
  return { across, down, sizes };
}

/**
 * Whether panels next to each other would be too narrow to be read on a canvas of this width.
 * @type {(scene: Scene, width: number) => boolean}
 */
export function isNarrow(scene, width) {
  const share = width / (scene.width * PIXELS_PER_INCH);
  return gridOf(scene).sizes.some((size, k) => {
    const full = size.width * PIXELS_PER_INCH;
    return scene.panels[k].frame && size.width < scene.width && share * full < Math.min(NARROW, 0.7 * full);
  });
}

/**
 * Whether a panel in which circles are round cannot leave the width that it has no use for to another column.
 * @type {(scene: Scene) => boolean}
 */
export function isStiff({ panels }) {
  const others = panels.filter(({ frame, equal }) => frame && !equal);
  return panels.some(({ equal, column }) => equal && (!others.length || others.some((each) => isIn(each, column))));
}

/** @type {(panel: Panel, column: number) => boolean} */
function isIn(panel, column) {
  return panel.column <= column && column < panel.column + panel.columns;
}

/**
 * The panels' frames and axes on a canvas of this width, and how high it is: {places, height}. They stand in the scene's
 * grid, at most so many pixels high, or one below the other where that would be too narrow, as near to that as they can be
 * read; frames in one column, or row, begin and end together.
 * @type {(scene: Scene, width: number, most: number, pen: Pen, zoomed: (Zoomed | null)[], least: Partial<Room>) =>
 *   { places: Place[], height: number }}
 */
export function arrange(scene, width, most, pen, zoomed, least) {
  const grid = gridOf(scene);
  let { across } = grid;
  let own = scene.panels;
  const high = Math.min(most, (scene.height * width) / scene.width);
  let outer = grid.down.map((share) => share * high); // heights of the rows
  if (isNarrow(scene, width)) {
    const order = own.map((_, k) => k).sort((a, b) => own[a].row - own[b].row || own[a].column - own[b].column);
    own = own.map((panel, k) => ({ ...panel, row: order.indexOf(k), rows: 1, column: 0, columns: 1 }));
    across = [1];
    outer = order.map((k) => grid.sizes[k].height * Math.min(PIXELS_PER_INCH, width / grid.sizes[k].width));
    const kept = Math.max(SHRUNK, Math.min(1, most / total(outer, 0, outer.length)));
    outer = outer.map((each) => each * kept);
    most = Infinity; // or each would be as low as in a grid of so little height
  }
  const panels = own.map((panel, k) => {
    const names = Math.max(60, 0.3 * width * total(across, panel.column, panel.columns)); // pixels that names of rows have
    return { ...panel, ...zoomed[k], keys: keyWidths(scene, panel, pen), names };
  });
  // How wide the numbers are depends on the size, and that on the numbers.
  const guessed = panels.map(({ row, rows, column, columns }) => ({
    width: width * total(across, column, columns) - 60,
    height: total(outer, row, rows) - 50,
  }));
  const first = fitted(panels, guessed, width, most, across, outer, pen, least);
  across = sparing(across, panels, first.frames);
  const { frames, room, height } = fitted(panels, first.frames, width, most, across, outer, pen, least);
  const places = panels.map((panel, k) => {
    const frame = panel.equal ? equal(panel, frames[k]) : frames[k];
    const moving = panel.layers.findIndex(isMoving);
    return {
      panel,
      frame,
      least: room,
      edge: room.left[panel.column], // how far the labels reach from it
      x: direction(panel.x, frame.x, frame.x + frame.width),
      y: direction(panel.y, frame.y + frame.height, frame.y),
      xTicks: xTicks(panel.x, frame.width, pen),
      yTicks: yTicks(panel, frame.height, pen),
      bars: bars(panel, frame, pen),
      cased: panel.layers.some((layer) => layer.kind === "heatmap" && layer.palette !== "quiet"),
      still: moving < 0 ? panel.layers.length : moving,
      taken: [],
    };
  });
  return { places, height };
}

/**
 * The panels' frames, with as much room around as their words take when frames have these sizes.
 * @type {(panels: PlacedPanel[], sizes: Size[], width: number, most: number, across: number[], outer: number[], pen: Pen,
 *   least: Partial<Room>) => { frames: Frame[], room: Room, height: number }}
 */
function fitted(panels, sizes, width, most, across, outer, pen, least) {
  const [columns, rows] = [across.length, outer.length];
  const edges = panels.map((panel, k) => margins(panel, sizes[k], pen));
  const room = {
    left: largest(columns, panels, edges, (panel) => panel.column, "left", least),
    right: largest(columns, panels, edges, (panel) => panel.column + panel.columns - 1, "right", least),
    top: largest(rows, panels, edges, (panel) => panel.row, "top", least),
    bottom: largest(rows, panels, edges, (panel) => panel.row + panel.rows - 1, "bottom", least),
  };
  const xs = tracks(split(width, across, room.left, room.right), room.left, room.right);
  // Words alone take all of the width where nothing stands next to them.
  const isAlone = (/** @type {Panel} */ { frame }) => columns === 1 && !frame;
  const wideOf = (/** @type {Panel} */ panel) =>
    isAlone(panel) ? width - 4 : xs[panel.column + panel.columns - 1].to - xs[panel.column].from;
  const high = split(total(outer, 0, rows), shares(outer, rows), room.top, room.bottom);
  for (const panel of panels) {
    if (panel.rows === 1) high[panel.row] = Math.max(high[panel.row], leastHeight(panel, wideOf(panel), most, pen));
  }
  const ys = tracks(high, room.top, room.bottom);
  const frames = panels.map((panel) => {
    const [x, y] = [isAlone(panel) ? 2 : xs[panel.column].from, ys[panel.row].from];
    return { x, y, width: Math.max(1, wideOf(panel)), height: Math.max(1, ys[panel.row + panel.rows - 1].to - y) };
  });
  return { frames, room, height: Math.round(ys[rows - 1].to + room.bottom[rows - 1]) };
}

/**
 * Whether a control, or a hand, changes a layer.
 * @param {Layer} layer
 */
function isMoving(layer) {
  return layer.by.length > 0 || (layer.kind === "line" && layer.upto !== null) || (layer.kind === "points" && layer.drag !== null);
}

/**
 * How high a panel has to be in which something is to be read: a curve, or all lines of a text.
 * @type {(panel: Panel, width: number, most: number, pen: Pen) => number}
 */
function leastHeight(panel, width, most, pen) {
  if (panel.frame) return Math.min(LEAST, most / 4);
  const high = panel.layers.map((layer) => {
    if (layer.kind !== "text") return 0;
    const { lines, step } = pen.fitted(layer, longest([layer.texts].flat(Infinity).map(String)), width);
    return lines.length * step;
  });
  return Math.max(0, ...high);
}

/** @param {string[]} texts */
function longest(texts) {
  return texts.reduce((a, b) => (b.length > a.length ? b : a), "");
}

/** @type {(given: number[], n: number) => number[]} */
function shares(given, n) {
  const sizes = Array.from({ length: n }, (_, k) => given[k] ?? 1);
  const sum = total(sizes, 0, n);
  return sizes.map((size) => size / sum);
}

/** @type {(sizes: number[], from: number, n: number) => number} */
function total(sizes, from, n) {
  return sizes.slice(from, from + n).reduce((sum, size) => sum + size, 0);
}

/**
 * Of each of n rows or columns the largest edge, at least what `least` says.
 * @type {(n: number, panels: Panel[], edges: Edges[], place: (panel: Panel) => number, side: Side, least: Partial<Room>) =>
 *   number[]}
 */
function largest(n, panels, edges, place, side, least) {
  const found = Array.from({ length: n }, (_, k) => least[side]?.[k] ?? 0);
  panels.forEach((panel, k) => (found[place(panel)] = Math.max(found[place(panel)], edges[k][side])));
  return found;
}

/**
 * What is left of a length to rows or columns of these shares.
 * @type {(length: number, sizes: number[], before: number[], after: number[]) => number[]}
 */
function split(length, sizes, before, after) {
  const n = sizes.length;
  const free = length - total(before, 0, n) - total(after, 0, n) - GAP * (n - 1);
  return sizes.map((size) => size * free);
}

/** @type {(sizes: number[], before: number[], after: number[]) => { from: number, to: number }[]} */
function tracks(sizes, before, after) {
  let at = 0;
  return sizes.map((size, k) => {
    const from = at + before[k];
    at = from + size + after[k] + GAP;
    return { from: Math.round(from), to: Math.round(from + size) };
  });
}

/**
 * The shares of the columns where one in which circles are round leaves the others what it cannot use.
 * @type {(across: number[], panels: Panel[], frames: Frame[]) => number[]}
 */
function sparing(across, panels, frames) {
  const used = across.map((_, column) => {
    const within = panels.map((panel, k) => {
      if (!panel.frame || !isIn(panel, column)) return 0;
      return panel.equal && panel.columns === 1 ? equal(panel, frames[k]).width / frames[k].width : 1;
    });
    return Math.max(...within) || 1;
  });
  const left = across.reduce((sum, share, column) => sum + share * (1 - used[column]), 0);
  const takers = across.reduce((sum, share, column) => sum + (used[column] === 1 ? share : 0), 0);
  return takers ? across.map((share, column) => (used[column] === 1 ? share * (1 + left / takers) : share * used[column])) : across;
}

/** @type {(panel: Panel, frame: Frame) => Frame} */
function equal(panel, { x, y, width, height }) {
  const reach = (/** @type {Axis} */ axis) => (axis.scale === "log" ? Math.log10(axis.high / axis.low) : axis.high - axis.low);
  const unit = Math.min(width / reach(panel.x), height / reach(panel.y));
  return { x, y, width: Math.round(unit * reach(panel.x)), height: Math.round(unit * reach(panel.y)) };
}

/**
 * Ticks along x, as many as leave room between their words.
 * @type {(axis: Axis, length: number, pen: Pen) => Ticks}
 */
function xTicks(axis, length, pen) {
  const short = (/** @type {Ticks} */ found) => pen.shortTicks(found, axis, Math.max(90, length / (axis.ticks?.length ?? 1) - 14));
  let found = short(ticks(axis, length, 46 * pen.scale));
  const widest = Math.max(0, ...found.major.map((tick) => pen.tickWidth(tick)));
  if (widest + 14 > 46 * pen.scale) found = short(ticks(axis, length, widest + 14));
  return found;
}

/**
 * Ticks along y; given ones, as names of rows, may stand line by line.
 * @type {(panel: PlacedPanel, height: number, pen: Pen) => Ticks}
 */
function yTicks({ y, names }, height, pen) {
  return pen.shortTicks(ticks(y, height, (y.ticks ? 15 : 34) * pen.scale), y, names);
}

/** @type {(panel: PlacedPanel, frame: Size, pen: Pen) => Edges} */
function margins(panel, { width, height }, pen) {
  const titled = panel.title ? 16 * pen.titleLines(panel, width).length * pen.scale : 0;
  const top = 8 + titled + keysHeight(panel, width);
  if (!panel.frame) return { left: 2, right: 2, top, bottom: 2 };
  const along = xTicks(panel.x, width, pen).major;
  const up = yTicks(panel, height, pen).major;
  const reach = direction(panel.x, 0, width);
  const past = (/** @type {(at: number) => number} */ side) =>
    Math.max(0, ...along.map((tick) => pen.tickWidth(tick) / 2 + side(reach.at(tick.value))));
  const bar = bars(panel, { x: 0, y: 0, width: 0, height }, pen);
  return {
    left: Math.max(Math.max(0, ...up.map(pen.tickWidth)) + 9 + (panel.y.label ? 19 * pen.scale : 2), past((at) => -at)),
    right: Math.max(6, past((at) => at - width), ...bar.map(({ x, reach }) => x + reach)),
    top,
    bottom: 7 + 13 * pen.scale + (panel.x.label ? 19 * pen.scale : 2),
  };
}

/**
 * How wide each entry of a panel's own legend may become, with its sample and the room between.
 * @type {(scene: Scene, panel: Panel, pen: Pen) => number[]}
 */
function keyWidths(scene, panel, pen) {
  if (panel.legend === null) return [];
  return keysOf(scene, [panel]).map((layer) => {
    const control = controlOf(scene, layer.legend_by);
    const value = control ? longest(control.values.map((_, k) => ` (${words(control, k)})`)) : "";
    return 40 + pen.nameWidth(layer.name + value + (panel.legend && layer.kind === "line" ? " 0.00012" : ""));
  });
}

/**
 * How high a panel's own legend is: one row, which scrolls, for fingers.
 * @type {(panel: PlacedPanel, width: number) => number}
 */
export function keysHeight({ keys }, width) {
  const isCoarse = globalThis.matchMedia?.("(pointer: coarse)").matches;
  return isCoarse && keys.length ? FINGER : KEY * rowsOf(keys, width + BEFORE).length;
}

/**
 * Widths in rows of at most so many pixels.
 * @type {(widths: number[], room: number) => number[][]}
 */
export function rowsOf(widths, room) {
  /** @type {number[][]} */
  const rows = [];
  let left = Infinity;
  for (const width of widths) {
    if (left + width > room) {
      rows.push([]);
      left = 0;
    }
    rows[rows.length - 1].push(width);
    left += width;
  }
  return rows;
}

/**
 * Colour bars of a panel's images, next to each other.
 * @type {(panel: Panel, frame: Frame, pen: Pen) => Bar[]}
 */
function bars(panel, frame, pen) {
  let x = frame.x + frame.width + 14;
  return panel.layers.flatMap((layer) => {
    if (layer.kind !== "heatmap" || !layer.label) return [];
    const [low, high] = layer.limits;
    const axis = { low, high, scale: layer.scale, ticks: null, upwards: true, label: layer.label };
    const shown = ticks(axis, frame.height, 34 * pen.scale);
    const words = Math.max(0, ...shown.major.map(pen.tickWidth));
    const reach = 11 + 8 + words + 23 * pen.scale;
    const bar = { layer, x, y: frame.y, width: 11, height: frame.height, ticks: shown, axis, words, reach };
    x += reach + 8;
    return [bar];
  });
}

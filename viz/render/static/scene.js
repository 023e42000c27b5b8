// Draws a Scene (viz/scene.py) on a canvas and lets a person change it. One module, the same in a notebook and in a page.
//
// It reads from the data to the picture: decode, numbers and ticks, where everything goes, how each layer is drawn,
// what lies under the pointer; then `mount`, which puts all this into an element, and what anywidget calls.
// Nothing here computes what is shown: whatever a control changes came with the scene.

const FORMAT = 1;
const TYPES = { uint8: Uint8Array, int16: Int16Array, int32: Int32Array, float32: Float32Array };
const PIXELS_PER_INCH = 96;
const PIXELS_PER_POINT = PIXELS_PER_INCH / 72;
const DOUBLE_CLICK = 400; // milliseconds
const MOST_LISTED = 24; // values of a choice; more are searched
const MOST_BELOW = 4; // controls below the picture; more are next to it where the page is this wide
const WIDE = 780; // pixels
const ROOM_OF_RUNS = 420; // pixels that a table of runs takes there
const LEAST_OF_RUNS = 150; // pixels of its rows' height
const ASIDE = 308; // pixels that they take there
const SEEN_SHARE = 0.78; // of the window's height that a view takes at most: the rest is the notebook's, and the cell's code
const LOWEST = 220; // pixels of a picture's height, however low the window
const STRETCH = 1.2; // how much wider than its own proportions a picture gets in which circles are round
const NARROW = 280; // pixels of a panel with its words, below which panels stand one below the other
const LEAST = 110; // pixels of a panel's height
const GAP = 18; // pixels between panels with their words
const KEY = 17; // pixels of a row of a panel's own legend
const BEFORE = 44; // pixels that it begins left of the panel
const PATIENCE = 3000; // milliseconds without an answer of Python until that is said
const QUIET = 5000; // milliseconds without a picture of something that changes by itself, until Python is asked for a sign
const FAMILY = 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, "Liberation Sans", sans-serif';
const FIXED = 'ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace';

// ---- Data

/** The scene in these bytes (ArrayBuffer, DataView or typed array); its arrays are {data, shape}, views of the bytes. */
export function decode(payload) {
  let bytes =
    payload instanceof ArrayBuffer
      ? new Uint8Array(payload)
      : new Uint8Array(payload.buffer, payload.byteOffset, payload.byteLength);
  if (bytes.byteOffset % 8) bytes = bytes.slice(); // typed arrays begin at multiples of their size
  const length = new DataView(bytes.buffer, bytes.byteOffset).getUint32(0, true);
  const scene = JSON.parse(new TextDecoder().decode(bytes.subarray(4, 4 + length)));
  if (scene.format !== FORMAT) {
    throw new Error(`a scene of format ${scene.format}; this is for format ${FORMAT}: reload the page after an update of tristep`);
  }
  const base = bytes.byteOffset + 8 * Math.ceil((4 + length) / 8);
  const arrays = scene.arrays.map(({ dtype, shape, start }) => ({
    data: new TYPES[dtype](bytes.buffer, base + start, product(shape)),
    shape,
  }));
  for (const panel of scene.panels) {
    for (const layer of panel.layers) {
      for (const [name, value] of Object.entries(layer)) {
        if (value !== null && typeof value === "object" && "array" in value) layer[name] = arrays[value.array];
      }
    }
  }
  return scene;
}

/** The bytes of a scene from those of a page, where viz/render/canvas.py has put them so that they are easily compressed. */
export function unpack(packed) {
  const bytes = new Uint8Array(packed);
  const length = new DataView(packed).getUint32(0, true);
  const start = 8 * Math.ceil((4 + length) / 8);
  const planes = bytes.slice(start); // the first byte of every word, then the second of every word, and so on
  const words = new Uint32Array(packed, start);
  const n = words.length;
  let word = 0;
  for (let k = 0; k < n; k++) {
    word = (word + (planes[k] | (planes[n + k] << 8) | (planes[2 * n + k] << 16) | (planes[3 * n + k] << 24))) | 0;
    words[k] = word;
  }
  return packed;
}

/** What the controls choose of a layer's array: a view of [own dimensions], never a copy. */
export function part(layer, name, state) {
  const { data, shape } = layer[name];
  const own = layer.kind === "text" ? 0 : layer.kind === "heatmap" && name === "values" ? 2 : 1;
  if (shape.length === own) return data;
  const size = product(shape.slice(layer.by.length));
  const number = layer.by.reduce((sum, control, k) => sum * shape[k] + state[control], 0);
  return data.subarray(number * size, (number + 1) * size);
}

/** How many points of a line are drawn. */
export function drawn(scene, layer, state) {
  const n = part(layer, "x", state).length;
  if (layer.upto === null) return n;
  const control = scene.controls.find(({ name }) => name === layer.upto);
  return Math.max(0, Math.min(n, Math.trunc(Number(control.values[state[layer.upto]])) + 1));
}

function text(layer, state) {
  return layer.by.reduce((texts, control) => (Array.isArray(texts) ? texts[state[control]] : texts), layer.texts);
}

/** What a legend calls a layer: its name, and behind that the value of a control. */
export function named(scene, layer, state) {
  const control = scene.controls.find(({ name }) => name === layer.legend_by);
  return control ? `${layer.name} (${words(control, state[control.name])})` : layer.name;
}

/** A line's value where the control of this name is along x, in few digits; empty without one, and for other layers. */
export function valueAt(scene, layer, state, name) {
  const control = scene.controls.find((each) => each.name === name);
  if (!control || layer.kind !== "line") return "";
  const [xs, ys] = [part(layer, "x", state), part(layer, "y", state)];
  let [low, high] = [0, drawn(scene, layer, state)]; // of the points up to there the last one
  while (low < high) {
    const middle = (low + high) >> 1;
    if (xs[middle] <= control.values[state[name]]) low = middle + 1;
    else high = middle;
  }
  return low && Number.isFinite(ys[low - 1]) ? number(Number(ys[low - 1].toPrecision(3))) : "–";
}

/** What a legend of these panels has: layers of different names or styles. */
function keysOf({ runs }, panels) {
  const found = new Map();
  for (const layer of panels.flatMap(({ layers }) => layers)) {
    if (layer.kind === "text" || (runs && layer.run !== null)) continue; // which are in the table
    const key = JSON.stringify([layer.name, layer.style]);
    if (layer.name && !found.has(key)) found.set(key, layer);
  }
  return [...found.values()];
}

function product(numbers) {
  return numbers.reduce((all, n) => all * n, 1);
}

// ---- Numbers and ticks

/** A number in four digits for people: 0.001, −1.5×10⁻⁷; integers with all digits: 12,345. */
export function number(value) {
  if (!Number.isFinite(value)) return Number.isNaN(value) ? "not a number" : value > 0 ? "∞" : "−∞";
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e9) return grouped(String(value));
  if (size !== 0 && (size < 1e-4 || size >= 1e6)) {
    const [digits, power] = value.toExponential(3).split("e");
    const raised = String(Number(power)).replace(/./g, (sign) => (sign === "-" ? "⁻" : "⁰¹²³⁴⁵⁶⁷⁸⁹"[sign]));
    return minus(`${Number(digits)}×10${raised}`);
  }
  return grouped(String(Number(value.toPrecision(size >= 1e4 ? 6 : 4))));
}

/** A control's value as its label shows it. */
export function words(control, index) {
  if (control.texts?.length) return control.texts[index];
  const value = control.values[index];
  return typeof value === "string" ? value : number(value);
}

/** The same to be edited: with the signs of a keyboard. */
function typeable(control, index) {
  const value = control.values[index];
  return typeof value === "string" ? value : String(Number(value.toPrecision(4)));
}

/**
 * Ticks of an axis {low, high, scale, ticks} that is so many pixels long, at least `space` pixels from one to the next:
 * {major: [{value, words, power}], minor: [value]}. A power stands raised behind the words.
 */
export function ticks(axis, length, space) {
  const { low, high } = axis;
  const most = Math.max(1, Math.floor(length / space));
  if (axis.ticks) {
    const inside = axis.ticks.filter(([value]) => value >= low && value <= high);
    const stride = Math.max(1, Math.ceil(inside.length / most));
    return { major: inside.filter((_, k) => k % stride === 0).map(([value, words]) => ({ value, words })), minor: [] };
  }
  if (axis.scale === "log") {
    const found = decades(low, high, most);
    if (found) return found;
  }
  let step = niceStep((high - low) / most);
  while (Math.floor(high / step + 1e-9) <= Math.ceil(low / step - 1e-9)) step = niceStep(step / 2.5); // one tick says nothing
  const decimals = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  const largest = Math.max(Math.abs(low), Math.abs(high));
  const power = largest >= 1e6 || largest < 1e-3 ? Math.floor(Math.log10(largest)) : 0;
  const major = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + 1e-9 * step; k++) {
    const value = k === 0 ? 0 : Number((k * step).toPrecision(12));
    if (power) {
      const digits = Math.max(0, power - Math.floor(Math.log10(step) + 1e-9));
      major.push(value ? { value, words: minus(`${(value / 10 ** power).toFixed(digits)}×10`), power } : { value, words: "0" });
    } else {
      major.push({ value, words: grouped(value.toFixed(decimals)) });
    }
  }
  return { major, minor: [] };
}

/** Ticks at powers of ten, with 2 and 5 times them where there is room; null where less than one power would be seen. */
function decades(low, high, most) {
  const first = Math.ceil(Math.log10(low) - 1e-9);
  const last = Math.floor(Math.log10(high) + 1e-9);
  const stride = Math.max(1, Math.ceil((last - first + 1) / most));
  const every = [];
  for (let power = first - 1; power <= last; power++) {
    for (let k = 1; k < 10; k++) {
      const value = Number(`${k}e${power}`);
      if (value >= low * (1 - 1e-9) && value <= high * (1 + 1e-9)) every.push({ value, k, power });
    }
  }
  let major = every.filter(({ k, power }) => k === 1 && (power - first) % stride === 0);
  if (major.length < 3 && stride === 1) {
    const more = every.filter(({ k }) => k === 1 || k === 2 || k === 5);
    if (more.length < 2) return null;
    if (more.length <= most + 1) major = more;
  }
  if (major.length < 2) return null;
  const plain = major.every(({ value }) => value > 0.9e-3 && value < 1.1e4);
  return {
    major: major.map(({ value, k, power }) =>
      plain ? { value, words: grouped(String(value)) } : { value, words: k === 1 ? "10" : `${k}×10`, power },
    ),
    minor: stride === 1 && last - first < 8 ? every.filter((tick) => !major.includes(tick)).map(({ value }) => value) : [],
  };
}

function niceStep(raw) {
  const power = 10 ** Math.floor(Math.log10(raw));
  const share = raw / power;
  return power * (share <= 1 + 1e-9 ? 1 : share <= 2 + 1e-9 ? 2 : share <= 5 + 1e-9 ? 5 : 10);
}

function minus(words) {
  return words.replace(/^-/, "−");
}

function grouped(words) {
  const [whole, decimals] = words.split(".");
  const thousands = whole.replace("-", "").length > 4 ? whole.replace(/\B(?=(\d{3})+$)/g, ",") : whole;
  return minus(decimals === undefined ? thousands : `${thousands}.${decimals}`);
}

// ---- Where everything goes

/** From values of an axis to pixels and back. */
function direction(axis, from, to) {
  if (!axis.upwards) [from, to] = [to, from];
  if (axis.scale === "log") {
    const low = Math.log10(axis.low);
    const unit = (to - from) / (Math.log10(axis.high) - low);
    return { axis, unit, at: (value) => from + (Math.log10(value) - low) * unit, value: (at) => 10 ** (low + (at - from) / unit) };
  }
  const unit = (to - from) / (axis.high - axis.low);
  return { axis, unit, at: (value) => from + (value - axis.low) * unit, value: (at) => axis.low + (at - from) / unit };
}

/** The shares of the scene's columns and rows, and how large each panel is with its words, in inches, where all have room. */
function gridOf({ panels, widths, heights, width, height }) {
  const across = shares(widths, Math.max(...panels.map((panel) => panel.column + panel.columns)));
  const down = shares(heights, Math.max(...panels.map((panel) => panel.row + panel.rows)));
  const sizes = panels.map((panel) => ({
    width: width * total(across, panel.column, panel.columns),
    height: height * total(down, panel.row, panel.rows),
  }));
  return { across, down, sizes };
}

/** Whether panels next to each other would be too narrow to be read on a canvas of this width. */
function isNarrow(scene, width) {
  const share = width / (scene.width * PIXELS_PER_INCH);
  return gridOf(scene).sizes.some((size, k) => {
    const full = size.width * PIXELS_PER_INCH;
    return scene.panels[k].frame && size.width < scene.width && share * full < Math.min(NARROW, 0.7 * full);
  });
}

/**
 * The panels' frames and axes on a canvas of this width, and how high it is: {places, height}. They stand in the scene's
 * grid, at most so many pixels high, or one below the other where that would be too narrow; frames in one column, or row,
 * begin and end together.
 */
function arrange(scene, width, most, pen, zoomed, least) {
  const grid = gridOf(scene);
  let { across } = grid;
  let panels = scene.panels.map((panel, k) => ({ ...panel, ...zoomed[k], keys: keyWidths(scene, panel, pen) }));
  const high = Math.min(most, (scene.height * width) / scene.width);
  let outer = grid.down.map((share) => share * high); // heights of the rows
  if (isNarrow(scene, width)) {
    const order = panels.map((_, k) => k).sort((a, b) => panels[a].row - panels[b].row || panels[a].column - panels[b].column);
    panels = panels.map((panel, k) => ({ ...panel, row: order.indexOf(k), rows: 1, column: 0, columns: 1 }));
    across = [1];
    outer = order.map((k) => grid.sizes[k].height * Math.min(PIXELS_PER_INCH, width / grid.sizes[k].width));
  }
  const [columns, rows] = [across.length, outer.length];
  let frames = panels.map((panel) => {
    const wide = width * total(across, panel.column, panel.columns);
    panel.names = Math.max(60, 0.3 * wide); // pixels that names of rows have
    return { width: wide - 60, height: total(outer, panel.row, panel.rows) - 50 };
  });
  // Words alone take all of the width where nothing stands next to them.
  const wideOf = ({ frame, column, columns: n }, xs) => (columns === 1 && !frame ? width - 4 : xs[column + n - 1].to - xs[column].from);
  let [room, height] = [null, 0];
  for (let pass = 0; pass < 2; pass++) { // how wide the numbers are depends on the size, and that on the numbers
    const edges = panels.map((panel, k) => margins(panel, frames[k], pen));
    room = {
      left: largest(columns, panels, edges, (panel) => panel.column, "left", least),
      right: largest(columns, panels, edges, (panel) => panel.column + panel.columns - 1, "right", least),
      top: largest(rows, panels, edges, (panel) => panel.row, "top", least),
      bottom: largest(rows, panels, edges, (panel) => panel.row + panel.rows - 1, "bottom", least),
    };
    const xs = tracks(split(width, across, room.left, room.right), room.left, room.right);
    const high = split(total(outer, 0, rows), shares(outer, rows), room.top, room.bottom);
    panels.forEach((panel, k) => {
      if (panel.rows === 1) high[panel.row] = Math.max(high[panel.row], leastHeight(panel, wideOf(panel, xs), most, pen));
    });
    const ys = tracks(high, room.top, room.bottom);
    height = Math.round(ys.at(-1).to + room.bottom.at(-1));
    frames = panels.map((panel) => {
      const [x, y] = [columns === 1 && !panel.frame ? 2 : xs[panel.column].from, ys[panel.row].from];
      return {
        x,
        y,
        width: Math.max(1, wideOf(panel, xs)),
        height: Math.max(1, ys[panel.row + panel.rows - 1].to - y),
      };
    });
  }
  const places = panels.map((panel, k) => {
    const frame = panel.equal ? equal(panel, frames[k]) : frames[k];
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
    };
  });
  return { places, height };
}

/** How high a panel has to be in which something is to be read: a curve, or all lines of a text. */
function leastHeight(panel, width, most, pen) {
  if (panel.frame) return Math.min(LEAST, most / 6);
  const high = panel.layers.filter(({ kind }) => kind === "text").map((layer) => {
    const all = [layer.texts].flat(Infinity);
    const { lines, step } = pen.fitted(layer, all.reduce((a, b) => (b.length > a.length ? b : a)), width);
    return lines.length * step;
  });
  return Math.max(0, ...high);
}

function shares(given, n) {
  const sizes = Array.from({ length: n }, (_, k) => given[k] ?? 1);
  const sum = total(sizes, 0, n);
  return sizes.map((size) => size / sum);
}

function total(sizes, from, n) {
  return sizes.slice(from, from + n).reduce((sum, size) => sum + size, 0);
}

/** Of each of n rows or columns the largest edge, at least what `least` says. */
function largest(n, panels, edges, place, side, least) {
  const found = Array.from({ length: n }, (_, k) => least[side]?.[k] ?? 0);
  panels.forEach((panel, k) => (found[place(panel)] = Math.max(found[place(panel)], edges[k][side])));
  return found;
}

/** What is left of a length to rows or columns of these shares. */
function split(length, sizes, before, after) {
  const n = sizes.length;
  const free = length - total(before, 0, n) - total(after, 0, n) - GAP * (n - 1);
  return sizes.map((size) => size * free);
}

function tracks(sizes, before, after) {
  let at = 0;
  return sizes.map((size, k) => {
    const from = at + before[k];
    at = from + size + after[k] + GAP;
    return { from: Math.round(from), to: Math.round(from + size) };
  });
}

function equal(panel, { x, y, width, height }) {
  const reach = (axis) => (axis.scale === "log" ? Math.log10(axis.high / axis.low) : axis.high - axis.low);
  const unit = Math.min(width / reach(panel.x), height / reach(panel.y));
  return { x, y, width: Math.round(unit * reach(panel.x)), height: Math.round(unit * reach(panel.y)) };
}

/** Ticks along x, as many as leave room between their words. */
function xTicks(axis, length, pen) {
  const short = (found) => pen.shortTicks(found, axis, Math.max(90, length / (axis.ticks?.length ?? 1) - 14));
  let found = short(ticks(axis, length, 46 * pen.scale));
  const widest = Math.max(0, ...found.major.map((tick) => pen.tickWidth(tick)));
  if (widest + 14 > 46 * pen.scale) found = short(ticks(axis, length, widest + 14));
  return found;
}

/** Ticks along y; given ones, as names of rows, may stand line by line. */
function yTicks({ y, names }, height, pen) {
  return pen.shortTicks(ticks(y, height, (y.ticks ? 15 : 34) * pen.scale), y, names);
}

function margins(panel, { width, height }, pen) {
  const titled = panel.title ? 16 * pen.titleLines(panel, width).length * pen.scale : 0;
  const top = 8 + titled + KEY * rowsOf(panel.keys, width + BEFORE).length;
  if (!panel.frame) return { left: 2, right: 2, top, bottom: 2 };
  const along = xTicks(panel.x, width, pen).major;
  const up = yTicks(panel, height, pen).major;
  const reach = direction(panel.x, 0, width);
  const past = (side) => Math.max(0, ...along.map((tick) => pen.tickWidth(tick) / 2 + side(reach.at(tick.value))));
  const bar = bars(panel, { x: 0, y: 0, width: 0, height }, pen);
  return {
    left: Math.max(Math.max(0, ...up.map(pen.tickWidth)) + 9 + (panel.y.label ? 19 * pen.scale : 2), past((at) => -at)),
    right: Math.max(6, past((at) => at - width), ...bar.map(({ x, reach }) => x + reach)),
    top,
    bottom: 7 + 13 * pen.scale + (panel.x.label ? 19 * pen.scale : 2),
  };
}

/** How wide each entry of a panel's own legend may become, with its sample and the room between. */
function keyWidths(scene, panel, pen) {
  if (panel.legend === null) return [];
  const control = (layer) => scene.controls.find(({ name }) => name === layer.legend_by);
  return keysOf(scene, [panel]).map((layer) => {
    const longest = control(layer)?.values.map((_, k) => ` (${words(control(layer), k)})`).reduce((a, b) => (b.length > a.length ? b : a));
    return 40 + pen.nameWidth(layer.name + (longest ?? "") + (panel.legend && layer.kind === "line" ? " 0.00012" : ""));
  });
}

/** Widths in rows of at most so many pixels. */
function rowsOf(widths, room) {
  const rows = [];
  let left = Infinity;
  for (const width of widths) {
    if (left + width > room) {
      rows.push([]);
      left = 0;
    }
    rows.at(-1).push(width);
    left += width;
  }
  return rows;
}

/** Colour bars of a panel's images, next to each other. */
function bars(panel, frame, pen) {
  let x = frame.x + frame.width + 14;
  return panel.layers
    .filter((layer) => layer.kind === "heatmap" && layer.label)
    .map((layer) => {
      const [low, high] = layer.limits;
      const axis = { low, high, scale: layer.scale, ticks: null, upwards: true, label: layer.label };
      const shown = ticks(axis, frame.height, 34 * pen.scale);
      const words = Math.max(0, ...shown.major.map(pen.tickWidth));
      const bar = { layer, x, y: frame.y, width: 11, height: frame.height, ticks: shown, axis, words };
      bar.reach = bar.width + 8 + words + 23 * pen.scale;
      x += bar.reach + 8;
      return bar;
    });
}

// ---- How everything is drawn

/** What is needed to draw: a context, the theme's colours, sizes of letters. */
function penFor(context, style, theme, scale, ratio) {
  const colours = style[theme];
  const pen = {
    context,
    theme,
    scale,
    ratio,
    background: colours.background,
    ink: colours.ink,
    quiet: colours.quiet,
    grid: colours.grid,
    colour: (layerStyle) =>
      typeof layerStyle === "number" ? colours.colours[layerStyle % colours.colours.length] : colours[layerStyle],
    dashes: (layerStyle, width) =>
      (typeof layerStyle === "number" ? style.dashes[layerStyle % style.dashes.length] : []).map((length) => length * width),
    font: (size, { bold = false, fixed = false } = {}) => {
      pen.context.font = `${bold ? "600 " : ""}${size * scale}px ${fixed ? FIXED : FAMILY}`;
    },
    tickWidth: ({ words, power }) => {
      pen.font(11);
      const plain = pen.context.measureText(words).width;
      if (power === undefined) return plain;
      pen.font(8.5);
      return plain + pen.context.measureText(minus(String(power))).width + 1;
    },
    nameWidth: (words) => {
      pen.context.font = `11px ${FAMILY}`;
      return pen.context.measureText(words).width;
    },
    /** The ticks with words that are no longer than this, where they were given. */
    shortTicks: ({ major, minor }, axis, room) => {
      if (!axis.ticks) return { major, minor };
      pen.font(11);
      return { major: major.map(({ value, words }) => ({ value, words: shortened(pen.context, words, room) })), minor };
    },
    titleLines: ({ title }, room) => {
      pen.font(12.5, { bold: true });
      return wrapped(pen.context, title, room);
    },
    /** A text's lines on so many pixels, how far apart they are and how large: wrapped, or smaller if columns are to stay. */
    fitted: (layer, words, room) => {
      const look = { fixed: layer.fixed };
      let size = layer.size * PIXELS_PER_POINT;
      pen.font(size, look);
      let lines = words.split("\n");
      if (layer.fixed) {
        const widest = Math.max(...lines.map((line) => pen.context.measureText(line).width));
        size *= Math.max(0.5, Math.min(1, room / widest));
        pen.font(size, look);
        lines = lines.map((line) => shortened(pen.context, line, room));
      } else {
        lines = wrapped(pen.context, words, room);
      }
      return { lines, size: size * scale, step: 1.4 * size * scale };
    },
    // The middle of a line of this width, in CSS pixels, that fills whole pixels of the screen.
    crisp: (at, width = 1) => {
      const thick = Math.max(1, Math.round(width * ratio));
      return (Math.round(at * ratio - thick / 2) + thick / 2) / ratio;
    },
  };
  return pen;
}

function drawAxes(pen, { panel, frame, edge, x, y, xTicks, yTicks }) {
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

/** The frame's two lines and small ticks, above what is drawn in it. */
function drawFrame(pen, { panel, frame, x, y, xTicks, yTicks }) {
  if (!panel.frame) return;
  const { context } = pen;
  const { x: left, y: top, width, height } = frame;
  const [edge, base] = [pen.crisp(left) - 0.5, pen.crisp(top + height) - 0.5];
  context.fillStyle = pen.quiet; // rectangles: their edges are exact
  context.fillRect(edge, top, 1, base + 1 - top);
  context.fillRect(edge, base, left + width - edge, 1);
  const small = (values, length, across) => {
    for (const value of values) {
      const at = pen.crisp(across ? x.at(value) : y.at(value)) - 0.5;
      if (across) context.fillRect(at, base, 1, length + 1);
      else context.fillRect(edge - length, at, length, 1);
    }
  };
  for (const [found, across] of [[xTicks, true], [yTicks, false]]) {
    small(found.major.map(({ value }) => value), 4, across);
    small(found.minor, 2, across);
  }
}

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

function sideways(pen, words, x, y, room) {
  const { context } = pen;
  context.save();
  context.translate(x, y);
  context.rotate(-Math.PI / 2);
  context.textAlign = "center";
  context.fillText(shortened(context, words, room), 0, 0);
  context.restore();
}

/** The words, or both ends of them where there is no room for all. */
function shortened(context, words, room) {
  const signs = [...words];
  let kept = signs.length;
  let shown = words;
  while (kept > 2 && context.measureText(shown).width > room) {
    kept--;
    shown = signs.slice(0, Math.ceil(kept / 2)).join("") + "…" + signs.slice(signs.length - Math.floor(kept / 2)).join("");
  }
  return shown;
}

/** The words in lines for which there is room. */
function wrapped(context, words, room) {
  return words.split("\n").flatMap((line) => {
    const lines = [""];
    for (const word of line.split(" ")) {
      const longer = lines.at(-1) ? `${lines.at(-1)} ${word}` : word;
      if (lines.at(-1) && context.measureText(longer).width > room) lines.push(word);
      else lines[lines.length - 1] = longer;
    }
    return lines.map((each) => shortened(context, each.trimEnd(), room));
  });
}

function drawBar(pen, bar) {
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

function gradient(pen, layer) {
  const table = palette(pen, layer).reverse();
  const canvas = blank(1, table.length);
  const pixels = new ImageData(1, table.length);
  new Uint32Array(pixels.data.buffer).set(table);
  canvas.getContext("2d").putImageData(pixels, 0, 0);
  return canvas;
}

function blank(width, height) {
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [width, height];
  return canvas;
}

/** The colours of an image as words of pixels. */
function palette(pen, layer) {
  return Uint32Array.from(layer.colours[pen.theme].match(/.{6}/g), (hex) => {
    const value = parseInt(hex, 16);
    return ((255 << 24) | ((value & 255) << 16) | (value & 0xff00) | (value >> 16)) >>> 0; // as a little-endian word holds it
  });
}

const pictures = new WeakMap(); // by layer: the last cells that were coloured, and for what

function coloured(pen, layer, state) {
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
  canvas.getContext("2d").putImageData(pixels, 0, 0);
  pictures.set(layer, { canvas, start: values.byteOffset, theme: pen.theme });
  return canvas;
}

/** Far from the frame nothing is seen, and dashes on a line of a million pixels would take forever: it is cut. */
function cut(x0, y0, x1, y1, box) {
  const [dx, dy] = [x1 - x0, y1 - y0];
  const from = { share: 0, x: x0, y: y0 };
  const to = { share: 1, x: x1, y: y1 };
  for (const [p, q, edge] of [
    [-dx, x0 - box.left, { x: box.left }],
    [dx, box.right - x0, { x: box.right }],
    [-dy, y0 - box.top, { y: box.top }],
    [dy, box.bottom - y0, { y: box.bottom }],
  ]) {
    const share = q / p;
    if (p === 0 && q < 0) return null;
    if (p < 0 && share > from.share) Object.assign(from, { share, x: x0 + share * dx, y: y0 + share * dy }, edge);
    if (p > 0 && share < to.share) Object.assign(to, { share, x: x0 + share * dx, y: y0 + share * dy }, edge);
  }
  // Of very far places digits are lost: on an edge its own number is taken, and what then lies next to the box is left out.
  const inside = ({ x, y }) => x > box.left - 1 && x < box.right + 1 && y > box.top - 1 && y < box.bottom + 1;
  return from.share <= to.share && inside(from) && inside(to) ? [from.x, from.y, to.x, to.y] : null;
}

function trace(context, xs, ys, n, place) {
  const { frame, x: X, y: Y } = place;
  const [wide, high] = [frame.width, frame.height];
  const box = { left: frame.x - wide, right: frame.x + 2 * wide, top: frame.y - high, bottom: frame.y + 2 * high };
  let [x0, y0, down] = [NaN, NaN, false];
  context.beginPath();
  for (let k = 0; k < n; k++) {
    const [x, y] = [X.at(xs[k]), Y.at(ys[k])];
    if (!Number.isFinite(x) || !Number.isFinite(y)) {
      [x0, y0, down] = [NaN, NaN, false];
      continue;
    }
    const inside = x > box.left && x < box.right && y > box.top && y < box.bottom;
    if (down && inside) {
      context.lineTo(x, y);
    } else if (!Number.isNaN(x0)) {
      const piece = cut(x0, y0, x, y, box);
      if (piece) {
        if (!down) context.moveTo(piece[0], piece[1]);
        context.lineTo(piece[2], piece[3]);
      }
    } else if (inside) {
      context.moveTo(x, y);
    }
    [x0, y0, down] = [x, y, inside];
  }
}

const draw = {
  line(pen, layer, place, { scene, state }) {
    const { context } = pen;
    const [xs, ys, n] = [part(layer, "x", state), part(layer, "y", state), drawn(scene, layer, state)];
    const width = layer.width * PIXELS_PER_POINT;
    context.globalAlpha = layer.alpha;
    context.lineJoin = "round";
    trace(context, xs, ys, n, place);
    if (place.cased && layer.width >= 1) { // on an image a line has an edge, so that it is seen on every colour
      context.setLineDash([]);
      context.lineCap = "round";
      context.lineWidth = width + 2;
      context.strokeStyle = pen.background;
      context.globalAlpha = layer.alpha * 0.65;
      context.stroke();
      context.globalAlpha = layer.alpha;
    }
    context.lineCap = "butt";
    context.setLineDash(pen.dashes(layer.style, width));
    context.lineWidth = width;
    context.strokeStyle = pen.colour(layer.style);
    context.stroke();
    context.setLineDash([]);
    context.fillStyle = pen.colour(layer.style);
    if (layer.marker) {
      for (let k = 0; k < n; k++) dot(pen, place.x.at(xs[k]), place.y.at(ys[k]), 1.25 * width + 0.8, place.cased);
    }
    if (layer.head) {
      let k = n - 1;
      while (k >= 0 && !(Number.isFinite(xs[k]) && Number.isFinite(ys[k]))) k--;
      if (k >= 0) dot(pen, place.x.at(xs[k]), place.y.at(ys[k]), 1.4 * width + 1.4, true);
    }
  },

  band(pen, layer, place, { state }) {
    const { context } = pen;
    const [xs, low, high] = ["x", "low", "high"].map((name) => part(layer, name, state));
    const far = 4 * (place.frame.width + place.frame.height);
    const near = (at) => Math.max(-far, Math.min(far, at));
    const X = (k) => near(place.x.at(xs[k]));
    const known = (k) => Number.isFinite(place.x.at(xs[k])) && !Number.isNaN(place.y.at(low[k]) + place.y.at(high[k]));
    context.globalAlpha = layer.alpha;
    context.fillStyle = pen.colour(layer.style);
    for (let from = 0; from < xs.length; from++) {
      if (!known(from)) continue;
      let to = from;
      while (to + 1 < xs.length && known(to + 1)) to++;
      context.beginPath();
      for (let k = from; k <= to; k++) context.lineTo(X(k), near(place.y.at(high[k])));
      for (let k = to; k >= from; k--) context.lineTo(X(k), near(place.y.at(low[k])));
      context.fill();
      from = to;
    }
  },

  heatmap(pen, layer, place, { state }) {
    const { context } = pen;
    const [rows, columns] = layer.values.shape.slice(-2);
    const [x, y] = [part(layer, "x", state), part(layer, "y", state)];
    const [left, low] = [place.x.at(x[0]), place.y.at(y[0])];
    const [wide, high] = [place.x.at(x[1]) - left, place.y.at(y[1]) - low];
    context.save();
    context.translate(left, low);
    context.scale(wide / columns, high / rows);
    // Cells smaller than a pixel are averaged, others have sharp edges.
    context.imageSmoothingEnabled = Math.min(Math.abs(wide) / columns, Math.abs(high) / rows) * pen.ratio < 1;
    context.drawImage(coloured(pen, layer, state), 0, 0);
    context.restore();
  },

  points(pen, layer, place, { state, moved }) {
    const { context } = pen;
    const [xs, ys] = [part(layer, "x", state), part(layer, "y", state)];
    const radius = (layer.size * PIXELS_PER_POINT) / 2;
    context.fillStyle = context.strokeStyle = pen.colour(layer.style);
    for (let k = 0; k < xs.length; k++) {
      const [vx, vy] = moved.get(layer)?.[k] ?? [xs[k], ys[k]];
      const [x, y] = [place.x.at(vx), place.y.at(vy)];
      if (inFrame(place, x, y)) marker(pen, layer.marker, x, y, radius);
    }
  },

  arrows(pen, layer, place, { state }) {
    const { context } = pen;
    const [xs, ys, dxs, dys] = ["x", "y", "dx", "dy"].map((name) => part(layer, name, state));
    const width = layer.width * PIXELS_PER_POINT;
    for (let k = 0; k < xs.length; k++) {
      const [x0, y0] = [place.x.at(xs[k]), place.y.at(ys[k])];
      const [x1, y1] = [place.x.at(xs[k] + dxs[k]), place.y.at(ys[k] + dys[k])];
      if (Number.isFinite(x0 + y0 + x1 + y1)) arrow(pen, layer.style, x0, y0, x1, y1, width, place.cased);
    }
    context.setLineDash([]);
  },

  refline(pen, layer, place, { state, taken }) {
    const { context } = pen;
    const { x: left, y: top, width, height } = place.frame;
    const upright = layer.axis === "x";
    const thick = layer.width * PIXELS_PER_POINT;
    context.strokeStyle = pen.colour(layer.style);
    context.lineWidth = thick;
    context.setLineDash(pen.dashes(layer.style, thick));
    let first = null;
    context.beginPath();
    for (const value of part(layer, "at", state)) {
      const at = pen.crisp(place[layer.axis].at(value), thick);
      if (!(upright ? at >= left - 1 && at <= left + width + 1 : at >= top - 1 && at <= top + height + 1)) continue;
      first ??= at;
      context.moveTo(upright ? at : left, upright ? top : at);
      context.lineTo(upright ? at : left + width, upright ? top + height : at);
    }
    context.stroke();
    context.setLineDash([]);
    if (first === null || !layer.label) return;
    pen.font(10.5);
    const words = shortened(context, layer.label, width - 10);
    const long = context.measureText(words).width;
    const tall = 14 * pen.scale;
    const beside = first + 5 + long > left + width ? Math.max(first - 5 - long, left + 3) : first + 5;
    const x = upright ? Math.min(beside, left + width - long - 3) : left + width - long - 3;
    let y = upright ? top + 3 : first - tall - 1 < top ? first + 2 : first - tall - 1;
    // Labels of lines that are close stand one below the other.
    const hits = () => taken.find((box) => x < box.x + box.long + 4 && box.x < x + long + 4 && y < box.y + tall && box.y < y + tall);
    for (let other = hits(); upright && other && y < top + height - 2 * tall; other = hits()) y = other.y + tall;
    taken.push({ x, y, long });
    context.textAlign = "left";
    outlined(pen, words, x, y + 11 * pen.scale, pen.colour(layer.style));
  },

  text(pen, layer, place, { state }) {
    const { context } = pen;
    const { x: left, y: top, width, height } = place.frame;
    const share = part(layer, "x", state)[0];
    const room = { left: 1 - share, right: share, center: 2 * Math.min(share, 1 - share) }[layer.align] * width;
    const { lines, size, step } = pen.fitted(layer, text(layer, state), room);
    const x = left + share * width;
    const middle = top + (1 - part(layer, "y", state)[0]) * height;
    context.textAlign = layer.align;
    lines.forEach((line, k) => {
      const y = middle + (k - (lines.length - 1) / 2) * step + 0.35 * size;
      if (place.panel.frame) outlined(pen, line, x, y, pen.colour(layer.style)); // above what is drawn there
      else {
        context.fillStyle = pen.colour(layer.style);
        context.fillText(line, x, y);
      }
    });
  },
};

function outlined(pen, words, x, y, colour) {
  const { context } = pen;
  context.save();
  context.lineJoin = "round";
  context.lineWidth = 3;
  context.strokeStyle = pen.background;
  context.globalAlpha = 0.85;
  context.strokeText(words, x, y);
  context.restore();
  context.fillStyle = colour;
  context.fillText(words, x, y);
}

function dot(pen, x, y, radius, cased) {
  const { context } = pen;
  if (!Number.isFinite(x) || !Number.isFinite(y)) return;
  context.beginPath();
  context.arc(x, y, radius, 0, 2 * Math.PI);
  if (cased) {
    context.lineWidth = 2.4;
    context.strokeStyle = pen.background;
    context.stroke();
  }
  context.fill();
}

function marker(pen, kind, x, y, radius) {
  const { context } = pen;
  if (kind === "dot") return dot(pen, x, y, radius, true);
  context.beginPath();
  if (kind === "ring") {
    context.arc(x, y, 0.85 * radius, 0, 2 * Math.PI);
  } else if (kind === "cross") {
    const reach = 0.8 * radius;
    for (const side of [1, -1]) {
      context.moveTo(x - reach, y - side * reach);
      context.lineTo(x + reach, y + side * reach);
    }
  } else {
    for (let k = 0; k < 10; k++) {
      const [angle, far] = [(k * Math.PI) / 5, (k % 2 ? 0.5 : 1.15) * radius];
      context.lineTo(x + far * Math.sin(angle), y - far * Math.cos(angle));
    }
    context.closePath();
  }
  const colour = context.strokeStyle;
  context.lineJoin = "round";
  context.lineCap = "round";
  context.strokeStyle = pen.background;
  const thick = Math.max(1.8, 0.3 * radius);
  context.lineWidth = kind === "star" ? 2.4 : thick + 2.4;
  context.stroke();
  context.strokeStyle = colour;
  context.lineWidth = thick;
  if (kind === "star") context.fill();
  else context.stroke();
  context.lineCap = "butt";
}

function arrow(pen, style, x0, y0, x1, y1, width, cased) {
  const { context } = pen;
  const long = Math.hypot(x1 - x0, y1 - y0);
  if (!long) return;
  const head = Math.min(4 * width + 3, long);
  const [ux, uy] = [(x1 - x0) / long, (y1 - y0) / long];
  const [bx, by] = [x1 - head * ux, y1 - head * uy];
  const path = () => {
    context.beginPath();
    context.moveTo(x0, y0);
    context.lineTo(bx, by);
  };
  const tip = () => {
    context.beginPath();
    context.moveTo(x1, y1);
    context.lineTo(bx - 0.42 * head * uy, by + 0.42 * head * ux);
    context.lineTo(bx + 0.42 * head * uy, by - 0.42 * head * ux);
    context.closePath();
  };
  context.lineJoin = "round";
  context.setLineDash([]);
  if (cased) {
    context.strokeStyle = pen.background;
    context.lineWidth = width + 2.4;
    path();
    context.stroke();
    context.lineWidth = 2.4;
    tip();
    context.stroke();
  }
  context.strokeStyle = context.fillStyle = pen.colour(style);
  context.lineWidth = width;
  path();
  context.stroke();
  tip();
  context.fill();
}

// ---- What lies under the pointer

function nearestOnSegment(x, y, x0, y0, x1, y1) {
  const [dx, dy] = [x1 - x0, y1 - y0];
  const share = dx || dy ? Math.max(0, Math.min(1, ((x - x0) * dx + (y - y0) * dy) / (dx * dx + dy * dy))) : 0;
  const at = { x: x0 + share * dx, y: y0 + share * dy };
  return { ...at, far: Math.hypot(x - at.x, y - at.y) };
}

/** The point of a draggable or spoken-of layer, or of a line, nearest to a place; else the image's cell; else null. */
function lookAt(place, x, y, { scene, state, isDrawn, moved }) {
  const shown = place.panel.layers.filter(isDrawn);
  let best = null;
  const offer = (found) => {
    if (!best || found.far < best.far) best = found;
  };
  for (const layer of shown) {
    if (layer.kind === "points" && (layer.words.length || layer.drag)) {
      const [xs, ys] = [part(layer, "x", state), part(layer, "y", state)];
      for (let k = 0; k < xs.length; k++) {
        const [vx, vy] = moved.get(layer)?.[k] ?? [xs[k], ys[k]];
        const [px, py] = [place.x.at(vx), place.y.at(vy)];
        const far = Math.hypot(px - x, py - y);
        if (far < 12) offer({ layer, far: far - 8, k, vx, vy, px, py, title: layer.words[k] || layer.name }); // points first
      }
    } else if (layer.kind === "line") {
      const [xs, ys, n] = [part(layer, "x", state), part(layer, "y", state), drawn(scene, layer, state)];
      let [px, py] = [NaN, NaN];
      for (let k = 0; k < n; k++) {
        const [qx, qy] = [place.x.at(xs[k]), place.y.at(ys[k])];
        const from = Number.isFinite(px + py) ? k - 1 : k;
        const near = nearestOnSegment(x, y, from < k ? px : qx, from < k ? py : qy, qx, qy);
        if (near.far < 22 && (!best || near.far < best.far)) {
          const at = from < k && Math.hypot(near.x - px, near.y - py) < Math.hypot(near.x - qx, near.y - qy) ? from : k;
          const [vx, vy] = [xs[at], ys[at]];
          const found = { layer, far: near.far, vx, vy, px: place.x.at(vx), py: place.y.at(vy), title: layer.name };
          // Where points are far apart, it is the line between them that is pointed at.
          const between = { px: near.x, py: near.y, vx: place.x.value(near.x), vy: place.y.value(near.y) };
          offer(Math.hypot(found.px - near.x, found.py - near.y) < 22 ? found : { ...found, ...between });
        }
        [px, py] = [qx, qy];
      }
    }
  }
  if (best) return best;
  for (const layer of shown) {
    if (layer.kind !== "heatmap") continue;
    const [rows, columns] = layer.values.shape.slice(-2);
    const [ends, heights] = [part(layer, "x", state), part(layer, "y", state)];
    const [x0, x1, y0, y1] = [place.x.at(ends[0]), place.x.at(ends[1]), place.y.at(heights[0]), place.y.at(heights[1])];
    const [column, row] = [Math.floor(((x - x0) / (x1 - x0)) * columns), Math.floor(((y - y0) / (y1 - y0)) * rows)];
    if (column < 0 || column >= columns || row < 0 || row >= rows) continue;
    const value = part(layer, "values", state)[row * columns + column];
    const [wide, high] = [(x1 - x0) / columns, (y1 - y0) / rows];
    const [px, py] = [x0 + (column + 0.5) * wide, y0 + (row + 0.5) * high];
    best = { layer, far: 0, px, py, vx: place.x.value(px), vy: place.y.value(py), cell: { wide, high }, title: layer.name };
    best.says = `${layer.label ? `${layer.label} ` : ""}${number(value)}`;
  }
  return best;
}

/** The value of a coordinate in words: those of a given tick where there is one. */
function spoken(axis, value, reach) {
  const tick = axis.ticks?.find(([at]) => Math.abs(at - value) <= reach);
  return `${axis.label ? `${axis.label} ` : ""}${tick ? tick[1] : number(value)}`;
}

/** What is to be said of something found: a title and lines. */
function said(place, found) {
  const { cell } = found;
  const reach = (along, size) => (size && along.axis.scale === "linear" ? Math.abs(size / along.unit) / 2 : 0);
  const lines = [spoken(place.panel.x, found.vx, reach(place.x, cell?.wide)), spoken(place.panel.y, found.vy, reach(place.y, cell?.high))];
  if (found.layer.kind === "points" && found.layer.words.length) return { title: found.title, lines };
  return { title: found.says ?? found.title, lines };
}

// ---- In an element

const CSS = `
.tristep { position: relative; box-sizing: border-box; overflow-wrap: anywhere; padding: 8px 10px; border-radius: 6px; overflow: hidden;
  font: 13px/1.4 ${FAMILY}; color: var(--tristep-ink); background: var(--tristep-background); accent-color: var(--tristep-accent); }
.tristep *, .tristep *::before { box-sizing: border-box; }
.tristep-title { font-weight: 600; font-size: 15px; margin: 0 0 4px; }
.tristep-legend { display: flex; flex-wrap: wrap; gap: 0 6px; margin: 0 0 4px -6px; }
.tristep-legend > * { max-width: 100%; display: inline-flex; align-items: center; gap: 6px; padding: 0 6px; border: 0; border-radius: 4px;
  background: none; color: inherit; font: inherit; font-size: 12px; }
.tristep-legend span { overflow: hidden; text-overflow: ellipsis; white-space: nowrap; }
.tristep-own { position: absolute; margin: 0; font-variant-numeric: tabular-nums; }
.tristep-legend.tristep-own > * { height: ${KEY}px; padding: 0 2px; gap: 4px; font-size: 11px; }
.tristep-legend b { font-weight: inherit; }
.tristep-legend b:empty { display: none; }
.tristep-legend button { cursor: pointer; }
.tristep-legend button:hover { background: var(--tristep-grid); }
.tristep-legend button[aria-pressed="false"] { color: var(--tristep-quiet); }
.tristep-legend button[aria-pressed="false"] svg { opacity: 0.25; }
.tristep-legend button[aria-pressed="false"] span { text-decoration: line-through; }
.tristep-legend svg { flex: none; }
.tristep-picture { position: relative; max-width: 100%; }
.tristep-picture canvas { display: block; width: 100%; }
.tristep-picture canvas + canvas { position: absolute; inset: 0; pointer-events: none; }
.tristep-picture canvas:first-child { touch-action: pan-y; border-radius: 3px; }
.tristep :focus { outline: none; }
.tristep :focus-visible { outline: 2px solid var(--tristep-accent); outline-offset: 1px; }
.tristep-readout { position: absolute; left: 0; top: 0; z-index: 1; pointer-events: none; max-width: 280px; padding: 4px 8px; border-radius: 4px;
  border: 1px solid var(--tristep-grid); background: var(--tristep-background); box-shadow: 0 1px 5px rgb(0 0 0 / 0.18);
  font-size: 12px; font-variant-numeric: tabular-nums; white-space: pre-line; }
.tristep-readout[hidden] { display: none; }
.tristep-readout b { font-weight: 600; }
.tristep-readout i { display: inline-block; width: 9px; height: 9px; margin-right: 6px; border-radius: 5px; }
.tristep-readout div { color: var(--tristep-quiet); }
.tristep-controls { display: flex; flex-wrap: wrap; gap: 3px 24px; align-items: center; margin-top: 2px; font-size: 12.5px; }
.tristep-controls:empty { display: none; }
.tristep-control { flex: 1 1 290px; max-width: min(100%, 520px); display: grid; grid-template-columns: fit-content(36%) minmax(80px, 1fr) fit-content(36%); gap: 0 10px; align-items: center; }
.tristep-aside .tristep-body { display: grid; grid-template-columns: auto minmax(290px, 1fr); grid-template-rows: auto 1fr; gap: 0 18px; }
.tristep-aside .tristep-picture { grid-row: 1 / -1; }
.tristep-aside .tristep-runs { grid-column: 2; }
.tristep-runs { min-width: 0; margin-top: 4px; font-size: 12.5px; }
.tristep-runs[hidden] { display: none; }
.tristep-runs-head { display: flex; gap: 10px; align-items: center; margin-bottom: 4px; }
.tristep-runs-head input { flex: 1 1 100px; min-width: 60px; max-width: 260px; font: inherit; color: inherit; padding: 2px 6px;
  background: var(--tristep-background); border: 1px solid var(--tristep-edge); border-radius: 4px; }
.tristep-runs-head span { color: var(--tristep-quiet); white-space: nowrap; }
.tristep-runs-rows { overflow: auto; max-height: var(--tristep-rows); border: 1px solid var(--tristep-grid); border-radius: 4px; }
.tristep-runs table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; overflow-wrap: normal; }
.tristep-runs th { font-weight: inherit; text-align: left; }
.tristep-runs td { text-align: right; white-space: nowrap; }
.tristep-runs th, .tristep-runs td { padding: 1px 6px; }
.tristep-runs thead th { position: sticky; top: 0; background: var(--tristep-background); border-bottom: 1px solid var(--tristep-grid); }
.tristep-runs thead button { padding: 0; border: 0; background: none; color: var(--tristep-quiet); font: inherit; cursor: pointer; text-align: left; }
.tristep-runs tbody tr:hover { background: var(--tristep-grid); }
.tristep-runs label { display: inline-flex; align-items: center; gap: 6px; cursor: pointer; }
.tristep-runs label svg { flex: none; }
.tristep-runs label span { max-width: 180px; overflow: hidden; text-overflow: ellipsis; white-space: nowrap; }
.tristep-runs tr[data-drawn="false"] { color: var(--tristep-quiet); }
.tristep-runs tr[data-drawn="false"] svg { opacity: 0.25; }
.tristep-runs tr[hidden] { display: none; }
.tristep-aside .tristep-controls { display: grid; grid-template-columns: minmax(0, 1fr); align-content: start; gap: 5px; margin: 0; }
.tristep-aside .tristep-control { grid-template-columns: 92px minmax(60px, 1fr) fit-content(40%); gap: 0 8px; }
.tristep-controls output { min-width: 64px; font-variant-numeric: tabular-nums; }
.tristep-controls input[type="text"] { font: inherit; color: inherit; background: var(--tristep-background); width: 76px; padding: 1px 5px;
  border: 1px solid var(--tristep-edge); border-radius: 4px; font-variant-numeric: tabular-nums; }
.tristep-controls input[type="text"].tristep-wide { width: auto; grid-column: 2 / -1; }
.tristep-controls input[type="range"] { appearance: none; width: 100%; height: 18px; margin: 0; border-radius: 4px; background: none; cursor: pointer; }
.tristep-controls input::-webkit-slider-runnable-track { height: 4px; border-radius: 2px; background: var(--tristep-edge); }
.tristep-controls input::-moz-range-track { height: 4px; border-radius: 2px; background: var(--tristep-edge); }
.tristep-controls input::-webkit-slider-thumb { appearance: none; width: 14px; height: 14px; margin-top: -5px; border: 0; border-radius: 7px;
  background: var(--tristep-accent); box-shadow: 0 0 0 2px var(--tristep-background); }
.tristep-controls input::-moz-range-thumb { width: 14px; height: 14px; border: 0; border-radius: 7px; background: var(--tristep-accent);
  box-shadow: 0 0 0 2px var(--tristep-background); }
.tristep-controls select, .tristep-controls button { font: inherit; color: inherit; background: var(--tristep-background);
  border: 1px solid var(--tristep-edge); border-radius: 4px; padding: 3px 10px; cursor: pointer; }
.tristep-controls select { justify-self: start; max-width: 100%; padding: 2px 4px; }
.tristep-controls button:hover { background: var(--tristep-grid); }
.tristep-controls button[aria-disabled="true"] { color: var(--tristep-quiet); opacity: 0.55; cursor: default; background: none; }
.tristep-controls .tristep-play { display: flex; gap: 8px; align-items: center; }
.tristep-controls .tristep-play button { flex: none; display: inline-flex; width: 26px; height: 22px; padding: 0; align-items: center; justify-content: center; }
.tristep-hint { font-size: 11.5px; line-height: 1.2; color: var(--tristep-quiet); }
.tristep-hint:empty { display: none; }
.tristep-hint button { margin-left: 8px; padding: 0 8px; font: inherit; color: var(--tristep-ink); background: var(--tristep-background);
  border: 1px solid var(--tristep-edge); border-radius: 4px; cursor: pointer; }
.tristep-listing { position: relative; margin-top: 6px; font-size: 12.5px; }
.tristep-listing summary { cursor: pointer; color: var(--tristep-quiet); padding-right: 70px; }
.tristep-listing pre { margin: 4px 0 0; padding: 6px 10px; max-height: 260px; overflow: auto; border-radius: 4px; font: 12px/1.45 ${FIXED};
  color: var(--tristep-ink); background: none; border: 1px solid var(--tristep-grid); white-space: pre-wrap; }
.tristep-listing button { position: absolute; right: 0; top: -2px; font: inherit; font-size: 12px; color: inherit; cursor: pointer;
  background: var(--tristep-background); border: 1px solid var(--tristep-edge); border-radius: 4px; padding: 0 8px; }
.tristep-listing button:hover { background: var(--tristep-grid); }
.tristep-message { margin-top: 6px; font-size: 12.5px; color: var(--tristep-ink); white-space: pre-line; }
.tristep-message:empty { display: none; }
.tristep-notes { margin-top: 6px; font-size: 12.5px; color: var(--tristep-ink); }
.tristep-notes:empty { display: none; }
.tristep-notes button { display: block; padding: 1px 0; border: 0; background: none; color: inherit; font: inherit; text-align: left;
  cursor: pointer; text-decoration: underline dotted; text-underline-offset: 3px; }
.tristep-notes button:hover { background: var(--tristep-grid); }
.tristep-silence { margin-top: 6px; font-size: 12.5px; color: var(--tristep-ink); }
.tristep-lost .tristep-remote { opacity: 0.55; }
.tristep-buttons { flex: 0 0 100%; display: flex; flex-wrap: wrap; gap: 6px; }
.jp-OutputArea-child:has(.tristep-pictured) + .jp-OutputArea-child:has(.jp-RenderedImage) { display: none; }
.tristep-hidden { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); white-space: nowrap; }
`;

/**
 * Show a scene in an element.
 *
 * @param element where to; it is emptied.
 * @param payload the bytes of Scene.to_bytes().
 * @param options.send gets what a person did, as viz/render/canvas.py lists it; null where there is no Python: what only it could act on is left out.
 * @param options.theme "light", "dark", or "auto" for that of the page around.
 * @returns {update(payload), answered(), destroy()}; answered() says that Python has acted on what was sent.
 */
export function mount(element, payload, { send = null, theme = "auto" } = {}) {
  let scene = decode(payload);
  let state = Object.fromEntries(scene.controls.map(({ name, index }) => [name, index]));
  let places = []; // of the panels on the canvas
  let zoomed = scene.panels.map(() => null);
  let [width, height, ratio] = [0, 0, 1];
  let most = Infinity; // pixels that the picture may be high
  let covered = null; // pixels of the screen, [wide, high]; null: not known yet
  let [colouring, backIsOld, frameAsked, pen] = ["light", true, 0, null];
  let cursor = null; // of the keyboard: {k, x, y}, a panel's number and pixels
  let held = null; // the point that is being moved: {k, layer, number}
  let pressed = null; // where a pointer went down: {k, x, y, drags, pointer}
  let playing = null; // {name, since}
  let tableTimer = 0;
  let clickTimer = 0;
  let answerTimer = 0;
  let heardAt = performance.now(); // of Python
  let isLost = false; // whether Python does not answer
  let arrived = null; // the bytes of a scene that is to be shown from the next frame on
  const hidden = new Set(); // names
  let chosen = new Set(scene.runs?.shown); // numbers of runs that are drawn
  const order = { column: null, down: false }; // by which the table of runs is sorted: -1 is that of names
  const moved = new Map(); // by layer: places of points since they were moved by hand
  const waiting = new Map(); // by what they tell of: messages that follow when Python has had a moment
  const inputs = new Map(); // by control: what shows a state

  // The parts, in the order in which they are seen.
  const root = make("div", "tristep");
  const style = make("style", "", CSS);
  const title = make("div", "tristep-title");
  const legends = [legendBox("tristep-legend", "Legend: what is shown")]; // that of the picture, and those of panels
  const picture = make("div", "tristep-picture");
  const front = make("canvas");
  const over = make("canvas");
  const back = document.createElement("canvas"); // what no control changes
  const readout = make("div", "tristep-readout");
  readout.hidden = true;
  const hint = make("div", "tristep-hint");
  const whole = make("button", "", "Show all again");
  const controls = make("div", "tristep-controls");
  const silence = make("div", "tristep-silence", "Python does not answer: it is busy, or the kernel has ended or been restarted; then run this cell again. This is the last picture that came.");
  silence.setAttribute("role", "status");
  silence.hidden = true;
  const body = make("div", "tristep-body");
  const runs = make("div", "tristep-runs");
  runs.setAttribute("role", "group");
  runs.setAttribute("aria-label", "Runs");
  const notes = make("div", "tristep-notes");
  notes.setAttribute("aria-live", "polite");
  const message = make("div", "tristep-message");
  message.setAttribute("role", "status");
  const listings = make("div");
  const table = make("div", "tristep-hidden");
  const voice = make("div", "tristep-hidden");
  voice.setAttribute("aria-live", "polite");
  front.tabIndex = 0;
  front.setAttribute("role", "img");
  over.setAttribute("aria-hidden", "true");
  whole.type = "button";
  whole.addEventListener("click", () => zoom(null));
  picture.append(front, over, readout, hint);
  body.append(picture, controls, runs);
  root.append(style, title, legends[0], body, notes, message, listings, silence, table, voice);
  element.replaceChildren(root);

  const isDrawn = ({ name, run }) => !hidden.has(name) && (run === null || !scene.runs || chosen.has(run));
  const look = () => ({ scene, state, isDrawn, moved, taken: [] });

  // -- Drawing, at most once a frame

  function changed({ back: old = false } = {}) {
    backIsOld ||= old;
    frameAsked ||= requestAnimationFrame(() => {
      frameAsked = 0;
      if (arrived) take(arrived);
      paint();
    });
  }

  /** Put the panels in their places, and give the canvases the pixels that these take. */
  function layOut() {
    const scale = isNarrow(scene, width) ? 1 : Math.max(0.9, Math.min(1, width / (scene.width * PIXELS_PER_INCH)));
    pen = penFor(back.getContext("2d"), scene.style, colouring, scale, ratio);
    // While a point is held the panels do not move under the hand, however long the numbers next to them get.
    const made = arrange(scene, width, most, pen, zoomed, held ? places[0].least : {});
    places = made.places;
    if (made.height !== height) {
      height = made.height;
      covered = cursor = null;
      for (const canvas of [front, over]) canvas.style.height = `${height}px`;
      const free = root.classList.contains("tristep-aside") ? height - controls.offsetHeight - 40 : 0;
      runs.style.setProperty("--tristep-rows", `${Math.max(LEAST_OF_RUNS, free)}px`);
    }
    const [wide, high] = covered ?? [Math.round(width * ratio), Math.round(height * ratio)];
    for (const canvas of [front, over, back]) {
      if (canvas.width !== wide || canvas.height !== high) [canvas.width, canvas.height] = [wide, high];
    }
  }

  function paint() {
    if (!width) return;
    const context = front.getContext("2d");
    if (backIsOld) {
      layOut();
      placeLegends();
      pen.context.setTransform(ratio, 0, 0, ratio, 0, 0);
      pen.context.fillStyle = pen.background;
      pen.context.fillRect(0, 0, width + 1, height + 1);
      for (const place of places) {
        place.cased = place.panel.layers.some(({ kind, palette }) => kind === "heatmap" && palette !== "quiet");
        const { layers } = place.panel;
        const moving = layers.findIndex((layer) => layer.by.length || layer.upto || layer.drag);
        place.still = moving < 0 ? layers.length : moving;
        place.taken = [];
        drawAxes(pen, place);
        place.bars.forEach((bar) => drawBar(pen, bar));
        drawLayers(place, layers.slice(0, place.still), place.taken);
        if (place.still === layers.length) drawFrame(pen, place);
      }
      backIsOld = false;
    }
    context.setTransform(1, 0, 0, 1, 0, 0);
    context.drawImage(back, 0, 0);
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    const still = pen.context;
    pen.context = context;
    for (const place of places) {
      const rest = place.panel.layers.slice(place.still);
      if (!rest.length) continue;
      drawLayers(place, rest, [...place.taken]);
      drawFrame(pen, place);
    }
    pen.context = still;
    paintOver();
    clearTimeout(tableTimer);
    tableTimer = setTimeout(tabulate, 300);
  }

  function drawLayers(place, layers, taken) {
    const { context } = pen;
    const { x, y, width: wide, height: high } = place.frame;
    for (const layer of layers) {
      if (!isDrawn(layer)) continue;
      context.save();
      if (layer.kind !== "points" && layer.kind !== "text") { // these are whole also where they lie on the edge
        context.beginPath();
        context.rect(x, y - 1, wide + 1, high + 2);
        context.clip();
      }
      draw[layer.kind](pen, layer, place, { ...look(), taken });
      context.restore();
    }
  }

  /** The cursor, the rectangle of a zoom, and what is pointed at. */
  function paintOver(found = null, place = null) {
    const context = over.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, height);
    if (!pen) return;
    context.strokeStyle = pen.quiet;
    context.lineWidth = 1;
    if (cursor) {
      const { frame } = places[cursor.k];
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
    if (pressed?.seen) {
      const { x, y, width: wide, height: high } = pressed.seen;
      context.fillStyle = pen.quiet;
      context.globalAlpha = 0.15;
      context.fillRect(x, y, wide, high);
      context.globalAlpha = 1;
      context.strokeRect(pen.crisp(x), pen.crisp(y), wide, high);
    }
    if (!found) return;
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

  // -- Size and colours

  /** The picture is as wide as its cell, and no higher than leaves its controls on the screen. */
  function resize() {
    const room = root.clientWidth - 20;
    if (room <= 0) return;
    const aside = scene.runs ? Math.min(ROOM_OF_RUNS, 0.4 * room) : ASIDE;
    const isAside = (isLong() || scene.runs !== null) && root.clientWidth >= WIDE && !isNarrow(scene, room - aside);
    root.classList.toggle("tristep-aside", isAside);
    let wide = isAside ? room - aside : room;
    // The height of a frame in a page tells nothing: it may follow its content.
    const seen = SEEN_SHARE * (window === window.top ? innerHeight : screen.availHeight - 120);
    const heightOf = (...parts) => parts.reduce((sum, part) => sum + part.offsetHeight, 0);
    const lines = 26 * scene.listings.length; // folded, for the picture is not to move when one is unfolded
    const below = Math.min(0.25 * seen, heightOf(notes, message) + lines);
    const around = 40 + heightOf(title, legends[0], hint) + (isAside ? 0 : heightOf(controls)) + below;
    const high = isNarrow(scene, wide) ? Infinity : Math.max(LOWEST, seen - around);
    if (scene.panels.some(({ equal: round }) => round)) wide = Math.min(wide, (STRETCH * high * scene.width) / scene.height);
    wide = Math.floor(wide);
    if (wide === width && high === most && ratio === devicePixelRatio) return;
    [width, most, ratio] = [wide, high, devicePixelRatio || 1];
    picture.style.width = isAside || wide < room ? `${width}px` : ""; // a page may give it parts of a pixel
    covered = cursor = null;
    backIsOld = true;
    paint(); // at once: a canvas that has got a new size is empty
  }

  /** Where a page is zoomed, a canvas may begin and end within a pixel of the screen: how many it has, only the browser knows. */
  function sharpen([{ devicePixelContentBoxSize: [{ inlineSize: wide, blockSize: high }] }]) {
    const near = Math.abs(wide - width * ratio) < 2 && Math.abs(high - height * ratio) < 2;
    if (!near || (wide === front.width && high === front.height)) return;
    covered = [wide, high];
    backIsOld = true;
    paint();
  }

  function recolour() {
    colouring = theme === "auto" ? themeAround() : theme;
    const colours = scene.style[colouring];
    root.style.colorScheme = colouring;
    root.dataset.theme = colouring;
    for (const [name, value] of Object.entries({ ...colours, accent: colours.colours[0], edge: mixed(colours.quiet, colours.background) })) {
      if (typeof value === "string") root.style.setProperty(`--tristep-${name}`, value);
    }
    fillLegend();
    fillRuns();
    changed({ back: true });
  }

  // -- Title, legend, controls, table

  let legendBy = new Set(); // controls whose values are in a legend

  function legendBox(name, label) {
    const box = make("div", name);
    box.setAttribute("role", "group");
    box.setAttribute("aria-label", label);
    return box;
  }

  function fillLegend() {
    const own = scene.panels.filter(({ legend }) => legend !== null);
    while (legends.length > own.length + 1) legends.pop().remove();
    while (legends.length < own.length + 1) {
      legends.push(legendBox("tristep-legend tristep-own", "Legend of a panel"));
      picture.append(legends.at(-1));
    }
    legendBy = new Set(own.length ? scene.controls.map(({ name }) => name) : []);
    [scene.panels.filter(({ legend }) => legend === null), ...own.map((panel) => [panel])].forEach((panels, k) => fillBox(legends[k], panels));
  }

  function fillBox(box, panels) {
    const shown = keysOf(scene, panels);
    const wanted = JSON.stringify([colouring, scene.style, shown.map(({ kind, name, style: look, alpha, marker, head }) => [kind, name, look, alpha, marker, head])]);
    if (wanted !== box.filledFor) { // else it is left alone, for somebody may be about to release a button
      const focused = [...box.children].indexOf(box.getRootNode().activeElement);
      box.replaceChildren(...shown.map(entry));
      box.hidden = !shown.length;
      box.style.display = shown.length ? "" : "none";
      if (focused >= 0) box.children[focused]?.focus();
      box.filledFor = wanted;
    }
    shown.forEach((layer, k) => {
      if (layer.legend_by !== null) legendBy.add(layer.legend_by);
      box.children[k].setAttribute("aria-pressed", String(!hidden.has(layer.name)));
      const [, name, value] = box.children[k].children;
      name.textContent = named(scene, layer, state);
      value.textContent = valueAt(scene, layer, state, panels[0].legend);
      box.children[k].title = `${name.textContent} ${value.textContent}`.trim();
    });
  }

  /** Put legends of panels above these. */
  function placeLegends() {
    places.filter(({ panel }) => panel.legend !== null).forEach(({ panel, frame }, k) => {
      const rows = rowsOf(panel.keys, frame.width + BEFORE).length;
      const { style: look } = legends[k + 1];
      const left = Math.max(0, frame.x - BEFORE);
      [look.left, look.width] = [`${left}px`, `${frame.x + frame.width + 12 - left}px`];
      look.top = `${frame.y - 5 - KEY * rows - (panel.title ? 16 * pen.titleLines(panel, frame.width).length * pen.scale : 0)}px`;
    });
  }

  function entry(layer) {
    const button = make("button");
    button.append(swatch(layer, scene.style, colouring), make("span", "", layer.name), make("b"));
    button.type = "button";
    button.addEventListener("click", () => {
      if (!hidden.delete(layer.name)) hidden.add(layer.name);
      fillLegend();
      changed({ back: true });
    });
    return button;
  }

  let notedFor = "";

  /** A note: if it leads somewhere, a button that goes there. */
  function noted(note) {
    if (typeof note === "string") return make("div", "", note);
    const button = make("button", "", note.words);
    button.type = "button";
    button.addEventListener("click", () => {
      for (const [name, index] of Object.entries(note.sets)) set(name, index);
      const k = note.x === null ? -1 : places.findIndex(({ panel: { frame, x } }) => frame && note.x >= x.low && note.x <= x.high);
      if (k < 0) return;
      front.focus();
      const { frame, x } = places[k];
      cursor = { k, x: x.at(note.x), y: frame.y + frame.height / 2 };
      tellOf(k, cursor.x, cursor.y, { aloud: true });
    });
    return button;
  }

  function fillWords() {
    message.textContent = scene.message;
    const wanted = JSON.stringify(scene.notes);
    if (wanted !== notedFor) notes.replaceChildren(...scene.notes.map(noted)); // else one may be about to be clicked
    notedFor = wanted;
    title.textContent = scene.title;
    title.style.display = scene.title ? "" : "none";
    front.setAttribute("aria-label", [scene.title, scene.description].filter(Boolean).join(". "));
  }

  /** What can be done with the picture itself. */
  function fillHint() {
    const label = (name) => scene.controls.find((each) => each.name === name).label;
    const framed = scene.panels.filter(({ frame }) => frame);
    const clicks = framed.flatMap(({ click }) => click ?? []);
    const told = send ? clicks.filter(({ event }) => event !== null) : [];
    const set = clicks.flatMap(({ control, other }) => [control, other].filter((name) => name !== null).map(label));
    const drags = send ? framed.flatMap(({ layers }) => layers.map(({ drag }) => drag ?? null)).filter((name) => name !== null) : [];
    const words = [
      ...told.map(({ does }) => `click, or arrows and Enter: ${does}`),
      ...(set.length ? [`click or drag, or arrows and Enter: choose ${[...new Set(set)].join(", ")}`] : []),
      ...drags.map((name) => `drag ${name}: move it`),
      ...(framed.some(({ click }) => !click?.control) ? [`${drags.length ? "drag elsewhere" : "drag"}: zoom`, "double click: back"] : []),
    ];
    hint.textContent = [...new Set(words)].join(" · ");
    if (zoomed.some((each) => each)) hint.append(whole);
  }

  /** Look at a part {x, y} of a panel, or at all of it again; at all of all panels without a number. */
  function zoom(part, k = null) {
    zoomed = zoomed.map((each, number) => (k === null || number === k ? part : each));
    fillHint();
    changed({ back: true });
  }

  /** Whether there are more controls than have room below the picture. */
  function isLong() {
    return scene.controls.filter(({ remote }) => !remote || send).length > MOST_BELOW;
  }

  let listedFor = "";

  let tabledFor = "";
  let [search, count, every, rows] = [null, null, null, []];

  /** The table of runs: a search, headings that sort, and for each run a box that draws it. */
  function fillRuns() {
    runs.hidden = !scene.runs;
    if (!scene.runs) return;
    const { names, columns } = scene.runs;
    const wanted = JSON.stringify([colouring, names, columns.map(([heading]) => heading)]);
    if (wanted !== tabledFor) makeRuns(names, columns); // else somebody may be about to set a box
    tabledFor = wanted;
    rows.forEach(({ cells }, k) => cells.forEach((cell, column) => (cell.textContent = tabled(columns[column][1][k]))));
    sortRuns();
    showRuns();
  }

  function tabled(value) {
    return typeof value === "string" ? value : number(Number(value.toPrecision(4)));
  }

  function makeSearch() {
    const head = make("div", "tristep-runs-head");
    search = make("input");
    Object.assign(search, { type: "search", placeholder: "search runs", spellcheck: false });
    search.setAttribute("aria-label", "Search runs");
    search.addEventListener("input", showRuns);
    count = make("span");
    count.setAttribute("role", "status");
    head.append(search, count);
    runs.append(head);
  }

  function makeRuns(names, columns) {
    const focused = rows.findIndex(({ box }) => box === root.getRootNode().activeElement);
    if (!search) makeSearch();
    every = make("input");
    every.type = "checkbox";
    every.setAttribute("aria-label", "Draw all runs found");
    every.addEventListener("change", () => chooseRuns(rows.filter(({ line }) => !line.hidden).map(({ k }) => k), every.checked));
    const titles = make("tr");
    titles.append(...["run", ...columns.map(([heading]) => heading)].map((heading, k) => {
      const cell = make("th");
      const button = make("button", "", heading);
      cell.scope = "col";
      button.type = "button";
      button.addEventListener("click", () => {
        Object.assign(order, { column: k - 1, down: order.column === k - 1 && !order.down });
        sortRuns();
      });
      cell.append(...(k ? [] : [every, " "]), button);
      return cell;
    }));
    const top = make("thead");
    top.append(titles);
    rows = names.map((name, k) => runRow(name, k, columns.length));
    const list = make("tbody");
    // At first those that are drawn stand above the others.
    list.append(...[...rows].sort((a, b) => chosen.has(b.k) - chosen.has(a.k)).map(({ line }) => line));
    list.addEventListener("keydown", (event) => {
      const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
      if (!step) return;
      const boxes = [...list.querySelectorAll("tr:not([hidden]) input")];
      boxes[boxes.indexOf(event.target) + step]?.focus();
      event.preventDefault();
    });
    const all = make("table");
    all.append(top, list);
    const frame = make("div", "tristep-runs-rows");
    frame.append(all);
    runs.querySelector(".tristep-runs-rows")?.remove();
    runs.append(frame);
    rows[focused]?.box.focus();
  }

  function runRow(name, k, n) {
    const [line, header, label, box] = [make("tr"), make("th"), make("label"), make("input")];
    const layer = scene.panels.flatMap(({ layers }) => layers).find((each) => each.run === k && each.name);
    header.scope = "row";
    box.type = "checkbox";
    box.dataset.run = k;
    box.addEventListener("change", () => chooseRuns([k], box.checked));
    label.title = name;
    label.append(box, ...(layer ? [swatch(layer, scene.style, colouring)] : []), make("span", "", name));
    header.append(label);
    const cells = Array.from({ length: n }, () => make("td"));
    line.append(header, ...cells);
    return { k, name, line, box, cells };
  }

  function chooseRuns(numbers, isOn) {
    for (const k of numbers) {
      if (isOn) chosen.add(k);
      else chosen.delete(k);
    }
    showRuns();
    tell({ kind: "runs", shown: [...chosen].sort((a, b) => a - b) }, "runs");
    changed({ back: true });
  }

  /** Which rows have what is searched for, which are drawn, and how many. */
  function showRuns() {
    const asked = search.value.trim().toLowerCase();
    for (const { k, name, line, box, cells } of rows) {
      const all = [name, ...cells.map(({ textContent }) => textContent)].join(" ").toLowerCase();
      line.hidden = !asked.split(/\s+/).every((part) => all.includes(part));
      box.checked = chosen.has(k);
      line.dataset.drawn = box.checked;
    }
    const found = rows.filter(({ line }) => !line.hidden);
    const drawnOf = (several) => several.filter(({ box }) => box.checked).length;
    every.checked = found.length > 0 && drawnOf(found) === found.length;
    every.indeterminate = !every.checked && drawnOf(found) > 0;
    const said = `${drawnOf(rows)} of ${rows.length} drawn` + (asked ? `, ${found.length} found` : "");
    if (count.textContent !== said) count.textContent = said;
  }

  /** Sort the rows: numbers before words, and the least first, or the other way round. */
  function sortRuns() {
    const { column, down } = order;
    runs.querySelectorAll("thead th").forEach((cell, k) => {
      const isIt = k - 1 === column;
      cell.setAttribute("aria-sort", !isIt ? "none" : down ? "descending" : "ascending");
      const button = cell.querySelector("button");
      button.textContent = button.textContent.replace(/ [▴▾]$/, "") + (isIt ? (down ? " ▾" : " ▴") : "");
    });
    if (column === null) return;
    const { names, columns } = scene.runs;
    const values = column < 0 ? names : columns[column][1];
    const compare = (a, b) => {
      const [one, other] = [values[a.k], values[b.k]];
      if (typeof one !== typeof other) return typeof one === "number" ? -1 : 1; // what is not finite is last both ways
      const sign = typeof one === "number" ? one - other : one.localeCompare(other, undefined, { numeric: true });
      return (down ? -sign : sign) || a.k - b.k;
    };
    const list = runs.querySelector("tbody");
    const sorted = [...rows].sort(compare).map(({ line }) => line);
    if (sorted.every((line, k) => line === list.children[k])) return;
    const focused = root.getRootNode().activeElement;
    list.append(...sorted);
    if (list.contains(focused)) focused.focus(); // which moving it has taken away
  }

  /** Listings stay folded, or not, as they are; their lines may change. */
  function fillListings() {
    const wanted = JSON.stringify(scene.listings.map(({ title }) => title));
    if (wanted !== listedFor) listings.replaceChildren(...scene.listings.map(listed));
    listedFor = wanted;
    scene.listings.forEach(({ text: lines }, k) => {
      const shown = listings.children[k].querySelector("pre");
      if (shown.textContent !== lines) shown.textContent = lines; // else a selection would be lost
    });
  }

  function listed({ title: name }) {
    const about = make("details");
    const copy = make("button", "", "Copy");
    const lines = make("pre");
    copy.type = "button";
    copy.setAttribute("aria-label", ["Copy", name].join(" "));
    copy.addEventListener("click", async () => {
      const done = await copied(lines);
      copy.textContent = done ? "Copied" : "Press Ctrl+C"; // they are selected then
      voice.textContent = copy.textContent;
      setTimeout(() => (copy.textContent = "Copy"), 2000);
    });
    about.append(make("summary", "", name), lines);
    const row = make("div", "tristep-listing");
    row.append(about, copy);
    return row;
  }

  let filledFor = "";

  function fillControls() {
    const shown = scene.controls.filter(({ remote }) => !remote || send);
    // Not what may change under somebody's hand: what is in a field, or how a button looks.
    const plain = (control) => {
      const { kind, values } = control;
      return { ...control, index: 0, ...(kind === "choice" ? {} : { values: kind === "text" ? 0 : values.length, texts: [] }) };
    };
    const wanted = JSON.stringify([shown.map(plain), scene.buttons.map(({ name, label }) => [name, label])]);
    if (wanted === filledFor) return inputs.forEach((show) => show());
    filledFor = wanted;
    playing = null;
    const focused = controls.contains(document.activeElement) ? document.activeElement.dataset : {};
    inputs.clear();
    controls.replaceChildren();
    for (const control of shown) {
      const id = `tristep-${Math.random().toString(36).slice(2)}`;
      const label = make("label", "", control.label);
      label.htmlFor = id;
      const input = control.kind === "choice" ? make("select") : make("input");
      const value = make("output");
      input.id = id;
      input.dataset.control = control.name;
      input.setAttribute("aria-label", control.label);
      value.htmlFor = id;
      const line = make("div", control.remote ? "tristep-control tristep-remote" : "tristep-control");
      controls.append(line);
      if (control.kind === "text") {
        const field = fieldOf(control);
        field.id = id;
        field.classList.add("tristep-wide");
        line.append(label, field);
      } else if (control.kind === "choice" && control.values.length > MOST_LISTED) {
        line.append(label, ...searchFor(control, id));
      } else if (control.kind === "choice") {
        control.values.forEach((_, k) => input.append(new Option(words(control, k), k)));
        input.addEventListener("change", () => set(control.name, Number(input.value)));
        line.append(label, input);
        inputs.set(control.name, () => (input.value = state[control.name]));
      } else {
        Object.assign(input, { type: "range", min: 0, max: control.values.length - 1, step: 1 });
        input.addEventListener("input", () => {
          if (playing?.name === control.name) stop();
          set(control.name, Number(input.value));
        });
        const buttons = [];
        if (control.kind === "play") buttons.push(playButton(control));
        const row = make("div", "tristep-play");
        row.append(...buttons, input);
        line.append(label, row, control.typed ? fieldOf(control) : value);
        const field = inputs.get(control.name); // shows what is in it
        inputs.set(control.name, () => {
          const said = words(scene.controls.find(({ name }) => name === control.name), state[control.name]);
          if (Number(input.value) !== state[control.name]) input.value = state[control.name];
          input.setAttribute("aria-valuetext", said);
          value.textContent = said;
          field?.();
        });
      }
      inputs.get(control.name)();
    }
    for (const key of ["control", "typed"]) {
      if (key in focused) [...controls.querySelectorAll(`[data-${key}]`)].find(({ dataset }) => dataset[key] === focused[key])?.focus();
    }
    if (send && scene.buttons.length) {
      const row = make("div", "tristep-buttons");
      for (const { name, label } of scene.buttons) {
        const button = make("button", "", label);
        button.type = "button";
        button.dataset.button = name;
        const isOn = () => !isLost && scene.buttons.find((each) => each.name === name).enabled;
        button.addEventListener("click", () => isOn() && tell({ kind: "button", name }));
        inputs.set(`button ${name}`, () => button.setAttribute("aria-disabled", String(!isOn()))); // it keeps the focus
        inputs.get(`button ${name}`)();
        row.append(button);
      }
      controls.append(row);
    }
  }

  /** A choice of many: a field in which a part of a word finds it, and the list of those that have what was typed. */
  function searchFor(control, id) {
    const [field, list] = [make("input"), make("datalist")];
    Object.assign(field, { id, type: "text", autocomplete: "off", spellcheck: false, className: "tristep-wide" });
    list.id = `${id}-list`;
    field.setAttribute("list", list.id);
    field.setAttribute("aria-label", control.label);
    field.dataset.control = control.name;
    const all = control.values.map((_, k) => words(control, k));
    list.append(...all.map((each) => new Option(each)));
    const show = () => (field.value = all[state[control.name]]);
    const choose = (test) => {
      const k = all.findIndex((each) => test(each.toLowerCase(), field.value.trim().toLowerCase()));
      if (k < 0 || !field.value.trim()) return;
      set(control.name, k);
      show();
    };
    field.addEventListener("focus", () => {
      field.placeholder = field.value; // an empty field lists all
      field.value = "";
    });
    field.addEventListener("input", () => choose((each, typed) => each === typed));
    field.addEventListener("change", () => choose((each, typed) => each.includes(typed)));
    field.addEventListener("blur", show);
    inputs.set(control.name, () => field.matches(":focus") || show());
    return [field, list];
  }

  /** What a value is typed into: Python gets it with Enter, or when the field is left. */
  function fieldOf({ name, label }) {
    const field = make("input");
    Object.assign(field, { type: "text", autocomplete: "off", spellcheck: false });
    field.dataset.typed = name;
    field.setAttribute("aria-label", label);
    let isEdited = false;
    field.addEventListener("input", () => (isEdited = true));
    field.addEventListener("change", () => {
      isEdited = false;
      tell({ kind: "entry", name, text: field.value });
    });
    inputs.set(name, () => {
      const said = typeable(scene.controls.find((each) => each.name === name), state[name]);
      if (!isEdited && field.value !== said) field.value = said;
    });
    return field;
  }

  function set(name, index) {
    if (state[name] === index) return;
    state = { ...state, [name]: index };
    inputs.get(name)?.();
    if (legendBy.has(name)) fillLegend();
    tell({ kind: "control", name, index }, `control ${name}`);
    changed();
  }

  function playButton(control) {
    const button = make("button");
    button.type = "button";
    button.dataset.play = control.name;
    const show = () => {
      const on = playing?.name === control.name;
      button.setAttribute("aria-label", `${on ? "Pause" : "Play"} ${control.label}`);
      button.replaceChildren(icon(on ? "M2 1h3v10H2zM7 1h3v10H7z" : "M2.5 1v10l8-5z"));
    };
    button.addEventListener("click", () => {
      if (playing?.name === control.name) return stop();
      stop();
      const last = control.values.length - 1;
      const from = state[control.name] === last ? 0 : state[control.name];
      const mine = (playing = { name: control.name, show });
      const long = 1000 * control.seconds;
      let begun = null;
      const step = (now) => {
        if (playing !== mine) return;
        begun ??= now - (from / Math.max(1, last)) * long;
        const index = Math.min(last, Math.floor(((now - begun) / long) * last + 1e-6));
        set(control.name, index);
        if (index < last) requestAnimationFrame(step);
        else stop();
      };
      requestAnimationFrame(step);
      show();
    });
    show();
    return button;
  }

  function stop() {
    const { show } = playing ?? {};
    playing = null;
    show?.();
  }

  /** The last values of the lines, for those who do not see them. */
  function tabulate() {
    const rows = [];
    for (const panel of scene.panels) {
      for (const layer of panel.layers) {
        if (layer.kind !== "line" || !layer.name || !isDrawn(layer)) continue;
        const ys = part(layer, "y", state);
        let k = drawn(scene, layer, state) - 1;
        while (k >= 0 && !Number.isFinite(ys[k])) k--;
        if (k >= 0) rows.push([layer.name, panel.title || panel.y.label, number(ys[k])]);
      }
    }
    const body = make("table");
    body.append(make("caption", "", "Last values"));
    for (const row of rows) {
      const line = make("tr");
      line.append(...row.map((words) => make("td", "", words)));
      body.append(line);
    }
    table.replaceChildren(...(rows.length ? [body] : []));
  }

  // -- What a person does

  function tell(message, key = null) {
    if (!send) return;
    if (key === null) return ask(message);
    const earlier = waiting.get(key);
    if (earlier) {
      earlier.next = message; // the latest wins: a slider must not run ahead of Python
      return;
    }
    const entry = { next: null };
    waiting.set(key, entry);
    ask(message);
    setTimeout(() => {
      waiting.delete(key);
      if (entry.next) tell(entry.next, key);
    }, 50);
  }

  function ask(message) {
    answerTimer ||= setTimeout(() => lose(true), PATIENCE);
    try {
      send(message);
    } catch { // as where the kernel has ended
      lose(true);
    }
  }

  /** Say that Python does not answer, and that nothing can be asked of it; or that it does again. */
  function lose(lost) {
    if (lost === isLost) return;
    isLost = lost;
    silence.hidden = !lost;
    root.classList.toggle("tristep-lost", lost);
    inputs.forEach((show) => show());
  }

  /** Python has given a sign. */
  function heard() {
    clearTimeout(answerTimer);
    answerTimer = 0;
    heardAt = performance.now();
    lose(false);
  }

  function answered() {
    heard();
    if (moved.size) { // where points are now is for Python to say
      moved.clear();
      changed();
    }
  }

  function panelAt(x, y) {
    return places.findIndex((place) => place.panel.frame && inFrame(place, x, y));
  }

  function point(k, x, y) {
    const { frame } = places[k];
    return [Math.max(frame.x, Math.min(frame.x + frame.width, x)), Math.max(frame.y, Math.min(frame.y + frame.height, y))];
  }

  function click(k, x, y) {
    const { panel, x: X, y: Y } = places[k];
    if (!panel.click) return;
    const { control, other, along, event } = panel.click;
    if (event !== null) tell({ kind: "click", name: event, x: X.value(x), y: Y.value(y) });
    const directions = along === "x" ? [[X, x], [Y, y]] : [[Y, y], [X, x]];
    if (control !== null) set(control, nearest(control, ...directions[0]));
    if (other !== null) set(other, nearest(other, ...directions[1]));
  }

  /** The number of a control's value that is nearest to a place on an axis; words are numbered. */
  function nearest(name, axis, at) {
    const { values } = scene.controls.find((each) => each.name === name);
    const distances = values.map((value, index) => Math.abs(axis.at(typeof value === "string" ? index : value) - at));
    return distances.indexOf(Math.min(...distances));
  }

  function grip(k, x, y) {
    if (!send) return null;
    let best = null;
    for (const layer of places[k].panel.layers) {
      if (layer.kind !== "points" || layer.drag === null || !isDrawn(layer)) continue;
      const [xs, ys] = [part(layer, "x", state), part(layer, "y", state)];
      for (let number = 0; number < xs.length; number++) {
        const [vx, vy] = moved.get(layer)?.[number] ?? [xs[number], ys[number]];
        const far = Math.hypot(places[k].x.at(vx) - x, places[k].y.at(vy) - y);
        if (far < 14 && (!best || far < best.far)) best = { k, layer, number, far };
      }
    }
    return best;
  }

  function move(x, y) {
    const { k, layer, number } = held;
    [x, y] = point(k, x, y);
    const to = [places[k].x.value(x), places[k].y.value(y)];
    moved.set(layer, { ...moved.get(layer), [number]: to });
    tell({ kind: "drag", name: layer.drag, number, x: to[0], y: to[1] }, `drag ${layer.drag} ${number}`);
    changed();
  }

  function tellOf(k, x, y, { aloud = false } = {}) {
    const found = lookAt(places[k], x, y, look());
    paintOver(found, places[k]);
    const place = places[k];
    const words = found ? said(place, found) : aloud ? { title: "", lines: [spoken(place.panel.x, place.x.value(x), 0), spoken(place.panel.y, place.y.value(y), 0)] } : null;
    readout.hidden = !words;
    if (!words) return;
    const head = make("b", "", words.title);
    const parts = words.title ? [head] : [];
    if (found && !found.cell) {
      const colour = make("i");
      colour.style.background = pen.colour(found.layer.style);
      parts.unshift(colour);
    }
    readout.replaceChildren(...parts, make("div", "", words.lines.join("\n")));
    const { offsetWidth: wide, offsetHeight: high } = readout;
    const left = x + 14 + wide > width ? Math.max(0, x - 14 - wide) : x + 14;
    const top = y + 14 + high > height ? Math.max(0, y - 10 - high) : y + 14;
    readout.style.transform = `translate(${Math.round(left)}px, ${Math.round(top)}px)`;
    if (aloud) voice.textContent = [words.title, ...words.lines].filter(Boolean).join(", ");
  }

  function quiet() {
    readout.hidden = true;
    paintOver();
  }

  function place(event) {
    const box = front.getBoundingClientRect(); // may be scaled by the page around
    return [((event.clientX - box.left) * width) / box.width, ((event.clientY - box.top) * height) / box.height];
  }

  front.addEventListener("pointerdown", (event) => {
    const [x, y] = place(event);
    const k = panelAt(x, y);
    if (k < 0 || event.button) return;
    cursor = null;
    held = grip(k, x, y);
    pressed = { k, x, y, far: false, pointer: event.pointerId };
    front.setPointerCapture(event.pointerId);
  });

  front.addEventListener("pointermove", (event) => {
    const [x, y] = place(event);
    if (!pressed) {
      const k = panelAt(x, y);
      front.style.cursor = k >= 0 && grip(k, x, y) ? "grab" : k >= 0 && places[k].panel.click ? "crosshair" : "default";
      if (k < 0 || !pen) quiet();
      else tellOf(k, x, y);
      return;
    }
    pressed.far ||= Math.hypot(x - pressed.x, y - pressed.y) > 5;
    if (held) {
      front.style.cursor = "grabbing";
      move(x, y);
      tellOf(held.k, ...point(held.k, x, y));
    } else if (pressed.far && places[pressed.k].panel.click?.control) {
      click(pressed.k, ...point(pressed.k, x, y));
    } else if (pressed.far && event.pointerType !== "touch") {
      pressed.seen = rectangle(places[pressed.k], pressed, ...point(pressed.k, x, y));
      quiet();
    }
  });

  front.addEventListener("pointerup", (event) => {
    if (!pressed) return;
    const [x, y] = place(event);
    const { k, far, seen } = pressed;
    clearTimeout(clickTimer);
    if (!held && !far) {
      if (zoomed[k]) clickTimer = setTimeout(click, DOUBLE_CLICK, k, x, y); // unless it is the first of a double click
      else click(k, x, y);
    }
    if (seen && seen.width > 8 && seen.height > 8) {
      const { panel, x: X, y: Y } = places[k];
      const within = (axis, way, from, to) => {
        const ends = [way.value(from), way.value(to)].sort((a, b) => a - b);
        return { ...axis, low: ends[0], high: ends[1] };
      };
      zoom({ x: within(panel.x, X, seen.x, seen.x + seen.width), y: within(panel.y, Y, seen.y, seen.y + seen.height) }, k);
    }
    held = pressed = null;
    quiet();
  });

  front.addEventListener("pointercancel", () => {
    held = pressed = null;
    quiet();
  });

  front.addEventListener("pointerleave", () => pressed || quiet());

  front.addEventListener("dblclick", (event) => {
    const [x, y] = place(event);
    const k = panelAt(x, y);
    if (k < 0 || !zoomed[k]) return;
    clearTimeout(clickTimer);
    zoom(null, k);
  });

  front.addEventListener("keydown", (event) => {
    const framed = places.flatMap(({ panel }, k) => (panel.frame ? [k] : []));
    if (!framed.length || event.ctrlKey || event.metaKey || event.altKey) return;
    const step = event.shiftKey ? 0.1 : 0.02;
    const ways = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
    const centre = (k) => ({ k, x: places[k].frame.x + places[k].frame.width / 2, y: places[k].frame.y + places[k].frame.height / 2 });
    if (event.key in ways) {
      const [dx, dy] = ways[event.key];
      if (cursor) {
        const { frame } = places[cursor.k];
        const [x, y] = point(cursor.k, cursor.x + dx * step * frame.width, cursor.y + dy * step * frame.height);
        cursor = { ...cursor, x, y };
        if (held) move(x, y);
      } else {
        cursor = centre(framed[0]);
      }
    } else if (event.key === "PageDown" || event.key === "PageUp") {
      const now = cursor ? framed.indexOf(cursor.k) : event.key === "PageDown" ? -1 : 0;
      cursor = centre(framed[(now + (event.key === "PageDown" ? 1 : framed.length - 1)) % framed.length]);
      held = null;
    } else if (event.key === "Enter" && cursor) {
      if (held) held = null;
      else if (!(held = grip(cursor.k, cursor.x, cursor.y))) click(cursor.k, cursor.x, cursor.y);
    } else if (event.key === "Escape") {
      held = cursor = null;
      quiet();
      front.blur();
      event.preventDefault();
      return;
    } else {
      return;
    }
    event.preventDefault();
    tellOf(cursor.k, cursor.x, cursor.y, { aloud: true });
  });

  front.addEventListener("blur", () => {
    held = cursor = null;
    quiet();
  });

  // A notebook takes keys for itself, arrows above all; those with Ctrl or the like remain its own.
  root.addEventListener("keydown", (event) => {
    if (isPlain(event)) event.stopPropagation();
  });
  // Notebook 7 takes them before they come here, but not from an element with this attribute.
  const mark = (event) => root.contains(event.target) && event.target.toggleAttribute("data-lm-suppress-shortcuts", isPlain(event));
  window.addEventListener("keydown", mark, true);

  // -- Life

  const sizes = new ResizeObserver(resize);
  sizes.observe(root);
  const pixels = new ResizeObserver(sharpen);
  try {
    pixels.observe(front, { box: "device-pixel-content-box" });
  } catch {
    // Safari does not tell, and the picture is as sharp as rounded numbers make it.
  }
  window.addEventListener("resize", resize); // another screen may have other pixels
  const themes = new MutationObserver(() => theme === "auto" && themeAround() !== colouring && recolour());
  if (document.body) themes.observe(document.body, { attributes: true, attributeFilter: ["data-jp-theme-light", "data-theme", "class"] });
  const preference = matchMedia("(prefers-color-scheme: dark)");
  preference.addEventListener("change", recolour);

  fillWords();
  fillHint();
  fillControls();
  fillListings();
  const watch = setInterval(() => {
    const isQuiet = scene.live && !answerTimer && performance.now() - heardAt > QUIET;
    if (send && isQuiet) ask({ kind: "waiting" });
  }, QUIET / 5);
  recolour();
  resize();

  /** Show another scene; controls that are in both, with as many values, stay as they are set, unless it sets them. */
  function take(bytes) {
    arrived = null;
    const before = scene;
    scene = decode(bytes);
    const known = new Map(before.controls.map((control) => [control.name, control]));
    state = Object.fromEntries(
      scene.controls.map(({ name, index, values }) => {
        const old = known.get(name);
        return [name, old && old.values.length === values.length && old.index === index ? state[name] : index];
      }),
    );
    zoomed = scene.panels.map((panel, k) => {
      const old = before.panels[k];
      const same = old && ["x", "y"].every((way) => old[way].label === panel[way].label && old[way].scale === panel[way].scale);
      return (same && zoomed[k]) || null;
    });
    moved.clear();
    if (held) {
      const number = before.panels[held.k].layers.indexOf(held.layer);
      const layer = scene.panels[held.k]?.layers[number];
      held = layer?.kind === "points" && layer.drag === held.layer.drag ? { ...held, layer } : null;
    }
    if (places.length !== scene.panels.length) cursor = pressed = null;
    fillWords();
    fillHint();
    // Runs stay as they were chosen; those that are new, as the scene says.
    const had = before.runs?.names.length ?? 0;
    chosen = new Set([...[...chosen].filter((k) => k < had), ...(scene.runs?.shown ?? []).filter((k) => k >= had)]);
    fillControls();
    fillRuns();
    fillListings();
    fillLegend();
    backIsOld = true;
    resize();
  }

  return {
    update(bytes) {
      arrived = bytes; // of many in one frame the last is shown
      heard();
      changed();
    },
    answered,
    destroy() {
      sizes.disconnect();
      pixels.disconnect();
      window.removeEventListener("keydown", mark, true);
      themes.disconnect();
      preference.removeEventListener("change", recolour);
      window.removeEventListener("resize", resize);
      cancelAnimationFrame(frameAsked);
      [tableTimer, clickTimer, answerTimer].forEach(clearTimeout);
      clearInterval(watch);
      playing = null;
      root.remove();
    },
  };
}

function make(tag, name = "", words = "") {
  const made = document.createElement(tag);
  if (name) made.className = name;
  if (words) made.textContent = words;
  return made;
}

/** Put the text of an element into the clipboard, or at least select it: a page may not allow the first. */
async function copied(element) {
  try {
    await navigator.clipboard.writeText(element.textContent);
    return true;
  } catch {
    const fold = element.closest("details");
    if (fold) fold.open = true;
    getSelection().selectAllChildren(element);
    try {
      return document.execCommand("copy");
    } catch {
      return false;
    }
  }
}

function svg(tag, attributes, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

function icon(path) {
  return svg("svg", { width: 12, height: 12, viewBox: "0 0 12 12", "aria-hidden": "true" }, svg("path", { d: path, fill: "currentColor" }));
}

/** How a layer looks, next to its name in the legend. */
function swatch(layer, style, theme) {
  const { colours, ...roles } = style[theme];
  const numbered = typeof layer.style === "number";
  let colour = numbered ? colours[layer.style % colours.length] : roles[layer.style];
  const parts = [];
  if (layer.kind === "heatmap") colour = `#${layer.colours[theme].slice(-6)}`;
  if (layer.kind === "band" || layer.kind === "heatmap") {
    const opacity = layer.kind === "band" ? Math.max(0.25, layer.alpha) : 1;
    parts.push(svg("rect", { x: 1, y: 2, width: 32, height: 8, fill: colour, "fill-opacity": opacity }));
  } else if (layer.kind === "points") {
    const shape = { ring: "none" }[layer.marker] ?? colour;
    if (layer.marker === "cross") parts.push(svg("path", { d: "M9 2l8 8M17 2l-8 8", stroke: colour, "stroke-width": 2 }));
    else if (layer.marker === "star") parts.push(svg("path", { d: "M13 0l1.6 4 4.4.2-3.4 2.7 1.2 4.2-3.8-2.4-3.8 2.4 1.2-4.2L7 4.2 11.4 4z", fill: colour }));
    else parts.push(svg("circle", { cx: 13, cy: 6, r: 4, fill: shape, stroke: colour, "stroke-width": layer.marker === "ring" ? 2 : 0 }));
  } else if (layer.kind === "arrows") {
    parts.push(svg("path", { d: "M1 6h17", stroke: colour, "stroke-width": 2.4 }), svg("path", { d: "M17 1.5l8 4.5-8 4.5z", fill: colour }));
  } else {
    const width = layer.kind === "refline" ? 1.4 : 2.4;
    const dashes = (numbered ? style.dashes[layer.style % style.dashes.length] : []).map((length) => length * width).join(" ");
    parts.push(svg("path", { d: "M1 6h32", stroke: colour, "stroke-width": width, "stroke-dasharray": dashes }));
    if (layer.marker || layer.head) parts.push(svg("circle", { cx: layer.head && !layer.marker ? 31 : 17, cy: 6, r: 3, fill: colour }));
  }
  return svg("svg", { width: 34, height: 12, viewBox: "0 0 34 12", "aria-hidden": "true" }, ...parts);
}

function inFrame({ frame }, x, y) {
  return x >= frame.x - 1 && x <= frame.x + frame.width + 1 && y >= frame.y - 1 && y <= frame.y + frame.height + 1;
}

function rectangle({ panel, frame }, from, x, y) {
  const made = { x: Math.min(from.x, x), y: Math.min(from.y, y), width: Math.abs(x - from.x), height: Math.abs(y - from.y) };
  if (panel.equal) { // what is seen keeps the frame's proportions
    const share = Math.max(made.width / frame.width, made.height / frame.height);
    [made.width, made.height] = [share * frame.width, share * frame.height];
    made.x = Math.min(made.x, frame.x + frame.width - made.width);
    made.y = Math.min(made.y, frame.y + frame.height - made.height);
  }
  return made;
}

function isPlain({ ctrlKey, metaKey, altKey }) {
  return !ctrlKey && !metaKey && !altKey;
}

/** "light" or "dark": that of the page, as Jupyter, marimo or VS Code mark it, else the one that the system prefers. */
function themeAround() {
  const body = document.body;
  const jupyter = body?.dataset.jpThemeLight;
  if (jupyter !== undefined) return jupyter === "false" ? "dark" : "light";
  if (["light", "dark"].includes(body?.dataset.theme)) return body.dataset.theme;
  const code = body?.className.match(/\bvscode-(?:high-contrast-)?(light|dark|high-contrast)\b/)?.[1];
  if (code) return code === "light" ? "light" : "dark";
  return matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
}

function mixed(one, other) {
  const [a, b] = [one, other].map((hex) => hex.match(/[0-9a-f]{2}/gi).map((digits) => parseInt(digits, 16)));
  return `rgb(${a.map((value, k) => Math.round((value + b[k]) / 2)).join(" ")})`;
}

// ---- In a notebook: what anywidget calls

export default {
  render({ model, el }) {
    const shown = mount(el, model.get("payload"), { send: (message) => model.send(message) });
    const update = () => shown.update(model.get("payload"));
    const hide = () => el.classList.toggle("tristep-pictured", model.get("pictured"));
    hide();
    const answered = ({ kind }) => kind === "answered" && shown.answered();
    model.on("change:payload", update);
    model.on("change:pictured", hide);
    model.on("msg:custom", answered);
    return () => {
      model.off("change:payload", update);
      model.off("change:pictured", hide);
      model.off("msg:custom", answered);
      shown.destroy();
    };
  },
};

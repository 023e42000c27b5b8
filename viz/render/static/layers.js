// How each kind of layer is drawn.

import { drawn, part, textOf } from "./data.js";
import { inFrame } from "./hit.js";
import { coloured, spanOf } from "./images.js";
import { PIXELS_PER_POINT, shortened } from "./pen.js";

const THICK = 4; // points a column of pixels, above which it is drawn by four of them

/**
 * Far from the frame nothing is seen, and dashes on a line of a million pixels would take forever: it is cut.
 * @type {(x0: number, y0: number, x1: number, y1: number, box: Edges) => number[] | null}
 */
function cut(x0, y0, x1, y1, box) {
  const [dx, dy] = [x1 - x0, y1 - y0];
  const from = { share: 0, x: x0, y: y0 };
  const to = { share: 1, x: x1, y: y1 };
  /** @type {[number, number, { x: number } | { y: number }][]} */
  const edges = [
    [-dx, x0 - box.left, { x: box.left }],
    [dx, box.right - x0, { x: box.right }],
    [-dy, y0 - box.top, { y: box.top }],
    [dy, box.bottom - y0, { y: box.bottom }],
  ];
  for (const [p, q, edge] of edges) {
    const share = q / p;
    if (p === 0 && q < 0) return null;
    if (p < 0 && share > from.share) Object.assign(from, { share, x: x0 + share * dx, y: y0 + share * dy }, edge);
    if (p > 0 && share < to.share) Object.assign(to, { share, x: x0 + share * dx, y: y0 + share * dy }, edge);
  }
  // Of very far places digits are lost: on an edge its own number is taken, and what then lies next to the box is left out.
  const isInside = (/** @type {{ x: number, y: number }} */ { x, y }) =>
    x > box.left - 1 && x < box.right + 1 && y > box.top - 1 && y < box.bottom + 1;
  return from.share <= to.share && isInside(from) && isInside(to) ? [from.x, from.y, to.x, to.y] : null;
}

/**
 * Begin a path through the points of a line, and return the places of those that have a gap on both sides, through which
 * there is none. Of more points than `THICK` in a pixel's column, those that follow each other in it are drawn by the first,
 * the lowest, the highest and the last of them.
 * @type {(context: CanvasRenderingContext2D, xs: Numbers, ys: Numbers, n: number, place: Place, ratio: number) =>
 *   [number, number][]}
 */
export function trace(context, xs, ys, n, place, ratio) {
  const { frame, x: X, y: Y } = place;
  const path = new LinePath(context, frame);
  context.beginPath();
  if (n <= THICK * frame.width * ratio) {
    for (let k = 0; k < n; k++) path.to(X.at(xs[k]), Y.at(ys[k]));
  } else {
    let column = NaN;
    let [low, lowAt, high, highAt, first, last] = [NaN, 0, NaN, 0, 0, 0]; // of the column: values and numbers of points
    const finish = () => {
      const inner = lowAt < highAt ? [lowAt, highAt] : [highAt, lowAt];
      for (const k of inner[1] < last ? [...inner, last] : inner) if (k > first) path.to(X.at(xs[k]), Y.at(ys[k]));
    };
    for (let k = 0; k < n; k++) {
      const at = Math.floor(X.at(xs[k]) * ratio);
      const y = ys[k];
      if (at === column && Number.isFinite(y)) {
        if (y < low) [low, lowAt] = [y, k];
        if (y > high) [high, highAt] = [y, k];
        last = k;
        continue;
      }
      if (!Number.isNaN(column)) finish();
      path.to(X.at(xs[k]), Y.at(y));
      column = Number.isFinite(at) && Number.isFinite(Y.at(y)) ? at : NaN;
      [low, high, first, lowAt, highAt, last] = [y, y, k, k, k, k];
    }
    if (!Number.isNaN(column)) finish();
  }
  path.end();
  return path.lone;
}

/** A path with gaps at what is not finite, without what is far from the frame. */
class LinePath {
  /**
   * @param {CanvasRenderingContext2D} context
   * @param {Frame} frame
   */
  constructor(context, { x, y, width, height }) {
    this.context = context;
    this.box = { left: x - width, right: x + 2 * width, top: y - height, bottom: y + 2 * height };
    this.x = NaN; // of the last point
    this.y = NaN;
    this.isDown = false; // whether the pen is there
    this.length = 0; // points since the last gap
    /** @type {[number, number][]} */
    this.lone = [];
  }

  /** @type {(x: number, y: number) => void} */
  to(x, y) {
    if (!Number.isFinite(x) || !Number.isFinite(y)) return this.end();
    const { context, box } = this;
    const isInside = x > box.left && x < box.right && y > box.top && y < box.bottom;
    if (this.isDown && isInside) {
      context.lineTo(x, y);
    } else if (this.length) {
      const piece = cut(this.x, this.y, x, y, box);
      if (piece) {
        if (!this.isDown) context.moveTo(piece[0], piece[1]);
        context.lineTo(piece[2], piece[3]);
      }
    } else if (isInside) {
      context.moveTo(x, y);
    }
    [this.x, this.y, this.isDown] = [x, y, isInside];
    this.length++;
  }

  end() {
    if (this.length === 1) this.lone.push([this.x, this.y]);
    this.isDown = false;
    this.length = 0;
  }
}

/** @type {{ [K in Layer["kind"]]: (pen: Pen, layer: Extract<Layer, { kind: K }>, place: Place, look: Look) => void }} */
const draw = {
  line(pen, layer, place, { scene, state }) {
    const { context } = pen;
    const [xs, ys, n] = [part(layer, "x", state), part(layer, "y", state), drawn(scene, layer, state)];
    const width = layer.width * PIXELS_PER_POINT;
    context.globalAlpha = layer.alpha;
    context.lineJoin = "round";
    const lone = trace(context, xs, ys, n, place, pen.ratio);
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
    } else {
      for (const [x, y] of lone) dot(pen, x, y, Math.max(1.5, 0.8 * width), place.cased);
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
    const near = (/** @type {number} */ at) => Math.max(-far, Math.min(far, at));
    const X = (/** @type {number} */ k) => near(place.x.at(xs[k]));
    const known = (/** @type {number} */ k) =>
      Number.isFinite(place.x.at(xs[k])) && !Number.isNaN(place.y.at(low[k]) + place.y.at(high[k]));
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
    const { frame } = place;
    const [left, right, low, high] = [place.x.at(x[0]), place.x.at(x[1]), place.y.at(y[0]), place.y.at(y[1])];
    // Only what is seen, and in groups of cells where these are smaller than pixels: a canvas has at most 65,535 of them.
    const across = spanOf(columns, left, right, frame.x, frame.x + frame.width, pen.ratio);
    const up = spanOf(rows, low, high, frame.y + frame.height, frame.y, pen.ratio);
    const [wide, tall] = [(right - left) / columns, (high - low) / rows]; // of a cell
    context.save();
    context.translate(left + across.from * wide, low + up.from * tall);
    context.scale(((across.to - across.from) * wide) / across.n, ((up.to - up.from) * tall) / up.n);
    context.imageSmoothingEnabled = Math.min(Math.abs(wide), Math.abs(tall)) * pen.ratio < 1; // else cells have sharp edges
    context.drawImage(coloured(pen, layer, state, across, up), 0, 0);
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

  text(pen, layer, place, { state, isPast }) {
    const { context } = pen;
    const { x: left, y: top, width, height } = place.frame;
    const share = part(layer, "x", state)[0];
    const room = { left: 1 - share, right: share, center: 2 * Math.min(share, 1 - share) }[layer.align] * width;
    const past = isPast && layer.name === "status" ? "when last heard: " : "";
    const { lines, size, step } = pen.fitted(layer, past + textOf(layer, state), room);
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

/** @type {(pen: Pen, layer: Layer, place: Place, look: Look) => void} */
export function drawLayer(pen, layer, place, look) {
  const drawKind = /** @type {typeof drawLayer} */ (draw[layer.kind]);
  drawKind(pen, layer, place, look);
}

/** @type {(pen: Pen, words: string, x: number, y: number, colour: string) => void} */
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

/** @type {(pen: Pen, x: number, y: number, radius: number, cased: boolean) => void} */
export function dot(pen, x, y, radius, cased) {
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

/** @type {(pen: Pen, kind: Marker, x: number, y: number, radius: number) => void} */
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

/**
 * @type {(pen: Pen, style: LayerStyle, x0: number, y0: number, x1: number, y1: number, width: number, cased: boolean) => void}
 */
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

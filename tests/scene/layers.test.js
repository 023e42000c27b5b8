// The paths of lines: gaps, lone points, and lines of more points than there are pixels.

import assert from "node:assert/strict";
import { test } from "node:test";

import { spanOf } from "../../viz/render/static/images.js";
import { trace } from "../../viz/render/static/layers.js";
import { direction } from "../../viz/render/static/layout.js";

const axis = (low, high) => ({ low, high, scale: "linear", upwards: true });

/** What is drawn of a line in a frame of 200 x 100 pixels: runs of points, and those that are alone. */
function traced(xs, ys, [low, high] = [0, 10]) {
  const runs = [];
  const context = { beginPath() {}, moveTo: (x, y) => runs.push([[x, y]]), lineTo: (x, y) => runs.at(-1).push([x, y]) };
  const frame = { x: 0, y: 0, width: 200, height: 100 };
  const place = { frame, x: direction(axis(low, high), 0, 200), y: direction(axis(0, 1), 100, 0) };
  const lone = trace(context, Float64Array.from(xs), Float64Array.from(ys), xs.length, place, 1);
  return { runs: runs.filter((run) => run.length > 1), lone };
}

test("a point between gaps is alone, and others are on lines", () => {
  const { runs, lone } = traced([0, 1, 2, 3, 4, 5, 6], [0.5, NaN, 0.25, Infinity, 0, 1, NaN]);
  assert.deepEqual(lone, [[0, 50], [40, 75]]);
  assert.deepEqual(runs, [[[80, 100], [100, 0]]]);
});

test("a line of many points has few, with the least and the largest of each column of pixels, and its gaps", () => {
  let seed = 1;
  const random = () => (seed = (seed * 16807) % 2147483647) / 2147483647;
  const n = 50_000;
  const xs = Array.from({ length: n }, (_, k) => (10 * k) / n);
  const ys = xs.map((_, k) => (k >= 10_000 && k < 10_400 ? NaN : random()));
  const { runs } = traced(xs, ys);
  assert.equal(runs.length, 2);
  const points = runs.flat();
  assert.ok(points.length <= 4 * 200, `${points.length}`);
  const bounds = (several) => {
    const found = new Map();
    for (const [x, y] of several) {
      const [low, high] = found.get(Math.floor(x)) ?? [Infinity, -Infinity];
      found.set(Math.floor(x), [Math.min(low, y), Math.max(high, y)]);
    }
    return found;
  };
  const all = xs.map((x, k) => [20 * x, 100 - 100 * ys[k]]).filter(([, y]) => !Number.isNaN(y));
  assert.deepEqual(bounds(points), bounds(all));
  const order = points.map(([x]) => x);
  assert.deepEqual(order, [...order].sort((a, b) => a - b));
});

test("a line that goes to and fro is not taken for a curve", () => {
  const n = 4_000;
  const xs = Array.from({ length: n }, (_, k) => (k % 2 ? 9 : 1)); // no two points that follow each other are in one column
  assert.equal(traced(xs, xs.map((_, k) => k / n)).runs.flat().length, n);
});

test("of a map the cells that are seen are drawn, in no more groups than there are pixels", () => {
  assert.deepEqual(spanOf(10, 0, 200, 0, 200, 1), { from: 0, to: 10, n: 10 });
  assert.deepEqual(spanOf(10, 200, 0, 0, 200, 2), { from: 0, to: 10, n: 10 }); // an axis that goes the other way
  assert.deepEqual(spanOf(70_000, 0, 200, 0, 200, 2), { from: 0, to: 70_000, n: 400 });
  assert.deepEqual(spanOf(70_000, -35_000, 35_000, 0, 200, 1), { from: 35_000, to: 35_200, n: 200 });
  assert.deepEqual(spanOf(3, 50, 80, 0, 200, 1), { from: 0, to: 3, n: 3 });
});

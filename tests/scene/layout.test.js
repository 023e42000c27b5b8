// Where panels, their frames and their words go, with letters that are all six pixels wide.

import assert from "node:assert/strict";
import { test } from "node:test";

import { arrange, direction, isNarrow, isStiff, rowsOf } from "../../viz/render/static/layout.js";
import { penFor } from "../../viz/render/static/pen.js";

const roles = { background: "#ffffff", ink: "#000000", quiet: "#777777", grid: "#eeeeee", colours: ["#ff0000"] };
const style = { dashes: [[]], light: roles, dark: roles };
const pen = penFor({ measureText: (words) => ({ width: 6 * words.length }) }, style, "light", 1, 1);
const axis = (low, high, more = {}) => ({ label: "x", low, high, scale: "linear", ticks: null, upwards: true, ...more });
const panel = (row, column, more = {}) => ({
  x: axis(0, 1), y: axis(0, 1), layers: [], title: "", row, column, rows: 1, columns: 1, equal: false, frame: true, legend: null, ...more,
});
const scene = (panels) => ({ panels, controls: [], runs: null, widths: [], heights: [], width: 9, height: 4.5, style });

test("frames in one row or column begin and end together, and none reaches over another", () => {
  const wordy = axis(0, 2, { ticks: [[0, "a long name"], [1, "another"]] });
  const panels = [panel(0, 0), panel(0, 1, { y: wordy, title: "title" }), panel(1, 0, { y: wordy }), panel(1, 1)];
  const { places, height } = arrange(scene(panels), 864, Infinity, pen, [null, null, null, null], {});
  const [a, b, c, d] = places.map(({ frame }) => frame);
  assert.ok(a.x === c.x && b.x === d.x && a.y === b.y && c.y === d.y && a.width === c.width && b.height === a.height);
  assert.ok(a.x + a.width < b.x && a.y + a.height < c.y && c.y + c.height < height && d.x + d.width < 864);
});

test("panels that would be too narrow stand one below the other", () => {
  const two = scene([panel(0, 0), panel(0, 1)]);
  assert.ok(isNarrow(two, 400) && !isNarrow(two, 864));
  const [a, b] = arrange(two, 400, Infinity, pen, [null, null], {}).places.map(({ frame }) => frame);
  assert.ok(a.x === b.x && a.y + a.height < b.y);
  const [high, low, lowest] = [Infinity, 700, 100].map((most) => arrange(two, 400, most, pen, [null, null], {}).height);
  assert.ok(low <= 700 && low < high && lowest < low && lowest > 0.7 * high);
});

test("a part that is looked at is all of its panel, and circles stay round", () => {
  const part = { x: axis(0.2, 0.4), y: axis(0.5, 0.6) };
  const [{ x, y, frame }] = arrange(scene([panel(0, 0, { equal: true })]), 864, Infinity, pen, [part], {}).places;
  assert.deepEqual([x.at(0.2), x.at(0.4)], [frame.x, frame.x + frame.width]);
  assert.ok(Math.abs(x.unit / -y.unit - 1) < 0.02);
});

test("a round panel leaves the width that it cannot use to its neighbour, if there is one", () => {
  const round = panel(0, 0, { equal: true });
  const [{ frame }, other] = arrange(scene([round, panel(0, 1)]), 1200, 300, pen, [null, null], {}).places;
  assert.ok(Math.abs(frame.width - frame.height) < 3 && other.frame.x - frame.x - frame.width < 80 && other.frame.width > 700);
  assert.deepEqual([isStiff(scene([round])), isStiff(scene([round, panel(0, 1)])), isStiff(scene([round, panel(1, 0)]))], [true, false, true]);
});

test("values to pixels and back", () => {
  for (const each of [axis(-1, 3), axis(0.01, 100, { scale: "log" }), axis(-1, 3, { upwards: false })]) {
    const way = direction(each, 50, 450);
    assert.deepEqual([way.at(each.low), way.at(each.high)].sort((a, b) => a - b), [50, 450]);
    for (const at of [50, 123.4, 450]) assert.ok(Math.abs(way.at(way.value(at)) - at) < 1e-9);
  }
});

test("legends are broken into rows", () => {
  assert.deepEqual(rowsOf([50, 50, 30, 200], 100), [[50, 50], [30], [200]]);
});

// Bytes of a scene to arrays, what controls choose of them, and what stays when another scene comes.

import assert from "node:assert/strict";
import { test } from "node:test";

import { decode, drawn, keysOf, named, part, textOf, valueAt } from "../../viz/render/static/data.js";
import { sortedBy } from "../../viz/render/static/runs.js";
import { Shown } from "../../viz/render/static/shown.js";

/** The bytes of a header and arrays, as Scene.to_bytes lays them out. */
function bytes(header, ...arrays) {
  let start = 0;
  const described = arrays.map((array) => {
    const entry = { dtype: `${array.constructor.name.replace("Array", "").toLowerCase()}`, shape: [array.length], start };
    start += 8 * Math.ceil(array.byteLength / 8);
    return entry;
  });
  const words = new TextEncoder().encode(JSON.stringify({ format: 1, panels: [], ...header, arrays: described }));
  const base = 8 * Math.ceil((4 + words.length) / 8);
  const all = new Uint8Array(base + start);
  new DataView(all.buffer).setUint32(0, words.length, true);
  all.set(words, 4);
  arrays.forEach((array, k) => all.set(new Uint8Array(array.buffer, 0, array.byteLength), base + described[k].start));
  return all;
}

const control = (name, values, index = 0) => ({ name, label: name, values, index, texts: [] });
const line = (x, y, more = {}) => ({
  kind: "line", name: "loss", style: 0, by: [], run: null, upto: null, legend_by: null,
  x: { data: Float32Array.from(x), shape: [x.length] }, y: { data: Float32Array.from(y), shape: [y.length] }, ...more,
});
const axis = { label: "", scale: "linear" };
const scene = (layers, more = {}) => ({ panels: [{ x: axis, y: axis, layers, legend: null }], controls: [], runs: null, ...more });

test("arrays are those that were written, wherever the bytes begin", () => {
  const arrays = [new Float32Array([1.5, NaN, -Infinity]), new Int16Array([-7]), new Uint8Array([255, 0]), new Int32Array([1 << 30]), new Float64Array([2 ** 24 + 1])];
  const layers = arrays.map((_, k) => ({ kind: "line", by: [], x: { array: k } }));
  const written = bytes({ panels: [{ layers }] }, ...arrays);
  for (const shift of [0, 3, 8]) {
    const moved = new Uint8Array(written.length + shift);
    moved.set(written, shift);
    const found = decode(new DataView(moved.buffer, shift)).panels[0].layers;
    assert.deepEqual(found.map((layer) => part(layer, "x", {})), arrays);
  }
  assert.throws(() => decode(bytes({ format: 2 })), /format 2; this is for format 1: reload/);
});

test("controls choose parts of arrays, and how many points are drawn", () => {
  const [a, b] = [control("a", [10, 20]), control("b", [0, 1, 2])];
  const values = { data: Float32Array.from({ length: 12 }, (_, k) => k), shape: [2, 3, 2] };
  const layer = line([0, 1], [0, 0], { by: ["a", "b"], y: values, upto: "b" });
  assert.deepEqual([...part(layer, "y", { a: 1, b: 2 })], [10, 11]);
  assert.deepEqual([...part(layer, "x", { a: 1, b: 2 })], [0, 1]);
  const all = scene([layer], { controls: [a, b] });
  assert.deepEqual([0, 1, 2].map((k) => drawn(all, layer, { a: 0, b: k })), [1, 2, 2]);
  assert.equal(named(all, { ...layer, legend_by: "a" }, { a: 1 }), "loss (20)");
  assert.equal(textOf({ kind: "text", by: ["a", "b"], texts: [["p"], ["q", "r"]] }, { a: 1, b: 1 }), "r");
});

test("a legend's value is that of the last point up to the control's", () => {
  const layer = line([0, 10, 20], [1, 0.123456, NaN]);
  const all = scene([layer], { controls: [control("step", [-1, 0, 15, 20])] });
  assert.deepEqual([0, 1, 2, 3].map((step) => valueAt(all, layer, { step }, "step")), ["–", "1", "0.123", "–"]);
});

test("a legend has each name and style once, and no runs that are in the table", () => {
  const [one, two] = [line([0], [0]), line([0], [0], { name: "run", run: 0 })];
  const names = (all) => keysOf(all, all.panels).map(({ name }) => name);
  assert.deepEqual(names(scene([one, { ...one }, two])), ["loss", "run"]);
  assert.deepEqual(names(scene([one, two], { runs: { names: ["run"] } })), ["loss"]);
});

test("another scene keeps what was chosen where it can", () => {
  const runs = (n, chosen) => ({ names: Array.from({ length: n }, (_, k) => `run ${k}`), columns: [], shown: chosen });
  const shown = new Shown(scene([], { controls: [control("rate", [1, 2, 3]), control("step", [0, 1])], runs: runs(2, [0, 1]) }));
  shown.state = { rate: 2, step: 1 };
  shown.chosen.delete(0);
  shown.zoomed = [{ x: axis, y: axis }];
  shown.replace(scene([], { controls: [control("rate", [1, 2, 3]), control("step", [0, 1, 2])], runs: runs(4, [0, 1, 3]) }));
  assert.deepEqual(shown.state, { rate: 2, step: 0 });
  assert.deepEqual([...shown.chosen], [1, 3]);
  assert.notEqual(shown.zoomed[0], null);
  shown.replace(scene([], { controls: [control("rate", [1, 2, 3], 1)], panels: [{ x: { ...axis, label: "other" }, y: axis, layers: [] }] }));
  assert.deepEqual(shown.state, { rate: 1 });
  assert.deepEqual(shown.zoomed, [null]);
});

test("runs are sorted by numbers, then words, and the not finite stay last", () => {
  assert.deepEqual(sortedBy([3, "not finite", 1, 3], false), [2, 0, 3, 1]);
  assert.deepEqual(sortedBy([3, "not finite", 1, 3], true), [0, 3, 2, 1]);
  assert.deepEqual(sortedBy(["run 10", "run 9"], false), [1, 0]);
});

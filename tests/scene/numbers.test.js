// Numbers and ticks. That ticks are where matplotlib has them is in tests/browser/test_scene_module.py.

import assert from "node:assert/strict";
import { test } from "node:test";

import { number, typeable, words } from "../../viz/render/static/numbers.js";
import { ticks } from "../../viz/render/static/ticks.js";

const axis = (low, high, scale = "linear") => ({ low, high, scale, ticks: null });

test("numbers in words", () => {
  const expected = { 0: "0", 12345: "12,345", "-2.5": "−2.5", 0.00012346: "0.0001235", 2.5e9: "2.5×10⁹", "-3.2e-9": "−3.2×10⁻⁹" };
  for (const [value, said] of Object.entries(expected)) assert.equal(number(Number(value)), said);
  assert.deepEqual([NaN, Infinity, -Infinity].map(number), ["not a number", "∞", "−∞"]);
});

test("a control's value is its text, its word or its number, and can be typed", () => {
  assert.equal(words({ values: [1, 2], texts: ["one", "two"] }, 1), "two");
  assert.equal(words({ values: ["a", "b"], texts: [] }, 0), "a");
  assert.equal(words({ values: [-0.001], texts: [] }, 0), "−0.001");
  assert.equal(typeable({ values: [-0.00123456] }, 0), "-0.001235");
});

test("given ticks are thinned", () => {
  const given = Array.from({ length: 100 }, (_, k) => [k, `row ${k}`]);
  const { major } = ticks({ ...axis(0, 99), ticks: given }, 200, 20);
  assert.deepEqual(major.map(({ value }) => value), [0, 10, 20, 30, 40, 50, 60, 70, 80, 90]);
});

test("an axis without length, or with one that no digits tell, has one tick", () => {
  for (const [low, high] of [[2, 2], [2, 2 + 4e-16], [0, 0], [-1e8, -1e8 + 1e-8], [NaN, NaN]]) {
    for (const scale of ["linear", "log"]) assert.equal(ticks(axis(low, high, scale), 400, 40).major.length, 1);
  }
});

test("ticks lie on the axis, in order, and there are as many as have room", () => {
  for (const [low, high, scale] of [[-2, 2], [0, 1e7], [99.98, 100.01], [-1e-300, 1e-300], [1e-4, 1, "log"], [2, 3, "log"]]) {
    const values = ticks(axis(low, high, scale), 400, 40).major.map(({ value }) => value);
    assert.ok(values.length >= 2 && values.length <= 11, `${low} to ${high}: ${values}`);
    assert.deepEqual(values, [...new Set(values)].sort((a, b) => a - b));
    assert.ok(values[0] >= low - 1e-9 * (high - low) && values.at(-1) <= high + 1e-9 * (high - low));
  }
});

test("labels of short logarithmic axes are apart, and there are some at either end", () => {
  const ranges = [[0.013, 0.95], [0.04, 0.9], [0.2, 2.4], [0.21, 0.48], [0.3, 0.95], [0.011, 0.9], [1e-4, 1], [5e-9, 3]];
  for (const [low, high] of ranges) {
    for (const length of [60, 105, 117, 250, 600]) {
      const { major } = ticks(axis(low, high, "log"), length, 34);
      const places = major.map(({ value }) => (length * Math.log(value / low)) / Math.log(high / low));
      const gaps = places.slice(1).map((place, k) => place - places[k]);
      const said = `${low} to ${high} on ${length}: ${major.map(({ value }) => value)}`;
      assert.ok(places.length >= 2 && Math.min(...gaps) >= 15, said);
      assert.ok(places[0] <= 0.62 * length && places.at(-1) >= 0.38 * length, said);
    }
  }
});

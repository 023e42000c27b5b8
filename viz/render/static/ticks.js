// Ticks of an axis: where they stand, and their words.

import { grouped, minus, number } from "./numbers.js";

/**
 * Ticks of an axis {low, high, scale, ticks} that is so many pixels long, at least `space` pixels from one to the next:
 * {major: [{value, words, power}], minor: [value]}. A power stands raised behind the words.
 * @type {(axis: Pick<Axis, "low" | "high" | "scale" | "ticks">, length: number, space: number) => Ticks}
 */
export function ticks(axis, length, space) {
  const { low, high } = axis;
  const most = Math.max(1, Math.floor(length / space));
  if (axis.ticks) {
    const inside = axis.ticks.filter(([value]) => value >= low && value <= high);
    const stride = Math.max(1, Math.ceil(inside.length / most));
    return { major: inside.filter((_, k) => k % stride === 0).map(([value, words]) => ({ value, words })), minor: [] };
  }
  const largest = Math.max(Math.abs(low), Math.abs(high));
  if (!(high - low > 1e-12 * largest)) return { major: [{ value: low, words: number(low) }], minor: [] }; // words have 12 digits
  /** @type {(value: number) => number} */
  const place = (value) => (length * Math.log(value / low)) / Math.log(high / low);
  if (axis.scale === "log") {
    const found = decades(low, high, most, place, space / 2);
    if (found) return found;
  }
  let step = niceStep((high - low) / most);
  while (Math.floor(high / step + 1e-9) <= Math.ceil(low / step - 1e-9)) step = niceStep(step / 2.5); // one tick says nothing
  const decimals = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
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
  if (axis.scale !== "log") return { major, minor: [] };
  const kept = apart(major, place, space / 2);
  return { major: kept.length > 1 ? kept : [major[0], major[major.length - 1]], minor: [] };
}

/**
 * Those of `found` that are at least `space` from each other, the first ones first.
 * @template {{ value: number }} T
 * @param {T[]} found
 * @param {(value: number) => number} place
 * @param {number} space
 */
function apart(found, place, space) {
  /** @type {T[]} */
  const kept = [];
  for (const tick of found) {
    if (kept.every(({ value }) => Math.abs(place(value) - place(tick.value)) >= space)) kept.push(tick);
  }
  return kept.sort((one, other) => one.value - other.value);
}

/**
 * Ticks at powers of ten, and at 5 and 2 times them where there is room; null where the axis has less than two of these.
 * @type {(low: number, high: number, most: number, place: (value: number) => number, space: number) => Ticks | null}
 */
function decades(low, high, most, place, space) {
  const first = Math.ceil(Math.log10(low) - 1e-9);
  const last = Math.floor(Math.log10(high) + 1e-9);
  const stride = Math.max(1, Math.ceil((last - first + 1) / Math.max(2, most)));
  /** @type {{ value: number, k: number, power: number }[]} */
  const every = [];
  for (let power = first - 1; power <= last; power++) {
    for (let k = 1; k < 10; k++) {
      const value = Number(`${k}e${power}`);
      if (value >= low * (1 - 1e-9) && value <= high * (1 + 1e-9)) every.push({ value, k, power });
    }
  }
  /** @type {(wanted: number) => typeof every} */
  const times = (wanted) => every.filter(({ k, power }) => k === wanted && (power - first) % stride === 0);
  const major = last - first < 3 ? apart([...times(1), ...times(5), ...times(2)], place, space) : times(1);
  if (major.length < 2) return null;
  const plain = major.every(({ value }) => value > 0.9e-3 && value < 1.1e4);
  return {
    major: major.map(({ value, k, power }) =>
      plain ? { value, words: grouped(String(value)) } : { value, words: k === 1 ? "10" : `${k}×10`, power },
    ),
    minor: stride === 1 && last - first < 8 ? every.filter((tick) => !major.includes(tick)).map(({ value }) => value) : [],
  };
}

/** @type {(raw: number) => number} */
function niceStep(raw) {
  const power = 10 ** Math.floor(Math.log10(raw));
  const share = raw / power;
  return power * (share <= 1 + 1e-9 ? 1 : share <= 2 + 1e-9 ? 2 : share <= 5 + 1e-9 ? 5 : 10);
}

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
  if (axis.scale === "log") {
    const found = decades(low, high, most);
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
  return { major, minor: [] };
}

/**
 * Ticks at powers of ten, with 2 and 5 times them where there is room; null where less than one power would be seen.
 * @type {(low: number, high: number, most: number) => Ticks | null}
 */
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

/** @type {(raw: number) => number} */
function niceStep(raw) {
  const power = 10 ** Math.floor(Math.log10(raw));
  const share = raw / power;
  return power * (share <= 1 + 1e-9 ? 1 : share <= 2 + 1e-9 ? 2 : share <= 5 + 1e-9 ? 5 : 10);
}

// The data of a scene: its arrays from bytes, and what the controls choose of them.

import { number, words } from "./numbers.js";

const FORMAT = 1;
/** @type {Record<string, new (buffer: ArrayBuffer, start: number, length: number) => Numbers>} */
const TYPES = { uint8: Uint8Array, int16: Int16Array, int32: Int32Array, float32: Float32Array, float64: Float64Array };

/**
 * The scene in these bytes (ArrayBuffer, DataView or typed array); its arrays are {data, shape}, views of the bytes.
 * @type {(payload: ArrayBuffer | ArrayBufferView<ArrayBuffer>) => Scene}
 */
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
  /** @type {NumberArray[]} */
  const arrays = scene.arrays.map((/** @type {{ dtype: string, shape: number[], start: number }} */ { dtype, shape, start }) => ({
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

/**
 * The bytes of a scene from those of a page, where viz/render/canvas.py has put them so that they are easily compressed.
 * @type {(packed: ArrayBuffer) => ArrayBuffer}
 */
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

/**
 * What the controls choose of a layer's array: a view of [own dimensions], never a copy.
 * @type {(layer: Layer, name: string, state: State) => Numbers}
 */
export function part(layer, name, state) {
  const { data, shape } = /** @type {NumberArray} */ (Reflect.get(layer, name));
  const own = layer.kind === "text" ? 0 : layer.kind === "heatmap" && name === "values" ? 2 : 1;
  if (shape.length === own) return data;
  const size = product(shape.slice(layer.by.length));
  const number = layer.by.reduce((sum, control, k) => sum * shape[k] + state[control], 0);
  return data.subarray(number * size, (number + 1) * size);
}

/**
 * The control of this name.
 * @type {(scene: Scene, name: string | null) => Control | undefined}
 */
export function controlOf(scene, name) {
  return scene.controls.find((each) => each.name === name);
}

/**
 * How many points of a line are drawn.
 * @type {(scene: Scene, layer: LineLayer, state: State) => number}
 */
export function drawn(scene, layer, state) {
  const n = part(layer, "x", state).length;
  const control = controlOf(scene, layer.upto);
  return control ? Math.max(0, Math.min(n, Math.trunc(Number(control.values[state[control.name]])) + 1)) : n;
}

/** @type {(layer: TextLayer, state: State) => string} */
export function textOf(layer, state) {
  return String(layer.by.reduce((texts, control) => (Array.isArray(texts) ? texts[state[control]] : texts), layer.texts));
}

/**
 * What a legend calls a layer: its name, and behind that the value of a control.
 * @type {(scene: Scene, layer: Layer, state: State) => string}
 */
export function named(scene, layer, state) {
  const control = controlOf(scene, layer.legend_by);
  return control ? `${layer.name} (${words(control, state[control.name])})` : layer.name;
}

/**
 * A line's value where the control of this name is along x, in few digits; empty without one, and for other layers.
 * @type {(scene: Scene, layer: Layer, state: State, name: string | null) => string}
 */
export function valueAt(scene, layer, state, name) {
  const control = controlOf(scene, name);
  if (!control || layer.kind !== "line") return "";
  const [xs, ys] = [part(layer, "x", state), part(layer, "y", state)];
  const at = Number(control.values[state[control.name]]);
  let [low, high] = [0, drawn(scene, layer, state)]; // of the points up to there the last one
  while (low < high) {
    const middle = (low + high) >> 1;
    if (xs[middle] <= at) low = middle + 1;
    else high = middle;
  }
  return low && Number.isFinite(ys[low - 1]) ? number(Number(ys[low - 1].toPrecision(3))) : "–";
}

/**
 * What a legend of these panels has: layers of different names or styles.
 * @type {(scene: Scene, panels: Panel[]) => Layer[]}
 */
export function keysOf({ runs }, panels) {
  const found = new Map();
  for (const layer of panels.flatMap(({ layers }) => layers)) {
    if (layer.kind === "text" || (runs && layer.run !== null)) continue; // which are in the table
    const key = JSON.stringify([layer.name, layer.style]);
    if (layer.name && !found.has(key)) found.set(key, layer);
  }
  return [...found.values()];
}

/** @type {(numbers: number[]) => number} */
function product(numbers) {
  return numbers.reduce((all, n) => all * n, 1);
}

// Numbers in words, as people read them.

/**
 * A number in four digits for people: 0.001, −1.5×10⁻⁷; integers with all digits: 12,345.
 * @type {(value: number) => string}
 */
export function number(value) {
  if (!Number.isFinite(value)) return Number.isNaN(value) ? "not a number" : value > 0 ? "∞" : "−∞";
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e9) return grouped(String(value));
  if (size !== 0 && (size < 1e-4 || size >= 1e6)) {
    const [digits, power] = value.toExponential(3).split("e");
    const raised = String(Number(power)).replace(/./g, (sign) => (sign === "-" ? "⁻" : "⁰¹²³⁴⁵⁶⁷⁸⁹"[Number(sign)]));
    return minus(`${Number(digits)}×10${raised}`);
  }
  return grouped(String(Number(value.toPrecision(size >= 1e4 ? 6 : 4))));
}

/**
 * A control's value as its label shows it.
 * @type {(control: Control, index: number) => string}
 */
export function words(control, index) {
  if (control.texts?.length) return control.texts[index];
  const value = control.values[index];
  return typeof value === "string" ? value : number(value);
}

/**
 * The same to be edited: with the signs of a keyboard.
 * @type {(control: Control, index: number) => string}
 */
export function typeable(control, index) {
  const value = control.values[index];
  return typeof value === "string" ? value : String(Number(value.toPrecision(4)));
}

/** @type {(words: string) => string} */
export function minus(words) {
  return words.replace(/^-/, "−");
}

/** @type {(words: string) => string} */
export function grouped(words) {
  const [whole, decimals] = words.split(".");
  const thousands = whole.replace("-", "").length > 4 ? whole.replace(/\B(?=(\d{3})+$)/g, ",") : whole;
  return minus(decimals === undefined ? thousands : `${thousands}.${decimals}`);
}

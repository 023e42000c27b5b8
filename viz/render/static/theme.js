// The colours of the page around.

/**
 * "light" or "dark": that of the page, as Jupyter, marimo or VS Code mark it, else the one that the system prefers.
 * @type {() => Theme}
 */
export function themeAround() {
  const body = document.body;
  const jupyter = body?.dataset.jpThemeLight;
  if (jupyter !== undefined) return jupyter === "false" ? "dark" : "light";
  const named = body?.dataset.theme;
  if (named === "light" || named === "dark") return named;
  const code = body?.className.match(/\bvscode-(?:high-contrast-)?(light|dark|high-contrast)\b/)?.[1];
  if (code) return code === "light" ? "light" : "dark";
  return matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
}

/** @type {(one: string, other: string) => string} */
export function mixed(one, other) {
  const [a, b] = [one, other].map((hex) => (hex.match(/[0-9a-f]{2}/gi) ?? []).map((digits) => parseInt(digits, 16)));
  return `rgb(${a.map((value, k) => Math.round((value + b[k]) / 2)).join(" ")})`;
}

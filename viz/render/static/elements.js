// Elements of a page.

/**
 * An element with a class and words.
 * @template {keyof HTMLElementTagNameMap} T
 * @param {T} tag
 * @returns {HTMLElementTagNameMap[T]}
 */
export function make(tag, name = "", words = "") {
  const made = document.createElement(tag);
  if (name) made.className = name;
  if (words) made.textContent = words;
  return made;
}

/**
 * Put the text of an element into the clipboard, or at least select it: a page may not allow the first.
 * @type {(element: HTMLElement) => Promise<boolean>}
 */
export async function copied(element) {
  try {
    await navigator.clipboard.writeText(element.textContent);
    return true;
  } catch {
    const fold = element.closest("details");
    if (fold) fold.open = true;
    getSelection()?.selectAllChildren(element);
    try {
      return document.execCommand("copy");
    } catch {
      return false;
    }
  }
}

/** @type {(tag: string, attributes: Record<string, string | number>, ...children: Element[]) => SVGElement} */
export function svg(tag, attributes, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, String(value));
  made.append(...children);
  return made;
}

/** @type {(path: string) => SVGElement} */
export function icon(path) {
  return svg("svg", { width: 12, height: 12, viewBox: "0 0 12 12", "aria-hidden": "true" }, svg("path", { d: path, fill: "currentColor" }));
}

/** @type {(event: KeyboardEvent) => boolean} */
export function isPlain({ ctrlKey, metaKey, altKey }) {
  return !ctrlKey && !metaKey && !altKey;
}

/**
 * What has the focus in the page, or the shadow in it, in which this element is.
 * @param {HTMLElement} element
 */
export function focusOf(element) {
  const around = element.getRootNode();
  const focused = around instanceof Document || around instanceof ShadowRoot ? around.activeElement : null;
  return focused instanceof HTMLElement ? focused : null;
}

// A view in an element of a page: its parts, its size and its colours.

import { Controls } from "./controls.js";
import { CSS } from "./css.js";
import { decode } from "./data.js";
import { isPlain, make } from "./elements.js";
import { isNarrow, isStiff } from "./layout.js";
import { Legends } from "./legend.js";
import { Picture } from "./picture.js";
import { Pointer } from "./pointer.js";
import { Python } from "./python.js";
import { Runs } from "./runs.js";
import { Shown } from "./shown.js";
import { mixed, themeAround } from "./theme.js";
import { Hint, Words } from "./words.js";

const WIDE = 780; // pixels of a page from which on controls stand next to the picture
const ASIDE = 308; // pixels that they take there
const SLIM = 480; // pixels of a view below which a slider of many values has a line of its own
const ROOM_OF_RUNS = 420; // pixels that a table of runs takes there
const SEEN_SHARE = 0.775; // of the window's height that a view takes at most: the rest is the notebook's, and the cell's code
const LOWEST = 220; // pixels of a picture's height, however low the window
const SEEN_CONTROLS = 0.3; // of the height that a view has: controls over the picture take as much, however high it is
const ENDLESS = 1e5; // pixels, higher than any screen
const STRETCH = 1.2; // how much wider than its own proportions a picture gets in which a panel cannot be wider

/**
 * Show a scene in an element, which is emptied.
 *
 * `payload` are the bytes of Scene.to_bytes(). `send` gets what a person did, as viz/render/canvas.py lists it; null where
 * there is no Python: what only it could act on is left out. `theme` is "light", "dark", or "auto" for that of the page
 * around. What is returned shows another scene by `update(payload)`; `answered()` says that Python has acted on what was sent.
 * @type {(element: HTMLElement, payload: Payload, options?: { send?: Send | null, theme?: Theme | "auto" }) =>
 *   { update: (payload: Payload) => void, answered: () => void, destroy: () => void }}
 */
export function mount(element, payload, { send = null, theme = "auto" } = {}) {
  const view = new View(element, decode(payload), send, theme);
  return {
    update: (bytes) => view.update(bytes),
    answered: () => view.answered(),
    destroy: () => view.destroy(),
  };
}

class View {
  /**
   * @param {HTMLElement} element
   * @param {Scene} scene
   * @param {Send | null} send
   * @param {Theme | "auto"} theme
   */
  constructor(element, scene, send, theme) {
    this.theme = theme;
    /** @type {Element | null} the lowest box around that scrolls */
    this.box = null;
    /** @type {number | null} pixels of its height; null: to be looked for */
    this.boxHeight = null;
    this.seen = 0; // pixels of the height that the view may take
    /** @type {Payload | null} the bytes of a scene that is to be shown from the next frame on */
    this.arrived = null;
    this.shown = new Shown(scene);
    this.python = new Python(send, (isLost) => this.lost(isLost), () => this.shown.scene.live);
    this.picture = new Picture(this.shown, {
      beforeFrame: () => this.arrived && this.take(this.arrived),
      laidOut: (isHigher) => this.laidOut(isHigher),
      painted: () => this.words.tabulateSoon(),
    });
    this.legends = new Legends(this.shown, this.picture);
    this.controls = new Controls(this.shown, this.python, (name, index) => this.set(name, index));
    this.runs = new Runs(this.shown, this.picture, this.python);
    this.words = new Words(this.shown, (note) => this.follow(note));
    this.hint = new Hint(this.shown, this.python, () => this.zoom(null));
    this.pointer = new Pointer(this.shown, this.picture, this.python, {
      set: (name, index) => this.set(name, index),
      zoom: (part, k) => this.zoom(part, k),
      say: (words) => (this.words.voice.textContent = words),
    });
    this.root = this.assemble();
    element.replaceChildren(this.root);
    this.fill();
    this.stopWatching = this.watch();
    this.recolour();
    this.resize();
  }

  /** All parts, in the order in which they are seen. */
  assemble() {
    const { words } = this;
    const body = make("div", "tristep-body");
    this.picture.element.append(this.hint.element);
    body.append(this.picture.element, this.controls.element, this.runs.element);
    const root = make("div", "tristep");
    root.append(words.title, this.legends.element, body, words.notes, words.message, words.listings, words.silence);
    root.append(words.table, words.voice);
    return root;
  }

  /** Follow the page: its size, its pixels, its colours, and keys. Returns what ends that. */
  watch() {
    const { root } = this;
    const resize = () => {
      this.boxHeight = null;
      this.resize();
    };
    const recolour = () => this.recolour();
    this.sizes = new ResizeObserver((entries) => (entries.every(({ target }) => target === root) ? this.resize() : resize()));
    this.sizes.observe(root);
    const pixels = new ResizeObserver(([{ devicePixelContentBoxSize: [{ inlineSize, blockSize }] }]) => {
      this.picture.sharpen(inlineSize, blockSize);
    });
    try {
      pixels.observe(this.picture.front, { box: "device-pixel-content-box" });
    } catch {
      // Safari does not tell, and the picture is as sharp as rounded numbers make it.
    }
    window.addEventListener("resize", resize); // another screen may have other pixels
    const themes = new MutationObserver(() => this.theme === "auto" && themeAround() !== this.picture.theme && recolour());
    const attributeFilter = ["data-jp-theme-light", "data-theme", "class"];
    if (document.body) themes.observe(document.body, { attributes: true, attributeFilter });
    const preference = matchMedia("(prefers-color-scheme: dark)");
    preference.addEventListener("change", recolour);

    // A notebook takes keys for itself, arrows above all; those with Ctrl or the like remain its own.
    root.addEventListener("keydown", (event) => {
      if (isPlain(event)) event.stopPropagation();
    });
    // Notebook 7 takes them before they come here, but not from an element with this attribute.
    const mark = (/** @type {KeyboardEvent} */ event) => {
      const [target] = event.composedPath(); // of a shadow, `target` is its host
      if (target instanceof Element && root.contains(target)) target.toggleAttribute("data-lm-suppress-shortcuts", isPlain(event));
    };
    window.addEventListener("keydown", mark, true);
    return () => {
      this.sizes?.disconnect();
      pixels.disconnect();
      themes.disconnect();
      preference.removeEventListener("change", recolour);
      window.removeEventListener("resize", resize);
      window.removeEventListener("keydown", mark, true);
    };
  }

  /** Write everything anew that is not on the canvas, but for what depends on colours. */
  fill() {
    this.words.fill();
    this.picture.front.setAttribute("aria-label", this.words.label);
    this.hint.fill();
    this.controls.fill();
  }

  /** The picture is as wide as its cell, and no higher than leaves its controls on the screen. */
  resize() {
    const { root, words, picture } = this;
    const { scene } = this.shown;
    styled(root);
    const room = root.clientWidth - 20;
    if (room <= 0) return;
    const aside = scene.runs ? Math.min(ROOM_OF_RUNS, 0.4 * room) : ASIDE;
    const isAside = (this.controls.isLong || scene.runs !== null) && root.clientWidth >= WIDE && !isNarrow(scene, room - aside);
    root.classList.toggle("tristep-aside", isAside);
    root.classList.toggle("tristep-slim", room < SLIM);
    let width = isAside ? room - aside : room;
    this.boxHeight ??= this.lookAround();
    // The height of a frame in a page tells nothing: it may follow its content.
    const seen = Math.min(SEEN_SHARE * (window === window.top ? innerHeight : screen.availHeight - 120), this.boxHeight - 4);
    this.seen = seen;
    const heightOf = (/** @type {HTMLElement[]} */ ...parts) => parts.reduce((sum, part) => sum + part.offsetHeight, 0);
    const lines = 26 * scene.listings.length; // folded, for the picture is not to move when one is unfolded
    const below = Math.min(0.25 * seen, heightOf(words.notes, words.message) + lines);
    const above = heightOf(words.title, this.legends.element, this.hint.element);
    const around = 40 + above + (isAside ? 0 : this.controls.element.scrollHeight) + below; // also where they are over the picture
    const most = Math.max(LOWEST, seen - around);
    if (isStiff(scene)) width = Math.min(width, (STRETCH * most * scene.width) / scene.height);
    width = Math.floor(width);
    const ratio = devicePixelRatio || 1;
    if (width === picture.width && most === picture.most && ratio === picture.ratio) return this.placeControls();
    picture.element.style.width = isAside || width < room ? `${width}px` : ""; // a page may give it parts of a pixel
    picture.resize(width, most, ratio);
  }

  /** Find the lowest box around that scrolls, and watch it. Returns how high it is, or would be with more in it. */
  lookAround() {
    const { root } = this;
    /** @type {Element[]} */
    const boxes = [];
    for (let each = parentOf(root); each; each = parentOf(each)) {
      if (/auto|scroll/.test(getComputedStyle(each).overflowY)) boxes.push(each);
    }
    root.style.minHeight = `${ENDLESS}px`;
    const heights = boxes.map((box) => box.clientHeight);
    root.style.minHeight = "";
    const least = Math.min(ENDLESS, ...heights);
    const box = boxes[heights.indexOf(least)] ?? null;
    if (box && box !== this.box) this.sizes?.observe(box);
    this.box = box;
    return least;
  }

  /** @param {boolean} isHigher */
  laidOut(isHigher) {
    const { root, controls } = this;
    const { height, pen } = this.picture;
    if (pen) this.legends.place(pen);
    if (!isHigher) return;
    const isAside = root.classList.contains("tristep-aside");
    this.placeControls();
    this.runs.fit(isAside ? height - controls.element.offsetHeight - 40 : 0);
  }

  /** Controls that have no room below the picture are over its end, while that is not on the screen, and scroll. */
  placeControls() {
    const { root, controls, picture, seen } = this;
    const left = seen - picture.element.offsetHeight - 8; // pixels below the picture
    const isOver = !root.classList.contains("tristep-aside") && controls.element.scrollHeight > left;
    root.classList.toggle("tristep-over", isOver);
    root.style.setProperty("--tristep-most", `${Math.round(Math.max(left, SEEN_CONTROLS * seen))}px`);
  }

  recolour() {
    const { root, picture } = this;
    picture.theme = this.theme === "auto" ? themeAround() : this.theme;
    const { colours, ...roles } = this.shown.scene.style[picture.theme];
    root.style.colorScheme = picture.theme;
    root.dataset.theme = picture.theme;
    const all = { ...roles, accent: colours[0], edge: mixed(roles.quiet, roles.background) };
    for (const [name, value] of Object.entries(all)) root.style.setProperty(`--tristep-${name}`, value);
    this.legends.fill();
    this.runs.fill();
    picture.changed({ back: true });
  }

  /**
   * Set a control to its value of this number.
   * @type {(name: string, index: number) => void}
   */
  set(name, index) {
    const { shown } = this;
    if (shown.state[name] === index) return;
    shown.state = { ...shown.state, [name]: index };
    this.controls.show(name);
    if (this.legends.controls.has(name)) this.legends.fill();
    this.python.tell({ kind: "control", name, index }, `control ${name}`);
    this.picture.changed();
  }

  /**
   * Look at a part of a panel, or at all of it again; at all of all panels without a number.
   * @type {(part: Zoomed | null, k?: number | null) => void}
   */
  zoom(part, k = null) {
    this.shown.zoomed = this.shown.zoomed.map((each, number) => (k === null || number === k ? part : each));
    this.hint.fill();
    this.picture.changed({ back: true });
  }

  /**
   * Go where a note leads.
   * @param {Exclude<Note, string>} note
   */
  follow(note) {
    for (const [name, index] of Object.entries(note.sets)) this.set(name, index);
    if (note.x !== null) this.pointer.goTo(note.x);
  }

  /**
   * Say that Python does not answer, and that nothing can be asked of it; or that it does again.
   * @param {boolean} isLost
   */
  lost(isLost) {
    this.words.silence.hidden = !isLost;
    this.root.classList.toggle("tristep-lost", isLost);
    this.controls.show();
    this.shown.isPast = isLost;
    this.picture.changed({ back: true });
  }

  /** @param {Payload} payload */
  update(payload) {
    this.arrived = payload; // of many in one frame the last is shown
    this.python.heard();
    this.picture.changed();
  }

  answered() {
    this.python.heard();
    if (!this.shown.moved.size) return;
    this.shown.moved.clear(); // where points are now is for Python to say
    this.picture.changed();
  }

  /**
   * Show another scene.
   * @param {Payload} payload
   */
  take(payload) {
    this.arrived = null;
    const before = this.shown.scene;
    this.shown.replace(decode(payload));
    this.pointer.replaced(before);
    this.fill();
    this.runs.fill();
    this.legends.fill();
    this.picture.isBackOld = true;
    this.resize();
  }

  destroy() {
    this.stopWatching();
    for (const each of [this.picture, this.pointer, this.python, this.words]) each.destroy();
    this.controls.playing = null;
    this.root.remove();
  }
}

/**
 * What an element is in, also where that is a shadow's host.
 * @type {(element: Element) => Element | null}
 */
function parentOf(element) {
  const around = element.getRootNode();
  return element.parentElement ?? (around instanceof ShadowRoot ? around.host : null);
}

/**
 * Give the page, or the shadow in it, in which an element is, our rules, once for all views.
 * @param {HTMLElement} element
 */
function styled(element) {
  const around = element.getRootNode();
  const place = around instanceof Document ? around.head : around instanceof ShadowRoot ? around : null;
  if (!place || [...place.querySelectorAll("style.tristep-rules")].some(({ textContent }) => textContent === CSS)) return;
  place.append(make("style", "tristep-rules", CSS));
}

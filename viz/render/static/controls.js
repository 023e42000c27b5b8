// Controls: sliders, choices, fields, buttons, and what plays by itself.

import { focusOf, icon, make } from "./elements.js";
import { typeable, words } from "./numbers.js";

/** @import { Python } from "./python.js" */
/** @import { Shown } from "./shown.js" */

const MOST_LISTED = 24; // values of a choice; more are searched
const LONG = 80; // values of a slider from which on it gets the width
const MOST_BELOW = 4; // controls below the picture; more are next to it where the page is wide

export class Controls {
  /**
   * @param {Shown} shown
   * @param {Python} python
   * @param {(name: string, index: number) => void} set
   */
  constructor(shown, python, set) {
    this.shown = shown;
    this.python = python;
    this.set = set;
    this.element = make("div", "tristep-controls");
    /** @type {Map<string, () => void>} by control, or button: what shows a state */
    this.inputs = new Map();
    /** @type {{ name: string, show: () => void } | null} what plays */
    this.playing = null;
    this.filledFor = "";
  }

  /** Those that a person can do something with. */
  get usable() {
    return this.shown.scene.controls.filter(({ remote }) => !remote || this.python.send);
  }

  /** Whether there are more than have room below the picture. */
  get isLong() {
    return this.usable.length > MOST_BELOW;
  }

  /**
   * Show the state of all, or of one.
   * @param {string | null} name
   */
  show(name = null) {
    if (name === null) this.inputs.forEach((show) => show());
    else this.inputs.get(name)?.();
  }

  fill() {
    const { buttons } = this.shown.scene;
    const usable = this.usable;
    const wanted = JSON.stringify([usable.map(lasting), buttons.map(({ name, label }) => [name, label])]);
    if (wanted === this.filledFor) return this.show();
    this.filledFor = wanted;
    this.playing = null;
    const focused = focusOf(this.element);
    const { control, typed } = this.element.contains(focused) ? (focused?.dataset ?? {}) : {};
    this.inputs.clear();
    this.element.replaceChildren(...usable.map((each) => this.line(each)));
    const inputs = [...this.element.querySelectorAll("input, select")].map((each) => /** @type {HTMLElement} */ (each));
    const same = ({ dataset } = /** @type {HTMLElement} */ ({})) =>
      (control !== undefined && dataset.control === control) || (typed !== undefined && dataset.typed === typed);
    inputs.find(same)?.focus();
    if (this.python.send && buttons.length) {
      const row = make("div", "tristep-buttons");
      row.append(...buttons.map(({ name, label }) => this.button(name, label)));
      this.element.append(row);
    }
    this.show();
  }

  /**
   * One control with its label.
   * @param {Control} control
   */
  line(control) {
    const id = `tristep-${Math.random().toString(36).slice(2)}`;
    const label = make("label", "", control.label);
    label.htmlFor = id;
    const line = make("div", control.remote ? "tristep-control tristep-remote" : "tristep-control");
    line.append(label);
    if (control.kind === "text") {
      const field = this.field(control);
      field.id = id;
      field.classList.add("tristep-wide");
      line.append(field);
    } else if (control.kind === "choice" && control.values.length > MOST_LISTED) {
      line.append(...this.searched(control, id));
    } else if (control.kind === "choice") {
      line.append(this.listed(control, id));
    } else {
      line.append(...this.slider(control, id));
    }
    return line;
  }

  /** @type {(control: Control, id: string) => HTMLElement} */
  listed(control, id) {
    const input = make("select");
    input.id = id;
    input.dataset.control = control.name;
    input.setAttribute("aria-label", control.label);
    control.values.forEach((_, k) => input.append(new Option(words(control, k), String(k))));
    input.addEventListener("change", () => this.set(control.name, Number(input.value)));
    this.inputs.set(control.name, () => (input.value = String(this.shown.state[control.name])));
    return input;
  }

  /** @type {(control: Control, id: string) => HTMLElement[]} */
  slider(control, id) {
    const { name } = control;
    const input = make("input");
    const value = make("output");
    Object.assign(input, { id, type: "range", min: 0, max: control.values.length - 1, step: 1 });
    input.dataset.control = name;
    input.setAttribute("aria-label", control.label);
    input.classList.toggle("tristep-long", control.values.length > LONG);
    value.htmlFor.value = id;
    input.addEventListener("input", () => {
      if (this.playing?.name === name) this.stop();
      this.set(name, Number(input.value));
    });
    const row = make("div", "tristep-play");
    row.append(...(control.kind === "play" ? [this.playButton(control)] : []), input);
    const beside = control.typed ? this.field(control) : value;
    const field = this.inputs.get(name); // shows what is in it
    this.inputs.set(name, () => {
      const index = this.shown.state[name];
      const said = words(this.shown.control(name), index);
      if (Number(input.value) !== index) input.value = String(index);
      input.setAttribute("aria-valuetext", said);
      value.textContent = said;
      field?.();
    });
    return [row, beside];
  }

  /**
   * A choice of many: a field in which a part of a word finds it, and the list of those that have what was typed.
   * @type {(control: Control, id: string) => HTMLElement[]}
   */
  searched(control, id) {
    const { name } = control;
    const [field, list] = [make("input"), make("datalist")];
    Object.assign(field, { id, type: "text", autocomplete: "off", spellcheck: false, className: "tristep-wide" });
    list.id = `${id}-list`;
    field.setAttribute("list", list.id);
    field.setAttribute("aria-label", control.label);
    field.dataset.control = name;
    const all = control.values.map((_, k) => words(control, k));
    list.append(...all.map((each) => new Option(each)));
    const show = () => (field.value = all[this.shown.state[name]]);
    const choose = (/** @type {(each: string, typed: string) => boolean} */ test) => {
      const k = all.findIndex((each) => test(each.toLowerCase(), field.value.trim().toLowerCase()));
      if (k < 0 || !field.value.trim()) return;
      this.set(name, k);
      show();
    };
    field.addEventListener("focus", () => {
      field.placeholder = field.value; // an empty field lists all
      field.value = "";
    });
    field.addEventListener("input", () => choose((each, typed) => each === typed));
    field.addEventListener("change", () => {
      choose((each, typed) => each.includes(typed));
      show(); // what is drawn, also where nothing has what was typed
      field.select();
    });
    field.addEventListener("blur", show);
    this.inputs.set(name, () => field.matches(":focus") || show());
    return [field, list];
  }

  /**
   * What a value is typed into: Python gets it with Enter, or when the field is left.
   * @param {Control} control
   */
  field({ name, label }) {
    const field = make("input");
    Object.assign(field, { type: "text", autocomplete: "off", spellcheck: false });
    field.dataset.typed = name;
    field.setAttribute("aria-label", label);
    let isEdited = false;
    field.addEventListener("input", () => (isEdited = true));
    field.addEventListener("change", () => {
      isEdited = false;
      this.python.tell({ kind: "entry", name, text: field.value });
    });
    this.inputs.set(name, () => {
      const said = typeable(this.shown.control(name), this.shown.state[name]);
      if (!isEdited && field.value !== said) field.value = said;
    });
    return field;
  }

  /** @type {(name: string, label: string) => HTMLElement} */
  button(name, label) {
    const button = make("button", "", label);
    button.type = "button";
    button.dataset.button = name;
    const isOn = () => !this.python.isLost && !!this.shown.scene.buttons.find((each) => each.name === name)?.enabled;
    button.addEventListener("click", () => isOn() && this.python.tell({ kind: "button", name }));
    this.inputs.set(`button ${name}`, () => button.setAttribute("aria-disabled", String(!isOn()))); // it keeps the focus
    return button;
  }

  /** @param {Control} control */
  playButton(control) {
    const button = make("button");
    button.type = "button";
    button.dataset.play = control.name;
    const show = () => {
      const isOn = this.playing?.name === control.name;
      button.setAttribute("aria-label", `${isOn ? "Pause" : "Play"} ${control.label}`);
      button.replaceChildren(icon(isOn ? "M2 1h3v10H2zM7 1h3v10H7z" : "M2.5 1v10l8-5z"));
    };
    button.addEventListener("click", () => {
      const isOn = this.playing?.name === control.name;
      this.stop();
      if (!isOn) this.play(control, show);
    });
    show();
    return button;
  }

  /** @type {(control: Control, show: () => void) => void} */
  play({ name, values, seconds }, show) {
    const last = values.length - 1;
    const from = this.shown.state[name] === last ? 0 : this.shown.state[name];
    const mine = (this.playing = { name, show });
    const long = 1000 * seconds;
    /** @type {number | null} */
    let begun = null;
    const step = (/** @type {number} */ now) => {
      if (this.playing !== mine) return;
      begun ??= now - (from / Math.max(1, last)) * long;
      const index = Math.min(last, Math.floor(((now - begun) / long) * last + 1e-6));
      this.set(name, index);
      if (index < last) requestAnimationFrame(step);
      else this.stop();
    };
    requestAnimationFrame(step);
    show();
  }

  stop() {
    const { show } = this.playing ?? {};
    this.playing = null;
    show?.();
  }
}

/**
 * What of a control does not change under somebody's hand, as what is in a field does.
 * @param {Control} control
 */
function lasting(control) {
  const { kind, values } = control;
  return { ...control, index: 0, ...(kind === "choice" ? {} : { values: kind === "text" ? 0 : values.length, texts: [] }) };
}

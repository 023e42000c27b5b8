// The table of runs: a search, headings that sort, and for each run a box that draws it.

import { focusOf, make } from "./elements.js";
import { swatch } from "./legend.js";
import { number } from "./numbers.js";

/** @import { Picture } from "./picture.js" */
/** @import { Python } from "./python.js" */
/** @import { Shown } from "./shown.js" */

/** @typedef {{ k: number, name: string, line: HTMLTableRowElement, box: HTMLInputElement, cells: HTMLElement[] }} Row */

const LEAST_OF_RUNS = 150; // pixels of its rows' height

export class Runs {
  /**
   * @param {Shown} shown
   * @param {Picture} picture
   * @param {Python} python
   */
  constructor(shown, picture, python) {
    this.shown = shown;
    this.picture = picture;
    this.python = python;
    this.element = make("div", "tristep-runs");
    this.element.setAttribute("role", "group");
    this.element.setAttribute("aria-label", "Runs");
    this.search = make("input");
    this.count = make("span");
    this.every = make("input"); // the box that draws all
    this.list = make("tbody");
    this.headings = make("tr");
    /** @type {Row[]} */
    this.rows = [];
    /** @type {number | null} the column by which it is sorted; -1 is that of names */
    this.column = null;
    this.isDown = false;
    this.filledFor = "";
  }

  fill() {
    const { runs } = this.shown.scene;
    this.element.hidden = !runs;
    if (!runs) return;
    const { names, columns } = runs;
    const wanted = JSON.stringify([this.picture.theme, names, columns.map(([heading]) => heading)]);
    if (wanted !== this.filledFor) this.make(runs); // else somebody may be about to set a box
    this.filledFor = wanted;
    this.rows.forEach(({ cells }, k) => cells.forEach((cell, column) => (cell.textContent = tabled(columns[column][1][k]))));
    this.sort(runs);
    this.show();
  }

  /**
   * How high the rows are next to a picture of this height; 0 where they stand below it.
   * @param {number} free
   */
  fit(free) {
    this.element.style.setProperty("--tristep-rows", `${Math.max(LEAST_OF_RUNS, free)}px`);
  }

  makeSearch() {
    const head = make("div", "tristep-runs-head");
    Object.assign(this.search, { type: "search", placeholder: "search runs", spellcheck: false });
    this.search.setAttribute("aria-label", "Search runs");
    this.search.addEventListener("input", () => this.show());
    this.count.setAttribute("role", "status");
    head.append(this.search, this.count);
    this.element.append(head);
  }

  /** @param {RunTable} runs */
  make({ names, columns }) {
    const focused = this.rows.findIndex(({ box }) => box === focusOf(this.element));
    if (!this.element.contains(this.search)) this.makeSearch();
    this.every = make("input");
    this.every.type = "checkbox";
    this.every.setAttribute("aria-label", "Draw all runs found");
    this.every.addEventListener("change", () => {
      this.choose(this.rows.filter(({ line }) => !line.hidden).map(({ k }) => k), this.every.checked);
    });
    this.headings = make("tr");
    this.headings.append(...["run", ...columns.map(([heading]) => heading)].map((heading, k) => this.heading(heading, k - 1)));
    const top = make("thead");
    top.append(this.headings);
    this.rows = names.map((name, k) => this.row(name, k, columns.length));
    this.list = make("tbody");
    // At first those that are drawn stand above the others.
    const isChosen = (/** @type {Row} */ { k }) => Number(this.shown.chosen.has(k));
    this.list.append(...[...this.rows].sort((a, b) => isChosen(b) - isChosen(a)).map(({ line }) => line));
    this.list.addEventListener("keydown", (event) => this.onKey(event));
    const all = make("table");
    all.append(top, this.list);
    const frame = make("div", "tristep-runs-rows");
    frame.append(all);
    this.element.querySelector(".tristep-runs-rows")?.remove();
    this.element.append(frame);
    this.rows[focused]?.box.focus();
  }

  /** @type {(words: string, column: number) => HTMLElement} */
  heading(words, column) {
    const cell = make("th");
    const button = make("button", "", words);
    cell.scope = "col";
    button.type = "button";
    button.addEventListener("click", () => {
      [this.column, this.isDown] = [column, this.column === column && !this.isDown];
      if (this.shown.scene.runs) this.sort(this.shown.scene.runs);
    });
    cell.append(...(column < 0 ? [this.every, " "] : []), button);
    return cell;
  }

  /** @type {(name: string, k: number, n: number) => Row} */
  row(name, k, n) {
    const { scene } = this.shown;
    const [line, header, label, box] = [make("tr"), make("th"), make("label"), make("input")];
    const layer = scene.panels.flatMap(({ layers }) => layers).find((each) => each.run === k && each.name);
    header.scope = "row";
    box.type = "checkbox";
    box.dataset.run = String(k);
    box.addEventListener("change", () => this.choose([k], box.checked));
    label.title = name;
    label.append(box, ...(layer ? [swatch(layer, scene.style, this.picture.theme)] : []), make("span", "", name));
    header.append(label);
    const cells = Array.from({ length: n }, () => make("td"));
    line.append(header, ...cells);
    return { k, name, line, box, cells };
  }

  /**
   * Arrows lead from box to box.
   * @param {KeyboardEvent} event
   */
  onKey(event) {
    const step = event.key === "ArrowDown" ? 1 : event.key === "ArrowUp" ? -1 : 0;
    if (!step) return;
    const boxes = this.rows.filter(({ line }) => !line.hidden).sort((a, b) => a.line.rowIndex - b.line.rowIndex);
    boxes[boxes.findIndex(({ box }) => box === event.target) + step]?.box.focus();
    event.preventDefault();
  }

  /** @type {(numbers: number[], isOn: boolean) => void} */
  choose(numbers, isOn) {
    const { chosen } = this.shown;
    for (const k of numbers) {
      if (isOn) chosen.add(k);
      else chosen.delete(k);
    }
    this.show();
    this.python.tell({ kind: "runs", shown: [...chosen].sort((a, b) => a - b) }, "runs");
    this.picture.changed({ back: true });
  }

  /** Which rows have what is searched for, which are drawn, and how many. */
  show() {
    const asked = this.search.value.trim().toLowerCase();
    for (const { k, name, line, box, cells } of this.rows) {
      const all = [name, ...cells.map(({ textContent }) => textContent)].join(" ").toLowerCase();
      line.hidden = !asked.split(/\s+/).every((part) => all.includes(part));
      box.checked = this.shown.chosen.has(k);
      line.dataset.drawn = String(box.checked);
    }
    const found = this.rows.filter(({ line }) => !line.hidden);
    const drawnOf = (/** @type {Row[]} */ several) => several.filter(({ box }) => box.checked).length;
    this.every.checked = found.length > 0 && drawnOf(found) === found.length;
    this.every.indeterminate = !this.every.checked && drawnOf(found) > 0;
    const said = `${drawnOf(this.rows)} of ${this.rows.length} drawn` + (asked ? `, ${found.length} found` : "");
    if (this.count.textContent !== said) this.count.textContent = said;
  }

  /**
   * Sort the rows.
   * @param {RunTable} runs
   */
  sort({ names, columns }) {
    [...this.headings.children].forEach((cell, k) => {
      const isIt = k - 1 === this.column;
      cell.setAttribute("aria-sort", !isIt ? "none" : this.isDown ? "descending" : "ascending");
      const button = cell.querySelector("button");
      if (button) button.textContent = button.textContent?.replace(/ [▴▾]$/, "") + (isIt ? (this.isDown ? " ▾" : " ▴") : "");
    });
    if (this.column === null) return;
    const sorted = sortedBy(this.column < 0 ? names : columns[this.column][1], this.isDown).map((k) => this.rows[k].line);
    if (sorted.every((line, k) => line === this.list.children[k])) return;
    const focused = focusOf(this.element);
    this.list.append(...sorted);
    if (this.list.contains(focused)) focused?.focus(); // which moving it has taken away
  }
}

/** @param {Cell} value */
function tabled(value) {
  return typeof value === "string" ? value : number(Number(value.toPrecision(4)));
}

/**
 * The numbers of entries in their order: numbers before words, and the least first, or the other way round.
 * @type {(values: Cell[], isDown: boolean) => number[]}
 */
export function sortedBy(values, isDown) {
  const compare = (/** @type {number} */ a, /** @type {number} */ b) => {
    const [one, other] = [values[a], values[b]];
    if (typeof one === "number" && typeof other === "string") return -1; // what is not finite is last both ways
    if (typeof one === "string" && typeof other === "number") return 1;
    const sign =
      typeof one === "number" ? one - Number(other) : one.localeCompare(String(other), undefined, { numeric: true });
    return (isDown ? -sign : sign) || a - b;
  };
  return values.map((_, k) => k).sort(compare);
}

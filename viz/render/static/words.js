// Words around the picture: title, hint, notes, listings, and what only those are told who do not see it.

import { drawn, part } from "./data.js";
import { copied, make } from "./elements.js";
import { number } from "./numbers.js";

/** @import { Python } from "./python.js" */
/** @import { Shown } from "./shown.js" */

const SILENCE =
  "Python does not answer: it is busy, or the kernel has ended or been restarted; then run this cell again. " +
  "This is the last picture that came.";

export class Words {
  /**
   * @param {Shown} shown
   * @param {(note: Exclude<Note, string>) => void} follow goes where a note leads
   */
  constructor(shown, follow) {
    this.shown = shown;
    this.follow = follow;
    this.title = make("div", "tristep-title");
    this.notes = make("div", "tristep-notes");
    this.notes.setAttribute("aria-live", "polite");
    this.message = make("div", "tristep-message");
    this.message.setAttribute("role", "status");
    this.listings = make("div");
    this.silence = make("div", "tristep-silence", SILENCE);
    this.silence.setAttribute("role", "status");
    this.silence.hidden = true;
    this.table = make("div", "tristep-hidden");
    this.voice = make("div", "tristep-hidden");
    this.voice.setAttribute("aria-live", "polite");
    this.notedFor = this.listedFor = "";
    /** @type {ReturnType<typeof setTimeout> | undefined} */
    this.tableTimer = undefined;
  }

  /** The picture in words. */
  get label() {
    const { title, description } = this.shown.scene;
    return [title, description].filter(Boolean).join(". ");
  }

  fill() {
    const { message, notes, title } = this.shown.scene;
    this.message.textContent = message;
    const wanted = JSON.stringify(notes);
    if (wanted !== this.notedFor) { // else one may be about to be clicked
      this.notes.replaceChildren(...notes.map((note) => this.note(note)));
    }
    this.notedFor = wanted;
    this.title.textContent = title;
    this.title.style.display = title ? "" : "none";
    this.fillListings();
  }

  /**
   * A note: if it leads somewhere, a button that goes there.
   * @param {Note} note
   */
  note(note) {
    if (typeof note === "string") return make("div", "", note);
    const button = make("button", "", note.words);
    button.type = "button";
    button.addEventListener("click", () => this.follow(note));
    return button;
  }

  /** Listings stay folded, or not, as they are; their lines may change. */
  fillListings() {
    const { listings } = this.shown.scene;
    const wanted = JSON.stringify(listings.map(({ title }) => title));
    if (wanted !== this.listedFor) this.listings.replaceChildren(...listings.map(({ title }) => this.listing(title)));
    this.listedFor = wanted;
    listings.forEach(({ text }, k) => {
      const shown = this.listings.children[k].querySelector("pre");
      if (shown && shown.textContent !== text) shown.textContent = text; // else a selection would be lost
    });
  }

  /** @param {string} title */
  listing(title) {
    const about = make("details");
    const copy = make("button", "", "Copy");
    const lines = make("pre");
    copy.type = "button";
    copy.setAttribute("aria-label", ["Copy", title].join(" "));
    copy.addEventListener("click", async () => {
      const isDone = await copied(lines);
      copy.textContent = isDone ? "Copied" : "Press Ctrl+C"; // they are selected then
      this.voice.textContent = copy.textContent;
      setTimeout(() => (copy.textContent = "Copy"), 2000);
    });
    about.append(make("summary", "", title), lines);
    const row = make("div", "tristep-listing");
    row.append(about, copy);
    return row;
  }

  /** Write the table soon: not at each picture of many. */
  tabulateSoon() {
    clearTimeout(this.tableTimer);
    this.tableTimer = setTimeout(() => this.tabulate(), 300);
  }

  /** The last values of the lines, for those who do not see them. */
  tabulate() {
    const { scene, state } = this.shown;
    const rows = [];
    for (const panel of scene.panels) {
      for (const layer of panel.layers) {
        if (layer.kind !== "line" || !layer.name || !this.shown.isDrawn(layer)) continue;
        const ys = part(layer, "y", state);
        let k = drawn(scene, layer, state) - 1;
        while (k >= 0 && !Number.isFinite(ys[k])) k--;
        if (k >= 0) rows.push([layer.name, panel.title || panel.y.label, number(ys[k])]);
      }
    }
    const body = make("table");
    body.append(make("caption", "", "Last values"));
    for (const row of rows) {
      const line = make("tr");
      line.append(...row.map((words) => make("td", "", words)));
      body.append(line);
    }
    this.table.replaceChildren(...(rows.length ? [body] : []));
  }

  destroy() {
    clearTimeout(this.tableTimer);
  }
}

/** What can be done with the picture itself. */
export class Hint {
  /**
   * @param {Shown} shown
   * @param {Python} python
   * @param {() => void} showAll
   */
  constructor(shown, python, showAll) {
    this.shown = shown;
    this.python = python;
    this.element = make("div", "tristep-hint");
    this.whole = make("button", "", "Show all again");
    this.whole.type = "button";
    this.whole.addEventListener("click", showAll);
  }

  fill() {
    const { send } = this.python;
    const framed = this.shown.scene.panels.filter(({ frame }) => frame);
    const clicks = framed.flatMap(({ click }) => click ?? []);
    const told = send ? clicks.filter(({ event }) => event !== null) : [];
    const names = clicks.flatMap(({ control, other }) => [control ?? [], other ?? []].flat());
    const labels = [...new Set(names.map((name) => this.shown.control(name).label))];
    const layers = framed.flatMap((panel) => panel.layers);
    const drags = send ? layers.flatMap((layer) => (layer.kind === "points" ? (layer.drag ?? []) : [])) : [];
    const words = [
      ...told.map(({ does }) => `click, or arrows and Enter: ${does}`),
      ...(labels.length ? [`click or drag, or arrows and Enter: choose ${labels.join(", ")}`] : []),
      ...drags.map((name) => `drag ${name}: move it`),
    ];
    const isFree = framed.some(({ click }) => !click?.control); // whether a drag has no other meaning
    const elsewhere = drags.length ? " elsewhere" : "";
    if (isFree && matchMedia("(pointer: coarse)").matches) words.push(`tap or slide${elsewhere}: read values`);
    else if (isFree) words.push(`drag${elsewhere}: zoom`, "double click: back");
    this.element.textContent = [...new Set(words)].join(" · ");
    if (this.shown.zoomed.some((each) => each)) this.element.append(this.whole);
  }
}

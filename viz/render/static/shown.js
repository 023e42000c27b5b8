// What is shown: a scene, and what a person has made of it. Plain state: who changes it asks for a picture.

import { controlOf } from "./data.js";

export class Shown {
  /** @param {Scene} scene */
  constructor(scene) {
    this.scene = scene;
    /** @type {State} */
    this.state = Object.fromEntries(scene.controls.map(({ name, index }) => [name, index]));
    /** @type {(Zoomed | null)[]} by panel: the part that is looked at; null for all of it */
    this.zoomed = scene.panels.map(() => null);
    /** @type {Set<string>} names that the legend has hidden */
    this.hidden = new Set();
    /** @type {Set<number>} runs that are drawn */
    this.chosen = new Set(scene.runs?.shown);
    /** @type {Moved} */
    this.moved = new Map();
    this.isPast = false; // whether Python does not answer, which may have gone on, or ended
  }

  /** @param {Layer} layer */
  isDrawn({ name, run }) {
    return !this.hidden.has(name) && (run === null || !this.scene.runs || this.chosen.has(run));
  }

  /** @param {Box[]} taken where words stand already */
  look(taken = []) {
    const { scene, state, moved, isPast } = this;
    return { scene, state, moved, isPast, taken, isDrawn: (/** @type {Layer} */ layer) => this.isDrawn(layer) };
  }

  /** @param {string} name of a control that there is */
  control(name) {
    return /** @type {Control} */ (controlOf(this.scene, name));
  }

  /**
   * The place of a point, where it has been moved to by hand, if it was.
   * @type {(layer: PointsLayer, k: number, xs: Numbers, ys: Numbers) => [number, number]}
   */
  placeOf(layer, k, xs, ys) {
    return this.moved.get(layer)?.[k] ?? [xs[k], ys[k]];
  }

  /**
   * Show another scene. Controls that are in both, with as many values, stay as they are set, unless it sets them; runs stay
   * as they were chosen, and those that are new are as the scene says.
   * @param {Scene} scene
   */
  replace(scene) {
    const before = this.scene;
    const known = new Map(before.controls.map((control) => [control.name, control]));
    this.scene = scene;
    this.state = Object.fromEntries(
      scene.controls.map(({ name, index, values }) => {
        const old = known.get(name);
        return [name, old && old.values.length === values.length && old.index === index ? this.state[name] : index];
      }),
    );
    this.zoomed = scene.panels.map((panel, k) => {
      const old = before.panels[k];
      const isSame = (/** @type {Way} */ way) => old[way].label === panel[way].label && old[way].scale === panel[way].scale;
      return (old && isSame("x") && isSame("y") && this.zoomed[k]) || null;
    });
    const had = before.runs?.names.length ?? 0;
    this.chosen = new Set([...[...this.chosen].filter((k) => k < had), ...(scene.runs?.shown ?? []).filter((k) => k >= had)]);
    this.moved.clear();
  }
}

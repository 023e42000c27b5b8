// Draws a Scene (viz/scene/scene.py) on a canvas and lets a person change it: the same in a notebook and in a page.
//
// The modules of this folder are joined into one by viz/render/joined.py. From the data to the picture: data and numbers,
// ticks, layout, pen, axes, images, layers, hit; then classes for the parts of a view, which view puts into an element.
// Nothing here computes what is shown: whatever a control changes came with the scene.

import { mount } from "./view.js";

export { decode, drawn, named, part, unpack, valueAt } from "./data.js";
export { number, words } from "./numbers.js";
export { ticks } from "./ticks.js";
export { mount };

/**
 * What anywidget calls in a notebook.
 * @typedef {object} Model
 * @property {(name: string) => any} get
 * @property {(name: string, call: (message: any) => void) => void} on
 * @property {(name: string, call: (message: any) => void) => void} off
 * @property {Send} send
 */
export default {
  /** @param {{ model: Model, el: HTMLElement }} given */
  render({ model, el }) {
    const shown = mount(el, model.get("payload"), { send: (message) => model.send(message) });
    const update = () => shown.update(model.get("payload"));
    const hide = () => el.classList.toggle("tristep-pictured", model.get("pictured"));
    hide();
    const answered = (/** @type {{ kind: string }} */ { kind }) => kind === "answered" && shown.answered();
    model.on("change:payload", update);
    model.on("change:pictured", hide);
    model.on("msg:custom", answered);
    return () => {
      model.off("change:payload", update);
      model.off("change:pictured", hide);
      model.off("msg:custom", answered);
      shown.destroy();
    };
  },
};

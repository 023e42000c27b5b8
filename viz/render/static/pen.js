// A pen: a context to draw in, with the theme's colours, and letters that are measured.

import { PIXELS_PER_INCH } from "./layout.js";
import { minus } from "./numbers.js";

export const FAMILY = 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, "Liberation Sans", sans-serif';
export const FIXED = 'ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace';
export const PIXELS_PER_POINT = PIXELS_PER_INCH / 72;

/**
 * What is needed to draw: a context, the theme's colours, sizes of letters.
 * @type {(context: CanvasRenderingContext2D, style: Style, theme: Theme, scale: number, ratio: number) => Pen}
 */
export function penFor(context, style, theme, scale, ratio) {
  const { colours, ...roles } = style[theme];
  /** @type {Pen} */
  const pen = {
    context,
    theme,
    scale,
    ratio,
    ...roles,
    colour: (layerStyle) => colourOf(style[theme], layerStyle),
    dashes: (layerStyle, width) => dashesOf(style, layerStyle).map((length) => length * width),
    font: (size, { bold = false, fixed = false } = {}) => {
      pen.context.font = `${bold ? "600 " : ""}${size * scale}px ${fixed ? FIXED : FAMILY}`;
    },
    tickWidth: ({ words, power }) => {
      pen.font(11);
      const plain = pen.context.measureText(words).width;
      if (power === undefined) return plain;
      pen.font(8.5);
      return plain + pen.context.measureText(minus(String(power))).width + 1;
    },
    nameWidth: (words) => {
      pen.context.font = `11px ${FAMILY}`;
      return pen.context.measureText(words).width;
    },
    /** The ticks with words that are no longer than this, where they were given. */
    shortTicks: ({ major, minor }, axis, room) => {
      if (!axis.ticks) return { major, minor };
      pen.font(11);
      return { major: major.map(({ value, words }) => ({ value, words: shortened(pen.context, words, room) })), minor };
    },
    titleLines: ({ title }, room) => {
      pen.font(12.5, { bold: true });
      return wrapped(pen.context, title, room);
    },
    /** A text's lines on so many pixels, how far apart they are and how large: wrapped, or smaller if columns are to stay. */
    fitted: (layer, words, room) => {
      const look = { fixed: layer.fixed };
      let size = layer.size * PIXELS_PER_POINT;
      pen.font(size, look);
      let lines = words.split("\n");
      if (layer.fixed) {
        const widest = Math.max(...lines.map((line) => pen.context.measureText(line).width));
        size *= Math.max(0.5, Math.min(1, room / widest));
        pen.font(size, look);
        lines = lines.map((line) => shortened(pen.context, line, room));
      } else {
        lines = wrapped(pen.context, words, room);
      }
      return { lines, size: size * scale, step: 1.4 * size * scale };
    },
    // The middle of a line of this width, in CSS pixels, that fills whole pixels of the screen.
    crisp: (at, width = 1) => {
      const thick = Math.max(1, Math.round(width * ratio));
      return (Math.round(at * ratio - thick / 2) + thick / 2) / ratio;
    },
  };
  return pen;
}

/**
 * The words, or both ends of them where there is no room for all.
 * @type {(context: CanvasRenderingContext2D, words: string, room: number) => string}
 */
export function shortened(context, words, room) {
  const signs = [...words];
  let kept = signs.length;
  let shown = words;
  while (kept > 2 && context.measureText(shown).width > room) {
    kept--;
    shown = signs.slice(0, Math.ceil(kept / 2)).join("") + "…" + signs.slice(signs.length - Math.floor(kept / 2)).join("");
  }
  return shown;
}

/**
 * The words in lines for which there is room.
 * @type {(context: CanvasRenderingContext2D, words: string, room: number) => string[]}
 */
function wrapped(context, words, room) {
  return words.split("\n").flatMap((line) => {
    const lines = [""];
    for (const word of line.split(" ")) {
      const longer = lines.at(-1) ? `${lines.at(-1)} ${word}` : word;
      if (lines.at(-1) && context.measureText(longer).width > room) lines.push(word);
      else lines[lines.length - 1] = longer;
    }
    return lines.map((each) => shortened(context, each.trimEnd(), room));
  });
}

/** @type {(theme: Style[Theme], style: LayerStyle) => string} */
export function colourOf({ colours, ...roles }, style) {
  return typeof style === "number" ? colours[style % colours.length] : roles[style];
}

/** @type {(styles: Style, style: LayerStyle) => number[]} */
export function dashesOf({ dashes }, style) {
  return typeof style === "number" ? dashes[style % dashes.length] : [];
}

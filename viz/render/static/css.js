// The rules of all views.

import { FINGER, KEY } from "./layout.js";
import { FAMILY, FIXED } from "./pen.js";

export const CSS = `
.tristep { position: relative; box-sizing: border-box; overflow-wrap: anywhere; padding: 8px 10px; border-radius: 6px; overflow: hidden; overflow: clip;
  font: 13px/1.4 ${FAMILY}; color: var(--tristep-ink); background: var(--tristep-background); accent-color: var(--tristep-accent); }
.tristep *, .tristep *::before { box-sizing: border-box; }
.tristep-title { font-weight: 600; font-size: 15px; margin: 0 0 4px; }
.tristep-legend { display: flex; flex-wrap: wrap; gap: 0 6px; margin: 0 0 4px -6px; }
.tristep-legend > * { max-width: 100%; display: inline-flex; align-items: center; gap: 6px; padding: 0 6px; border: 0; border-radius: 4px;
  background: none; color: inherit; font: inherit; font-size: 12px; }
.tristep-legend span { overflow: hidden; text-overflow: ellipsis; white-space: nowrap; }
.tristep-own { position: absolute; margin: 0; font-variant-numeric: tabular-nums; }
.tristep-legend.tristep-own > * { height: ${KEY}px; padding: 0 2px; gap: 4px; font-size: 11px; }
.tristep-legend b { flex: none; font-weight: inherit; }
.tristep-legend b:empty { display: none; }
.tristep-legend button { cursor: pointer; }
.tristep-legend button:hover { background: var(--tristep-grid); }
.tristep-legend button[aria-pressed="false"] { color: var(--tristep-quiet); }
.tristep-legend button[aria-pressed="false"] svg { opacity: 0.25; }
.tristep-legend button[aria-pressed="false"] span { text-decoration: line-through; }
.tristep-legend svg { flex: none; }
.tristep-picture { position: relative; max-width: 100%; }
.tristep-picture canvas { display: block; width: 100%; }
.tristep-picture canvas + canvas { position: absolute; inset: 0; pointer-events: none; }
.tristep-picture canvas:first-child { touch-action: pan-y; border-radius: 3px; }
.tristep :focus { outline: none; }
.tristep :focus-visible { outline: 2px solid var(--tristep-accent); outline-offset: 1px; }
.tristep-readout { position: absolute; left: 0; top: 0; z-index: 1; pointer-events: none; max-width: 280px; padding: 4px 8px; border-radius: 4px;
  border: 1px solid var(--tristep-grid); background: var(--tristep-background); box-shadow: 0 1px 5px rgb(0 0 0 / 0.18);
  font-size: 12px; font-variant-numeric: tabular-nums; white-space: pre-line; }
.tristep-readout[hidden] { display: none; }
.tristep-readout b { font-weight: 600; }
.tristep-readout i { display: inline-block; width: 9px; height: 9px; margin-right: 6px; border-radius: 5px; }
.tristep-readout div { color: var(--tristep-quiet); }
.tristep-controls { display: flex; flex-wrap: wrap; gap: 3px 24px; align-items: center; margin-top: 2px; font-size: 12.5px; }
.tristep-controls:empty { display: none; }
.tristep-control { flex: 1 1 290px; max-width: min(100%, 520px); display: grid; grid-template-columns: fit-content(36%) minmax(80px, 1fr) fit-content(36%); gap: 0 10px; align-items: center; }
.tristep-control:has(.tristep-long) { flex: 3 1 290px; max-width: 100%; }
.tristep-control:has(> select) { flex: 1 1 150px; }
.tristep-over .tristep-controls { position: sticky; bottom: 0; z-index: 2; max-height: var(--tristep-most); overflow-y: auto; padding: 4px 0;
  background: var(--tristep-background); border-top: 1px solid var(--tristep-grid); }
.tristep-aside .tristep-body { display: grid; grid-template-columns: auto minmax(290px, 1fr); grid-template-rows: auto 1fr; gap: 0 18px; }
.tristep-aside .tristep-picture { grid-row: 1 / -1; }
.tristep-aside .tristep-runs { grid-column: 2; }
.tristep-runs { min-width: 0; margin-top: 4px; font-size: 12.5px; }
.tristep-runs[hidden] { display: none; }
.tristep-runs-head { display: flex; gap: 10px; align-items: center; margin-bottom: 4px; }
.tristep-runs-head input { flex: 1 1 100px; min-width: 60px; max-width: 260px; font: inherit; color: inherit; padding: 2px 6px;
  background: var(--tristep-background); border: 1px solid var(--tristep-edge); border-radius: 4px; }
.tristep-runs-head span { color: var(--tristep-quiet); white-space: nowrap; }
.tristep-runs-rows { overflow: auto; max-height: var(--tristep-rows); border: 1px solid var(--tristep-grid); border-radius: 4px; }
.tristep-runs table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; overflow-wrap: normal; }
.tristep-runs th { font-weight: inherit; text-align: left; }
.tristep-runs td { text-align: right; white-space: nowrap; }
.tristep-runs th, .tristep-runs td { padding: 1px 6px; }
.tristep-runs thead th { position: sticky; top: 0; background: var(--tristep-background); border-bottom: 1px solid var(--tristep-grid); }
.tristep-runs thead button { padding: 0; border: 0; background: none; color: var(--tristep-quiet); font: inherit; cursor: pointer; text-align: left; }
.tristep-runs tbody tr:hover { background: var(--tristep-grid); }
.tristep-runs label { display: inline-flex; align-items: center; gap: 6px; cursor: pointer; }
.tristep-runs label svg { flex: none; }
.tristep-runs label span { max-width: 180px; overflow: hidden; text-overflow: ellipsis; white-space: nowrap; }
.tristep-runs tr[data-drawn="false"] { color: var(--tristep-quiet); }
.tristep-runs tr[data-drawn="false"] svg { opacity: 0.25; }
.tristep-runs tr[hidden] { display: none; }
.tristep-aside .tristep-controls { display: grid; grid-template-columns: minmax(0, 1fr); align-content: start; gap: 5px; margin: 0; }
.tristep-aside .tristep-control { grid-template-columns: 92px minmax(60px, 1fr) fit-content(40%); gap: 0 8px; }
.tristep-aside .tristep-control:has(.tristep-long), .tristep-slim .tristep-control:has(.tristep-long) { grid-template-columns: 1fr auto; }
.tristep-aside .tristep-play:has(.tristep-long), .tristep-slim .tristep-play:has(.tristep-long) { grid-row: 2; grid-column: 1 / -1; }
.tristep-controls output { min-width: 64px; font-variant-numeric: tabular-nums; }
.tristep-controls input[type="text"] { font: inherit; color: inherit; background: var(--tristep-background); width: 76px; padding: 1px 5px;
  border: 1px solid var(--tristep-edge); border-radius: 4px; font-variant-numeric: tabular-nums; }
.tristep-controls input[type="text"].tristep-wide { width: auto; grid-column: 2 / -1; }
.tristep-controls input[type="range"] { appearance: none; width: 100%; height: 18px; margin: 0; border-radius: 4px; background: none; cursor: pointer; }
.tristep-controls input::-webkit-slider-runnable-track { height: 4px; border-radius: 2px; background: var(--tristep-edge); }
.tristep-controls input::-moz-range-track { height: 4px; border-radius: 2px; background: var(--tristep-edge); }
.tristep-controls input::-webkit-slider-thumb { appearance: none; width: 14px; height: 14px; margin-top: -5px; border: 0; border-radius: 7px;
  background: var(--tristep-accent); box-shadow: 0 0 0 2px var(--tristep-background); }
.tristep-controls input::-moz-range-thumb { width: 14px; height: 14px; border: 0; border-radius: 7px; background: var(--tristep-accent);
  box-shadow: 0 0 0 2px var(--tristep-background); }
@media (forced-colors: active) { /* where backgrounds are all one */
  .tristep-controls input[type="range"], .tristep-readout i { forced-color-adjust: none; }
  .tristep-controls input::-webkit-slider-runnable-track { background: CanvasText; }
  .tristep-controls input::-moz-range-track { background: CanvasText; }
  .tristep-controls input::-webkit-slider-thumb { background: Highlight; box-shadow: 0 0 0 2px Canvas; }
  .tristep-controls input::-moz-range-thumb { background: Highlight; box-shadow: 0 0 0 2px Canvas; }
}
.tristep-controls select, .tristep-controls button { font: inherit; color: inherit; background: var(--tristep-background);
  border: 1px solid var(--tristep-edge); border-radius: 4px; padding: 3px 10px; cursor: pointer; }
.tristep-controls select { justify-self: start; max-width: 100%; padding: 2px 4px; }
.tristep-controls button:hover { background: var(--tristep-grid); }
.tristep-controls button[aria-disabled="true"] { color: var(--tristep-quiet); opacity: 0.55; cursor: default; background: none; }
.tristep-controls .tristep-play { display: flex; gap: 8px; align-items: center; }
.tristep-controls .tristep-play button { flex: none; display: inline-flex; width: 26px; height: 22px; padding: 0; align-items: center; justify-content: center; }
.tristep-hint { font-size: 11.5px; line-height: 1.2; color: var(--tristep-quiet); }
.tristep-hint:empty { display: none; }
.tristep-hint button { margin-left: 8px; padding: 0 8px; font: inherit; color: var(--tristep-ink); background: var(--tristep-background);
  border: 1px solid var(--tristep-edge); border-radius: 4px; cursor: pointer; }
.tristep-listing { position: relative; margin-top: 6px; font-size: 12.5px; }
.tristep-listing summary { cursor: pointer; color: var(--tristep-quiet); padding-right: 70px; }
.tristep-listing pre { margin: 4px 0 0; padding: 6px 10px; max-height: 260px; overflow: auto; border-radius: 4px; font: 12px/1.45 ${FIXED};
  color: var(--tristep-ink); background: none; border: 1px solid var(--tristep-grid); white-space: pre-wrap; }
.tristep-listing button { position: absolute; right: 0; top: -2px; font: inherit; font-size: 12px; color: inherit; cursor: pointer;
  background: var(--tristep-background); border: 1px solid var(--tristep-edge); border-radius: 4px; padding: 0 8px; }
.tristep-listing button:hover { background: var(--tristep-grid); }
.tristep-message { margin-top: 6px; font-size: 12.5px; color: var(--tristep-ink); white-space: pre-line; }
.tristep-message:empty { display: none; }
.tristep-notes { margin-top: 6px; font-size: 12.5px; color: var(--tristep-ink); }
.tristep-notes:empty { display: none; }
.tristep-notes button { display: block; padding: 1px 0; border: 0; background: none; color: inherit; font: inherit; text-align: left;
  cursor: pointer; text-decoration: underline dotted; text-underline-offset: 3px; }
.tristep-notes button:hover { background: var(--tristep-grid); }
.tristep-silence { margin-top: 6px; font-size: 12.5px; color: var(--tristep-ink); }
.tristep-lost .tristep-remote { opacity: 0.55; }
.tristep-buttons { flex: 0 0 100%; display: flex; flex-wrap: wrap; gap: 6px; }
@media (pointer: coarse) {
  .tristep-controls button, .tristep-controls select, .tristep-controls input[type="text"], .tristep-controls input[type="range"],
  .tristep-controls .tristep-play button, .tristep-hint button, .tristep-notes button, .tristep-listing button, .tristep-listing summary,
  .tristep-runs-head input, .tristep-runs thead button, .tristep-runs label { min-height: ${FINGER}px; min-width: ${FINGER}px; }
  .tristep-controls input::-webkit-slider-thumb { width: 22px; height: 22px; margin-top: -9px; border-radius: 11px; }
  .tristep-controls input::-moz-range-thumb { width: 22px; height: 22px; border-radius: 11px; }
  .tristep-listing summary { line-height: ${FINGER}px; }
  .tristep-legend { flex-wrap: nowrap; overflow-x: auto; }
  .tristep-legend > *, .tristep-legend.tristep-own > * { flex: none; min-width: ${FINGER}px; height: ${FINGER}px; }
}
.jp-OutputArea:has(.tristep), .jp-OutputArea-child:has(.tristep), .jp-OutputArea-output:has(.tristep) {
  overflow: visible; min-width: 0; } /* or sliders would stick to an output, which does not scroll */
.jp-OutputArea-child:has(.tristep-pictured) + .jp-OutputArea-child:has(.jp-RenderedImage) { display: none; }
.tristep-hidden { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); white-space: nowrap; }
`;

// The types in the comments of viz/render/static: what Scene.to_bytes of viz/scene/scene.py writes, and what is made of it.
// They are global, so that comments need no imports.

type Numbers = Uint8Array | Int16Array | Int32Array | Float32Array | Float64Array;
type NumberArray = { data: Numbers; shape: number[] };
type State = Record<string, number>; // the index of each control's value, by name
type Theme = "light" | "dark";
type LayerStyle = number | "ink" | "quiet" | "grid";
type Marker = "dot" | "ring" | "cross" | "star";
type Way = "x" | "y";

type Axis = {
  label: string;
  low: number;
  high: number;
  scale: "linear" | "log";
  ticks: [value: number, words: string][] | null;
  upwards: boolean;
};

type Common = {
  name: string;
  legend_by: string | null;
  style: LayerStyle;
  by: string[];
  run: number | null;
};
type LineLayer = Common & {
  kind: "line";
  x: NumberArray;
  y: NumberArray;
  upto: string | null;
  head: boolean;
  marker: boolean;
  width: number;
  alpha: number;
};
type BandLayer = Common & { kind: "band"; x: NumberArray; low: NumberArray; high: NumberArray; alpha: number };
type HeatmapLayer = Common & {
  kind: "heatmap";
  values: NumberArray;
  x: NumberArray;
  y: NumberArray;
  palette: string;
  limits: [number, number];
  scale: "linear" | "log";
  label: string;
  colours: Record<Theme, string>;
};
type PointsLayer = Common & {
  kind: "points";
  x: NumberArray;
  y: NumberArray;
  size: number;
  marker: Marker;
  words: string[];
  drag: string | null;
};
type ArrowsLayer = Common & {
  kind: "arrows";
  x: NumberArray;
  y: NumberArray;
  dx: NumberArray;
  dy: NumberArray;
  width: number;
};
type RefLineLayer = Common & { kind: "refline"; at: NumberArray; axis: Way; label: string; width: number };
type Texts = string | any[]; // as deep as there are controls
type TextLayer = Common & {
  kind: "text";
  texts: Texts;
  x: NumberArray;
  y: NumberArray;
  align: "left" | "center" | "right";
  size: number;
  fixed: boolean;
};
type Layer = LineLayer | BandLayer | HeatmapLayer | PointsLayer | ArrowsLayer | RefLineLayer | TextLayer;

type Click = { control: string | null; along: Way; other: string | null; event: string | null; does: string };
type Panel = {
  x: Axis;
  y: Axis;
  layers: Layer[];
  title: string;
  row: number;
  column: number;
  rows: number;
  columns: number;
  equal: boolean;
  click: Click | null;
  frame: boolean;
  legend: string | null;
};
type Control = {
  name: string;
  label: string;
  values: (number | string)[];
  index: number;
  kind: "slider" | "choice" | "play" | "text";
  remote: boolean;
  seconds: number;
  texts: string[];
  typed: boolean;
};
type Note = string | { words: string; sets: State; x: number | null };
type Cell = number | string;
type RunTable = { names: string[]; columns: [heading: string, cells: Cell[]][]; shown: number[] };
type Roles = Record<"background" | "ink" | "quiet" | "grid", string>;
type Style = { dashes: number[][] } & Record<Theme, Roles & { colours: string[] }>;
type Scene = {
  format: number;
  panels: Panel[];
  title: string;
  controls: Control[];
  buttons: { name: string; label: string; enabled: boolean }[];
  width: number;
  height: number;
  widths: number[];
  heights: number[];
  description: string;
  listings: { title: string; text: string }[];
  message: string;
  notes: Note[];
  live: boolean;
  runs: RunTable | null;
  style: Style;
};

type Message = { kind: string } & Record<string, unknown>; // EVENTS of viz/render/canvas.py
type Payload = ArrayBuffer | ArrayBufferView<ArrayBuffer>;
type Send = (message: Message) => void;

// Layout
type Tick = { value: number; words: string; power?: number };
type Ticks = { major: Tick[]; minor: number[] };
type Size = { width: number; height: number };
type Frame = Size & { x: number; y: number };
type Side = "left" | "right" | "top" | "bottom";
type Edges = Record<Side, number>; // pixels around a panel's frame
type Room = Record<Side, number[]>; // the same of each column, or row
type Zoomed = { x: Axis; y: Axis };
/** From values of an axis to pixels and back. */
type Direction = { axis: Axis; unit: number; at: (value: number) => number; value: (at: number) => number };
type PlacedPanel = Panel & { keys: number[]; names: number };
type Bar = Frame & { layer: HeatmapLayer; ticks: Ticks; axis: Axis; words: number; reach: number };
type Place = {
  panel: PlacedPanel;
  frame: Frame;
  least: Room;
  edge: number;
  x: Direction;
  y: Direction;
  xTicks: Ticks;
  yTicks: Ticks;
  bars: Bar[];
  cased: boolean; // whether lines have an edge, as on an image
  still: number; // how many of the layers, from the lowest, no control changes
  taken: Box[];
};
type Box = { x: number; y: number; long: number };

type Pen = {
  context: CanvasRenderingContext2D;
  theme: Theme;
  scale: number;
  ratio: number;
  background: string;
  ink: string;
  quiet: string;
  grid: string;
  colour: (style: LayerStyle) => string;
  dashes: (style: LayerStyle, width: number) => number[];
  font: (size: number, look?: { bold?: boolean; fixed?: boolean }) => void;
  tickWidth: (tick: Tick) => number;
  nameWidth: (words: string) => number;
  shortTicks: (ticks: Ticks, axis: Axis, room: number) => Ticks;
  titleLines: (panel: Panel, room: number) => string[];
  fitted: (layer: TextLayer, words: string, room: number) => { lines: string[]; size: number; step: number };
  crisp: (at: number, width?: number) => number;
};

type Places = Record<number, [number, number]>; // by the number of a point
type Moved = Map<Layer, Places>; // places of points since they were moved by hand
/** What drawing and pointing need to know of what is shown. */
type Look = { scene: Scene; state: State; isDrawn: (layer: Layer) => boolean; moved: Moved; isPast: boolean; taken: Box[] };
type Found = {
  layer: Layer;
  far: number;
  px: number;
  py: number;
  vx: number;
  vy: number;
  title: string;
  cell?: { wide: number; high: number };
  says?: string;
};
type Said = { title: string; lines: string[] };

// Interaction
type Cursor = { k: number; x: number; y: number }; // a panel's number and pixels
type Grip = { k: number; layer: PointsLayer; number: number; far: number };
type Pressed = { k: number; x: number; y: number; far: boolean; pointer: number; seen?: Frame };

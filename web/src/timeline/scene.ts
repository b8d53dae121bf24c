/** All that the timeline draws of one answer: operations, steps, samples, counters, findings, losses. */
import { column, textAt, type Columns, type TypedArray } from "./columns.ts";
import { firstReaching, firstStarting, lanes, operations, type Lanes, type Ops } from "./model.ts";

export interface Steps extends Lanes {
  number: TypedArray;
}

export interface Samples extends Lanes {
  frame: TypedArray;
}

export interface CounterLane {
  name: string;
  unit: string;
  time: Float64Array;
  value: Float64Array;
  most: number;
}

export interface Marker {
  at: number;
  until: number;
  text: string;
  severity: string;
}

export interface Gap {
  node: string;
  /** Index of the rank, or -1: all ranks of the node. */
  rank: number;
  from: number;
  to: number;
  /** Which rows are missing, as `comm.ops`. */
  table: string;
}

export interface Scene {
  columns: Columns;
  ops: Ops;
  steps: Steps;
  samples: Samples;
  counters: CounterLane[];
  markers: Marker[];
  gaps: Gap[];
  /** Length of the range in µs. */
  length: number;
  /** What the server left out of the range or says of it. */
  notes: string[];
  /** How far the clocks of two nodes may be apart, µs; null: not known. */
  clockError: number | null;
}

function times(columns: Columns, section: string, name: string): Float64Array {
  const found = column(columns, section, name);
  return found instanceof Float64Array ? found : Float64Array.from(found);
}

/** Returns the scene of an answer; `length` is the length of the range in µs, 0: as long as its rows. */
export function sceneOf(columns: Columns, length = lengthOf(columns)): Scene {
  const end = length > 0 ? length : lastTime(columns);
  const ranks = columns.ranks.length;
  const stepsOf = { row: column(columns, "steps", "rank", 0), start: times(columns, "steps", "start"), end: times(columns, "steps", "end") };
  const sampleTime = times(columns, "samples", "start");
  const sampleLength = times(columns, "samples", "duration");
  const sampleEnd = sampleTime.map((time, i) => time + (Number.isFinite(sampleLength[i]) ? (sampleLength[i] as number) : 0));
  return {
    columns,
    ops: operations(columns, end),
    steps: { ...lanes(stepsOf.row, stepsOf.start, stepsOf.end, ranks), number: column(columns, "steps", "step") },
    samples: { ...lanes(column(columns, "samples", "rank", 0), sampleTime, sampleEnd, ranks), frame: column(columns, "samples", "frame", 0) },
    counters: countersOf(columns),
    markers: markersOf(columns, end),
    gaps: gapsOf(columns, end),
    length: Math.max(end, 1),
    notes: notesOf(columns),
    clockError: clockErrorOf(columns),
  };
}

/** The length of the range that was asked for in µs, or 0. */
function lengthOf(columns: Columns): number {
  const end = columns.header["to_ns"];
  return typeof end === "string" ? Number(BigInt(end) - columns.fromNs) / 1e3 : 0;
}

function notesOf(columns: Columns): string[] {
  return Array.isArray(columns.header["notes"]) ? columns.header["notes"].slice(0, 20).map(String) : [];
}

function lastTime(columns: Columns): number {
  let last = 0;
  for (const name of ["call", "done_hi"]) for (const time of column(columns, "ops", name)) if (time > last) last = time;
  return last;
}

function countersOf(columns: Columns): CounterLane[] {
  const which = column(columns, "counters", "counter", 0);
  const [time, value] = [times(columns, "counters", "time"), times(columns, "counters", "value")];
  const names = (columns.dictionaries.get("counters") ?? []) as ({ node?: string; device?: string; name?: string; unit?: string } | string)[];
  const places: number[][] = names.map(() => []);
  for (let i = 0; i < which.length; i++) places[which[i] as number]?.push(i);
  return names.flatMap((entry, index) => {
    const own = places[index] ?? [];
    if (!own.length) return [];
    own.sort((a, b) => (time[a] as number) - (time[b] as number));
    const values = Float64Array.from(own, (i) => value[i] as number);
    const name = typeof entry === "string" ? entry : [entry.node, entry.device, entry.name].filter(Boolean).join(" ");
    const unit = typeof entry === "string" ? "" : (entry.unit ?? "");
    return [{ name, unit, time: Float64Array.from(own, (i) => time[i] as number), value: values, most: values.reduce((most, one) => Math.max(most, one), 0) }];
  });
}

function markersOf(columns: Columns, end: number): Marker[] {
  const [begin, until] = [times(columns, "findings", "start"), times(columns, "findings", "end")];
  const texts = (columns.dictionaries.get("findings") ?? []) as ({ sentence?: string; severity?: string } | string)[];
  return Array.from(begin.slice(0, 200), (at, i) => {
    const entry = texts[i] ?? "";
    const text = typeof entry === "string" ? entry : (entry.sentence ?? "");
    return { at, until: Number.isFinite(until[i]) ? (until[i] as number) : end, text, severity: typeof entry === "string" ? "error" : (entry.severity ?? "error") };
  });
}

function gapsOf(columns: Columns, end: number): Gap[] {
  return columns.losses.slice(0, 2000).map((loss) => ({
    node: String(loss.node ?? ""),
    rank: loss.pid == null ? -1 : columns.ranks.findIndex((rank) => rank.pid === loss.pid && rank.node === loss.node),
    from: loss.from_us ?? 0,
    to: loss.to_us ?? end,
    table: String(loss.table ?? ""),
  }));
}

function clockErrorOf(columns: Columns): number | null {
  if (columns.clocks.length < 2) return null;
  const bounds = columns.clocks.map((clock) => clock.bound_ns);
  if (bounds.some((bound) => bound === null)) return null;
  const sorted = (bounds as number[]).sort((a, b) => b - a);
  return ((sorted[0] ?? 0) + (sorted[1] ?? 0)) / 1e3;
}

/** Returns the name of an operation: `all_reduce #812`. */
export function opName(scene: Scene, i: number): string {
  const seq = scene.ops.seq[i] as number;
  const name = textAt(scene.columns.ops, scene.ops.op[i]);
  return Number.isFinite(seq) && seq >= 0 ? `${name} #${seq}` : name;
}

/** Returns the sample of a row at a time, or -1. */
export function sampleAt(scene: Scene, rank: number, time: number): number {
  const place = firstStarting(scene.samples, rank, time);
  const from = firstReaching(scene.samples, rank, time - 1e5);
  for (let at = Math.min(place, (scene.samples.first[rank + 1] as number) - 1); at >= from && at >= (scene.samples.first[rank] as number); at--) {
    if ((scene.samples.start[scene.samples.order[at] as number] as number) <= time) return scene.samples.order[at] as number;
  }
  return -1;
}

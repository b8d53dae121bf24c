/** Draws the part of a timeline that is seen: rows of operations as pixels, and texts and marks above them. */
import { visible } from "../text/escape.ts";
import { duration } from "../text/format.ts";
import { colour } from "../theme.ts";
import { contrast } from "../charts/contrast.ts";
import { spans } from "./detail.ts";
import { firstReaching, firstStarting } from "./model.ts";
import { mix, packed, Pixels } from "./pixels.ts";
import { firstBelow, type TimelineRow } from "./rows.ts";
import { opName, type CounterLane, type Scene } from "./scene.ts";
import { offsetText, ticks, timeOfDay, type View } from "./view.ts";

export const GUTTER = 92;
export const AXIS = 32;
export const COUNTER_HEIGHT = 36;

export interface Picture {
  scene: Scene;
  rows: readonly TimelineRow[];
  view: View;
  /** How far the rows are scrolled, in pixels. */
  top: number;
  folded: ReadonlySet<string>;
  selected: number;
  hovered: number;
  focusRow: number;
  cursor: number | null;
  range: View | null;
}

interface Palette {
  panel: number;
  quiet: number;
  grid: number;
  comms: { strong: number; pale: number; hex: string }[];
  frames: number[];
  step: number;
}

const COMMS = 8;

export class Painter {
  private pixels: Pixels | null = null;
  private palette: Palette | null = null;

  /** Colours are read anew at the next picture. */
  recolour(): void {
    this.palette = null;
  }

  /** Draws into a canvas whose context is scaled by `ratio`; sizes in CSS pixels. */
  draw(context: CanvasRenderingContext2D, width: number, height: number, ratio: number, picture: Picture): void {
    const palette = (this.palette ??= readPalette());
    const counters = Math.min(picture.scene.counters.length, 8);
    const bottom = height - counters * COUNTER_HEIGHT;
    const area = { x: GUTTER, y: AXIS, width: Math.max(1, width - GUTTER), height: Math.max(1, bottom - AXIS) };
    context.fillStyle = colour("panel");
    context.fillRect(0, 0, width, height);
    const labels = this.drawRows(context, area, ratio, picture, palette);
    drawAxis(context, area, picture);
    drawLabels(context, area, labels);
    drawGaps(context, area, picture);
    drawMarks(context, area, picture);
    drawGutter(context, area, picture);
    picture.scene.counters.slice(0, counters).forEach((lane, index) => drawCounter(context, area, bottom + index * COUNTER_HEIGHT, lane, picture.view));
    drawCursor(context, area, height, picture);
  }

  private drawRows(context: CanvasRenderingContext2D, area: Area, ratio: number, picture: Picture, palette: Palette): Label[] {
    const [across, down] = [Math.round(area.width * ratio), Math.round(area.height * ratio)];
    if (this.pixels?.width !== across || this.pixels.height !== down) this.pixels = new Pixels(across, down);
    const pixels = this.pixels;
    pixels.clear(palette.panel);
    const labels: Label[] = [];
    const { rows, scene, view, top } = picture;
    for (const time of ticks(view, area.width).at) {
      const x = Math.round(((time - view.from) / (view.to - view.from)) * across);
      pixels.fill(x, x + Math.max(1, Math.round(ratio)), 0, down, palette.grid);
    }
    for (let index = firstBelow(rows, top); index < rows.length; index++) {
      const row = rows[index] as TimelineRow;
      const y = row.y - top;
      if (y >= area.height) break;
      if (row.kind === "node") {
        pixels.fill(0, across, Math.round(y * ratio), Math.round((y + row.height - 1) * ratio), palette.quiet);
        continue;
      }
      const line = Math.max(1, Math.round(ratio));
      const [y0, y1] = [Math.round((y + 2) * ratio), Math.round((y + 15) * ratio)];
      this.drawOps(pixels, scene, row.rank, view, across, y0, y1, palette, ratio, labels, y);
      drawStrip(pixels, scene, row.rank, view, across, Math.round((y + 16) * ratio), Math.round((y + 19) * ratio), palette);
      drawSteps(pixels, scene, row.rank, view, across, Math.round(y * ratio), Math.round((y + 21) * ratio), line, palette);
    }
    context.putImageData(pixels.image, Math.round(area.x * ratio), Math.round(area.y * ratio));
    return labels;
  }

  private drawOps(pixels: Pixels, scene: Scene, rank: number, view: View, across: number, y0: number, y1: number, palette: Palette, ratio: number, labels: Label[], y: number): void {
    const { ops } = scene;
    const scale = across / (view.to - view.from);
    spans(ops, rank, view, across, (x0, x1, encoded, busy, waiting) => {
      const i = encoded < 0 ? ~encoded : encoded;
      const own = palette.comms[(ops.comm[i] as number) % COMMS] as Palette["comms"][number];
      if (busy < 1 || encoded < 0) {
        const pale = mix(palette.panel, own.pale, Math.min(1, busy));
        pixels.fill(x0, x1, y0, y1, mix(pale, own.strong, Math.max(0, busy - waiting)));
        return;
      }
      const ready = Math.round(((ops.ready[i] as number) - view.from) * scale);
      const turn = Math.max(x0, Math.min(x1, ready));
      if (turn > x0) pixels.hatch(x0, turn, y0, y1, own.pale, mix(own.pale, palette.panel, 0.55), Math.round(6 * ratio));
      pixels.fill(turn, x1, y0, y1, own.strong);
      // Neighbours stay apart where there is room.
      if (x1 - x0 > 3) pixels.fill(x1 - 1, x1, y0, y1, palette.panel);
      if (ops.open[i]) pixels.fill(x0, x1, y1 - Math.round(2 * ratio), y1, own.strong);
      if (x1 - x0 > 44 * ratio && labels.length < 500) {
        // In the longer part, in the colour that is read on it.
        const [left, right, back] = turn - x0 > x1 - turn ? [x0, turn, ""] : [turn, x1, own.hex];
        labels.push({ x: left / ratio, width: (right - left) / ratio, y, text: opName(scene, i), back });
      }
    });
  }
}

interface Area {
  x: number;
  y: number;
  width: number;
  height: number;
}

interface Label {
  x: number;
  y: number;
  width: number;
  text: string;
  back: string;
}

function readPalette(): Palette {
  const panel = packed(colour("panel"));
  const names = Array.from({ length: COMMS }, (_, i) => colour(`comm-${i}`));
  return {
    panel,
    quiet: packed(colour("bg")),
    grid: packed(colour("grid")),
    comms: names.map((hex) => ({ hex, strong: packed(hex), pale: mix(panel, packed(hex), 0.42) })),
    frames: Array.from({ length: COMMS }, (_, i) => mix(panel, packed(colour(`comm-${i}`)), 0.75)),
    step: packed(colour("soft")),
  };
}

function drawStrip(pixels: Pixels, scene: Scene, rank: number, view: View, across: number, y0: number, y1: number, palette: Palette): void {
  const { samples } = scene;
  if (!samples.order.length) return;
  const scale = across / (view.to - view.from);
  let place = firstStarting(samples, rank, view.from);
  const end = samples.first[rank + 1] as number;
  while (place < end) {
    const i = samples.order[place] as number;
    const time = samples.start[i] as number;
    if (time >= view.to) break;
    const x = Math.max(0, Math.floor((time - view.from) * scale));
    const wide = Math.max(1, Math.round(((samples.end[i] as number) - time) * scale));
    // A prime spreads neighbours over the colours.
    pixels.fill(x, x + wide, y0, y1, palette.frames[((samples.frame[i] as number) * 5) % COMMS] as number);
    place = Math.max(place + 1, firstStarting(samples, rank, view.from + (x + 1) / scale, place + 1));
  }
}

function drawSteps(pixels: Pixels, scene: Scene, rank: number, view: View, across: number, y0: number, y1: number, line: number, palette: Palette): void {
  const { steps } = scene;
  if (!steps.order.length) return;
  const scale = across / (view.to - view.from);
  let place = firstStarting(steps, rank, view.from);
  const last = firstStarting(steps, rank, view.to, place);
  // Where steps are denser than this, their lines say nothing.
  if ((last - place) * 24 > across) return;
  for (; place < last; place++) {
    const x = Math.round(((steps.start[steps.order[place] as number] as number) - view.from) * scale);
    pixels.fill(x, x + line, y0, y1, palette.step);
  }
}

function xOf(area: Area, view: View, time: number): number {
  return area.x + ((time - view.from) / (view.to - view.from)) * area.width;
}

function drawAxis(context: CanvasRenderingContext2D, area: Area, picture: Picture): void {
  const { view, scene } = picture;
  const { at, step } = ticks(view, area.width);
  context.font = "11px system-ui, sans-serif";
  context.textBaseline = "middle";
  context.textAlign = "left";
  context.strokeStyle = colour("grid");
  context.lineWidth = 1;
  context.beginPath();
  for (const time of at) {
    const x = Math.round(xOf(area, view, time)) + 0.5;
    context.moveTo(x, area.y - 6);
    context.lineTo(x, area.y);
  }
  context.stroke();
  for (const time of at) {
    const x = xOf(area, view, time);
    if (x > area.x + area.width - 60) continue;
    context.fillStyle = colour("text");
    context.fillText(offsetText(time, step), x + 4, 9);
    context.fillStyle = colour("soft");
    context.fillText(timeOfDay(scene.columns.fromNs, time, step), x + 4, 23);
  }
}

function drawLabels(context: CanvasRenderingContext2D, area: Area, labels: readonly Label[]): void {
  context.font = "11px system-ui, sans-serif";
  context.textBaseline = "middle";
  context.textAlign = "left";
  const [text, panel] = [colour("text"), colour("panel")];
  context.lineJoin = "round";
  for (const label of labels) {
    const room = Math.floor((label.width - 8) / 6.2);
    if (room < 4) continue;
    const shown = visible(label.text, 80);
    const fitted = shown.length > room ? `${shown.slice(0, room - 1)}…` : shown;
    const [x, y] = [area.x + label.x + 4, area.y + label.y + 9];
    if (!label.back) {
      // Stripes are quiet behind a text.
      context.strokeStyle = panel;
      context.lineWidth = 3;
      context.strokeText(fitted, x, y);
    }
    context.fillStyle = label.back ? contrast(label.back) : text;
    context.fillText(fitted, x, y);
  }
}

function drawGaps(context: CanvasRenderingContext2D, area: Area, picture: Picture): void {
  const { scene, rows, view, top } = picture;
  if (!scene.gaps.length) return;
  context.save();
  context.beginPath();
  context.rect(area.x, area.y, area.width, area.height);
  context.clip();
  context.strokeStyle = colour("error");
  context.lineWidth = 1;
  for (const gap of scene.gaps) {
    const [x0, x1] = [xOf(area, view, gap.from), Math.max(xOf(area, view, gap.to), xOf(area, view, gap.from) + 2)];
    if (x1 < area.x || x0 > area.x + area.width) continue;
    for (let index = firstBelow(rows, top); index < rows.length; index++) {
      const row = rows[index] as TimelineRow;
      if (row.y - top > area.height) break;
      const concerned = row.kind === "rank" ? row.node === gap.node && (gap.rank < 0 || gap.rank === row.rank) : row.node === gap.node && gap.rank < 0;
      if (!concerned) continue;
      const y = area.y + row.y - top;
      context.strokeRect(x0 + 0.5, y + 1.5, x1 - x0, row.height - 3);
      context.beginPath();
      for (let x = Math.max(x0, area.x - 20); x < Math.min(x1, area.x + area.width); x += 8) {
        context.moveTo(x, y + row.height - 2);
        context.lineTo(Math.min(x + row.height - 3, x1), y + 2);
      }
      context.stroke();
    }
  }
  context.restore();
}

/** The chosen operation on all its ranks, the range, findings, and by how much clocks may differ. */
function drawMarks(context: CanvasRenderingContext2D, area: Area, picture: Picture): void {
  const { scene, rows, view, top, range } = picture;
  context.save();
  context.beginPath();
  context.rect(area.x, 0, area.width, area.y + area.height);
  context.clip();
  if (range) {
    const [x0, x1] = [xOf(area, view, range.from), xOf(area, view, range.to)];
    context.fillStyle = colour("range");
    context.fillRect(x0, area.y, x1 - x0, area.height);
    context.fillStyle = colour("accent");
    context.fillRect(x0 - 1, area.y - 6, 2, area.height + 6);
    context.fillRect(x1 - 1, area.y - 6, 2, area.height + 6);
  }
  for (const marker of scene.markers) {
    const [x0, x1] = [xOf(area, view, marker.at), xOf(area, view, marker.until)];
    context.fillStyle = colour(marker.severity === "error" ? "error" : "warn");
    context.fillRect(x0, area.y - 3, Math.max(2, x1 - x0), 3);
    context.beginPath();
    context.moveTo(x0, area.y);
    context.lineTo(x0 - 5, area.y - 9);
    context.lineTo(x0 + 5, area.y - 9);
    context.fill();
  }
  for (const [index, strength] of [[picture.hovered, 1], [picture.selected, 2]] as const) {
    if (index < 0) continue;
    const group = scene.ops.group[index] as number;
    const places = new Map<number, number>();
    for (let at = scene.ops.groupFirst[group] as number; at < (scene.ops.groupFirst[group + 1] as number); at++) {
      const i = scene.ops.groupOps[at] as number;
      places.set(scene.ops.rank[i] as number, i);
    }
    context.strokeStyle = colour("text");
    for (let at = firstBelow(rows, top); at < rows.length; at++) {
      const row = rows[at] as TimelineRow;
      if (row.y - top > area.height) break;
      const i = row.kind === "rank" ? places.get(row.rank) : undefined;
      if (i === undefined) continue;
      const x0 = Math.max(xOf(area, view, scene.ops.start[i] as number), area.x - 4);
      const x1 = Math.min(xOf(area, view, scene.ops.end[i] as number), area.x + area.width + 4);
      context.lineWidth = i === index ? strength + 1 : strength;
      context.strokeRect(x0 - 0.5, area.y + row.y - top + 1.5, Math.max(2, x1 - x0), 14);
    }
    const error = scene.clockError;
    if (strength === 2 && error !== null) {
      const half = (error / (view.to - view.from)) * area.width;
      const x = xOf(area, view, scene.ops.start[index] as number);
      if (half > 3) bracket(context, x, half, area.y - 12, `±${duration(error * 1e3)}`);
    }
  }
  context.restore();
}

function bracket(context: CanvasRenderingContext2D, x: number, half: number, y: number, text: string): void {
  context.strokeStyle = colour("soft");
  context.lineWidth = 1;
  context.beginPath();
  context.moveTo(x - half, y - 3);
  context.lineTo(x - half, y + 3);
  context.moveTo(x + half, y - 3);
  context.lineTo(x + half, y + 3);
  context.moveTo(x - half, y);
  context.lineTo(x + half, y);
  context.stroke();
  context.fillStyle = colour("soft");
  context.textAlign = "center";
  context.fillText(text, x, y - 8);
}

function drawGutter(context: CanvasRenderingContext2D, area: Area, picture: Picture): void {
  const { rows, top, scene, folded, focusRow } = picture;
  context.save();
  context.beginPath();
  context.rect(0, area.y, area.x + area.width, area.height);
  context.clip();
  context.textBaseline = "middle";
  for (let index = firstBelow(rows, top); index < rows.length; index++) {
    const row = rows[index] as TimelineRow;
    const y = area.y + row.y - top;
    if (y > area.y + area.height) break;
    if (row.kind === "node") {
      context.fillStyle = colour("bg");
      context.fillRect(0, y, area.x, row.height - 1);
      context.fillStyle = colour("text");
      context.font = "600 11px system-ui, sans-serif";
      context.textAlign = "left";
      context.fillText(`${folded.has(row.node) ? "▸" : "▾"} ${visible(row.node, 40)}`, 8, y + row.height / 2);
      const wide = context.measureText(`▾ ${visible(row.node, 40)}`).width;
      context.font = "11px system-ui, sans-serif";
      context.fillStyle = colour("soft");
      context.fillText(`${row.count}`, Math.max(area.x - 24, wide + 16), y + row.height / 2);
    } else {
      context.fillStyle = colour(index === focusRow ? "accent-soft" : "panel");
      context.fillRect(0, y, area.x, row.height);
      context.font = `${index === focusRow ? "600 " : ""}12px system-ui, sans-serif`;
      context.fillStyle = colour(index === focusRow ? "accent" : "text");
      context.textAlign = "right";
      context.fillText(String(scene.columns.ranks[row.rank]?.rank ?? `pid ${scene.columns.ranks[row.rank]?.pid ?? "?"}`), area.x - 10, y + row.height / 2);
    }
  }
  context.restore();
}

function drawCounter(context: CanvasRenderingContext2D, area: Area, y: number, lane: CounterLane, view: View): void {
  context.fillStyle = colour("panel");
  context.fillRect(0, y, area.x + area.width, COUNTER_HEIGHT);
  context.fillStyle = colour("grid");
  context.fillRect(0, y, area.x + area.width, 1);
  context.save();
  context.beginPath();
  context.rect(area.x, y, area.width, COUNTER_HEIGHT);
  context.clip();
  context.strokeStyle = colour("accent");
  context.lineWidth = 1.25;
  context.beginPath();
  let [column, pen] = [-1, false];
  for (let i = lowerBound(lane.time, view.from); i < lane.time.length; i++) {
    const time = lane.time[i] as number;
    const x = xOf(area, view, time);
    // One value a column is enough; the next begins where the last one was.
    if (Math.floor(x) === column && i + 1 < lane.time.length) continue;
    column = Math.floor(x);
    const height = ((lane.value[i] as number) / Math.max(lane.most, Number.MIN_VALUE)) * (COUNTER_HEIGHT - 8);
    if (pen) context.lineTo(x, y + COUNTER_HEIGHT - 3 - height);
    else context.moveTo(x, y + COUNTER_HEIGHT - 3 - height);
    pen = true;
    if (time > view.to) break;
  }
  context.stroke();
  context.restore();
  context.font = "11px system-ui, sans-serif";
  context.textAlign = "left";
  context.textBaseline = "top";
  context.fillStyle = colour("soft");
  const text = `${visible(lane.name, 60)}, ≤ ${lane.most.toPrecision(3)} ${visible(lane.unit, 12)}`;
  context.fillStyle = colour("panel");
  context.fillRect(area.x, y + 1, context.measureText(text).width + 12, 14);
  context.fillStyle = colour("soft");
  context.fillText(text, area.x + 6, y + 3);
  context.textBaseline = "middle";
}

function lowerBound(times: Float64Array, at: number): number {
  let [low, high] = [0, times.length];
  while (low < high) {
    const middle = (low + high) >>> 1;
    if ((times[middle] as number) < at) low = middle + 1;
    else high = middle;
  }
  return Math.max(0, low - 1);
}

function drawCursor(context: CanvasRenderingContext2D, area: Area, height: number, picture: Picture): void {
  if (picture.cursor === null) return;
  const x = Math.round(xOf(area, picture.view, picture.cursor)) + 0.5;
  if (x < area.x || x > area.x + area.width) return;
  context.strokeStyle = colour("soft");
  context.lineWidth = 1;
  context.setLineDash([3, 3]);
  context.beginPath();
  context.moveTo(x, AXIS - 6);
  context.lineTo(x, height);
  context.stroke();
  context.setLineDash([]);
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

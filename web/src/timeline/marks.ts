/** Texts and marks above the rows of the timeline: axis, names, losses, the chosen operation, the range, the cursor. */
import { contrast } from "../charts/contrast.ts";
import { visible } from "../text/escape.ts";
import { duration } from "../text/format.ts";
import { colour } from "../theme.ts";
import { AXIS, xOf, type Area, type Label, type Picture } from "./picture.ts";
import { firstBelow, type TimelineRow } from "./rows.ts";
import { offsetText, ticks, timeOfDay } from "./view.ts";

export function drawAxis(context: CanvasRenderingContext2D, area: Area, picture: Picture): void {
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

export function drawLabels(context: CanvasRenderingContext2D, area: Area, labels: readonly Label[]): void {
  context.font = "11px system-ui, sans-serif";
  context.textBaseline = "middle";
  context.textAlign = "left";
  const [text, panel] = [colour("text"), colour("panel")];
  for (const label of labels) {
    const room = Math.floor((label.width - 8) / 6.2);
    if (room < 4) continue;
    const shown = visible(label.text, 80);
    const fitted = shown.length > room ? `${shown.slice(0, room - 1)}…` : shown;
    const [x, y] = [area.x + label.x + 4, area.y + label.y + 9];
    if (!label.back) {
      // Stripes are quiet behind a text.
      context.globalAlpha = 0.85;
      context.fillStyle = panel;
      context.fillRect(x - 3, y - 6, context.measureText(fitted).width + 6, 12);
      context.globalAlpha = 1;
    }
    context.fillStyle = label.back ? contrast(label.back) : text;
    context.fillText(fitted, x, y);
  }
}

/** Where rows are missing: of samples below the operations, of all else over them. */
export function drawGaps(context: CanvasRenderingContext2D, area: Area, picture: Picture): void {
  const { scene, rows, view, top } = picture;
  if (!scene.gaps.length) return;
  context.save();
  context.beginPath();
  context.rect(area.x, area.y, area.width, area.height);
  context.clip();
  context.strokeStyle = colour("error");
  context.fillStyle = colour("error");
  context.lineWidth = 1;
  for (const gap of scene.gaps) {
    const x0 = Math.max(xOf(area, view, gap.from), area.x - 16);
    const x1 = Math.min(Math.max(xOf(area, view, gap.to), x0 + 1), area.x + area.width + 16);
    if (x1 < area.x || x0 > area.x + area.width) continue;
    const samples = gap.table.startsWith("python.");
    for (let index = firstBelow(rows, top); index < rows.length; index++) {
      const row = rows[index] as TimelineRow;
      if (row.y - top > area.height) break;
      if (row.kind === "node" || row.node !== gap.node || (gap.rank >= 0 && gap.rank !== row.rank)) continue;
      const y = area.y + row.y - top;
      if (samples) context.fillRect(x0, y + 20, x1 - x0, 1.5);
      else stripes(context, x0, x1, y + 2, y + 15);
    }
  }
  context.restore();
}

function stripes(context: CanvasRenderingContext2D, x0: number, x1: number, y0: number, y1: number): void {
  context.save();
  context.beginPath();
  context.rect(x0, y0, x1 - x0, y1 - y0);
  context.clip();
  context.beginPath();
  // From a grid of the canvas, so that neighbours join.
  for (let x = Math.floor((x0 - (y1 - y0)) / 7) * 7; x < x1; x += 7) {
    context.moveTo(x, y1);
    context.lineTo(x + (y1 - y0), y0);
  }
  context.stroke();
  context.restore();
  context.fillRect(x0, y0 - 1, x1 - x0, 1);
}

/** The chosen operation on all its ranks, the range, findings, and by how much clocks may differ. */
export function drawMarks(context: CanvasRenderingContext2D, area: Area, picture: Picture): void {
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
    context.lineTo(x0 - 4, area.y - 7);
    context.lineTo(x0 + 4, area.y - 7);
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

export function drawCursor(context: CanvasRenderingContext2D, area: Area, height: number, picture: Picture): void {
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

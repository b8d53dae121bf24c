/** What lies beside and below the rows of the timeline: names of nodes and ranks, counters of nodes. */
import { visible } from "../text/escape.ts";
import { bitRate, bytes } from "../text/format.ts";
import { colour } from "../theme.ts";
import { COUNTER_HEIGHT, xOf, type Area, type Picture } from "./picture.ts";
import { firstBelow, type TimelineRow } from "./rows.ts";
import type { CounterLane } from "./scene.ts";
import type { View } from "./view.ts";

export function drawGutter(context: CanvasRenderingContext2D, area: Area, picture: Picture): void {
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

export function drawCounter(context: CanvasRenderingContext2D, area: Area, y: number, lane: CounterLane, view: View): void {
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
  const text = `${visible(lane.name.replace(/_/g, " "), 60)}, ≤ ${amount(lane.most, lane.unit)}`;
  context.fillStyle = colour("panel");
  context.fillRect(area.x, y + 1, context.measureText(text).width + 12, 14);
  context.fillStyle = colour("soft");
  context.fillText(text, area.x + 6, y + 3);
  context.textBaseline = "middle";
}

function amount(value: number, unit: string): string {
  if (unit === "Gb/s") return bitRate(value);
  return unit.startsWith("bytes") ? `${bytes(value)}${unit.slice(5)}` : `${value.toPrecision(3)} ${visible(unit, 12)}`;
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

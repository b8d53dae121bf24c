/** What is seen and chosen on a timeline, and how it changes. Pure: the drawing reads it, gestures and keys change it. */
import { firstStarting, intervalAt } from "./model.ts";
import { AXIS, COUNTER_HEIGHT, GUTTER } from "./picture.ts";
import { firstBelow, heightOf, rowsOf, type TimelineRow } from "./rows.ts";
import type { Scene } from "./scene.ts";
import { within, type View } from "./view.ts";

/** Zoom, pan and choice change many times a second: they live here, and not in the state of a component. */
export class Control {
  view: View;
  range: View | null;
  top = 0;
  folded = new Set<string>();
  selected = -1;
  hovered = -1;
  focusRow = -1;
  cursor: number | null = null;
  selecting = false;
  rows: TimelineRow[];
  width = 0;
  height = 0;

  constructor(
    readonly scene: Scene,
    view: View,
    range: View | null,
  ) {
    this.view = within(view, scene.length);
    this.range = range;
    this.rows = rowsOf(scene.columns.ranks, this.folded);
    this.focusRow = this.rows.findIndex((row) => row.kind === "rank");
  }

  fold(node: string): void {
    if (!this.folded.delete(node)) this.folded.add(node);
    this.rows = rowsOf(this.scene.columns.ranks, this.folded);
    this.focusRow = Math.min(this.focusRow, this.rows.length - 1);
    this.scroll(0);
  }

  /** The chosen rank, or -1. */
  get rank(): number {
    const row = this.rows[this.focusRow];
    return row?.kind === "rank" ? row.rank : -1;
  }

  get counters(): number {
    return Math.min(this.scene.counters.length, 8) * COUNTER_HEIGHT;
  }

  scroll(dy: number): boolean {
    const before = this.top;
    const room = Math.max(0, heightOf(this.rows) - (this.height - AXIS - this.counters));
    this.top = Math.min(room, Math.max(0, this.top + dy));
    return this.top !== before;
  }

  time(x: number): number {
    return this.view.from + ((x - GUTTER) / Math.max(1, this.width - GUTTER)) * (this.view.to - this.view.from);
  }

  rowAt(y: number): number {
    if (y < AXIS || y > this.height - this.counters) return -1;
    const index = firstBelow(this.rows, y - AXIS + this.top);
    return index < this.rows.length && (this.rows[index] as TimelineRow).y <= y - AXIS + this.top ? index : -1;
  }

  opAt(x: number, y: number): number {
    const row = this.rows[this.rowAt(y)];
    if (!row || row.kind !== "rank" || x < GUTTER) return -1;
    const pixel = (this.view.to - this.view.from) / Math.max(1, this.width - GUTTER);
    return intervalAt(this.scene.ops, row.rank, this.time(x), 3 * pixel);
  }

  /** Chooses the operation before or after the chosen one in its row. */
  step(by: 1 | -1): void {
    const row = this.rows[this.focusRow];
    if (!row || row.kind !== "rank") return;
    const { ops } = this.scene;
    const [first, end] = [ops.first[row.rank] as number, ops.first[row.rank + 1] as number];
    if (first === end) return;
    const known = this.selected >= 0 && ops.rank[this.selected] === row.rank;
    let place = known ? firstStarting(ops, row.rank, ops.start[this.selected] as number) : firstStarting(ops, row.rank, (this.view.from + this.view.to) / 2) - (by > 0 ? 1 : 0);
    if (known) while (place < end - 1 && ops.order[place] !== this.selected) place += 1;
    const next = Math.min(end - 1, Math.max(first, place + by));
    this.selected = ops.order[next] as number;
    this.show(this.selected);
  }

  /** Moves the view so that an operation is in it. */
  show(i: number): void {
    const [start, end] = [this.scene.ops.start[i] as number, this.scene.ops.end[i] as number];
    const size = this.view.to - this.view.from;
    this.cursor = start;
    if (start < this.view.from || Math.min(end, start + size / 2) > this.view.to) this.view = within({ from: start - size / 3, to: start + (2 * size) / 3 }, this.scene.length);
  }

  moveRow(by: 1 | -1): void {
    for (let index = this.focusRow + by; index >= 0 && index < this.rows.length; index += by) {
      const row = this.rows[index] as TimelineRow;
      this.focusRow = index;
      const visible = this.height - AXIS - this.counters;
      if (row.y < this.top) this.top = row.y;
      if (row.y + row.height > this.top + visible) this.top = row.y + row.height - visible;
      return;
    }
  }
}

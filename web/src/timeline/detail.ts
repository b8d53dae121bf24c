/**
 * What a row of the timeline shows on each column of pixels. Where many operations fall on one column, the column
 * shows which share of its time was spent in operations, and how much of that in waiting: from sums, so that a
 * frame costs as much as it has pixels, and not as much as there are operations.
 */
import { firstReaching, firstStarting, type Lanes, type Ops } from "./model.ts";
import type { View } from "./view.ts";

/** Takes a span of pixel columns from `x0` to before `x1`; `i`: its operation, or `~i` of the first of several. */
export type Span = (x0: number, x1: number, i: number, busy: number, waiting: number) => void;

/**
 * Calls `span` for what `row` shows in `view` on `width` columns, from left to right; columns without an operation
 * are left out. Returns the number of places looked at.
 */
export function spans(ops: Ops, row: number, view: View, width: number, span: Span): number {
  const scale = width / (view.to - view.from);
  const end = ops.first[row + 1] as number;
  const reaching = firstReaching(ops, row, view.from);
  const inside = firstStarting(ops, row, view.from, reaching);
  // Those that began before: the first ones reach farthest, the last ones are the shortest.
  for (let place = reaching; place < inside; place++) {
    if (place === reaching + NEAR && inside - place > NEAR) place = inside - NEAR;
    const i = ops.order[place] as number;
    const stop = ops.end[i] as number;
    if (stop > view.from) span(0, Math.min(width, Math.max(1, Math.round((stop - view.from) * scale))), i, 1, 0);
  }
  let place = inside;
  let looked = Math.min(inside - reaching, 2 * NEAR);
  let pending: Dense | null = null;
  while (place < end) {
    const start = ops.begins[place] as number;
    if (start >= view.to) break;
    looked += 1;
    const i = ops.order[place] as number;
    const x0 = (start - view.from) * scale;
    // Its length by the sums, which lie beside its start.
    const x1 = x0 + ((ops.sum[place + 1] as number) - (ops.sum[place] as number)) * scale;
    const column = Math.max(0, Math.floor(x0));
    if (x1 - x0 >= 1) {
      pending = flush(pending, span);
      span(column, Math.min(width, Math.max(column + 1, Math.round(x1))), i, 1, 0);
      place += 1;
      continue;
    }
    // All that start on this column, at once.
    const next = firstStarting(ops, row, view.from + (column + 1) / scale, place + 1);
    const [from, to] = [skipLong(ops, place, next, 1 / scale), next];
    const busy = Math.min(1, Math.max(0.08, ((ops.sum[from] as number) - (ops.sum[place] as number)) * scale));
    const waiting = Math.min(busy, ((ops.waitSum[from] as number) - (ops.waitSum[place] as number)) * scale);
    const only = from - place === 1 ? i : ~i;
    if (pending && pending.x1 === column && pending.i < 0 && only < 0 && near(pending, busy, waiting)) {
      // The mean of the span, so that its sum stays right.
      const columns = column - pending.x0;
      pending.busy += (busy - pending.busy) / (columns + 1);
      pending.waiting += (waiting - pending.waiting) / (columns + 1);
      pending.x1 = column + 1;
    } else {
      flush(pending, span);
      pending = { x0: column, x1: column + 1, i: only, busy, waiting };
    }
    place = from < to ? from : next;
  }
  flush(pending, span);
  return looked;
}

const NEAR = 512;

interface Dense {
  x0: number;
  x1: number;
  i: number;
  busy: number;
  waiting: number;
}

function flush(pending: Dense | null, span: Span): null {
  if (pending) span(pending.x0, pending.x1, pending.i, pending.busy, pending.waiting);
  return null;
}

function near(pending: Dense, busy: number, waiting: number): boolean {
  return Math.abs(pending.busy - busy) < 0.06 && Math.abs(pending.waiting - waiting) < 0.06;
}

/** Returns the first place after `place`, before `next`, whose operation is longer than a pixel, or `next`. */
function skipLong(ops: Lanes, place: number, next: number, pixel: number): number {
  // The reach grows beyond the column only where a long one is among them.
  const limit = (ops.begins[place] as number) + 2 * pixel;
  let [low, high] = [place + 1, next];
  if (next === 0 || (ops.reach[next - 1] as number) <= Math.max(limit, ops.reach[place] as number)) return next;
  while (low < high) {
    const middle = (low + high) >>> 1;
    if ((ops.reach[middle] as number) > Math.max(limit, ops.reach[place] as number)) high = middle;
    else low = middle + 1;
  }
  return low;
}

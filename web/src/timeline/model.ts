/**
 * Operations of a range, indexed for drawing and picking without an object for each: rows by rank in the order of
 * their calls, ends that only grow, time in operations summed up, and the operations of other ranks with the same
 * communicator and sequence number.
 */
import { column, type Columns, type TypedArray } from "./columns.ts";

/** Intervals of one kind by row: `start` is sorted within a row. Times in µs from the begin of the range. */
export interface Lanes {
  /** Where each row begins in `order`, and one more at the end. */
  first: Uint32Array;
  /** Numbers of intervals, by row and then by start. */
  order: Uint32Array;
  start: Float64Array;
  end: Float64Array;
  /** For each place in `order`: its start, so that a search reads neighbours in memory. */
  begins: Float64Array;
  /** For each place in `order`: the greatest end of its row so far. */
  reach: Float64Array;
  /** For each place in `order`: the sum of lengths of its row before it. */
  sum: Float64Array;
}

export const OPEN = 1;
export const UNSEEN = 2;

export interface Ops extends Lanes {
  count: number;
  rank: TypedArray;
  comm: TypedArray;
  op: TypedArray;
  seq: TypedArray;
  bytes: TypedArray;
  state: TypedArray;
  step: TypedArray;
  /** When the last rank called the operation of this one: before it, it waits; NaN: not known. */
  ready: Float64Array;
  /** When the first rank called it. */
  begun: Float64Array;
  /** OPEN: it has not ended, and is drawn to the end of the range; UNSEEN: when it ended is not known. */
  open: Uint8Array;
  /** Before this time it had not ended; its end lies between this and `end`. */
  sure: Float64Array;
  /** Group of each operation, and the operations of each group. */
  group: Uint32Array;
  groupFirst: Uint32Array;
  groupOps: Uint32Array;
  /** Sum of waiting time before each place in `order`. */
  waitSum: Float64Array;
}

/** Returns intervals sorted by row; `row` has the row of each, below `rows`. */
export function lanes(row: ArrayLike<number>, start: Float64Array, end: Float64Array, rows: number): Lanes {
  const count = start.length;
  const first = new Uint32Array(rows + 1);
  for (let i = 0; i < count; i++) {
    const at = row[i] as number;
    if (at < rows) first[at + 1] = (first[at + 1] as number) + 1;
  }
  for (let i = 0; i < rows; i++) first[i + 1] = (first[i + 1] as number) + (first[i] as number);
  const order = new Uint32Array(first[rows] as number);
  const next = first.slice();
  for (let i = 0; i < count; i++) {
    const at = row[i] as number;
    if (at < rows) {
      const place = next[at] as number;
      order[place] = i;
      next[at] = place + 1;
    }
  }
  for (let r = 0; r < rows; r++) sortByStart(order, start, first[r] as number, first[r + 1] as number);
  const begins = Float64Array.from(order, (i) => start[i] as number);
  const reach = new Float64Array(order.length);
  const sum = new Float64Array(order.length + 1);
  for (let r = 0; r < rows; r++) {
    let most = Number.NEGATIVE_INFINITY;
    for (let place = first[r] as number; place < (first[r + 1] as number); place++) {
      const i = order[place] as number;
      most = Math.max(most, end[i] as number);
      reach[place] = most;
    }
  }
  for (let place = 0; place < order.length; place++) {
    const i = order[place] as number;
    sum[place + 1] = (sum[place] as number) + Math.max(0, (end[i] as number) - (start[i] as number));
  }
  return { first, order, start, end, begins, reach, sum };
}

function sortByStart(order: Uint32Array, start: Float64Array, from: number, to: number): void {
  for (let place = from + 1; place < to; place++) {
    if ((start[order[place] as number] as number) < (start[order[place - 1] as number] as number)) {
      order.subarray(from, to).sort((a, b) => (start[a] as number) - (start[b] as number));
      return;
    }
  }
}

/** Returns the operations of `columns` with their index; `until`: µs at which operations without an end stop. */
export function operations(columns: Columns, until: number): Ops {
  const of = (name: string) => column(columns, "ops", name);
  const count = columns.sections.get("ops")?.rows ?? 0;
  const [rank, comm, seq] = [of("rank"), of("comm"), of("seq")];
  const call = of("call");
  const start = call instanceof Float64Array ? call : Float64Array.from(call);
  const [low, high] = [of("done_lo"), of("done_hi")];
  const end = new Float64Array(count);
  const open = new Uint8Array(count);
  const sure = new Float64Array(count);
  for (let i = 0; i < count; i++) {
    const [least, most, called] = [low[i] as number, high[i] as number, start[i] as number];
    open[i] = !Number.isNaN(most) ? 0 : Number.isNaN(least) ? OPEN : UNSEEN;
    end[i] = Math.max(called, open[i] === OPEN ? until : open[i] === UNSEEN ? least : most);
    sure[i] = Number.isNaN(least) ? (end[i] as number) : Math.min(Math.max(least, called), end[i] as number);
  }
  const groups = groupsOf(comm, seq, columns.comms.length, count);
  const size = groups.groupFirst.length - 1;
  const [last, begin] = [new Float64Array(size).fill(Number.NEGATIVE_INFINITY), new Float64Array(size).fill(Number.POSITIVE_INFINITY)];
  for (let i = 0; i < count; i++) {
    const group = groups.group[i] as number;
    last[group] = Math.max(last[group] as number, start[i] as number);
    begin[group] = Math.min(begin[group] as number, start[i] as number);
  }
  const ready = new Float64Array(count);
  const begun = new Float64Array(count);
  for (let i = 0; i < count; i++) {
    const group = groups.group[i] as number;
    // An operation that has not ended may still wait for a rank that has not called it.
    ready[i] = open[i] === OPEN ? (end[i] as number) : Math.min(last[group] as number, end[i] as number);
    begun[i] = begin[group] as number;
  }
  const byRank = lanes(rank, start, end, columns.ranks.length);
  const waitSum = new Float64Array(byRank.order.length + 1);
  for (let place = 0; place < byRank.order.length; place++) {
    const i = byRank.order[place] as number;
    waitSum[place + 1] = (waitSum[place] as number) + Math.max(0, (ready[i] as number) - (start[i] as number));
  }
  return { ...byRank, ...groups, count, rank, comm, op: of("op"), seq, bytes: of("bytes"), state: of("state"), step: of("step"), ready, begun, open, sure, waitSum };
}

/** Operations with one communicator and sequence number, without sorting: sequence numbers are dense. */
function groupsOf(comm: TypedArray, seq: TypedArray, comms: number, count: number) {
  const low = new Float64Array(comms).fill(Number.POSITIVE_INFINITY);
  const high = new Float64Array(comms).fill(Number.NEGATIVE_INFINITY);
  for (let i = 0; i < count; i++) {
    const [c, s] = [comm[i] as number, seq[i] as number];
    if (!(s >= 0) || c >= comms) continue;
    low[c] = Math.min(low[c] as number, s);
    high[c] = Math.max(high[c] as number, s);
  }
  const group = new Uint32Array(count);
  const dense: (Uint32Array | Map<number, number>)[] = [];
  for (let c = 0; c < comms; c++) {
    const range = (high[c] as number) - (low[c] as number) + 1;
    dense.push(range > 0 && range <= 4 * count + 1024 ? new Uint32Array(range) : new Map<number, number>());
  }
  let size = 0;
  for (let i = 0; i < count; i++) {
    const [c, s] = [comm[i] as number, seq[i] as number];
    const known = s >= 0 ? dense[c] : undefined;
    if (known === undefined) {
      // Without a number it belongs to no other operation.
      group[i] = size++;
    } else if (known instanceof Map) {
      let found = known.get(s);
      if (found === undefined) known.set(s, (found = size++));
      group[i] = found;
    } else {
      const at = s - (low[c] as number);
      if (known[at] === 0) known[at] = ++size;
      group[i] = (known[at] as number) - 1;
    }
  }
  const groupFirst = new Uint32Array(size + 1);
  for (let i = 0; i < count; i++) groupFirst[(group[i] as number) + 1] = (groupFirst[(group[i] as number) + 1] as number) + 1;
  for (let g = 0; g < size; g++) groupFirst[g + 1] = (groupFirst[g + 1] as number) + (groupFirst[g] as number);
  const groupOps = new Uint32Array(count);
  const next = groupFirst.slice();
  for (let i = 0; i < count; i++) {
    const g = group[i] as number;
    groupOps[next[g] as number] = i;
    next[g] = (next[g] as number) + 1;
  }
  return { group, groupFirst, groupOps };
}

/** Returns the first place of `row` whose interval may reach beyond `time`. */
export function firstReaching(all: Lanes, row: number, time: number): number {
  let [low, high] = [all.first[row] as number, all.first[row + 1] as number];
  while (low < high) {
    const middle = (low + high) >>> 1;
    if ((all.reach[middle] as number) > time) high = middle;
    else low = middle + 1;
  }
  return low;
}

/** Returns the first place of `row`, not before `from`, whose interval starts at or after `time`. */
export function firstStarting(all: Lanes, row: number, time: number, from = all.first[row] as number): number {
  const end = all.first[row + 1] as number;
  // The next one is mostly near: double the step first, then halve it.
  let [low, step] = [from, 1];
  while (low + step < end && startAt(all, low + step) < time) {
    low += step;
    step *= 2;
  }
  let high = Math.min(end, low + step);
  while (low < high) {
    const middle = (low + high) >>> 1;
    if (startAt(all, middle) >= time) high = middle;
    else low = middle + 1;
  }
  return low;
}

/** Returns the start of the interval at a place. */
export function startAt(all: Lanes, place: number): number {
  return all.begins[place] as number;
}

/** Returns the interval of `row` at `time`, the latest begun, or the nearest within `slack` µs; -1: none. */
export function intervalAt(all: Lanes, row: number, time: number, slack: number): number {
  const from = firstReaching(all, row, time - slack);
  const to = firstStarting(all, row, time + slack, from);
  let [best, distance] = [-1, slack];
  // Not more than is on one pixel: the last ones are the nearest.
  for (let place = to - 1; place >= from && place > to - 2000; place--) {
    const i = all.order[place] as number;
    const [start, end] = [all.start[i] as number, all.end[i] as number];
    if (start <= time && time <= end) return i;
    const away = Math.min(Math.abs(time - start), Math.abs(time - end));
    if (away <= distance) [best, distance] = [i, away];
  }
  return best;
}

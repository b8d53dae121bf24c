/** Figures of a range of time: by operation and by rank. */
import { firstReaching, firstStarting, type Ops } from "./model.ts";
import type { View } from "./view.ts";

export interface OpFigures {
  comm: number;
  op: number;
  count: number;
  busy: number;
  waiting: number;
  longest: number;
  bytes: number;
}

export interface RankFigures {
  row: number;
  count: number;
  busy: number;
  waiting: number;
  /** How often it called last of all ranks that called. */
  last: number;
}

/** Most operations that are looked at one by one. */
export const MOST = 3_000_000;

/** Returns figures of the operations that overlap `range`: times are cut to the range. */
export function figures(ops: Ops, rows: number, range: View): { ops: OpFigures[]; ranks: RankFigures[] } {
  const byOp = new Map<number, OpFigures>();
  const ranks: RankFigures[] = [];
  let looked = 0;
  for (let row = 0; row < rows && looked < MOST; row++) {
    const rank: RankFigures = { row, count: 0, busy: 0, waiting: 0, last: 0 };
    const end = firstStarting(ops, row, range.to);
    for (let place = firstReaching(ops, row, range.from); place < end; place++) {
      const i = ops.order[place] as number;
      looked += 1;
      const [start, stop] = [Math.max(ops.start[i] as number, range.from), Math.min(ops.end[i] as number, range.to)];
      if (stop < range.from) continue;
      const waiting = Math.max(0, Math.min(ops.ready[i] as number, stop) - start);
      const key = (ops.comm[i] as number) * 65536 + (ops.op[i] as number);
      let entry = byOp.get(key);
      if (!entry) {
        entry = { comm: ops.comm[i] as number, op: ops.op[i] as number, count: 0, busy: 0, waiting: 0, longest: 0, bytes: 0 };
        byOp.set(key, entry);
      }
      entry.count += 1;
      entry.busy += stop - start;
      entry.waiting += waiting;
      entry.longest = Math.max(entry.longest, (ops.end[i] as number) - (ops.start[i] as number));
      entry.bytes += Number.isFinite(ops.bytes[i] as number) ? (ops.bytes[i] as number) : 0;
      rank.count += 1;
      rank.busy += stop - start;
      rank.waiting += waiting;
      if (calledLast(ops, i)) rank.last += 1;
    }
    if (rank.count) ranks.push(rank);
  }
  return { ops: [...byOp.values()].sort((a, b) => b.busy - a.busy), ranks: ranks.sort((a, b) => b.last - a.last || a.waiting - b.waiting) };
}

function calledLast(ops: Ops, i: number): boolean {
  const group = ops.group[i] as number;
  const [from, to] = [ops.groupFirst[group] as number, ops.groupFirst[group + 1] as number];
  if (to - from < 2) return false;
  for (let at = from; at < to; at++) {
    const other = ops.groupOps[at] as number;
    if (other !== i && (ops.start[other] as number) >= (ops.start[i] as number)) return false;
  }
  return true;
}

/** Returns the operations of the same communicator and number on all ranks, the first to call first. */
export function sameOperation(ops: Ops, i: number): number[] {
  const group = ops.group[i] as number;
  const found = [...ops.groupOps.subarray(ops.groupFirst[group] as number, ops.groupFirst[group + 1] as number)];
  return found.sort((a, b) => (ops.start[a] as number) - (ops.start[b] as number));
}

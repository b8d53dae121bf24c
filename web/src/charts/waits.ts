/** Who waits for whom as few boxes: ranks that wait for the same ranks in the same operation are one box. Pure. */
import { numbersOf } from "../text/format.ts";
import type { Waits } from "../types.ts";

export interface Group {
  ranks: number[];
  /** Indexes of the groups that it waits for. */
  targets: number[];
  op: string | null;
  seq: number | null;
  comm: string | null;
  age: number | null;
  /** 0: waits for nobody; else one more than the farthest of those it waits for. */
  layer: number;
}

export interface WaitGraph {
  groups: Group[];
  /** They wait for each other, so that none is free. */
  cycle: boolean;
}

const MOST_LAYERS = 6;

export function waitGraph(waits: Waits): WaitGraph {
  const operations = waits.operations.map((operation) => ({ operation, waiters: numbersOf(operation.waiters), awaited: numbersOf(operation.awaited) })).filter(({ awaited }) => awaited.length > 0);
  // The operations that each rank waits in.
  const waitsIn = new Map<number, number[]>();
  operations.forEach(({ waiters }, index) => {
    for (const rank of waiters) {
      const list = waitsIn.get(rank);
      if (list) list.push(index);
      else waitsIn.set(rank, [index]);
    }
  });
  const names = new Map<string, number[]>();
  for (const rank of new Set([...waitsIn.keys(), ...operations.flatMap(({ awaited }) => awaited)])) {
    const own = waitsIn.get(rank);
    // Ranks that wait for nobody are apart: each may be a culprit of its own.
    const name = own ? own.join() : `free ${rank}`;
    const list = names.get(name);
    if (list) list.push(rank);
    else names.set(name, [rank]);
  }
  const lists = [...names.values()];
  const place = new Map<number, number>();
  lists.forEach((ranks, index) => ranks.forEach((rank) => place.set(rank, index)));
  const groups = lists.map((ranks, index): Group => {
    const own = (waitsIn.get(ranks[0] as number) ?? []).map((at) => operations[at] as (typeof operations)[number]);
    const targets = new Set(own.flatMap(({ awaited }) => awaited.map((rank) => place.get(rank) as number)));
    targets.delete(index);
    const first = own[0]?.operation;
    return {
      ranks: [...ranks].sort((a, b) => a - b),
      targets: [...targets].sort((a, b) => a - b),
      op: first?.op ?? null,
      seq: first?.seq ?? null,
      comm: first ? String(first.comm_name ?? first.comm) : null,
      age: own.length ? Math.max(...own.map(({ operation }) => operation.age_ns ?? 0)) : null,
      layer: targets.size ? -1 : 0,
    };
  });
  return { groups, cycle: !layered(groups) };
}

/** Sets the layers; returns whether there is a group that waits for nobody and all lead to one. */
function layered(groups: Group[]): boolean {
  for (let round = 0; round < MOST_LAYERS; round++) {
    for (const group of groups) {
      if (group.layer >= 0) continue;
      const layers = group.targets.map((target) => groups[target]?.layer ?? -1);
      if (layers.every((layer) => layer >= 0)) group.layer = Math.max(...layers) + 1;
    }
  }
  const whole = groups.every((group) => group.layer >= 0);
  for (const group of groups) if (group.layer < 0) group.layer = 1;
  return whole;
}

export interface Box {
  group: number;
  x: number;
  y: number;
}

/** Returns where boxes stand: those that wait on the left, those that are waited for on the right. */
export function boxes(graph: WaitGraph, boxWidth: number, boxHeight: number, gapX: number, gapY: number): { boxes: Box[]; width: number; height: number } {
  const layers = Math.max(0, ...graph.groups.map((group) => group.layer)) + 1;
  const filled = new Array<number>(layers).fill(0);
  const placed = graph.groups.map((group, index): Box => {
    const row = filled[group.layer] as number;
    filled[group.layer] = row + 1;
    return { group: index, x: (layers - 1 - group.layer) * (boxWidth + gapX), y: row * (boxHeight + gapY) };
  });
  const most = Math.max(1, ...filled);
  for (const box of placed) {
    const own = filled[(graph.groups[box.group] as Group).layer] as number;
    box.y += ((most - own) * (boxHeight + gapY)) / 2;
  }
  return { boxes: placed, width: layers * boxWidth + (layers - 1) * gapX, height: most * boxHeight + (most - 1) * gapY };
}

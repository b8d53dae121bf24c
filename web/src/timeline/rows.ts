/** Which rows the timeline has, and where: nodes that can be folded, with their ranks. */
import type { RankOf } from "./columns.ts";

export interface TimelineRow {
  kind: "node" | "rank";
  node: string;
  /** Number of the rank in the list of ranks; -1 of a node. */
  rank: number;
  /** Ranks below a node. */
  count: number;
  y: number;
  height: number;
}

export const NODE_HEIGHT = 20;
export const RANK_HEIGHT = 22;

/** Returns rows from the top down, ranks by their number below their node. */
export function rowsOf(ranks: readonly RankOf[], folded: ReadonlySet<string>): TimelineRow[] {
  const nodes = new Map<string, number[]>();
  ranks.forEach((rank, index) => {
    const list = nodes.get(rank.node);
    if (list) list.push(index);
    else nodes.set(rank.node, [index]);
  });
  const least = (list: number[]) => Math.min(...list.slice(0, 1024).map((index) => ranks[index]?.rank ?? 1e9));
  const sorted = [...nodes].map(([node, list]) => ({ node, list: list.sort((a, b) => (ranks[a]?.rank ?? 1e9) - (ranks[b]?.rank ?? 1e9)) }));
  sorted.sort((a, b) => least(a.list) - least(b.list) || (a.node < b.node ? -1 : 1));
  const rows: TimelineRow[] = [];
  let y = 0;
  for (const { node, list } of sorted) {
    rows.push({ kind: "node", node, rank: -1, count: list.length, y, height: NODE_HEIGHT });
    y += NODE_HEIGHT;
    if (folded.has(node)) continue;
    for (const rank of list) {
      rows.push({ kind: "rank", node, rank, count: 0, y, height: RANK_HEIGHT });
      y += RANK_HEIGHT;
    }
  }
  return rows;
}

/** Returns the height of all rows. */
export function heightOf(rows: readonly TimelineRow[]): number {
  const last = rows[rows.length - 1];
  return last ? last.y + last.height : 0;
}

/** Returns the index of the first row that is seen below `top`. */
export function firstBelow(rows: readonly TimelineRow[], top: number): number {
  let [low, high] = [0, rows.length];
  while (low < high) {
    const middle = (low + high) >>> 1;
    const row = rows[middle] as TimelineRow;
    if (row.y + row.height > top) high = middle;
    else low = middle + 1;
  }
  return low;
}

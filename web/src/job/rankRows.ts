/** Rows of ranks as they come, columns apart, as objects for the grid and its table. */
import type { Columns } from "../types.ts";
import { bytes, duration, number, percent, rate, UNKNOWN } from "../text/format.ts";

export interface RankRow {
  rank: number | null;
  node: string;
  pid: number;
  state: string;
  blame: string;
  away: boolean;
  ended: string | null;
  values: Record<string, unknown>;
}

/** Returns the rows, by node and rank; nodes in the order of their lowest rank. */
export function rankRows(table: Columns): RankRow[] {
  const index = new Map(table.columns.map((name, i) => [name, i]));
  const rows = table.rows.map((row): RankRow => {
    const value = (name: string): unknown => row[index.get(name) ?? -1];
    return {
      rank: typeof value("rank") === "number" ? (value("rank") as number) : null,
      node: String(value("node") ?? "?"),
      pid: Number(value("pid") ?? 0),
      state: String(value("state") ?? ""),
      blame: String(value("blame") ?? ""),
      away: value("away") === true,
      ended: typeof value("ended") === "string" ? (value("ended") as string) : null,
      values: Object.fromEntries(table.columns.map((name, i) => [name, row[i]])),
    };
  });
  const first = new Map<string, number>();
  for (const row of rows) first.set(row.node, Math.min(first.get(row.node) ?? Number.POSITIVE_INFINITY, row.rank ?? 1e9));
  return rows.sort((a, b) => (first.get(a.node) as number) - (first.get(b.node) as number) || (a.node < b.node ? -1 : a.node > b.node ? 1 : 0) || (a.rank ?? 1e9) - (b.rank ?? 1e9));
}

const NO_COLOUR = new Set(["rank", "node", "pid", "python", "op", "comm", "seq", "run", "job", "blame", "away", "ended", "how", "first", "waits_in", "gpu", "gpus", "local_rank", "world_size", "start_ns", "gpu_total_bytes"]);

/** Returns the columns by which ranks can be coloured: the state, and numbers that some rank has. */
export function colourable(rows: readonly RankRow[]): string[] {
  const found = new Set<string>(["state"]);
  for (const row of rows.slice(0, 2000)) {
    for (const [name, value] of Object.entries(row.values)) if (typeof value === "number" && !NO_COLOUR.has(name)) found.add(name);
  }
  return [...found];
}

// Numbers that count nothing.
const IDS = new Set(["pid", "tid", "seq", "rank", "local_rank", "step", "comm", "world_size"]);

/** Returns the value of a column as text. */
export function cellText(name: string, value: unknown): string {
  if (value === null || value === undefined || value === "") return UNKNOWN;
  if (Array.isArray(value)) return value.map(String).join(",") || UNKNOWN;
  if (typeof value !== "number") return String(value);
  if (IDS.has(name)) return String(value);
  if (name.endsWith("_ns")) return duration(value);
  if (name.endsWith("_bytes")) return bytes(value);
  if (name.endsWith("_pct")) return percent(value);
  if (name.endsWith("_per_s")) return rate(value);
  if (name.endsWith("_w")) return `${value.toFixed(0)} W`;
  if (name.endsWith("_c")) return `${value.toFixed(0)} °C`;
  return number(value);
}

/** The letter that a state has in the grid, beside its colour. */
export function sign(row: RankRow): "!" | "·" | "x" | "?" | "" {
  if (row.ended !== null) return "x";
  if (row.away) return "?";
  return row.blame === "culprit" ? "!" : row.blame === "victim" ? "·" : "";
}

/** Returns rows with those in trouble first: culprits, ended, away, waiting, others. */
export function troubleFirst(rows: readonly RankRow[]): RankRow[] {
  const level = (row: RankRow) => ["!", "x", "?", "·", ""].indexOf(sign(row));
  return [...rows].sort((a, b) => level(a) - level(b) || (a.rank ?? 1e9) - (b.rank ?? 1e9));
}

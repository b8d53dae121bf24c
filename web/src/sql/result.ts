/** Rows of a query as texts, and as a chart: which columns are numbers or times. Pure. */
import type { QueryResult } from "../types.ts";

/** Returns a value as the table shows it. */
export function valueText(value: unknown): string {
  if (value === null || value === undefined) return "";
  if (typeof value === "string") return value;
  if (typeof value === "number" || typeof value === "boolean") return String(value);
  return JSON.stringify(value);
}

/** Returns a value as a number for a chart, times in seconds since 1970; null: none. */
export function chartNumber(value: unknown): number | null {
  if (typeof value === "number") return Number.isFinite(value) ? value : null;
  if (typeof value === "bigint") return Number(value);
  if (typeof value !== "string" || value === "") return null;
  // Whole numbers beyond 2^53 come as text.
  if (/^-?\d+(\.\d+)?$/.test(value)) return Number(value);
  if (!/^\d{4}-\d\d-\d\d/.test(value)) return null;
  const at = Date.parse(value.replace(/(\.\d{3})\d+/, "$1"));
  return Number.isNaN(at) ? null : at / 1e3;
}

export function isTime(type: string): boolean {
  return /^(timestamp|date)/i.test(type);
}

/** Returns the indexes of columns that a chart can show. */
export function chartable(result: QueryResult): number[] {
  return result.columns.flatMap((column, index) => {
    if (isTime(column.type) || /int|float|double|decimal/i.test(column.type)) return [index];
    return [];
  });
}

/** Most lines that a column divides a chart into. */
export const MOST_GROUPS = 16;

/** Returns the indexes of columns that divide the rows into a few lines. */
export function dividing(result: QueryResult): number[] {
  return result.columns.flatMap((column, index) => {
    if (isTime(column.type) || /float|double|decimal/i.test(column.type)) return [];
    const values = new Set<string>();
    for (const row of result.rows) {
      values.add(valueText(row[index]));
      if (values.size > MOST_GROUPS) return [];
    }
    return values.size > 1 ? [index] : [];
  });
}

export interface Points {
  x: number[];
  series: (number | null)[][];
  /** The value of the dividing column of each series, or the number of its column. */
  names: (string | number)[];
}

/** Returns the points of a chart, in the order of x: rows without an x are left out. `by`: a column that divides. */
export function points(result: QueryResult, x: number | null, ys: readonly number[], by: number | null = null): Points {
  const rows = result.rows.map((row, index) => ({ at: x === null ? index : chartNumber(row[x]), row }));
  const known = rows.filter((entry): entry is { at: number; row: unknown[] } => entry.at !== null).sort((a, b) => a.at - b.at);
  const across = known.map(({ at }) => at);
  const y = ys[0];
  if (by === null || y === undefined) return { x: across, series: ys.map((column) => known.map(({ row }) => chartNumber(row[column]))), names: [...ys] };
  const groups = [...new Set(known.map(({ row }) => valueText(row[by])))].sort((a, b) => a.localeCompare(b, "en", { numeric: true })).slice(0, MOST_GROUPS);
  return { x: across, series: groups.map((group) => known.map(({ row }) => (valueText(row[by]) === group ? chartNumber(row[y]) : null))), names: groups };
}

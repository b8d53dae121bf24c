/** What a timeline rests on, by its own header. */
import type { Contract, Failure } from "../types.ts";
import type { Scene } from "./scene.ts";
import { instant } from "./view.ts";

/** Returns the contract of a timeline; a node that failed to answer a part of it did not answer. */
export function contractOf({ columns, length, clockError }: Scene): Contract {
  const given = columns.header["failures"];
  const failures = (Array.isArray(given) ? (given as Failure[]) : []).map(({ node, error }) => ({ node: String(node ?? ""), error: String(error ?? "") }));
  const nodes = [...columns.clocks, ...columns.ranks, ...failures].map(({ node }) => node);
  const asked = new Set(nodes).size;
  const counts = columns.losses.map((loss) => loss.rows);
  return {
    asked,
    answered: asked - new Set(failures.map(({ node }) => node)).size,
    failures,
    at: instant(columns.fromNs, length),
    lost_rows: counts.includes(null) ? null : counts.reduce<number>((sum, rows) => sum + (rows ?? 0), 0),
    clock_error_ns: clockError === null ? null : clockError * 1e3,
  };
}

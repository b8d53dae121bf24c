/** The fields of the form for a group, as they are sent; the server makes the table of ranks of them. */
import type { GroupSpec, WorkerRow } from "../types.ts";

type Numbers = "world_size" | "master_port" | "max_restarts" | "min_nodes";

export interface FormFields extends Omit<GroupSpec, "version" | "workers" | Numbers>, Record<Numbers, string> {
  name: string;
  /** The version that is changed; null: a new group. */
  version: number | null;
  workers: readonly string[];
}

export function emptyForm(): FormFields {
  return { name: "", version: null, workers: [], master: "", world_size: "", master_port: "29500", backend: "nccl", restart: "never", on_hang: "report", command: "", cwd: "", env: "", max_restarts: "3", min_nodes: "", grace: "10s", fence: "60s", save: "", save_time: "60s" };
}

export function formOf(name: string, spec: GroupSpec): FormFields {
  const numbers = { world_size: spec.world_size ?? "", master_port: spec.master_port, max_restarts: spec.max_restarts, min_nodes: spec.min_nodes || "" };
  return { ...spec, ...(Object.fromEntries(Object.entries(numbers).map(([field, number]) => [field, String(number)])) as Record<Numbers, string>), name };
}

/** Returns the body of a POST; empty fields are left out. */
export function bodyOf(fields: FormFields): Record<string, string | number> {
  const given = { ...fields, workers: fields.workers.join(","), master: fields.master || (fields.workers[0] ?? "") };
  return Object.fromEntries(Object.entries(given).filter((entry): entry is [string, string | number] => entry[1] !== "" && entry[1] !== null));
}

export interface Choice {
  worker: string;
  node: string;
  /** The group that runs on it. */
  group: string | null;
  away: boolean;
}

/** Returns the workers to choose from by node: those of the caller, and those chosen that are not connected. */
export function choicesOf(rows: readonly WorkerRow[], chosen: readonly string[]): Map<string, Choice[]> {
  const found = new Map<string, Choice>();
  for (const row of rows) {
    if (!row.mine) continue;
    const group = row.rank_state === "running" || row.rank_state === "starting" ? row.group_name : null;
    found.set(row.worker, { worker: row.worker, node: nodeOf(row.worker), group: found.get(row.worker)?.group ?? group, away: row.state === "failed" });
  }
  for (const worker of chosen) {
    if (!found.has(worker)) found.set(worker, { worker, node: nodeOf(worker), group: null, away: true });
  }
  const nodes = new Map<string, Choice[]>();
  for (const choice of found.values()) nodes.set(choice.node, [...(nodes.get(choice.node) ?? []), choice]);
  return nodes;
}

/** Returns `chosen` with or without `workers`, in the order in which all were chosen. */
export function toggled(chosen: readonly string[], workers: readonly string[], on: boolean): string[] {
  const rest = chosen.filter((worker) => !workers.includes(worker));
  return on ? [...chosen, ...workers.filter((worker) => !chosen.includes(worker))] : rest;
}

export function nodeOf(worker: string): string {
  return worker.slice(0, Math.max(0, worker.lastIndexOf("-")));
}

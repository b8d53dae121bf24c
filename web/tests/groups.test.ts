import assert from "node:assert/strict";
import { test } from "node:test";
import { bodyOf, choicesOf, emptyForm, formOf, nodeOf, toggled } from "../src/groups/form.ts";
import { linesOf } from "../src/groups/log.ts";
import type { WorkerRow } from "../src/types.ts";

const row = (worker: string, more: Partial<WorkerRow> = {}): WorkerRow => ({ node: nodeOf(worker), worker, user: "ann", state: "healthy", group_name: null, rank: null, rank_state: null, since: null, joined: null, mine: true, ...more });

test("workers to choose from are the caller's, by node", () => {
  const rows = [row("gn-6-0"), row("gn-6-1", { group_name: "llama", rank_state: "running" }), row("gn7-0", { mine: false }), row("gn-6-0", { group_name: "old", rank_state: "ended" })];
  const nodes = choicesOf(rows, ["gn8-3"]);
  assert.deepEqual([...nodes.keys()], ["gn-6", "gn8"]);
  assert.deepEqual(nodes.get("gn-6")?.map((choice) => [choice.worker, choice.group, choice.away]), [["gn-6-0", null, false], ["gn-6-1", "llama", false]]);
  assert.deepEqual(nodes.get("gn8"), [{ worker: "gn8-3", node: "gn8", group: null, away: true }]);
});

test("choosing keeps the order, and no worker is chosen twice", () => {
  assert.deepEqual(toggled(["a-1"], ["a-0", "a-1"], true), ["a-1", "a-0"]);
  assert.deepEqual(toggled(["a-1", "b-0"], ["a-0", "a-1"], false), ["b-0"]);
});

test("a new group sends no empty field, and its first worker as the master", () => {
  const body = bodyOf({ ...emptyForm(), name: "g", workers: ["b-0", "a-0"], command: "true" });
  assert.deepEqual(body, { name: "g", workers: "b-0,a-0", master: "b-0", master_port: "29500", backend: "nccl", restart: "never", on_hang: "report", command: "true", max_restarts: "3", grace: "10s", fence: "60s", save_time: "60s" });
});

test("a change sends the version that it was made from", () => {
  const spec = { version: 3, workers: ["a-0"], master: "a", world_size: 1, master_port: 29501, backend: "gloo", restart: "always", on_hang: "report", command: "x 'y z'", cwd: "/d", env: "A='1\n2'", max_restarts: 0, min_nodes: 3, grace: "1.5s", fence: "60s", save: "SIGUSR1", save_time: "5s" };
  assert.deepEqual(bodyOf(formOf("g", spec)), { ...spec, name: "g", workers: "a-0", world_size: "1", master_port: "29501", max_restarts: "0", min_nodes: "3" });
});

test("lines of a log cannot steer anything", () => {
  assert.deepEqual(linesOf("a\tb\r\n\u001b[2J\u202e\n"), ["a\tb", "\\x1b[2J\\u202e"]);
  assert.equal(linesOf("x\n".repeat(1000)).length, 400);
});

import assert from "node:assert/strict";
import { test } from "node:test";
import { decode } from "../src/timeline/columns.ts";
import { contractOf } from "../src/timeline/contract.ts";
import { sceneOf } from "../src/timeline/scene.ts";
import { instant } from "../src/timeline/view.ts";
import { encode } from "./columns.ts";

const CLOCKS = ["a", "b", "c"].map((node, i) => ({ node, offset_ns: i, bound_ns: 1000 * i }));

test("a node that failed to answer a part of the timeline did not answer", () => {
  const failures = ["b", "d", "b"].map((node) => ({ node, error: "gone" }));
  const columns = decode(encode({}, { from_ns: "1000", to_ns: "3000", clocks: CLOCKS, failures, losses: [{ rows: 7 }, { rows: 4 }] }));
  assert.deepEqual(contractOf(sceneOf(columns)), { asked: 4, answered: 2, failures, at: "1970-01-01T00:00:00.000003000Z", lost_rows: 11, clock_error_ns: 3000 });
});

test("a loss of an unknown number of rows makes their sum unknown", () => {
  const columns = decode(encode({}, { clocks: CLOCKS, losses: [{ rows: 7 }, { rows: null }] }));
  const { asked, answered, failures, lost_rows } = contractOf(sceneOf(columns));
  assert.deepEqual({ asked, answered, failures, lost_rows }, { asked: 3, answered: 3, failures: [], lost_rows: null });
});

test("an instant is exact to the ns", () => {
  assert.equal(instant(1_795_001_400_123_456_789n, 1000.001), "2026-11-18T11:30:00.124456790Z");
});

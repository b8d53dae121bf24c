import assert from "node:assert/strict";
import { test } from "node:test";
import { chartable, chartNumber, dividing, points, valueText } from "../src/sql/result.ts";
import type { QueryResult } from "../src/types.ts";

const result: QueryResult = {
  columns: [{ name: "ts", type: "timestamp[ns]" }, { name: "rank", type: "int32" }, { name: "ns", type: "int64" }, { name: "note", type: "string" }],
  rows: [
    ["2026-11-28T00:00:02.000000001Z", 1, "9223372036854775807", "a"],
    ["2026-11-28T00:00:01Z", 0, 7, null],
    [null, 0, 8, "c"],
    ["2026-11-28T00:00:03Z", 0, "NaN", "d"],
  ],
  truncated: false,
  warnings: [],
};

test("values are shown as they came, and what is no number is none on a chart", () => {
  assert.deepEqual([null, 7, "x", { a: [1] }].map(valueText), ["", "7", "x", '{"a":[1]}']);
  assert.deepEqual(["NaN", "Infinity", "", null, "1e5", "abc"].map(chartNumber), [null, null, null, null, null, null]);
  assert.equal(chartNumber("9223372036854775807"), 2 ** 63);
  assert.equal(chartNumber("1970-01-01T00:00:07.5Z"), 7.5);
});

test("a chart has its points in the order of time", () => {
  assert.deepEqual(chartable(result), [0, 1, 2]);
  const chart = points(result, 0, [2]);
  assert.deepEqual(chart.x.map((x) => x % 60), [1, 2, 3]);
  assert.deepEqual(chart.series, [[7, 2 ** 63, null]]);
});

test("a column with few values divides a chart into lines", () => {
  assert.deepEqual(dividing(result), [1, 2, 3]);
  const chart = points(result, 0, [2], 1);
  assert.deepEqual(chart.names, ["0", "1"]);
  assert.deepEqual(chart.series, [[7, null, null], [null, 2 ** 63, null]]);
});

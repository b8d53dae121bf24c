import assert from "node:assert/strict";
import { test } from "node:test";
import { cellAt, cellBeside, gridLayout } from "../src/charts/grid.ts";
import { between, position, scaleOf } from "../src/charts/scale.ts";
import { band, median, outlier } from "../src/charts/steps.ts";
import { boxes, waitGraph } from "../src/charts/waits.ts";
import { faultyFrame, parting } from "../src/stacks/parting.ts";
import type { Frame, PendingOperation } from "../src/types.ts";

const nodes = (count: number, each: number) => Array.from({ length: count }, (_, i) => ({ node: `n${i}`, count: each }));

test("8 to 10,000 ranks fit the grid, and no cells overlap", () => {
  for (const [count, each] of [[1, 8], [2, 4], [125, 8], [1000, 8], [1250, 8], [3, 100]] as const) {
    const layout = gridLayout(nodes(count, each), 1200, 420);
    assert.equal(layout.x.length, count * each);
    assert.ok(layout.width <= 1200 && layout.height <= 420, `${count}: ${layout.width} x ${layout.height}, cell ${layout.cell}`);
    const places = new Set(Array.from(layout.x, (x, i) => `${x} ${layout.y[i]}`));
    assert.equal(places.size, count * each);
  }
  assert.ok(gridLayout(nodes(1, 8), 400, 300).cell >= 32);
});

test("a point leads to the cell that holds it", () => {
  const layout = gridLayout(nodes(7, 8), 900, 300);
  for (let i = 0; i < 56; i++) {
    assert.equal(cellAt(layout, (layout.x[i] as number) + layout.cell / 2, (layout.y[i] as number) + layout.cell / 2), i);
  }
  assert.equal(cellAt(layout, -50, 0), -1);
  assert.equal(cellBeside(layout, 0, "right"), 1);
  assert.equal(cellBeside(layout, 0, "left"), 0);
});

test("scales are logarithmic over many powers, and even values have no colour", () => {
  assert.deepEqual(scaleOf([null, Number.NaN]), { low: 0, high: 0, log: false });
  const lag = scaleOf([1e3, 1e6, 2e11]);
  assert.equal(lag.log, true);
  assert.equal(position(lag, 2e11), 1);
  assert.ok(position(lag, 1e6) > 0.05);
  assert.equal(position(scaleOf([1000, 1001]), 1001), 0);
  assert.equal(between(["#000000", "#ffffff"], 0.5), "#808080");
});

test("the rank that stands out is found by its median", () => {
  const steps = Array.from({ length: 7 }, () => [10, 10, 11, 9, 300]);
  steps[3] = [19, 20, 21, 20, 20];
  assert.deepEqual(outlier(steps), { index: 3, times: 2 });
  assert.equal(outlier(steps.filter((_, i) => i !== 3)), null);
  assert.equal(outlier([]), null);
  assert.ok(Number.isNaN(median([null])));
  assert.deepEqual(band([[1, null], [3, null]], 2).middle, [3, null]);
});

const pending = (waiters: string, awaited: string, seq = 1): PendingOperation => ({ comm: "0", comm_name: "pg", seq, op: "all_reduce", age_ns: seq * 1e9, waiters, awaited, unknown: "" });
const graphOf = (...operations: PendingOperation[]) => waitGraph({ ranks: [], operations });

test("ranks that wait alike are one box, and the rank that all wait for is on the right", () => {
  const graph = graphOf(pending("0-2,4-7", "3"));
  assert.equal(graph.cycle, false);
  assert.deepEqual(graph.groups.map((group) => [group.ranks.join(), group.layer]), [["0,1,2,4,5,6,7", 1], ["3", 0]]);
  const placed = boxes(graph, 100, 40, 60, 10);
  assert.deepEqual(placed.boxes.map((box) => box.x), [0, 160]);
});

test("a chain has layers, and a circle is called so", () => {
  assert.deepEqual(graphOf(pending("0", "1"), pending("1", "2")).groups.map((group) => group.layer), [2, 1, 0]);
  assert.equal(graphOf(pending("0", "1", 5), pending("1", "0", 6)).cycle, true);
  assert.deepEqual(graphOf(), { groups: [], cycle: false });
  assert.deepEqual(graphOf(pending("0-3", "")), { groups: [], cycle: false });
});

test("8,000 ranks that wait for one are two boxes", () => {
  assert.equal(graphOf(pending("0-16,18-7999", "17")).groups.length, 2);
});

const frame = (func: string, lineno: number): Frame => ({ func, file: "/home/u/train.py", lineno, frame_type: "Python" });

test("stacks part at the first frame from outside that differs", () => {
  const culprit = [frame("fetch", 41), frame("batch", 20), frame("train", 88), frame("main", 99)];
  const victim = [frame("all_reduce", 5), frame("train", 91), frame("main", 99)];
  assert.deepEqual(parting(culprit, victim), { common: 1, sameFunction: true });
  assert.deepEqual(parting(culprit, []), { common: 0, sameFunction: false });
  assert.deepEqual(parting(victim, victim), { common: 3, sameFunction: false });
});

test("the line at fault is the one that the reason names, else the user's own", () => {
  const lock = { ...frame("acquire", 982), file: "/usr/lib/python3.12/threading.py" };
  assert.equal(faultyFrame([lock, frame("read", 41)], "waits in read, train.py:41")?.lineno, 41);
  assert.equal(faultyFrame([lock, frame("read", 41)], "")?.func, "read");
  assert.equal(faultyFrame([lock], "")?.func, "acquire");
  assert.equal(faultyFrame([{ ...lock, frame_type: "C" }], ""), null);
});

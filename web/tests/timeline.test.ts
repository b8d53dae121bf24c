import assert from "node:assert/strict";
import { test } from "node:test";
import { decode } from "../src/timeline/columns.ts";
import { Control } from "../src/timeline/control.ts";
import { spans } from "../src/timeline/detail.ts";
import { firstReaching, firstStarting, intervalAt, operations } from "../src/timeline/model.ts";
import { heightOf, rowsOf } from "../src/timeline/rows.ts";
import { sceneOf } from "../src/timeline/scene.ts";
import { figures, sameOperation } from "../src/timeline/stats.ts";
import { moved, offsetText, ticks, timeOfDay, within, zoomed } from "../src/timeline/view.ts";
import { encode, timeline, type Op } from "./columns.ts";

// Numbers that are the same in each run.
function random(seed: number): () => number {
  let state = seed;
  return () => {
    state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
    return state / 2 ** 32;
  };
}

test("each type of column is read as it was written", () => {
  const values = [0, 1, 97, 255];
  const columns = decode(
    encode({ ops: (["u8", "u16", "u32", "i32", "f32", "f64"] as const).map((type) => ({ name: type, type, values })) }),
  );
  const ops = columns.sections.get("ops");
  assert.equal(ops?.rows, 4);
  for (const type of ["u8", "u16", "u32", "i32", "f32", "f64"]) assert.deepEqual([...(ops?.columns.get(type) ?? [])], values);
});

test("a broken answer is an error in words", () => {
  const good = timeline([{ rank: 0, seq: 1, call: 0, done: 1 }], 1);
  assert.throws(() => decode(good.slice(0, 5)), /no header/);
  assert.throws(() => decode(good.slice(0, 40)), /cut within its header/);
  assert.throws(() => decode(good.slice(0, good.byteLength - 9)), /reaches beyond/);
  const other = good.slice(0);
  new Uint8Array(other)[7] = 50;
  assert.throws(() => decode(other), /another format/);
  assert.throws(() => decode(encode({}, { sections: { ops: { rows: -1, columns: [] } } })), /number of rows/);
});

test("an operation waits until its last rank calls it", () => {
  const ops = operations(
    decode(timeline([{ rank: 0, seq: 7, call: 10, done: 100 }, { rank: 1, seq: 7, call: 80, done: 101 }, { rank: 2, seq: 8, call: 20, done: Number.NaN }], 3)),
    500,
  );
  assert.deepEqual([...ops.ready], [80, 80, 500]);
  assert.deepEqual([...ops.open], [0, 0, 1]);
  assert.equal(ops.end[2], 500);
  assert.deepEqual([...ops.sure], [100, 101, 500]);
  assert.deepEqual(sameOperation(ops, 1), [0, 1]);
  assert.deepEqual(sameOperation(ops, 2), [2]);
});

test("sequence numbers that are far apart or unknown are grouped, too", () => {
  const list: Op[] = [1e15, 5, 1e15, Number.NaN, Number.NaN].map((seq, i) => ({ rank: i, seq, call: i, done: i + 1 }));
  const ops = operations(decode(timeline(list, 5)), 10);
  assert.deepEqual(sameOperation(ops, 0), [0, 2]);
  assert.deepEqual(sameOperation(ops, 3), [3]);
});

test("rows are sorted and searched as a scan of all operations says", () => {
  const next = random(1);
  const list: Op[] = Array.from({ length: 997 }, (_, i) => {
    const call = Math.floor(next() * 10_000);
    return { rank: Math.floor(next() * 3), seq: i, call, done: call + Math.floor(next() ** 4 * 3000) };
  });
  const ops = operations(decode(timeline(list, 3)), 20_000);
  for (let row = 0; row < 3; row++) {
    const own = list.filter((op) => op.rank === row);
    assert.equal((ops.first[row + 1] as number) - (ops.first[row] as number), own.length);
    for (let k = 0; k < 50; k++) {
      const time = next() * 12_000;
      const starting = firstStarting(ops, row, time) - (ops.first[row] as number);
      assert.equal(starting, own.filter((op) => op.call < time).length);
      const reaching = firstReaching(ops, row, time);
      const before = [...ops.order.subarray(ops.first[row] as number, reaching)];
      assert.ok(before.every((i) => (list[i] as Op).done <= time));
    }
  }
});

test("pixel columns show the time in operations, within the limits of a pixel", () => {
  const list: Op[] = [];
  // 10,007 operations of 6 of each 10 µs, the last half of each in waiting.
  for (let i = 0; i < 10_007; i++) list.push({ rank: 0, seq: i, call: i * 10, done: i * 10 + 6 });
  const ops = operations(decode(timeline(list, 1)), 100_070);
  let [busy, columns, calls] = [0, 0, 0];
  const looked = spans(ops, 0, { from: 0, to: 100_070 }, 1000, (x0, x1, _i, share) => {
    busy += (x1 - x0) * share;
    columns += x1 - x0;
    calls += 1;
  });
  assert.equal(columns, 1000);
  assert.ok(Math.abs(busy / 1000 - 0.6) < 0.02, `${busy}`);
  // As many as there are columns, not as there are operations; and even columns are one span.
  assert.ok(looked <= 1000, `${looked}`);
  assert.ok(calls < 500, `${calls}`);
});

test("a long operation among short ones is seen", () => {
  const list: Op[] = [];
  for (let i = 0; i < 5000; i++) list.push({ rank: 0, seq: i, call: i, done: i + 0.5 });
  list.push({ rank: 0, comm: 1, seq: 1, call: 2500.2, done: 4000 });
  const ops = operations(decode(timeline(list, 1)), 5000);
  const long: number[] = [];
  spans(ops, 0, { from: 0, to: 5000 }, 100, (x0, x1, i) => {
    if (i === 5000) long.push(x0, x1);
  });
  assert.deepEqual(long, [50, 80]);
  // Also where it began before the view, below thousands of others.
  const inside: number[] = [];
  spans(ops, 0, { from: 3500, to: 3600 }, 100, (x0, x1, i) => {
    if (i === 5000) inside.push(x0, x1);
  });
  assert.deepEqual(inside, [0, 100]);
});

test("the operation under the pointer is the one that runs then", () => {
  const ops = operations(decode(timeline([{ rank: 0, seq: 1, call: 0, done: 100 }, { rank: 0, seq: 2, call: 200, done: 210 }], 1)), 300);
  assert.equal(intervalAt(ops, 0, 50, 1), 0);
  assert.equal(intervalAt(ops, 0, 205, 1), 1);
  assert.equal(intervalAt(ops, 0, 150, 1), -1);
  assert.equal(intervalAt(ops, 0, 212, 5), 1);
});

test("figures of a range count what overlaps it, cut to it", () => {
  const ops = operations(
    decode(timeline([{ rank: 0, seq: 1, call: 0, done: 100 }, { rank: 1, seq: 1, call: 60, done: 100 }, { rank: 0, seq: 2, call: 200, done: 210 }], 2)),
    300,
  );
  const found = figures(ops, 2, { from: 50, to: 150 });
  assert.deepEqual(found.ops.map((op) => [op.count, op.busy, op.waiting, op.longest]), [[2, 90, 10, 100]]);
  assert.deepEqual(found.ranks.map((rank) => [rank.row, rank.last, rank.busy]), [[1, 1, 40], [0, 0, 50]]);
});

test("zoom keeps the time under the pointer, and the view stays within the range", () => {
  const view = zoomed({ from: 100, to: 200 }, 0.5, 120, 1000);
  assert.deepEqual(view, { from: 110, to: 160 });
  assert.deepEqual(moved({ from: 0, to: 100 }, -1, 1000), { from: 0, to: 100 });
  assert.deepEqual(within({ from: 950, to: 1100 }, 1000), { from: 850, to: 1000 });
  assert.deepEqual(zoomed({ from: 0, to: 1000 }, 4, 500, 1000), { from: 0, to: 1000 });
  const closest = zoomed({ from: 5, to: 5.2 }, 1e-9, 5.1, 1000);
  assert.ok(closest.to - closest.from >= 0.0999);
});

test("ticks are round and their texts differ", () => {
  for (const size of [0.5, 7, 300, 4e4, 3e6, 2e8, 9e9, 4e11]) {
    const { at, step } = ticks({ from: size, to: size * 2 }, 1000);
    assert.ok(at.length >= 3 && at.length <= 20, `${size}: ${at.length}`);
    assert.equal(new Set(at.map((time) => offsetText(time, step))).size, at.length, `${size}`);
  }
  assert.equal(offsetText(1_500_000, 100_000), "1.5 s");
  assert.equal(offsetText(125_000_000, 1e6), "2:05 min");
  assert.equal(timeOfDay(1_764_316_761_123_456_789n, 1000, 1), "07:59:21.124456");
});

test("rows follow nodes, and a folded node has none", () => {
  const ranks = [{ rank: 9, node: "b", pid: 1 }, { rank: 0, node: "a", pid: 2 }, { rank: 1, node: "a", pid: 3 }];
  const rows = rowsOf(ranks, new Set());
  assert.deepEqual(rows.map((row) => (row.kind === "node" ? row.node : row.rank)), ["a", 1, 2, "b", 0]);
  const folded = rowsOf(ranks, new Set(["a"]));
  assert.deepEqual(folded.map((row) => (row.kind === "node" ? row.node : row.rank)), ["a", "b", 0]);
  assert.equal(heightOf(rows), (rows.at(-1)?.y ?? 0) + 22);
});

test("keys choose rows and operations, and the view follows", () => {
  const list: Op[] = [0, 1].flatMap((rank) => Array.from({ length: 11 }, (_, i) => ({ rank, seq: i, call: i * 100, done: i * 100 + 50 })));
  const control = new Control(sceneOf(decode(timeline(list, 2)), 1200), { from: 0, to: 300 }, null);
  control.width = 392;
  control.height = 400;
  assert.equal(control.rank, 0);
  control.moveRow(1);
  assert.equal(control.rank, 1);
  control.step(1);
  assert.equal(control.scene.ops.seq[control.selected], 2);
  for (let i = 0; i < 20; i++) control.step(1);
  assert.equal(control.scene.ops.seq[control.selected], 10);
  assert.ok(control.view.from <= 1000 && control.view.to >= 1000);
  // The pointer finds the operation that is drawn there, and none beside it.
  control.view = { from: 0, to: 300 };
  assert.equal(control.scene.ops.seq[control.opAt(92 + 120, 32 + 20 + 5)], 1);
  assert.equal(control.opAt(92 + 70, 32 + 20 + 5), -1);
  assert.equal(control.opAt(10, 60), -1);
  control.fold("n0");
  assert.equal(control.rank, -1);
  assert.equal(control.rows.length, 1);
});

test("an end that was not seen is told from one that has not come", () => {
  const bytes = encode(
    {
      ops: [
        { name: "rank", type: "u32", values: [0, 0, 0] },
        { name: "comm", type: "u16", values: [0, 0, 0] },
        { name: "op", type: "u16", values: [0, 0, 0] },
        { name: "seq", type: "f64", values: [1, 2, 3] },
        { name: "call", type: "f64", values: [0, 100, 200] },
        { name: "done_lo", type: "f64", values: [10, 100, Number.NaN] },
        { name: "done_hi", type: "f64", values: [30, Number.NaN, Number.NaN] },
      ],
    },
    { dictionaries: { comms: ["pg"], ops: ["all_reduce"], ranks: [{ rank: 0, node: "n0", pid: 1 }] } },
  );
  const ops = operations(decode(bytes), 1000);
  assert.deepEqual([...ops.open], [0, 2, 1]);
  assert.deepEqual([...ops.sure], [10, 100, 1000]);
  assert.deepEqual([...ops.end], [30, 100, 1000]);
});

import assert from "node:assert/strict";
import { test } from "node:test";
import { frameAt, functions, layout, MOST_DEPTH, neighbour, search, seen, type FlameTree } from "../src/flame/layout.ts";
import { mergedTree, profileTree } from "../src/flame/trees.ts";

const tree: FlameTree = {
  name: "all",
  value: 100,
  children: [
    { name: "load", value: 30, children: [{ name: "read", value: 30 }] },
    { name: "train", value: 60, children: [{ name: "forward", value: 25 }, { name: "read", value: 20 }] },
  ],
};

test("frames are as wide as their time, the largest first", () => {
  const flame = layout(tree);
  assert.deepEqual(flame.nodes.map((node) => node.name), ["all", "train", "forward", "read", "load", "read"]);
  assert.deepEqual([...flame.x0].map((x) => Math.round(x * 100)), [0, 0, 0, 25, 60, 60]);
  assert.equal(flame.depths, 3);
  assert.equal(frameAt(flame, 0, 0.7, 1), 4);
  assert.equal(frameAt(flame, 0, 0.95, 1), -1);
  assert.deepEqual(seen(flame, 2, 1), { left: 0, right: 25 / 60 });
});

test("a search counts nested frames once", () => {
  const flame = layout({ name: "all", value: 10, children: [{ name: "Read", value: 8, children: [{ name: "read2", value: 4 }] }] });
  const { found, share } = search(flame, "read");
  assert.deepEqual([...found], [0, 1, 1]);
  assert.equal(share, 0.8);
  assert.equal(search(flame, " ").share, 0);
});

test("arrow keys reach each frame", () => {
  const flame = layout(tree);
  assert.equal(neighbour(flame, 0, "down"), 1);
  assert.equal(neighbour(flame, 1, "right"), 4);
  assert.equal(neighbour(flame, 4, "left"), 1);
  assert.equal(neighbour(flame, 5, "up"), 4);
  assert.equal(neighbour(flame, 5, "down"), 5);
});

test("functions have the time of all their frames", () => {
  const found = functions(layout(tree));
  assert.deepEqual(found[0], { name: "read", self: 50, total: 50 });
  assert.equal(found.find((entry) => entry.name === "train")?.self, 15);
});

test("a deep or broken tree is cut, not followed", () => {
  let deep: FlameTree = { name: "leaf", value: 1 };
  for (let i = 0; i < 3000; i++) deep = { name: `f${i}`, value: 1, children: [deep] };
  assert.equal(layout(deep).depths, MOST_DEPTH);
  assert.equal(layout({ name: "all", value: 0 }).nodes.length, 1);
  assert.ok([...layout({ name: "a", value: 1, children: [{ name: "b", value: 9 }] }).x1].every((x) => x <= 1));
});

test("merged stacks are as wide as they have threads", () => {
  const flame = mergedTree(
    [{ job: "j", thread: "MainThread", ranks: [0, 1, 2], threads: 3, children: [{ func: "main", file: "/x/train.py", lineno: 8, frame_type: "Python", ranks: [0, 1, 2], threads: 3, complete: true, children: [] }] }],
    "all",
  );
  assert.deepEqual([flame.name, flame.value, flame.ranks], ["MainThread", 3, "0-2"]);
  assert.equal(flame.children?.[0]?.name, "main (train.py:8)");
});

test("two selections are compared by their shares", () => {
  const tree = profileTree({ name: "rank 3", value: 60, base: 30, children: [{ name: "load", value: 48, base: 3, children: [] }] });
  assert.deepEqual([tree.value, tree.base, tree.children?.[0]?.value, tree.children?.[0]?.base], [1, 1, 0.8, 0.1]);
  assert.equal(profileTree({ name: "all", value: 12 }).value, 12);
});

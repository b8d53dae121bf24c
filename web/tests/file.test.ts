import assert from "node:assert/strict";
import { test } from "node:test";
import { deflateSync } from "node:zlib";
import { decode } from "../src/timeline/columns.ts";
import { unpacked } from "../src/timeline/packed.ts";
import { sceneOf } from "../src/timeline/scene.ts";
import { timeline } from "./columns.ts";

// As client/timeline/html.py writes them, with shorter lines.
function packed(bytes: Uint8Array, line = 331 * 3): string {
  const deflated = deflateSync(bytes);
  const lines: string[] = [];
  for (let start = 0; start < deflated.length; start += line) lines.push(`${deflated.subarray(start, start + line).toString("base64")}\n`);
  return `\n${lines.join("")}`;
}

test("what a document carries is read to the last byte", async () => {
  const bytes = Uint8Array.from({ length: 10_007 }, (_, i) => (i * i * 7919) >>> 8);
  assert.deepEqual(new Uint8Array(await unpacked(packed(bytes))), bytes);
  const columns = timeline([{ rank: 0, seq: 7, call: 10, done: 100 }], 1);
  assert.equal(sceneOf(decode(await unpacked(packed(new Uint8Array(columns))))).ops.count, 1);
});

test("a document that is cut or changed is an error in words", async () => {
  const text = packed(Uint8Array.from({ length: 10_007 }, (_, i) => (i * i * 7919) >>> 8));
  const lines = text.split("\n");
  await assert.rejects(unpacked(""), /cut or changed/);
  await assert.rejects(unpacked(lines.slice(0, 4).join("\n")), /cut or changed/);
  await assert.rejects(unpacked([...lines.slice(0, 2), ...lines.slice(3)].join("\n")), /cut or changed/);
  await assert.rejects(unpacked(text.replace(/[A-Za-z]/, "<")), /cut or changed/);
});

import assert from "node:assert/strict";
import { test } from "node:test";
import { verdictSentence } from "../src/i18n/zhFindings.ts";
import { visible, visibleLines } from "../src/text/escape.ts";
import { bitRate, bytes, clock, compact, duration, elapsed, number, numbersOf, ranges, rate, share } from "../src/text/format.ts";

test("text shows what would be hidden", () => {
  assert.equal(visible("a\u001b[31mred"), "a\\x1b[31mred");
  assert.equal(visible("a\nb\tc"), "a\\nb\\tc");
  assert.equal(visible("abc\u202egnp.exe"), "abc\\u202egnp.exe");
  assert.equal(visible("\u2066x\u2069\u200b\ufeff"), "\\u2066x\\u2069\\u200b\\ufeff");
  assert.equal(visible("\u{e0041}"), "\\U000e0041");
  assert.equal(visible("\ud800"), "\\ud800");
  assert.equal(visible("\x85\x9b"), "\\x85\\x9b");
});

test("an unknown text is nothing, and a number its digits", () => {
  assert.equal(visible(null), "");
  assert.equal(visible(7 as unknown as string), "7");
});

test("what is seen stays as it is", () => {
  const plain = "<b onclick=x>rank 3 & 训练 é 🚀 \"quoted\"</b>";
  assert.equal(visible(plain), plain);
});

test("a text of a megabyte is cut, and says so", () => {
  const shown = visible("x".repeat(1_000_003), 10);
  assert.equal(shown, "xxxxxxxxxx… (999993 more characters)");
});

test("lines are apart, and each is escaped", () => {
  assert.deepEqual(visibleLines("a\r\nb\u0007"), ["a", "b\\x07"]);
});

test("lengths of time", () => {
  const cases: [number | null, string][] = [
    [null, "–"],
    [Number.NaN, "–"],
    [0, "0 ns"],
    [812e6, "812 ms"],
    [3.24e9, "3.24 s"],
    [59.96e9, "1 min 00 s"],
    [192e9, "3 min 12 s"],
    [7500e9, "2 h 05 min"],
    [3.5 * 86400e9, "3 d 12 h"],
    [-1500, "−1.50 µs"],
  ];
  for (const [ns, text] of cases) assert.equal(duration(ns), text);
});

test("how long ago", () => {
  assert.deepEqual([0, 39.9e9, 59.99e9, 192.7e9, null].map(elapsed), ["<1 s", "39 s", "59 s", "3 min 12 s", "–"]);
});

test("sizes, rates and shares", () => {
  assert.equal(bytes(1000), "0.98 KiB");
  assert.equal(bytes(64 * 2 ** 30), "64.0 GiB");
  assert.equal(bytes(2 ** 63), "8192 PiB");
  assert.equal(bitRate(5.26e-6), "5.26 kb/s");
  assert.equal(bitRate(0), "0 b/s");
  assert.equal(compact(2 ** 63), "9,223,000T");
  assert.equal(compact(0.0125), "0.0125");
  assert.equal(rate(9.2), "9.20/s");
  assert.equal(share(0.053), "5.3%");
  assert.equal(share(0), "0%");
  assert.equal(number(1234567.8), "1,234,568");
  assert.equal(number(Number.POSITIVE_INFINITY), "–");
});

test("numbers as ranges", () => {
  assert.equal(ranges([7, 0, 1, 2, 4]), "0-2,4,7");
  assert.equal(ranges([5, 4]), "4,5");
  assert.equal(ranges([]), "");
  assert.equal(ranges([0, 2, 4, 6], 2), "0,2,…");
});

test("ranges as numbers", () => {
  assert.deepEqual(numbersOf("0-2,4"), [0, 1, 2, 4]);
  assert.deepEqual(numbersOf("x,-1,3-1,,7"), [7]);
  assert.equal(numbersOf("0-999999999", 1009).length, 1009);
});

test("times of day have a date on other days", () => {
  const now = new Date("2026-11-28T12:00:00Z");
  assert.equal(clock("2026-11-28T07:59:21.123456789Z", now), "07:59:21Z");
  assert.equal(clock("2026-11-27T07:59:21Z", now), "2026-11-27 07:59:21Z");
  assert.equal(clock("never", now), "never");
});

test("a finding is told in Chinese, with ranks or without", () => {
  assert.equal(verdictSentence("not_joined", "3", 7), "rank 3 没有加入其他 rank 正在等待的操作，影响 7 个 rank");
  assert.equal(verdictSentence("slow_rank", "", 0), "有 rank 拖慢了其他 rank");
  assert.equal(verdictSentence("rank_died", "1,4-6", 0), "有 rank 死亡，起因是 rank 1,4-6");
  assert.equal(verdictSentence("rank_died", "", 0), "有 rank 死亡，起因不明");
  assert.equal(verdictSentence("a verdict of a newer server", "3", 0), null);
});

/** The log of a rank as lines that may be shown. */
import { visible } from "../text/escape.ts";

const MOST_LINES = 400;

/** Returns the last lines of a log; tabs stay. */
export function linesOf(text: string): string[] {
  const lines = text.replace(/\n$/, "").split(/\r?\n/);
  return lines.slice(-MOST_LINES).map((line) => line.split("\t").map((part) => visible(part)).join("\t"));
}

/**
 * Text from jobs, nodes and files as it may be shown: what would move the cursor, turn the direction of writing or
 * be invisible is replaced by its code. The page puts all of it into text nodes, never into HTML.
 */

// Control characters, marks of direction, characters without width, separators of lines, private use, tags.
const HIDDEN =
  // eslint-disable-next-line no-control-regex
  /[\u0000-\u001f\u007f-\u009f\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u2028-\u202f\u205f-\u206f\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\uffff\ud800-\udfff\ue000-\uf8ff]|[\u{e0000}-\u{e0fff}\u{f0000}-\u{10ffff}\u{1d173}-\u{1d17a}]/gu;

const NAMES: Record<string, string> = { "\n": "\\n", "\r": "\\r", "\t": "\\t" };

/** Most characters of one text that the page shows. */
export const MOST = 4000;

/** Returns `text` with each hidden character as its code, and cut after `most` characters; nothing for none. */
export function visible(text: string | null | undefined, most: number = MOST): string {
  if (typeof text !== "string") return text === null || text === undefined ? "" : visible(String(text), most);
  const cut = text.length > most;
  const shown = (cut ? text.slice(0, most) : text).replace(HIDDEN, code);
  return cut ? `${shown}… (${text.length - most} more characters)` : shown;
}

/** Returns the lines of `text`, each as `visible` shows it. */
export function visibleLines(text: string, most: number = MOST): string[] {
  return text.slice(0, most * 10).split(/\r?\n/).map((line) => visible(line, most));
}

function code(character: string): string {
  const named = NAMES[character];
  if (named !== undefined) return named;
  const point = character.codePointAt(0) ?? 0;
  if (point < 0x100) return `\\x${point.toString(16).padStart(2, "0")}`;
  return point < 0x10000 ? `\\u${point.toString(16).padStart(4, "0")}` : `\\U${point.toString(16).padStart(8, "0")}`;
}

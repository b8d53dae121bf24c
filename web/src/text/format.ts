/** Lengths of time, sizes, rates, numbers and lists of ranks as text. An unknown value is `–`. */

export const UNKNOWN = "–";

export type Maybe = number | null | undefined;

function known(value: Maybe): value is number {
  return typeof value === "number" && Number.isFinite(value);
}

/** Returns a length of time in ns as `812 ms`, `3.2 s`, `3 min 12 s`, `2 h 05 min`, `3 d 04 h`. */
export function duration(ns: Maybe): string {
  if (!known(ns)) return UNKNOWN;
  const size = Math.abs(ns);
  const sign = ns < 0 ? "−" : "";
  if (size < 1e3) return `${sign}${Math.round(size)} ns`;
  if (size < 999.5e3) return `${sign}${three(size / 1e3)} µs`;
  if (size < 999.5e6) return `${sign}${three(size / 1e6)} ms`;
  if (size < 59.95e9) return `${sign}${three(size / 1e9)} s`;
  const seconds = Math.round(size / 1e9);
  if (seconds < 3600) return `${sign}${Math.floor(seconds / 60)} min ${two(seconds % 60)} s`;
  if (seconds < 86400) return `${sign}${Math.floor(seconds / 3600)} h ${two(Math.floor(seconds / 60) % 60)} min`;
  return `${sign}${Math.floor(seconds / 86400)} d ${two(Math.floor(seconds / 3600) % 24)} h`;
}

/** Returns how long ago something was, or for how long it has lasted, in whole seconds: `<1 s`, `39 s`, `3 min 12 s`. */
export function elapsed(ns: Maybe): string {
  if (!known(ns)) return UNKNOWN;
  if (ns < 1e9) return "<1 s";
  return ns < 60e9 ? `${Math.floor(ns / 1e9)} s` : duration(Math.floor(ns / 1e9) * 1e9);
}

function three(value: number): string {
  return value >= 99.95 ? value.toFixed(0) : value >= 9.995 ? value.toFixed(1) : value.toFixed(2);
}

function two(value: number): string {
  return String(value).padStart(2, "0");
}

/** Returns a number in a few characters, as `1.25M`. */
export function compact(value: Maybe): string {
  return known(value) ? value.toLocaleString("en-US", { notation: "compact", maximumSignificantDigits: 4 }) : UNKNOWN;
}

/** Returns bytes in powers of 1024, as `61.2 GiB`. */
export function bytes(size: Maybe): string {
  if (!known(size)) return UNKNOWN;
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let value = size;
  let unit = 0;
  while (Math.abs(value) >= 999.5 && unit < units.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return unit === 0 ? `${Math.round(value)} B` : `${three(value)} ${units[unit]}`;
}

/** Returns 1e9 bits a second as `5.26 kb/s`. */
export function bitRate(gbps: Maybe): string {
  if (!known(gbps)) return UNKNOWN;
  const units = ["b/s", "kb/s", "Mb/s", "Gb/s", "Tb/s"];
  let [value, unit] = [gbps * 1e9, 0];
  while (Math.abs(value) >= 999.5 && unit < units.length - 1) [value, unit] = [value / 1000, unit + 1];
  return unit === 0 ? `${Math.round(value)} b/s` : `${three(value)} ${units[unit]}`;
}

/** Returns a number with thousands apart, and at most three digits behind the point. */
export function number(value: Maybe, digits = 3): string {
  if (!known(value)) return UNKNOWN;
  return value.toLocaleString("en-US", { maximumFractionDigits: Math.abs(value) >= 1000 ? 0 : digits });
}

/** Returns events a second, as `0.25/s`. */
export function rate(value: Maybe): string {
  return known(value) ? `${value < 99.5 ? three(value) : value.toFixed(0)}/s` : UNKNOWN;
}

/** Returns a share of 1 in percent. */
export function share(value: Maybe): string {
  if (!known(value)) return UNKNOWN;
  const percent = value * 100;
  return percent !== 0 && Math.abs(percent) < 9.95 ? `${percent.toFixed(1)}%` : `${percent.toFixed(0)}%`;
}

/** Returns a percentage. */
export function percent(value: Maybe): string {
  return known(value) ? `${value.toFixed(0)}%` : UNKNOWN;
}

/** Returns numbers as ranges, `0-2,4,6-7`; at most `most` ranges. */
export function ranges(numbers: readonly number[], most = 8): string {
  const sorted = [...new Set(numbers)].sort((a, b) => a - b);
  const parts: string[] = [];
  for (let i = 0; i < sorted.length; ) {
    let j = i;
    while (j + 1 < sorted.length && sorted[j + 1] === (sorted[j] as number) + 1) j += 1;
    const [first, last] = [sorted[i] as number, sorted[j] as number];
    parts.push(first === last ? `${first}` : last === first + 1 ? `${first},${last}` : `${first}-${last}`);
    i = j + 1;
  }
  return parts.length > most ? `${parts.slice(0, most).join(",")},…` : parts.join(",");
}

/** Returns the numbers of ranges, `0-2,4`; at most `most`. */
export function numbersOf(text: string | null | undefined, most = 100_000): number[] {
  const found: number[] = [];
  for (const part of (text ?? "").split(",")) {
    const match = /^(\d{1,9})(?:-(\d{1,9}))?$/.exec(part.trim());
    if (!match) continue;
    const [from, to] = [Number(match[1]), Number(match[2] ?? match[1])];
    for (let number = from; number <= to && found.length < most; number++) found.push(number);
  }
  return found;
}

/** Returns the time of day of an ISO time, `07:59:21Z`, with its date unless that is the date of `now`. */
export function clock(iso: string | null | undefined, now: Date = new Date()): string {
  if (!iso) return UNKNOWN;
  const at = new Date(iso.replace(/(\.\d{3})\d+/, "$1"));
  if (Number.isNaN(at.getTime())) return iso;
  const text = at.toISOString();
  const time = `${text.slice(11, 19)}Z`;
  return text.slice(0, 10) === now.toISOString().slice(0, 10) ? time : `${text.slice(0, 10)} ${time}`;
}

/** Returns ns between an ISO time and `now`, or null. */
export function since(iso: string | null | undefined, now: number = Date.now()): number | null {
  if (!iso) return null;
  const at = Date.parse(iso.replace(/(\.\d{3})\d+/, "$1"));
  return Number.isNaN(at) ? null : Math.max(0, now - at) * 1e6;
}

/** Returns the last part of a path. */
export function fileName(path: string | null | undefined): string {
  return path ? (path.split("/").pop() ?? path) : "";
}

/** Returns a sentence with its first letter in upper case. */
export function capital(sentence: string): string {
  return sentence.charAt(0).toUpperCase() + sentence.slice(1);
}

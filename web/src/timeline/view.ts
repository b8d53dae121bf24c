/** The part of the time that is seen: zoom and pan as arithmetic. Times in µs from the begin of the range. */

export interface View {
  from: number;
  to: number;
}

/** Least length of time that is shown, µs. */
export const LEAST_US = 0.1;

/** Returns `view` within 0 to `length`, not shorter than LEAST_US. */
export function within(view: View, length: number): View {
  const size = Math.min(Math.max(view.to - view.from, LEAST_US), Math.max(length, LEAST_US));
  const from = Math.min(Math.max(view.from, 0), Math.max(0, length - size));
  return { from, to: from + size };
}

/** Returns `view` scaled by `factor` (below 1: closer) around the time `at`. */
export function zoomed(view: View, factor: number, at: number, length: number): View {
  const size = Math.max((view.to - view.from) * factor, LEAST_US);
  const share = (at - view.from) / (view.to - view.from);
  return within({ from: at - share * size, to: at + (1 - share) * size }, length);
}

/** Returns `view` moved by a share of its length. */
export function moved(view: View, share: number, length: number): View {
  const by = (view.to - view.from) * share;
  return within({ from: view.from + by, to: view.to + by }, length);
}

/** Returns round times for an axis, about one for each `every` pixels, and their distance in µs. */
export function ticks(view: View, width: number, every = 110): { at: number[]; step: number } {
  const size = view.to - view.from;
  const raw = (size * every) / Math.max(width, 1);
  const power = 10 ** Math.floor(Math.log10(raw));
  // Above a second the clock counts by 60.
  const seconds = [1e6, 2e6, 5e6, 1e7, 1.5e7, 3e7, 6e7, 1.2e8, 3e8, 6e8, 9e8, 1.8e9, 3.6e9, 7.2e9, 1.08e10, 2.16e10, 4.32e10, 8.64e10];
  const step = raw > 5e5 ? (seconds.find((s) => s >= raw) ?? 8.64e10) : ([1, 2, 5, 10].map((m) => m * power).find((s) => s >= raw) ?? raw);
  const at: number[] = [];
  for (let time = Math.ceil(view.from / step) * step; time <= view.to && at.length < 200; time += step) at.push(time);
  return { at, step };
}

/** Returns a time from the begin of the range as text that is exact to `step` µs. */
export function offsetText(us: number, step: number): string {
  const size = Math.abs(us);
  const digits = (unit: number) => Math.max(0, Math.min(3, Math.ceil(-Math.log10(step / unit) - 1e-9)));
  if (step < 1 && size < 1e3) return `${us.toFixed(digits(1))} µs`;
  if (step < 1e3 && size < 1e6) return `${(us / 1e3).toFixed(digits(1e3))} ms`;
  const seconds = us / 1e6;
  if (step >= 6e7 || size >= 6e7) {
    const minutes = Math.floor(seconds / 60);
    return `${minutes}:${(seconds - minutes * 60).toFixed(digits(1e6)).padStart(digits(1e6) ? 3 + digits(1e6) : 2, "0")} min`;
  }
  return `${seconds.toFixed(digits(1e6))} s`;
}

/** Returns the UTC time of day at an offset. */
export function timeOfDay(fromNs: bigint, us: number, step: number): string {
  const ns = fromNs + BigInt(Math.round(us * 1e3));
  const date = new Date(Number(ns / 1_000_000n));
  const base = date.toISOString().slice(11, 19);
  if (step >= 1e6) return base;
  const fraction = (ns % 1_000_000_000n).toString().padStart(9, "0");
  return `${base}.${fraction.slice(0, step >= 1e3 ? 3 : step >= 1 ? 6 : 9)}`;
}

/** Returns the instant at an offset, to the ns: `2026-11-29T08:15:00.000000000Z`. */
export function instant(fromNs: bigint, us: number): string {
  const ns = fromNs + BigInt(Math.round(us * 1e3));
  const whole = new Date(Number(ns / 1_000_000n)).toISOString().slice(0, 19);
  return `${whole}.${(ns % 1_000_000_000n).toString().padStart(9, "0")}Z`;
}

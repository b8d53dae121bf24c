/** Scales of colour: numbers to a place between 0 and 1 that a single outlier does not flatten. */

export interface Scale {
  low: number;
  high: number;
  log: boolean;
}

/** Returns the scale of `values`; unknown ones count for nothing. */
export function scaleOf(values: readonly (number | null)[]): Scale {
  let [low, high] = [Number.POSITIVE_INFINITY, Number.NEGATIVE_INFINITY];
  for (const value of values) {
    if (value === null || !Number.isFinite(value)) continue;
    low = Math.min(low, value);
    high = Math.max(high, value);
  }
  if (low > high) return { low: 0, high: 0, log: false };
  // Lags and ages reach from microseconds to hours.
  const least = Math.max(low, high / 1e6);
  return { low, high, log: low >= 0 && high > 0 && high / Math.max(least, Number.MIN_VALUE) > 1000 };
}

/** Returns where a value lies on a scale, 0 to 1; all equal: 0. */
export function position(scale: Scale, value: number): number {
  const { low, high, log } = scale;
  // A difference of a hundredth is none.
  if (high - low <= Math.abs(high) * 0.01) return 0;
  if (!log) return clamp((value - low) / (high - low));
  const floor = Math.max(low, high / 1e6);
  return clamp(Math.log(Math.max(value, floor) / floor) / Math.log(high / floor));
}

function clamp(value: number): number {
  return Math.min(1, Math.max(0, value));
}

/** Returns a colour between those of `stops` (`#rrggbb`), at 0 to 1. */
export function between(stops: readonly string[], at: number): string {
  const place = clamp(at) * (stops.length - 1);
  const index = Math.min(stops.length - 2, Math.floor(place));
  const [a, b] = [parts(stops[index] ?? "#000000"), parts(stops[index + 1] ?? stops[0] ?? "#000000")];
  const mixed = a.map((value, i) => Math.round(value + ((b[i] as number) - value) * (place - index)));
  return `#${mixed.map((value) => value.toString(16).padStart(2, "0")).join("")}`;
}

function parts(hex: string): number[] {
  return [1, 3, 5].map((i) => Number.parseInt(hex.slice(i, i + 2), 16));
}

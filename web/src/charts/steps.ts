/** Step times of all ranks: which rank stands out, and a band for many. Pure. */

export interface Outlier {
  /** Index of the rank. */
  index: number;
  /** Its median over the median of all. */
  times: number;
}

type Series = readonly (number | null)[];

/** Returns the middle of the known values, or NaN. */
export function median(values: Series): number {
  const known = values.filter((value): value is number => value !== null && Number.isFinite(value)).sort((a, b) => a - b);
  if (!known.length) return Number.NaN;
  const middle = known.length >> 1;
  return known.length % 2 ? (known[middle] as number) : ((known[middle - 1] as number) + (known[middle] as number)) / 2;
}

// Steps that are compared: what was long ago is not what one looks for.
const LAST = 50;

/** Returns the rank whose last steps differ most from those of the others, where it is more than a tenth; or null. */
export function outlier(durations: readonly Series[]): Outlier | null {
  const medians = durations.map((series) => median(series.slice(-LAST)));
  const middle = median(medians.map((value) => (Number.isNaN(value) ? null : value)));
  let best: Outlier | null = null;
  medians.forEach((value, index) => {
    const times = value / middle;
    if (!Number.isFinite(times) || Math.abs(Math.log(times)) < Math.log(1.1)) return;
    if (!best || Math.abs(Math.log(times)) > Math.abs(Math.log(best.times))) best = { index, times };
  });
  return best;
}

/** Returns low, middle and high of each step over all ranks: the 5th, 50th and 95th of a hundred. */
export function band(durations: readonly Series[], steps: number): { low: (number | null)[]; middle: (number | null)[]; high: (number | null)[] } {
  const result = { low: [] as (number | null)[], middle: [] as (number | null)[], high: [] as (number | null)[] };
  for (let step = 0; step < steps; step++) {
    const known = durations.map((series) => series[step] ?? null).filter((value): value is number => value !== null);
    known.sort((a, b) => a - b);
    const at = (share: number) => (known.length ? (known[Math.round(share * (known.length - 1))] as number) : null);
    result.low.push(at(0.05));
    result.middle.push(at(0.5));
    result.high.push(at(0.95));
  }
  return result;
}

/** The time of each step of all ranks, and which rank stands out. */
import { useMemo } from "preact/hooks";
import { band, outlier } from "../charts/steps.ts";
import { words } from "../i18n/index.ts";
import { LineChart, type Line } from "../parts/LineChart.tsx";
import { duration } from "../text/format.ts";
import type { Steps } from "../types.ts";

const MOST_LINES = 64;

export function StepsChart({ steps }: { steps: Steps }) {
  const w = words.value.steps;
  const found = useMemo(() => chartOf(steps, w), [steps, w]);
  if (!found) return <p class="soft">{w.none}</p>;
  return (
    <>
      <p class={found.text === w.even ? "soft" : "standout"}>{found.text}</p>
      <LineChart x={steps.steps} series={found.series} lines={found.lines} time={false} xLabel={w.axis} label={`${w.title}: ${found.text}`} format={duration} {...(found.bands ? { bands: found.bands } : {})} />
    </>
  );
}

interface Chart {
  series: (number | null)[][];
  lines: Line[];
  bands?: [number, number][];
  text: string;
}

function chartOf(steps: Steps, w: typeof words.value.steps): Chart | null {
  if (!steps.steps.length || !steps.duration_ns.length) return null;
  const rank = (index: number) => {
    const entry = steps.ranks[index];
    return String(typeof entry === "object" && entry !== null ? entry.rank : (entry ?? "?"));
  };
  const far = outlier(steps.duration_ns);
  const text = far ? w.rank(rank(far.index), far.times.toFixed(2)) : w.even;
  const emphasised = far ? [far.index] : [];
  const last = (index: number): Line => ({ label: rank(index), tone: "error", width: 2 });
  if (steps.duration_ns.length <= MOST_LINES) {
    const others = steps.duration_ns.map((_, index) => index).filter((index) => index !== far?.index);
    const order = [...others, ...emphasised];
    return {
      series: order.map((index) => steps.duration_ns[index] ?? []),
      lines: [...others.map((index): Line => ({ label: rank(index), tone: "line-soft" })), ...emphasised.map(last)],
      text,
    };
  }
  const { low, middle, high } = band(steps.duration_ns, steps.steps.length);
  return {
    series: [high, low, middle, ...emphasised.map((index) => steps.duration_ns[index] ?? [])],
    lines: [{ label: w.band, tone: "line-soft" }, { label: w.band, tone: "line-soft" }, { label: w.median, tone: "accent", dash: [4, 3] }, ...emphasised.map(last)],
    bands: [[0, 1]],
    text,
  };
}

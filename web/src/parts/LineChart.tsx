/** Lines over an axis, by uPlot, in the colours of the page. */
import { useSignalEffect } from "@preact/signals";
import { useEffect, useRef } from "preact/hooks";
import uPlot from "uplot";
import "uplot/dist/uPlot.min.css";
import { colour, colourEpoch } from "../theme.ts";
import { useWidth } from "./canvas.ts";

export interface Line {
  label: string;
  /** The name of a colour of the style sheet. */
  tone: string;
  width?: number;
  dash?: number[];
}

interface LineChartProps {
  x: readonly number[];
  series: readonly (readonly (number | null)[])[];
  lines: readonly Line[];
  /** Whether `x` are seconds since 1970. */
  time: boolean;
  xLabel?: string;
  label: string;
  height?: number;
  format: (value: number | null) => string;
  /** Pairs of indexes of series between which the area is filled. */
  bands?: readonly [number, number][];
  legend?: boolean;
  /** Whether each x has a value of one of the lines alone. */
  divided?: boolean;
}

export function LineChart(props: LineChartProps) {
  const box = useRef<HTMLDivElement>(null);
  const chart = useRef<uPlot | null>(null);
  const width = useWidth(box);
  const latest = useRef(props);
  latest.current = props;
  const make = () => {
    chart.current?.destroy();
    chart.current = null;
    if (!box.current || width < 40) return;
    chart.current = new uPlot(options(latest.current, width), data(latest.current), box.current);
    // Its canvas shows what the label and the figures below say.
    chart.current.root.querySelector("canvas")?.setAttribute("aria-hidden", "true");
  };
  const shape = JSON.stringify([props.lines, props.time, props.height, props.bands]);
  useEffect(() => {
    make();
    return () => {
      chart.current?.destroy();
      chart.current = null;
    };
  }, [shape, width]);
  useEffect(() => {
    chart.current?.setData(data(latest.current));
  }, [props.x, props.series]);
  useSignalEffect(() => {
    void colourEpoch.value;
    make();
  });
  return <div ref={box} class="line-chart" role="img" aria-label={props.label} />;
}

function data(props: LineChartProps): uPlot.AlignedData {
  return [props.x, ...props.series] as unknown as uPlot.AlignedData;
}

function options(props: LineChartProps, width: number): uPlot.Options {
  const [soft, grid] = [colour("soft"), colour("grid")];
  const font = "11px system-ui, sans-serif";
  const axis = { stroke: soft, font, grid: { stroke: grid, width: 1 }, ticks: { stroke: grid, width: 1, size: 4 } };
  return {
    width,
    height: props.height ?? 180,
    tzDate: (seconds) => uPlot.tzDate(new Date(seconds * 1e3), "Etc/UTC"),
    cursor: { y: false, points: { size: 6 }, drag: { x: true, y: false } },
    legend: { show: props.legend ?? false, live: true },
    scales: { x: { time: props.time }, y: { range: (_, low, high) => fromZero(low, high) } },
    axes: [
      { ...axis, size: 28, space: 72, ...(props.time ? { values: (_: uPlot, splits: number[]) => timesOfDay(splits) } : {}), ...(props.xLabel ? { label: props.xLabel, labelFont: font, labelSize: 16 } : {}) },
      { ...axis, size: 64, values: (_, splits) => splits.map((value) => props.format(value)) },
    ],
    series: [
      {},
      ...props.lines.map((line) => ({
        label: line.label,
        stroke: colour(line.tone),
        width: line.width ?? 1,
        ...(line.dash ? { dash: line.dash } : {}),
        points: { show: false },
        // Rows of other lines leave gaps that are none.
        spanGaps: props.divided ?? false,
        value: (_: uPlot, value: number | null) => props.format(value),
      })),
    ],
    ...(props.bands ? { bands: props.bands.map(([from, to]) => ({ series: [from + 1, to + 1] as [number, number], fill: colour("band") })) } : {}),
  };
}

/** Returns UTC times of day, to the second where they are close; a date where the day changes. */
function timesOfDay(splits: readonly number[]): string[] {
  const close = splits.length > 1 && (splits[1] as number) - (splits[0] as number) < 60;
  return splits.map((seconds, index) => {
    const text = new Date(seconds * 1e3).toISOString();
    const before = index > 0 ? new Date((splits[index - 1] as number) * 1e3).toISOString() : text;
    if (before.slice(0, 10) !== text.slice(0, 10)) return text.slice(5, 10);
    return text.slice(11, close ? 19 : 16);
  });
}

// Heights are compared from zero; a flat line at zero has a scale, too.
function fromZero(low: number | null, high: number | null): [number, number] {
  const top = high !== null && Number.isFinite(high) && high > 0 ? high * 1.05 : 1;
  const bottom = low !== null && Number.isFinite(low) && low < 0 ? low * 1.05 : 0;
  return [bottom, top];
}

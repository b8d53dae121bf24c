/** A result as lines: which column goes across, and which ones up. */
import { useMemo, useState } from "preact/hooks";
import { words } from "../i18n/index.ts";
import { LineChart, type Line } from "../parts/LineChart.tsx";
import { visible } from "../text/escape.ts";
import { number } from "../text/format.ts";
import type { QueryResult } from "../types.ts";
import { chartable, isTime, points } from "./result.ts";

const MOST_LINES = 8;

export function ResultChart({ result }: { result: QueryResult }) {
  const w = words.value.sql;
  const able = useMemo(() => chartable(result), [result]);
  const times = able.filter((index) => isTime(result.columns[index]?.type ?? ""));
  const numbers = able.filter((index) => !times.includes(index));
  const [x, setX] = useState<number | null>(null);
  const [y, setY] = useState<number[] | null>(null);
  const across = x ?? times[0] ?? numbers[0] ?? null;
  const up = (y ?? numbers.filter((index) => index !== across).slice(0, 1)).filter((index) => able.includes(index));
  const chart = useMemo(() => points(result, across, up), [result, across, up.join()]);
  if (!numbers.length || across === null) return <p class="soft">{w.noChart}</p>;
  const name = (index: number) => visible(result.columns[index]?.name ?? "?", 60);
  const lines = up.map((index, i): Line => ({ label: name(index), tone: `comm-${i % 8}`, width: 1.5 }));
  return (
    <>
      <div class="controls">
        <label>
          {w.x}{" "}
          <select value={String(across)} onChange={(event) => setX(Number(event.currentTarget.value))}>
            {able.map((index) => <option value={String(index)}>{name(index)}</option>)}
          </select>
        </label>
        <fieldset class="inline">
          <legend>{w.y}</legend>
          {numbers.filter((index) => index !== across).slice(0, 24).map((index) => (
            <label>
              <input type="checkbox" checked={up.includes(index)} onChange={(event) => setY(event.currentTarget.checked ? [...up, index].slice(-MOST_LINES) : up.filter((one) => one !== index))} /> {name(index)}
            </label>
          ))}
        </fieldset>
      </div>
      <LineChart x={chart.x} series={chart.series} lines={lines} time={isTime(result.columns[across]?.type ?? "")} label={`${w.chart}: ${lines.map((line) => line.label).join(", ")}`} height={320} format={(value) => number(value)} legend />
    </>
  );
}

/** A result as lines: which column goes across, and which ones up. */
import { useMemo, useState } from "preact/hooks";
import { words } from "../i18n/index.ts";
import { LineChart, type Line } from "../parts/LineChart.tsx";
import { visible } from "../text/escape.ts";
import { cellText } from "../job/rankRows.ts";
import { compact } from "../text/format.ts";
import type { QueryResult } from "../types.ts";
import { chartable, dividing, isTime, points } from "./result.ts";

const MOST_LINES = 8;

export function ResultChart({ result }: { result: QueryResult }) {
  const w = words.value.sql;
  const able = useMemo(() => chartable(result), [result]);
  const times = able.filter((index) => isTime(result.columns[index]?.type ?? ""));
  const numbers = able.filter((index) => !times.includes(index));
  const [x, setX] = useState<number | null>(null);
  const [y, setY] = useState<number[] | null>(null);
  const [split, setSplit] = useState<number | null | undefined>(undefined);
  const across = x ?? times[0] ?? numbers[0] ?? null;
  const groups = useMemo(() => dividing(result), [result]);
  const usual = groups.find((index) => result.columns[index]?.name === "rank") ?? null;
  const by = split === undefined ? usual : split !== null && groups.includes(split) ? split : null;
  // What is measured comes last in most statements.
  const first = numbers.filter((index) => index !== across && index !== by).slice(-1);
  const up = (y ?? first).filter((index) => able.includes(index)).slice(by === null ? 0 : -1);
  const chart = useMemo(() => points(result, across, up, by), [result, across, up.join(), by]);
  if (!numbers.length || across === null) return <p class="soft">{w.noChart}</p>;
  const name = (index: number) => visible(result.columns[index]?.name ?? "?", 60);
  const measured = result.columns[up[0] ?? -1]?.name ?? "";
  const format = (value: number | null) => (/_(ns|bytes|pct)$/.test(measured) ? cellText(measured, value) : compact(value));
  const lines = chart.names.map((one, i): Line => ({ label: typeof one === "number" ? name(one) : `${name(by ?? -1)} ${visible(one, 40)}`, tone: `comm-${i % 8}`, width: 1.5, ...(i >= 8 ? { dash: [5, 3] } : {}) }));
  return (
    <>
      <div class="controls">
        <label>
          {w.x}{" "}
          <select value={String(across)} onChange={(event) => setX(Number(event.currentTarget.value))}>
            {able.map((index) => <option value={String(index)}>{name(index)}</option>)}
          </select>
        </label>
        {groups.length ? (
          <label>
            {w.split}{" "}
            <select value={by === null ? "" : String(by)} onChange={(event) => setSplit(event.currentTarget.value === "" ? null : Number(event.currentTarget.value))}>
              <option value="">{w.whole}</option>
              {groups.map((index) => <option value={String(index)}>{name(index)}</option>)}
            </select>
          </label>
        ) : null}
        <fieldset class="inline">
          <legend>{w.y}</legend>
          {numbers.filter((index) => index !== across).slice(0, 24).map((index) => (
            <label>
              <input type="checkbox" checked={up.includes(index)} onChange={(event) => setY(event.currentTarget.checked ? [...up, index].slice(by === null ? -MOST_LINES : -1) : up.filter((one) => one !== index))} /> {name(index)}
            </label>
          ))}
        </fieldset>
      </div>
      <LineChart x={chart.x} series={chart.series} lines={lines} time={isTime(result.columns[across]?.type ?? "")} label={`${w.chart}: ${lines.map((line) => line.label).join(", ")}`} height={320} format={format} legend divided={by !== null} />
    </>
  );
}

/** Rows of a query; only those in sight are in the page. */
import { useRef, useState } from "preact/hooks";
import { words } from "../i18n/index.ts";
import { visible } from "../text/escape.ts";
import type { QueryResult } from "../types.ts";
import { isTime, valueText } from "./result.ts";

const ROW = 26;
const HEIGHT = 480;
const MOST_COLUMNS = 200;

export function ResultTable({ result }: { result: QueryResult }) {
  const w = words.value.sql;
  const [top, setTop] = useState(0);
  const box = useRef<HTMLDivElement>(null);
  const columns = result.columns.slice(0, MOST_COLUMNS);
  const first = Math.max(0, Math.floor(top / ROW) - 10);
  const last = Math.min(result.rows.length, first + Math.ceil(HEIGHT / ROW) + 20);
  const numeric = columns.map((column) => /int|float|double|decimal/i.test(column.type) && !/list|struct|map/i.test(column.type));
  if (!result.rows.length) return <p class="soft">{w.none}</p>;
  return (
    <>
      {result.columns.length > MOST_COLUMNS ? <p class="note">▲ {w.columnsCut(result.columns.length - MOST_COLUMNS)}</p> : null}
      <div class="scroll result" ref={box} tabIndex={0} role="region" aria-label={w.table} onScroll={() => setTop(box.current?.scrollTop ?? 0)}>
        <table>
          <thead>
            <tr>
              {columns.map((column, index) => (
                <th scope="col" class={numeric[index] ? "number" : ""} title={visible(column.type, 80)}>
                  {visible(column.name, 80)}
                </th>
              ))}
            </tr>
          </thead>
          <tbody>
            <Space rows={first} />
            {result.rows.slice(first, last).map((row, index) => (
              <tr key={first + index}>
                {columns.map((column, at) => {
                  const value = row[at];
                  const text = valueText(value);
                  return (
                    <td class={numeric[at] ? "number" : isTime(column.type) ? "time" : "text"} title={text.length > 60 ? visible(text, 2000) : undefined}>
                      {value === null ? <span class="soft">NULL</span> : visible(text, 200)}
                    </td>
                  );
                })}
              </tr>
            ))}
            <Space rows={result.rows.length - last} />
          </tbody>
        </table>
      </div>
    </>
  );
}

/** Stands for rows that are out of sight. */
function Space({ rows }: { rows: number }) {
  return rows > 0 ? <tr aria-hidden="true" style={{ height: `${rows * ROW}px` }} /> : null;
}

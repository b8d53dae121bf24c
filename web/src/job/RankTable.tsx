/** The ranks of a job as a table, those in trouble first. */
import { useState } from "preact/hooks";
import { words } from "../i18n/index.ts";
import { href } from "../location.ts";
import { visible } from "../text/escape.ts";
import { cellText, sign, troubleFirst, type RankRow } from "./rankRows.ts";

const PAGE = 100;
const COLUMNS = ["python", "op", "age_ns", "step", "steps_per_s", "lag_ns", "cpu_pct", "gpu_pct", "rss_bytes", "gpu_used_bytes", "state"];
const TEXTS = new Set(["state", "op", "python"]);

export function RankTable({ job, rows }: { job: string; rows: readonly RankRow[] }) {
  const [most, setMost] = useState(PAGE);
  const w = words.value;
  const columns = COLUMNS.filter((name) => rows.some((row) => row.values[name] !== null && row.values[name] !== undefined));
  const sorted = troubleFirst(rows);
  return (
    <div class="scroll" tabIndex={0} role="region" aria-label={w.grid.title}>
      <table class="ranks">
        <thead>
          <tr>
            <th scope="col" class="number">{w.columns["rank"]}</th>
            <th scope="col">{w.columns["node"]}</th>
            <th scope="col" class="number">{w.columns["pid"]}</th>
            {columns.map((name) => (
              <th scope="col" class={TEXTS.has(name) ? "" : "number"}>{w.columns[name] ?? name}</th>
            ))}
          </tr>
        </thead>
        <tbody>
          {sorted.slice(0, most).map((row) => (
            <tr key={`${row.node}\0${row.pid}`} class={row.blame === "culprit" ? "row-error" : ""}>
              <th scope="row" class="number">
                {sign(row) ? <b aria-hidden="true">{sign(row)} </b> : null}
                <a href={href({ screen: "rank", job, rank: String(row.rank ?? row.pid) }, { node: row.node, pid: String(row.pid) })}>{row.rank ?? "?"}</a>
              </th>
              <td>{visible(row.node, 60)}</td>
              <td class="number">{row.pid}</td>
              {columns.map((name) => (
                <td class={TEXTS.has(name) ? `text ${name}` : "number"}>{visible(cellText(name, name === "python" && row.ended ? row.values["how"] : row.values[name]), 120)}</td>
              ))}
            </tr>
          ))}
        </tbody>
      </table>
      {rows.length > most ? (
        <p>
          <button type="button" onClick={() => setMost(most + PAGE * 5)}>{w.grid.more(rows.length - most)}</button>
        </p>
      ) : null}
    </div>
  );
}

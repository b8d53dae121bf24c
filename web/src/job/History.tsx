/** Findings as a list, the newest first. */
import { words } from "../i18n/index.ts";
import { Badge, toneOf } from "../parts/Badge.tsx";
import { headline, Original } from "../parts/Sentence.tsx";
import { clock } from "../text/format.ts";
import type { HistoryRow } from "../types.ts";

export function History({ rows }: { rows: readonly HistoryRow[] }) {
  const w = words.value;
  if (!rows.length) return <p class="soft">{w.finding.noHistory}</p>;
  return (
    <ul class="history">
      {[...rows].reverse().slice(0, 50).map((row) => (
        <li>
          <time>{clock(row.opened ?? row.ts)}</time>
          <Badge tone={toneOf(row.severity)} text={w.severity[row.severity] ?? row.severity} />
          <span>{headline(row, 400)} <Original finding={row} longest={400} /></span>
        </li>
      ))}
    </ul>
  );
}

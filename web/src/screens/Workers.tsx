/** The workers that launchers serve: node, user, state of the launcher, and the rank that each has. */
import { useEffect } from "preact/hooks";
import { LauncherBadge, RankBadge } from "../groups/states.tsx";
import { words } from "../i18n/index.ts";
import { useAsked } from "../live.ts";
import { href } from "../location.ts";
import { Body, Empty, Panel } from "../parts/Panel.tsx";
import { visible } from "../text/escape.ts";
import { clock } from "../text/format.ts";
import type { WorkerRow } from "../types.ts";

const EVERY_MS = 5000;
const MOST_ROWS = 2000;

export function Workers() {
  const w = words.value.workers;
  const workers = useAsked<WorkerRow[]>("workers", {}, EVERY_MS);
  const rows = workers.answer?.data ?? [];
  const distinct = (name: "worker" | "node") => new Set(rows.map((row) => row[name])).size;
  useEffect(() => {
    document.title = `${w.title} · probing`;
  }, [w]);
  return (
    <>
      <h1 class="screen-title">
        {w.title}
        {rows.length ? <small>{w.count(distinct("worker"), distinct("node"))}</small> : null}
      </h1>
      <Panel title={w.title} contract={workers.answer?.contract} error={workers.error} again={workers.again} class="untitled">
        <Body of={workers.answer?.data} error={workers.error}>
          {(found) => (found.length ? <WorkerTable rows={found} /> : <Empty title={w.none} hint={w.noneHint} />)}
        </Body>
      </Panel>
    </>
  );
}

function WorkerTable({ rows }: { rows: readonly WorkerRow[] }) {
  const w = words.value.workers;
  return (
    <div class="scroll" tabIndex={0} role="region" aria-label={w.title}>
      <table class="workers">
        <thead>
          <tr>
            <th scope="col">{w.worker}</th>
            <th scope="col">{w.node}</th>
            <th scope="col">{w.user}</th>
            <th scope="col">{w.launcher}</th>
            <th scope="col">{w.group}</th>
            <th scope="col" class="number">{w.rank}</th>
            <th scope="col">{w.state}</th>
            <th scope="col">{w.since}</th>
            <th scope="col">{w.joined}</th>
          </tr>
        </thead>
        <tbody>
          {rows.slice(0, MOST_ROWS).map((row) => (
            <tr key={`${row.worker}\0${row.group_name ?? ""}`}>
              <th scope="row">{visible(row.worker, 80)}</th>
              <td>{visible(row.node, 80)}</td>
              <td>{visible(row.user, 64)}</td>
              <td><LauncherBadge state={row.state} /></td>
              <td>{row.group_name ? <a href={href({ screen: "group", name: row.group_name })}>{visible(row.group_name, 63)}</a> : ""}</td>
              <td class="number">{row.rank ?? ""}</td>
              <td>{row.rank_state ? <RankBadge state={row.rank_state} /> : ""}</td>
              <td>{row.since ? clock(row.since) : ""}</td>
              <td>{row.joined ? clock(row.joined) : ""}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

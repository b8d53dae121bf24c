/** The ranks of a group: what each does now; and the ranks that a specification would have. */
import { words } from "../i18n/index.ts";
import { href } from "../location.ts";
import { visible } from "../text/escape.ts";
import { clock } from "../text/format.ts";
import type { GroupRank, PlannedRank } from "../types.ts";
import { LauncherBadge, RankBadge } from "./states.tsx";

const MOST_ROWS = 2000;

export function RankTable({ name, ranks, chosen }: { name: string; ranks: readonly GroupRank[]; chosen: number | null }) {
  const w = words.value.groups;
  return (
    <div class="scroll tall" tabIndex={0} role="region" aria-label={w.ranks}>
      <table class="group-ranks">
        <thead>
          <tr>
            <th scope="col" class="number">{w.rank}</th>
            <th scope="col">{w.worker}</th>
            <th scope="col">{w.state}</th>
            <th scope="col">{w.log}</th>
            <th scope="col" class="number">{w.pid}</th>
            <th scope="col" class="number">{w.exit}</th>
            <th scope="col">{w.since}</th>
            <th scope="col">{w.launcher}</th>
            <th scope="col">{w.reason}</th>
          </tr>
        </thead>
        <tbody>
          {ranks.slice(0, MOST_ROWS).map((row) => (
            <tr key={row.rank} class={row.rank === chosen ? "row-chosen" : ""}>
              <th scope="row" class="number">{row.rank}</th>
              <td>{visible(row.worker, 80)}</td>
              <td><RankBadge state={row.state} exit={row.exit_code} /></td>
              <td>
                <a href={href({ screen: "group", name }, { rank: String(row.rank) })} aria-label={w.logOf(row.rank)} title={visible(row.log, 300)}>{w.log}</a>
              </td>
              <td class="number">{row.pid ?? ""}</td>
              <td class="number">{row.exit_code ?? ""}</td>
              <td>{row.since ? clock(row.since) : ""}</td>
              <td><LauncherBadge state={row.launcher} /></td>
              <td class="c-reason">{visible(row.reason, 300)}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

export function PlannedRanks({ ranks }: { ranks: readonly PlannedRank[] }) {
  const w = words.value.groups;
  return (
    <div class="scroll tall" tabIndex={0} role="region" aria-label={w.previewed}>
      <table class="planned-ranks">
        <thead>
          <tr>
            <th scope="col">{w.worker}</th>
            <th scope="col" class="number">RANK</th>
            <th scope="col" class="number">LOCAL_RANK</th>
            <th scope="col" class="number">NODE_RANK</th>
            <th scope="col" class="number">WORLD_SIZE</th>
            <th scope="col">{w.master}</th>
            <th scope="col">{w.backend}</th>
          </tr>
        </thead>
        <tbody>
          {ranks.slice(0, MOST_ROWS).map((row) => (
            <tr key={row.rank}>
              <th scope="row">{visible(row.worker, 80)}</th>
              <td class="number">{row.rank}</td>
              <td class="number">{row.local_rank}</td>
              <td class="number">{row.node_rank}</td>
              <td class="number">{row.world_size}</td>
              <td>{visible(row.master, 120)}</td>
              <td>{visible(row.backend, 40)}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

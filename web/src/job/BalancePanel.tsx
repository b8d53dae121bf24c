/** Where the time of a step goes, by rank, as stacked bars; and by parallel role. */
import { words } from "../i18n/index.ts";
import { href } from "../location.ts";
import { visible } from "../text/escape.ts";
import { capital, duration, share } from "../text/format.ts";
import type { Balance, BalanceRank } from "../types.ts";

const SHARES = ["compute", "io", "communication", "wait"] as const;
const MOST = 48;
// As probingctl balance calls work uneven.
const UNEVEN = 1.2;

export function BalanceBars({ balance, job }: { balance: Balance; job: string }) {
  const w = words.value.balance;
  const known = balance.ranks.filter((rank) => rank.steps > 0);
  if (!known.length) return <p class="soft">{w.none}</p>;
  // Those that compute longest hold up the others.
  const sorted = known.length > MOST ? [...known].sort((a, b) => (b.compute ?? 0) - (a.compute ?? 0)) : known;
  return (
    <>
      {balance.sentences.slice(0, 5).map((sentence) => (
        <p class={(balance.uneven ?? 1) >= UNEVEN ? "standout" : "soft"}>{visible(capital(sentence), 300)}</p>
      ))}
      <p class="legend">
        {SHARES.map((name) => (
          <span>
            <i class={`swatch share-${name}`} aria-hidden="true" /> {w[name]}
          </span>
        ))}
      </p>
      <div class="scroll" tabIndex={0} role="region" aria-label={w.label}>
        <table class="balance">
          <thead>
            <tr>
              <th scope="col" class="number">{words.value.columns["rank"]}</th>
              <th scope="col">{w.label}</th>
              {SHARES.map((name) => (
                <th scope="col" class="number">{w[name]}</th>
              ))}
              <th scope="col" class="number">{w.step}</th>
              <th scope="col" class="number">{w.last}</th>
            </tr>
          </thead>
          <tbody>
            {sorted.slice(0, MOST).map((rank) => (
              <tr>
                <th scope="row" class="number">
                  <a href={href({ screen: "rank", job, rank: String(rank.rank) }, { node: rank.node, pid: String(rank.pid) })}>{rank.rank}</a>
                </th>
                <td class="bar-cell">
                  <Bar rank={rank} />
                </td>
                {SHARES.map((name) => (
                  <td class="number">{share(rank[name])}</td>
                ))}
                <td class="number">{duration(rank.step_ns)}</td>
                <td class="number">{share(rank.last_share)}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
      {known.length > MOST ? <p class="soft">{w.more(known.length - MOST)}</p> : null}
      {balance.roles.length > 1 ? <Roles balance={balance} /> : null}
    </>
  );
}

function Bar({ rank }: { rank: BalanceRank }) {
  let x = 0;
  return (
    <svg class="bar" viewBox="0 0 100 10" preserveAspectRatio="none" aria-hidden="true">
      {SHARES.map((name) => {
        const width = Math.max(0, Math.min(1, rank[name] ?? 0)) * 100;
        const part = <rect class={`share-${name}`} x={x} y={0} width={width} height={10} />;
        x += width;
        return part;
      })}
    </svg>
  );
}

function Roles({ balance }: { balance: Balance }) {
  const w = words.value.balance;
  return (
    <table>
      <caption>{w.roles}</caption>
      <thead>
        <tr>
          <th scope="col">{w.role}</th>
          <th scope="col" class="number">{w.comms}</th>
          <th scope="col" class="number">{words.value.jobs.ranks}</th>
          <th scope="col" class="number">{w.communication}</th>
          <th scope="col" class="number">{w.wait}</th>
          <th scope="col" class="number">{w.last}</th>
        </tr>
      </thead>
      <tbody>
        {balance.roles.slice(0, 50).map((role) => (
          <tr>
            <th scope="row">{visible(role.role, 80)}</th>
            <td class="number">{role.comms}</td>
            <td class="number">{role.ranks}</td>
            <td class="number">{share(role.communication)}</td>
            <td class="number">{share(role.wait)}</td>
            <td class="number">{role.last === null ? "" : `${role.last} (${share(role.last_share)})`}</td>
          </tr>
        ))}
      </tbody>
    </table>
  );
}

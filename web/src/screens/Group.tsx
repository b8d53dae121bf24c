/** A group of workers: what its ranks do, the owner's orders, the log of a rank, and the form of its change. */
import { useEffect } from "preact/hooks";
import { formOf } from "../groups/form.ts";
import { GroupForm } from "../groups/GroupForm.tsx";
import { maySign, NoKey, Orders } from "../groups/Orders.tsx";
import { RankLog } from "../groups/RankLog.tsx";
import { RankTable } from "../groups/RankTable.tsx";
import { PhaseBadge } from "../groups/states.tsx";
import { words } from "../i18n/index.ts";
import { useAsked } from "../live.ts";
import { go, href, params } from "../location.ts";
import { Body, Panel } from "../parts/Panel.tsx";
import { visible } from "../text/escape.ts";
import { clock } from "../text/format.ts";
import type { GroupPage } from "../types.ts";

const EVERY_MS = 3000;
const PLAIN = /^[A-Za-z0-9._-]+$/;

export function Group({ name }: { name: string }) {
  const w = words.value.groups;
  const asked = useAsked<GroupPage>("group", { name }, EVERY_MS);
  const group = asked.answer?.data ?? null;
  const here = href({ screen: "group", name });
  const runs = group?.phase === "running" || group?.phase === "ending";
  const changing = params.value.get("change") === "1" && group !== null && group.spec !== null && !runs && maySign();
  const rank = rankOf(params.value.get("rank"));
  const shownRank = group?.workers.find((row) => row.rank === rank) ?? null;
  useEffect(() => {
    document.title = `${visible(name, 63)} · ${w.title} · probing`;
  }, [name, w]);
  const shown = PLAIN.test(name) ? name : "NAME";
  return (
    <>
      <h1 class="screen-title">
        {visible(name, 63)}
        {group ? <PhaseBadge phase={group.phase} /> : null}
        <small><a href={href({ screen: "groups" })}>{w.title}</a></small>
      </h1>
      <Panel title={w.group} contract={asked.answer?.contract} error={asked.error} again={asked.again} class="untitled">
        <Body of={group} error={asked.error}>
          {(found) => (
            <>
              <Facts group={found} />
              {maySign() ? (
                <>
                  <Orders name={name} phase={found.phase} onDone={(action) => (action === "delete" ? go(href({ screen: "groups" })) : asked.again())} />
                  {found.spec === null || changing ? null : runs ? <p class="soft small">{w.stopFirst}</p> : <a class="button" href={href({ screen: "group", name }, { change: "1" })}>{w.change}</a>}
                </>
              ) : (
                <NoKey commands={["start", "stop", "restart", "delete"].map((action) => `probingctl group ${action} ${shown}`)} />
              )}
            </>
          )}
        </Body>
      </Panel>
      {changing && group.spec ? (
        <GroupForm first={formOf(name, group.spec)} onCancel={() => go(here)} onDone={() => { go(here); asked.again(); }} />
      ) : null}
      {group ? (
        <Panel title={w.ranks} contract={asked.answer?.contract}>
          <RankTable name={name} ranks={group.workers} chosen={rank} />
          {rank === null ? <p class="soft small">{w.logChoose}</p> : null}
        </Panel>
      ) : null}
      {shownRank ? <RankLog key={`${rank}\0${shownRank.node}`} name={name} rank={shownRank.rank} node={shownRank.node} /> : null}
    </>
  );
}

function rankOf(text: string | null): number | null {
  return text !== null && /^\d{1,5}$/.test(text) ? Number(text) : null;
}

function Facts({ group }: { group: GroupPage }) {
  const w = words.value.groups;
  const facts: [string, string][] = [
    [w.living, visible(group.ranks, 20)],
    [w.generation, String(group.generation)],
    [w.since, group.since ? clock(group.since) : "–"],
    [w.master, visible(group.master, 120)],
    [w.owner, visible(group.owner, 64)],
    [w.restarts, String(group.restarts)],
  ];
  if (group.excluded.length) facts.push([w.excluded, visible(group.excluded.slice(0, 20).join(", "), 300)]);
  return (
    <dl class="facts-list">
      {facts.map(([label, value]) => <div key={label}><dt>{label}</dt><dd>{value}</dd></div>)}
      {group.why ? <div class="long"><dt>{w.why}</dt><dd>{visible(group.why, 400)}</dd></div> : null}
      <div class="long"><dt>{w.command}</dt><dd><code>{visible(group.command.join(" "), 2000)}</code></dd></div>
      <div class="long"><dt class="hidden-label">{w.findings}</dt><dd><a href={href({ screen: "job", job: group.group })}>{w.findings}</a></dd></div>
    </dl>
  );
}

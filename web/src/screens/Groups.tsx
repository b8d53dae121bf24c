/** All groups of workers, a line each; and the form of a new one. */
import { useEffect } from "preact/hooks";
import { emptyForm } from "../groups/form.ts";
import { GroupForm } from "../groups/GroupForm.tsx";
import { maySign, NoKey } from "../groups/Orders.tsx";
import { PhaseBadge } from "../groups/states.tsx";
import { words } from "../i18n/index.ts";
import { useAsked } from "../live.ts";
import { go, href, params } from "../location.ts";
import { Body, Empty, Panel } from "../parts/Panel.tsx";
import { visible } from "../text/escape.ts";
import { clock } from "../text/format.ts";
import type { GroupLine } from "../types.ts";

const EVERY_MS = 5000;
const MOST_ROWS = 1000;
const COMMANDS = ["probingctl group create NAME --workers A,B --master A -- COMMAND", "probingctl group start NAME", "probingctl group stop NAME"];

export function Groups() {
  const w = words.value.groups;
  const groups = useAsked<GroupLine[]>("groups", {}, EVERY_MS);
  const making = params.value.get("new") === "1" && maySign();
  const list = href({ screen: "groups" });
  useEffect(() => {
    document.title = `${w.title} · probing`;
  }, [w]);
  return (
    <>
      <h1 class="screen-title">
        {w.title}
        {making || !maySign() ? null : <a class="button" href={href({ screen: "groups" }, { new: "1" })}>{w.create}</a>}
      </h1>
      {maySign() ? null : <NoKey commands={COMMANDS} />}
      {making ? <GroupForm first={emptyForm()} onDone={(name) => go(href({ screen: "group", name }))} onCancel={() => go(list)} /> : null}
      <Panel title={w.title} contract={groups.answer?.contract} error={groups.error} again={groups.again} class="untitled">
        <Body of={groups.answer?.data} error={groups.error}>
          {(rows) => (rows.length ? <GroupTable rows={rows} /> : <Empty title={w.none} hint={w.noneHint} />)}
        </Body>
      </Panel>
    </>
  );
}

function GroupTable({ rows }: { rows: readonly GroupLine[] }) {
  const w = words.value.groups;
  return (
    <div class="scroll" tabIndex={0} role="region" aria-label={w.title}>
      <table class="groups">
        <thead>
          <tr>
            <th scope="col">{w.group}</th>
            <th scope="col">{w.phase}</th>
            <th scope="col" class="number">{w.living}</th>
            <th scope="col">{w.owner}</th>
            <th scope="col">{w.since}</th>
            <th scope="col" class="number">{w.generation}</th>
            <th scope="col">{w.master}</th>
            <th scope="col">{w.why}</th>
          </tr>
        </thead>
        <tbody>
          {rows.slice(0, MOST_ROWS).map((row) => (
            <tr key={row.group} class={row.phase === "failed" ? "row-error" : ""}>
              <th scope="row"><a href={href({ screen: "group", name: row.group })}>{visible(row.group, 63)}</a></th>
              <td><PhaseBadge phase={row.phase} /></td>
              <td class="number">{visible(row.ranks, 20)}</td>
              <td>{visible(row.owner, 64)}</td>
              <td>{row.since ? clock(row.since) : ""}</td>
              <td class="number">{row.generation}</td>
              <td>{visible(row.master, 120)}</td>
              <td class="c-reason">{visible(row.why, 300)}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

/** Flame graphs of a job: samples of a range, two selections compared, stacks of all ranks merged. */
import { useEffect, useMemo, useState } from "preact/hooks";
import { words } from "../i18n/index.ts";
import { FlameView, type Colouring } from "../flame/FlameView.tsx";
import { functions, layout, type FlameTree } from "../flame/layout.ts";
import { mergedTree, profileTree } from "../flame/trees.ts";
import { useAsked } from "../live.ts";
import { params, setParams } from "../location.ts";
import { Empty, Loading, Panel } from "../parts/Panel.tsx";
import { visible } from "../text/escape.ts";
import { clock, duration, number, share } from "../text/format.ts";
import type { MergedTree, ProfileNode } from "../types.ts";

const LENGTHS = ["30s", "1m", "5m", "30m", "2h"];
const DEFAULT = "5m";
const MOST_FUNCTIONS = 50;

export function Flame({ job }: { job: string }) {
  const w = words.value.flame;
  const query = params.value;
  const merged = query.get("stacks") === "1";
  useEffect(() => {
    document.title = `${w.title} · ${visible(job, 60)} · probing`;
  }, [job, w]);
  return (
    <>
      <h1 class="screen-title">{w.title}</h1>
      <div class="tabs" role="group" aria-label={w.title}>
        <button type="button" aria-pressed={!merged} onClick={() => setParams({ stacks: null }, false)}>{w.profile}</button>
        <button type="button" aria-pressed={merged} onClick={() => setParams({ stacks: "1" }, false)}>{w.merged}</button>
      </div>
      {merged ? <Merged job={job} /> : <Profile job={job} />}
    </>
  );
}

function Profile({ job }: { job: string }) {
  const w = words.value.flame;
  const query = params.value;
  const [from, to] = [query.get("from"), query.get("to")];
  const since = query.get("since") ?? DEFAULT;
  const wall = query.get("wall") === "1";
  const rank = query.get("rank") ?? "";
  const against = query.get("against") ?? "";
  const by = query.get("by") === "rank";
  const range = from ? { from, to } : { since };
  const compared = against !== "";
  const base = against === "before" ? `before:${from ? DEFAULT : since}` : `rank:${against}`;
  const asked = compared
    ? { job, ...range, wall, a: rank ? `rank:${rank}` : "", b: base }
    : { job, ...range, wall, by: by ? "rank" : null, rank: rank || null };
  const found = useAsked<ProfileNode>(compared ? "profile/diff" : "profile", asked);
  const data = found.answer?.data;
  const tree = useMemo(() => (data ? profileTree(data) : null), [data]);
  return (
    <>
      <form class="controls" onSubmit={(event) => event.preventDefault()}>
        <label>
          {w.range}{" "}
          <select value={from ? "" : since} onChange={(event) => event.currentTarget.value && setParams({ since: event.currentTarget.value, from: null, to: null }, false)}>
            {from ? <option value="">{`${clock(from)} – ${clock(to)}`}</option> : null}
            {[...new Set([...LENGTHS, since])].map((length) => <option value={length}>{length}</option>)}
          </select>
        </label>
        <label>
          {w.rank} <RankField name="rank" value={rank} />
        </label>
        <label>
          {w.compare}{" "}
          <select value={against === "" ? "" : against === "before" ? "before" : "rank"} onChange={(event) => setParams({ against: ({ before: "before", rank: "0" } as Record<string, string>)[event.currentTarget.value] ?? null }, false)}>
            <option value="">{w.nothing}</option>
            <option value="rank">{w.rank}</option>
            <option value="before">{w.range2}</option>
          </select>
        </label>
        {compared && against !== "before" ? (
          <label>
            {w.rank} <RankField name="against" value={against} />
          </label>
        ) : null}
        <label>
          <input type="checkbox" checked={wall} onChange={(event) => setParams({ wall: event.currentTarget.checked ? "1" : null }, false)} /> {w.wall}
        </label>
        {compared ? null : (
          <label>
            <input type="checkbox" checked={by} onChange={(event) => setParams({ by: event.currentTarget.checked ? "rank" : null }, false)} /> {w.by}
          </label>
        )}
      </form>
      <FlamePanel title={w.profile} tree={tree} asked={found} colouring={compared ? "difference" : "file"} format={compared ? share : duration} />
    </>
  );
}

function RankField({ name, value }: { name: "rank" | "against"; value: string }) {
  return <input type="text" inputMode="numeric" size={5} value={value} placeholder={words.value.flame.root} onChange={(event) => setParams({ [name]: event.currentTarget.value.replace(/\D/g, "") || null }, false)} />;
}

function Merged({ job }: { job: string }) {
  const w = words.value.flame;
  const found = useAsked<MergedTree[]>("stacks", { job, merge: true });
  const trees = found.answer?.data;
  const tree = useMemo(() => (trees ? mergedTree(trees, w.root) : null), [trees, w]);
  const ranks = useMemo(() => new Set((trees ?? []).flatMap((one) => one.ranks)).size, [trees]);
  return (
    <>
      <p class="legend">
        <span><i class="swatch minority" aria-hidden="true" /> {w.minority}</span>
        <span><i class="swatch flame-0" aria-hidden="true" /> {w.majority}</span>
      </p>
      <FlamePanel title={w.merged} tree={tree} asked={found} colouring="ranks" format={(value) => `${number(value)}`} ranks={ranks} />
    </>
  );
}

interface FlamePanelProps {
  title: string;
  tree: FlameTree | null;
  asked: ReturnType<typeof useAsked>;
  colouring: Colouring;
  format: (value: number) => string;
  ranks?: number;
}

function FlamePanel({ title, tree, asked, colouring, format, ranks }: FlamePanelProps) {
  const w = words.value.flame;
  const [find, setFind] = useState("");
  const full = tree !== null && (tree.children?.length ?? 0) > 0;
  return (
    <Panel
      title={title}
      contract={asked.answer?.contract}
      error={asked.error}
      again={asked.again}
      actions={
        <label>
          <span class="hidden-label">{w.search}</span>
          <input type="search" value={find} placeholder={w.search} onInput={(event) => setFind(event.currentTarget.value)} />
        </label>
      }
    >
      {tree === null ? asked.error ? null : <Loading /> : !full ? <Empty title={w.none} hint={w.noneHint} /> : (
        <>
          {colouring === "difference" ? (
            <p class="legend">
              <span><i class="swatch less" aria-hidden="true">−</i> {w.less}</span>
              <span><i class="swatch more" aria-hidden="true">+</i> {w.more}</span>
            </p>
          ) : null}
          <FlameView tree={tree} colouring={colouring} find={find} format={format} ranks={ranks ?? 0} />
          {colouring === "file" ? <Functions tree={tree} format={format} /> : null}
        </>
      )}
    </Panel>
  );
}

function Functions({ tree, format }: { tree: FlameTree; format: (value: number) => string }) {
  const w = words.value.flame;
  const rows = useMemo(() => functions(layout(tree)), [tree]);
  return (
    <details>
      <summary>{w.table}</summary>
      <table>
        <thead>
          <tr>
            <th scope="col" class="number">{w.self}</th>
            <th scope="col" class="number">%</th>
            <th scope="col" class="number">{w.total}</th>
            <th scope="col" class="number">%</th>
            <th scope="col">{w.func}</th>
          </tr>
        </thead>
        <tbody>
          {rows.slice(0, MOST_FUNCTIONS).map((row) => (
            <tr>
              <td class="number">{format(row.self)}</td>
              <td class="number">{share(row.self / tree.value)}</td>
              <td class="number">{format(row.total)}</td>
              <td class="number">{share(row.total / tree.value)}</td>
              <th scope="row">{visible(row.name, 200)}</th>
            </tr>
          ))}
        </tbody>
      </table>
    </details>
  );
}

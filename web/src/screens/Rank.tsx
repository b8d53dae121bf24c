/** A rank: its process, its stack when asked for, last operations, values over time, findings, log lines. */
import { useEffect, useState } from "preact/hooks";
import { asRequestError, get, type RequestError } from "../api.ts";
import { words } from "../i18n/index.ts";
import { History } from "../job/History.tsx";
import { cellText, rankRows } from "../job/rankRows.ts";
import { useAsked, useLive } from "../live.ts";
import { href, params } from "../location.ts";
import { Body, Empty, Loading, Panel, Trouble } from "../parts/Panel.tsx";
import { LineChart } from "../parts/LineChart.tsx";
import { StackView } from "../parts/StackView.tsx";
import { Badge } from "../parts/Badge.tsx";
import { visible, visibleLines } from "../text/escape.ts";
import { bitRate, bytes, clock, duration, number, percent } from "../text/format.ts";
import type { Answer, JobEvent, RankPage, Row, Thread } from "../types.ts";

export function Rank({ job, rank }: { job: string; rank: string }) {
  const w = words.value.rank;
  const { data: live, error: refused } = useLive<JobEvent>("live/job", "job", { job });
  const wanted = params.value;
  const rows = live ? rankRows(live.ranks) : [];
  const pid = wanted.get("pid");
  const own = rows.find((row) => (pid ? String(row.pid) === pid && row.node === wanted.get("node") : false)) ?? rows.find((row) => String(row.rank) === rank);
  const node = own?.node ?? wanted.get("node");
  const process = own ? String(own.pid) : pid;
  const run = live?.job?.run ?? wanted.get("run");
  const known = node !== null && process !== null;
  const page = useAsked<RankPage>(known ? "rank" : null, { job, run, node, pid: process }, 10_000);
  useEffect(() => {
    document.title = `${w.title(rank)} · ${visible(job, 60)} · probing`;
  }, [rank, job, w]);
  const data = page.answer?.data ?? null;
  return (
    <>
      <h1 class="screen-title">
        {w.title(visible(rank, 20))} <small>{node ? `${words.value.columns["node"]} ${visible(node, 60)}` : ""}{process ? `, pid ${process}` : ""}</small>
        {own?.blame === "culprit" ? <Badge tone="error" text={words.value.grid.culprit} /> : own?.blame === "victim" ? <Badge tone="warning" text={words.value.grid.victim} /> : null}
      </h1>
      {live && !own ? <Empty title={w.gone} hint={w.goneHint} /> : null}
      {page.error ? <Trouble error={page.error} again={page.again} /> : null}
      <div class="columns">
        <div>
          <Panel title={w.process} contract={live?.contract} live error={refused}>
            {own ? <Facts values={own.values} /> : live || refused ? null : <Loading />}
            {data?.process ? <Facts values={data.process} less={own?.values ?? {}} /> : null}
          </Panel>
          <Panel title={w.findings} contract={page.answer?.contract}>
            <Body of={data} error={page.error}>
              {(found) => <History rows={found.findings} />}
            </Body>
          </Panel>
        </div>
        <div>{known ? <StackNow node={node} pid={process} /> : null}</div>
      </div>
      <Panel title={w.series} contract={page.answer?.contract}>
        <Body of={data} error={page.error}>
          {(found) => <Charts page={found} />}
        </Body>
      </Panel>
      <div class="columns">
        <Panel title={w.ops} contract={page.answer?.contract}>
          <Body of={data} error={page.error}>
            {(found) => <Operations ops={[...(found.in_flight ?? []), ...found.ops]} job={job} />}
          </Body>
        </Panel>
        <Panel title={w.logs} contract={page.answer?.contract}>
          <Body of={data} error={page.error}>
            {(found) => <Logs rows={found.logs} />}
          </Body>
        </Panel>
      </div>
    </>
  );
}

const HIDDEN = new Set(["history", "gpus", "blame", "away", "ended", "how", "first", "node", "rank", "gpu_total_bytes", "ts", "start_ns", "job", "run", "job_source", "rank_source", "ppid", "uid", "comm"]);
// Texts that need a line of their own.
const LONG = new Set(["command", "python", "cwd"]);

function Facts({ values, less = {} }: { values: Row; less?: Row }) {
  const shown = Object.entries(values).filter(([name, value]) => !HIDDEN.has(name) && !(name in less) && value !== null && value !== undefined && value !== "" && (typeof value !== "object" || Array.isArray(value)));
  return (
    <dl class="facts-list">
      {shown.slice(0, 60).map(([name, value]) => (
        <div class={LONG.has(name) ? "long" : ""}>
          <dt>{words.value.columns[name] ?? visible(name, 40).replace(/_/g, " ")}</dt>
          <dd>{visible(cellText(name, value), 300)}</dd>
        </div>
      ))}
    </dl>
  );
}

/** Reads the stack when it is asked for: a look costs the process nothing, but it is no one's default. */
function StackNow({ node, pid }: { node: string; pid: string }) {
  const w = words.value.rank;
  const [native, setNative] = useState(false);
  const [locals, setLocals] = useState(false);
  const [busy, setBusy] = useState(false);
  const [answer, setAnswer] = useState<Answer<Thread[]> | null>(null);
  const [error, setError] = useState<RequestError | null>(null);
  const read = async () => {
    setBusy(true);
    setError(null);
    try {
      setAnswer(await get<Thread[]>("stacks", { node, pid, native, locals }));
    } catch (problem) {
      setError(asRequestError(problem));
    } finally {
      setBusy(false);
    }
  };
  useEffect(() => void read(), [node, pid]);
  const threads = answer?.data ?? [];
  const main = threads.filter((thread) => thread.trains);
  const others = threads.filter((thread) => !thread.trains);
  return (
    <Panel
      title={w.stack}
      contract={answer?.contract}
      error={error}
      actions={
        <>
          <label><input type="checkbox" checked={native} onChange={(event) => setNative(event.currentTarget.checked)} /> {w.native}</label>
          <label><input type="checkbox" checked={locals} onChange={(event) => setLocals(event.currentTarget.checked)} /> {w.locals}</label>
          <button type="button" onClick={read} disabled={busy} title={w.stackHint}>{busy ? w.reading : w.now}</button>
        </>
      }
    >
      {answer === null && !error ? <Loading /> : null}
      {main.map((thread) => (
        <ThreadView thread={thread} />
      ))}
      {others.length ? (
        <details open={main.length === 0}>
          <summary>{w.other(others.length)}</summary>
          {others.slice(0, 200).map((thread) => (
            <ThreadView thread={thread} />
          ))}
        </details>
      ) : null}
    </Panel>
  );
}

function ThreadView({ thread }: { thread: Thread }) {
  return (
    <section class="thread">
      <h3>
        {visible(thread.thread, 60)} <span class="soft">tid {thread.tid}{thread.state ? `, ${visible(thread.state, 30)}` : ""}{thread.gil ? ", GIL" : ""}</span>
      </h3>
      <StackView frames={thread.frames} />
      {thread.native_missing ? <p class="soft small">{visible(thread.native_missing, 300)}</p> : null}
    </section>
  );
}

function Charts({ page }: { page: RankPage }) {
  const w = words.value;
  const names = Object.keys(page.series).filter((name) => (page.series[name]?.t.length ?? 0) > 1);
  if (!names.length) return <p class="soft">{w.state.nothing}</p>;
  return (
    <div class="charts">
      {names.slice(0, 24).map((name) => {
        const series = page.series[name] as RankPage["series"][string];
        const last = series.v[series.v.length - 1] ?? null;
        const format = formatOf(name, series.unit);
        return (
          <figure>
            <figcaption>
              {visible(w.columns[name] ?? name.replace(/_/g, " "), 60)} <b>{format(last)}</b>
            </figcaption>
            <LineChart x={series.t} series={[series.v]} lines={[{ label: name, tone: "accent", width: 1.5 }]} time label={`${visible(name, 60)}: ${format(last)}`} height={110} format={format} />
          </figure>
        );
      })}
    </div>
  );
}

function formatOf(name: string, unit: string): (value: number | null) => string {
  if (unit === "bytes" || unit === "B" || name.endsWith("_bytes")) return bytes;
  if (unit === "Gb/s") return bitRate;
  if (unit === "ns" || name.endsWith("_ns")) return duration;
  if (unit === "%" || name.endsWith("_pct")) return percent;
  return (value) => `${number(value)}${unit ? ` ${visible(unit, 12)}` : ""}`;
}

function Operations({ ops, job }: { ops: readonly Row[]; job: string }) {
  const w = words.value.rank;
  if (!ops.length) return <p class="soft">{w.none}</p>;
  const value = (row: Row, name: string) => visible(cellText(name, row[name]), 80);
  return (
    <div class="scroll tall" tabIndex={0} role="region" aria-label={w.ops}>
      <p><a href={href({ screen: "timeline", job }, { since: "1m" })}>{words.value.timeline.title}</a></p>
      <table>
        <thead>
          <tr>
            <th scope="col">{w.when}</th>
            <th scope="col">{w.op}</th>
            <th scope="col" class="number">{w.seq}</th>
            <th scope="col">{w.comm}</th>
            <th scope="col" class="number">{w.took}</th>
            <th scope="col" class="number">{w.size}</th>
            <th scope="col">{w.state}</th>
          </tr>
        </thead>
        <tbody>
          {ops.slice(0, 100).map((row) => (
            <tr>
              <td class="number">{visible(timeOf(row["ts"]), 40)}</td>
              <th scope="row">{value(row, "op")}</th>
              <td class="number">{value(row, "seq")}</td>
              <td>{visible(String(row["comm_name"] ?? row["comm"] ?? ""), 60)}</td>
              <td class="number">{duration(asNumber(row["duration_ns"] ?? row["age_ns"]))}</td>
              <td class="number">{bytes(asNumber(row["bytes"]))}</td>
              <td>{value(row, "state")}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

function asNumber(value: unknown): number | null {
  return typeof value === "number" ? value : null;
}

/** The time of day of a row, to the millisecond. */
function timeOf(value: unknown): string {
  if (typeof value !== "string") return "–";
  const match = /T(\d\d:\d\d:\d\d)(\.\d{1,3})?/.exec(value);
  return match ? `${match[1]}${match[2] ?? ""}` : clock(value);
}

function Logs({ rows }: { rows: readonly Row[] }) {
  const w = words.value.rank;
  if (!rows.length) return <p class="soft">{w.none}</p>;
  return (
    <ol class="logs" tabIndex={0}>
      {rows.slice(0, 50).map((row) => (
        <li class={row["kind"] === "error" || row["kind"] === "exception" ? "bad-news" : ""}>
          <time>{visible(timeOf(row["ts"]), 30)}</time> {visibleLines(String(row["line"] ?? ""), 500).slice(0, 5).join(" ")}
        </li>
      ))}
    </ol>
  );
}

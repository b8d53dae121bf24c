/** The timeline of a job: which range, the timeline, and the figures of what is chosen on it. */
import { useEffect, useMemo, useState } from "preact/hooks";
import { bytesOf, RequestError, url } from "../api.ts";
import { words } from "../i18n/index.ts";
import { href, params, setParams } from "../location.ts";
import { ContractLine } from "../parts/Contract.tsx";
import { Empty, Loading, Panel, Trouble } from "../parts/Panel.tsx";
import { visible } from "../text/escape.ts";
import { duration, number } from "../text/format.ts";
import { decode } from "../timeline/columns.ts";
import { ChosenOperation, RangeFigures } from "../timeline/Details.tsx";
import { sceneOf, type Scene } from "../timeline/scene.ts";
import { TimelineView, type Chosen } from "../timeline/TimelineView.tsx";
import type { View } from "../timeline/view.ts";
import type { Contract } from "../types.ts";

const LENGTHS = ["10s", "30s", "1m", "5m", "30m", "2h"];
const DEFAULT = "1m";

type State = { scene: Scene | null; error: RequestError | null; loading: boolean };

export function Timeline({ job }: { job: string }) {
  const w = words.value.timeline;
  const query = params.value;
  const [from, to, since] = [query.get("from"), query.get("to"), query.get("since") ?? DEFAULT];
  const [turn, setTurn] = useState(0);
  const [{ scene, error, loading }, setState] = useState<State>({ scene: null, error: null, loading: true });
  const [chosen, setChosen] = useState<Chosen>({ op: -1, time: null, row: -1 });
  useEffect(() => {
    document.title = `${w.title} · ${visible(job, 60)} · probing`;
  }, [job, w]);
  useEffect(() => {
    const stop = new AbortController();
    setState((old) => ({ ...old, error: null, loading: true }));
    const load = async () => {
      try {
        const columns = decode(await bytesOf("timeline", from ? { job, from, to } : { job, since }, stop.signal));
        const end = columns.header["to_ns"];
        const length = typeof end === "string" ? Number(BigInt(end) - columns.fromNs) / 1e3 : 0;
        setChosen({ op: -1, time: null, row: -1 });
        setState({ scene: sceneOf(columns, length), error: null, loading: false });
      } catch (problem) {
        if (stop.signal.aborted) return;
        const known = problem instanceof RequestError ? problem : new RequestError("failed", problem instanceof Error ? problem.message : String(problem));
        setState({ scene: null, error: known, loading: false });
      }
    };
    void load();
    return () => stop.abort();
  }, [job, from, to, since, turn]);
  const start = useMemo(() => (scene ? windowOf(scene, query.get("view")) : null), [scene]);
  const range = useMemo(() => (scene ? windowOf(scene, query.get("range"), null) : null), [scene, query.get("range")]);
  const absolute = scene ? { from: iso(scene, 0), to: iso(scene, scene.length) } : null;
  const flame = scene && range ? href({ screen: "flame", job }, { from: iso(scene, range.from), to: iso(scene, range.to), wall: "1" }) : "";
  return (
    <>
      <h1 class="screen-title">
        {w.title} <small>{scene ? w.ops(number(scene.ops.count)) : ""}</small>
      </h1>
      <form class="controls" onSubmit={(event) => event.preventDefault()}>
        <label>
          {w.last}{" "}
          <select
            value={from ? "" : since}
            onChange={(event) => {
              const chosenLength = event.currentTarget.value;
              if (chosenLength) setParams({ since: chosenLength, from: null, to: null, view: null, range: null }, false);
            }}
          >
            {from ? <option value="">{`${visible(from, 40)} …`}</option> : null}
            {[...new Set([...LENGTHS, since])].map((length) => (
              <option value={length}>{length}</option>
            ))}
          </select>
        </label>
        <button type="button" onClick={() => setTurn(turn + 1)} disabled={loading}>{w.load}</button>
        {absolute ? (
          <>
            <a class="button" href={url("timeline/download", { job, ...absolute, format: "pftrace" })} download title={w.perfettoHint}>{w.perfetto}</a>
            <a class="button" href={url("timeline/download", { job, ...absolute, format: "json" })} download>{w.chrome}</a>
          </>
        ) : null}
      </form>
      {error ? <Trouble error={error} again={() => setTurn(turn + 1)} /> : null}
      {scene === null ? (
        loading ? <Loading /> : null
      ) : scene.ops.count === 0 && scene.samples.order.length === 0 ? (
        <Empty title={w.none} hint={w.noneHint} />
      ) : (
        <>
          {scene.notes.map((note) => (
            <p class="note">▲ {visible(note, 300)}</p>
          ))}
          <section class="panel" aria-label={w.title}>
            <TimelineView scene={scene} view={start ?? { from: 0, to: scene.length }} onView={(view) => setParams({ view: viewText(view, scene) })} range={range} onRange={(one) => setParams({ range: one ? viewText(one, scene) : null })} onChosen={setChosen} />
            <Signs scene={scene} />
            <ChosenOperation scene={scene} chosen={chosen} job={job} />
            <ContractLine contract={contractOfScene(scene)} />
          </section>
          <Panel title={w.stats}>
            <RangeFigures scene={scene} range={range} flame={flame} clear={() => setParams({ range: null })} />
          </Panel>
        </>
      )}
    </>
  );
}

/** What the timeline rests on, by its own header. */
function contractOfScene(scene: Scene): Contract {
  const nodes = Math.max(scene.columns.clocks.length, new Set(scene.columns.ranks.map((rank) => rank.node)).size);
  const counts = scene.columns.losses.map((loss) => loss.rows);
  const lost = counts.includes(null) ? null : counts.reduce<number>((sum, rows) => sum + (rows ?? 0), 0);
  return { asked: nodes, answered: nodes, failures: [], at: iso(scene, scene.length), lost_rows: lost, clock_error_ns: scene.clockError === null ? null : scene.clockError * 1e3 };
}

function Signs({ scene }: { scene: Scene }) {
  const w = words.value.timeline;
  return (
    <p class="legend">
      <span><i class="swatch sign-waits" aria-hidden="true" /> {w.waits}</span>
      <span><i class="swatch sign-runs" aria-hidden="true" /> {w.runs}</span>
      <span><i class="swatch sign-between" aria-hidden="true" /> {w.between}</span>
      {scene.steps.order.length ? <span><i class="swatch sign-step" aria-hidden="true" /> {w.step}</span> : null}
      {scene.samples.order.length ? <span><i class="swatch sign-sample" aria-hidden="true" /> {w.sample}</span> : null}
      {scene.gaps.length ? <span><i class="swatch sign-lost" aria-hidden="true" /> {w.lost} ({scene.gaps.length})</span> : null}
      {scene.markers.length ? <span><i class="swatch sign-finding" aria-hidden="true">▼</i> {w.finding}</span> : null}
      {scene.clockError === null ? null : <span>{w.clock(duration(scene.clockError * 1e3))}</span>}
      {scene.columns.comms.length > 1 ? <span><i class="swatch several" aria-hidden="true" /> {w.several}</span> : null}
      {scene.columns.comms.slice(0, 8).map((comm, index) => (
        <span><i class={`swatch comm-${index}`} aria-hidden="true" /> {visible(comm, 40)}</span>
      ))}
    </p>
  );
}

function iso(scene: Scene, us: number): string {
  const ns = scene.columns.fromNs + BigInt(Math.round(us * 1e3));
  const whole = new Date(Number(ns / 1_000_000n)).toISOString().slice(0, 19);
  return `${whole}.${(ns % 1_000_000_000n).toString().padStart(9, "0")}Z`;
}

/** A window as it stands in the address: µs from the begin of the range. */
function viewText(view: View, scene: Scene): string | null {
  if (view.from <= 0 && view.to >= scene.length) return null;
  return `${view.from.toFixed(1)}-${view.to.toFixed(1)}`;
}

function windowOf(scene: Scene, text: string | null, whole: View | null = { from: 0, to: scene.length }): View | null {
  const match = /^(\d+(?:\.\d+)?)-(\d+(?:\.\d+)?)$/.exec(text ?? "");
  if (!match) return whole;
  const view = { from: Number(match[1]), to: Math.min(Number(match[2]), scene.length) };
  return view.from < view.to ? view : whole;
}

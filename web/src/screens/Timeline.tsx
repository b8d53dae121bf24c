/** The timeline of a job: which range, its downloads, and the panels of the timeline. */
import { useEffect, useMemo, useState } from "preact/hooks";
import { bytesOf, RequestError, url } from "../api.ts";
import { words } from "../i18n/index.ts";
import { href, params, setParams } from "../location.ts";
import { Loading, Trouble } from "../parts/Panel.tsx";
import { visible } from "../text/escape.ts";
import { number } from "../text/format.ts";
import { decode } from "../timeline/columns.ts";
import { sceneOf, type Scene } from "../timeline/scene.ts";
import { TimelinePanels } from "../timeline/TimelinePanels.tsx";
import { instant, type View } from "../timeline/view.ts";

const LENGTHS = ["10s", "30s", "1m", "5m", "30m", "2h"];
const DEFAULT = "1m";

type State = { scene: Scene | null; error: RequestError | null; loading: boolean };

export function Timeline({ job }: { job: string }) {
  const w = words.value.timeline;
  const query = params.value;
  const [from, to, since] = [query.get("from"), query.get("to"), query.get("since") ?? DEFAULT];
  const [turn, setTurn] = useState(0);
  const [{ scene, error, loading }, setState] = useState<State>({ scene: null, error: null, loading: true });
  useEffect(() => {
    document.title = `${w.title} · ${visible(job, 60)} · probing`;
  }, [job, w]);
  useEffect(() => {
    const stop = new AbortController();
    setState((old) => ({ ...old, error: null, loading: true }));
    const load = async () => {
      try {
        const columns = decode(await bytesOf("timeline", from ? { job, from, to } : { job, since }, stop.signal));
        setState({ scene: sceneOf(columns), error: null, loading: false });
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
  const whole = scene ? boundsOf(scene, { from: 0, to: scene.length }) : null;
  // A range without an end reaches to the present, and has the operations in flight.
  const download = (format: string) => url("timeline/download", { job, from: whole?.from, to: to && whole?.to, format });
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
        {scene ? (
          <>
            <a class="button" href={download("pftrace")} download title={w.perfettoHint}>{w.perfetto}</a>
            <a class="button" href={download("json")} download>{w.chrome}</a>
            <a class="button" href={download("html")} download>{words.value.finding.mail}</a>
          </>
        ) : null}
      </form>
      {error ? <Trouble error={error} again={() => setTurn(turn + 1)} /> : null}
      {scene !== null ? (
        <TimelinePanels
          scene={scene}
          view={start ?? { from: 0, to: scene.length }}
          onView={(view) => setParams({ view: viewText(view, scene) })}
          range={range}
          onRange={(one) => setParams({ range: one ? viewText(one, scene) : null })}
          rankHref={(rank) => href({ screen: "rank", job, rank: String(rank.rank) }, { node: rank.node, pid: String(rank.pid) })}
          flameHref={(one) => href({ screen: "flame", job }, { ...boundsOf(scene, one), wall: "1" })}
        />
      ) : loading ? (
        <Loading />
      ) : null}
    </>
  );
}

function boundsOf(scene: Scene, view: View): { from: string; to: string } {
  return { from: instant(scene.columns.fromNs, view.from), to: instant(scene.columns.fromNs, view.to) };
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

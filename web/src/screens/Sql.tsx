/** SQL over the nodes: an editor with the tables beside it, and the rows as a table or a chart. */
import { useEffect, useRef, useState } from "preact/hooks";
import { asRequestError, download, post, type RequestError, session } from "../api.ts";
import { words } from "../i18n/index.ts";
import { useAsked } from "../live.ts";
import { params, setParams } from "../location.ts";
import { Loading, Panel } from "../parts/Panel.tsx";
import type { Editor } from "../sql/editor.ts";
import { ResultChart } from "../sql/ResultChart.tsx";
import { ResultTable } from "../sql/ResultTable.tsx";
import { visible } from "../text/escape.ts";
import { duration, number } from "../text/format.ts";
import type { Answer, QueryResult, TableDoc } from "../types.ts";

interface PlanStep {
  step: string;
  where: string;
  why: string;
  sql: string;
}

const EXAMPLE = "SELECT node, job, rank, pid, state\nFROM process.processes\nWHERE role = 'trainer'\nORDER BY job, rank";

export function Sql() {
  const w = words.value.sql;
  const query = params.value;
  const usual = session.value?.all_nodes ?? false;
  const [all, setAll] = useState(query.get("all") === null ? usual : query.get("all") === "1");
  const [editor, setEditor] = useState<Editor | null>(null);
  const [answer, setAnswer] = useState<{ answer: Answer<QueryResult>; ms: number } | null>(null);
  const [plan, setPlan] = useState<PlanStep[] | null>(null);
  const [error, setError] = useState<RequestError | null>(null);
  const [busy, setBusy] = useState(false);
  const chart = query.get("show") === "chart";
  const tables = useAsked<TableDoc[]>("tables");
  const running = useRef<AbortController | null>(null);
  useEffect(() => {
    document.title = `${w.title} · probing`;
  }, [w]);
  useEffect(() => {
    if (editor && tables.answer) editor.tables(tables.answer.data);
  }, [editor, tables.answer]);
  const sql = () => editor?.text() ?? params.peek().get("q") ?? EXAMPLE;
  const asked = async (act: (stop: AbortSignal) => Promise<void>) => {
    running.current?.abort();
    const stop = new AbortController();
    running.current = stop;
    setBusy(true);
    setError(null);
    setParams({ q: sql(), all: all === usual ? null : all ? "1" : "0" });
    try {
      await act(stop.signal);
    } catch (problem) {
      if (!stop.signal.aborted) setError(asRequestError(problem));
    } finally {
      if (running.current === stop) setBusy(false);
    }
  };
  const run = () =>
    asked(async (stop) => {
      const begun = performance.now();
      const found = await post<QueryResult>("query", { sql: sql(), all_nodes: all }, stop);
      setPlan(null);
      setAnswer({ answer: found, ms: performance.now() - begun });
    });
  const explain = () =>
    asked(async (stop) => {
      setPlan((await post<PlanStep[]>("query/plan", { sql: sql(), all_nodes: all }, stop)).data);
    });
  const save = (format: "csv" | "parquet") => asked(() => download("query/download", { sql: sql(), format, all_nodes: all }, `rows.${format}`));
  const runNow = useRef(run);
  runNow.current = run;
  useEffect(() => {
    // A pasted address shows its answer at once.
    if (editor && query.get("q")) void runNow.current();
  }, [editor]);
  const result = answer?.answer.data;
  return (
    <>
      <h1 class="screen-title">{w.title} <small>{w.hint}</small></h1>
      <div class="sql-screen">
        <div class="sql-main">
          <SqlEditor text={query.get("q") ?? EXAMPLE} onReady={setEditor} onRun={() => void runNow.current()} />
          <div class="controls">
            <button type="button" class="primary" onClick={run} disabled={busy}>{w.run}</button>
            <button type="button" onClick={explain} disabled={busy}>{w.plan}</button>
            <button type="button" onClick={() => save("csv")} disabled={busy}>{w.csv}</button>
            <button type="button" onClick={() => save("parquet")} disabled={busy}>{w.parquet}</button>
            <label><input type="checkbox" checked={all} onChange={(event) => setAll(event.currentTarget.checked)} /> {w.all}</label>
          </div>
          {plan !== null ? (
            <Panel title={w.plan}>
              <ol class="plan">
                {plan.slice(0, 100).map((step) => (
                  <li>
                    <b>{visible(step.step, 60)}</b> {visible(step.where, 200)} <span class="soft">{visible(step.why, 400)}</span>
                    <pre tabIndex={0}>{visible(step.sql, 20_000)}</pre>
                  </li>
                ))}
              </ol>
            </Panel>
          ) : null}
          {error ? <Panel title={w.table} error={error} /> : null}
          {busy ? <Loading /> : null}
          {result ? (
            <Panel
              title={w.rows(number(result.rows.length), duration((answer?.ms ?? 0) * 1e6))}
              contract={answer?.answer.contract}
              actions={
                <>
                  <button type="button" aria-pressed={!chart} onClick={() => setParams({ show: null })}>{w.table}</button>
                  <button type="button" aria-pressed={chart} onClick={() => setParams({ show: "chart" })}>{w.chart}</button>
                </>
              }
            >
              {result.truncated ? <p class="note">▲ {w.cut}</p> : null}
              {result.warnings.slice(0, 10).map((warning) => <p class="note">▲ {visible(warning, 500)}</p>)}
              {chart ? <ResultChart result={result} /> : <ResultTable result={result} />}
            </Panel>
          ) : null}
        </div>
        <TableList tables={tables.answer?.data ?? null} onInsert={(text) => editor?.insert(text)} />
      </div>
    </>
  );
}

function SqlEditor({ text, onReady, onRun }: { text: string; onReady: (editor: Editor | null) => void; onRun: () => void }) {
  const w = words.value.sql;
  const box = useRef<HTMLDivElement>(null);
  const [failed, setFailed] = useState(false);
  useEffect(() => {
    let made: Editor | null = null;
    let gone = false;
    const load = async () => {
      try {
        const { makeEditor } = await import("../sql/editor.ts");
        if (gone || !box.current) return;
        made = makeEditor(box.current, text, w.editor, w.hint, onRun, () => undefined);
        onReady(made);
      } catch {
        setFailed(true);
      }
    };
    void load();
    return () => {
      gone = true;
      made?.destroy();
      onReady(null);
    };
  }, []);
  return (
    <>
      <div ref={box} class="sql-editor" />
      {failed ? <p class="note">▲ {words.value.state.gone}</p> : null}
    </>
  );
}

function TableList({ tables, onInsert }: { tables: TableDoc[] | null; onInsert: (text: string) => void }) {
  const w = words.value.sql;
  const [filter, setFilter] = useState("");
  const wanted = filter.trim().toLowerCase();
  const shown = (tables ?? []).filter((one) => !wanted || one.table.toLowerCase().includes(wanted) || one.columns.some((column) => column.name.toLowerCase().includes(wanted)));
  return (
    <aside class="tables panel" aria-label={w.tables}>
      <label>
        <span class="hidden-label">{w.filter}</span>
        <input type="search" value={filter} placeholder={w.filter} onInput={(event) => setFilter(event.currentTarget.value)} />
      </label>
      {tables === null ? <Loading /> : null}
      <ul>
        {shown.slice(0, 300).map((one) => (
          <li key={one.table}>
            <details>
              <summary>
                <code>{visible(one.table, 80)}</code>
              </summary>
              <p class="soft small">{visible(one.doc, 600)}</p>
              <button type="button" class="small" onClick={() => onInsert(one.table)}>{w.insert}</button>
              <dl>
                {one.columns.slice(0, 300).map((column) => (
                  <>
                    <dt>
                      <code>{visible(column.name, 80)}</code> <span class="soft">{visible(column.type, 60)}</span>
                    </dt>
                    <dd class="soft">{visible(column.doc, 400)}</dd>
                  </>
                ))}
              </dl>
            </details>
          </li>
        ))}
      </ul>
    </aside>
  );
}

/** The nodes: who answers, what their hardware says, their GPUs with the ranks on them, what the daemon costs. */
import { useEffect, useState } from "preact/hooks";
import { post, RequestError, session } from "../api.ts";
import { words } from "../i18n/index.ts";
import { useAsked } from "../live.ts";
import { Badge, toneOf } from "../parts/Badge.tsx";
import { WithCommands } from "../parts/Copy.tsx";
import { Body, Panel } from "../parts/Panel.tsx";
import { headline, Original } from "../parts/Sentence.tsx";
import { visible } from "../text/escape.ts";
import { bytes, duration, number, percent } from "../text/format.ts";
import type { QueryResult, Row } from "../types.ts";

interface Status {
  node: string;
  address: string;
  version: string;
  state: string;
  reason: string;
  uptime_ns: number;
  processes: number;
  store_bytes: number;
  sources: { name: string; state: string; reason: string; lost: number | null }[];
}

interface Health {
  node: string;
  gpus: number;
  ports: number;
  disks: number;
  findings: { verdict: string; severity: string; sentence: string; evidence: string[]; next_steps: string[] }[];
  missing: string[];
}

interface Topo {
  node: string;
  gpus: { device_id: number; name: string; bus_id: string; numa_node: number | null; pcie_width: number | null; pcie_gen: number | null; state: string | null; ranks: number[]; jobs: string[] }[];
  links: Row[];
}

interface Preflight {
  ok: boolean;
  results: { check: string; state: string; text: string; nodes: string[]; hint: string | null }[];
}

const EVERY_MS = 30_000;
const COST = "SELECT node, sum(cpu_pct) AS cpu_pct, sum(rss_bytes) AS rss_bytes FROM (SELECT node, process, pid, avg(cpu_pct) AS cpu_pct, arg_max(rss_bytes, ts) AS rss_bytes FROM probing.cost WHERE ts > now() - INTERVAL 2 MINUTE GROUP BY node, process, pid) GROUP BY node";

export function Nodes() {
  const w = words.value.nodes;
  const status = useAsked<Status | Status[]>("status", {}, EVERY_MS);
  const nodes = useAsked<Row[]>("nodes", {}, EVERY_MS);
  const health = useAsked<Health[]>("health", {}, EVERY_MS * 2);
  const topo = useAsked<Topo[]>("topo", {}, 0);
  const costs = useCosts();
  const [checking, setChecking] = useState(false);
  // The nodes connect to each other for it, so it is done on request only.
  const checks = useAsked<Preflight>(checking ? "preflight" : null);
  useEffect(() => {
    document.title = `${w.title} · probing`;
  }, [w]);
  const list = status.answer ? (Array.isArray(status.answer.data) ? status.answer.data : [status.answer.data]) : null;
  return (
    <>
      <h1 class="screen-title">{w.title}</h1>
      <Panel title={w.title} contract={status.answer?.contract} error={status.error} again={status.again}>
        <Body of={list} error={status.error}>
          {(found) => (found.length ? <StatusTable rows={found} members={nodes.answer?.data ?? []} costs={costs} /> : <p class="soft">{w.none}</p>)}
        </Body>
      </Panel>
      <Panel
        title={w.preflight}
        contract={checks.answer?.contract}
        error={checks.error}
        actions={<button type="button" disabled={checks.loading} onClick={() => (checking ? checks.again() : setChecking(true))}>{checking ? w.checkAgain : w.check}</button>}
      >
        {checking ? <Body of={checks.answer?.data} error={checks.error}>{(report) => <Checks report={report} />}</Body> : <p class="soft">{w.preflightHint}</p>}
      </Panel>
      <div class="columns">
        <Panel title={w.health} contract={health.answer?.contract} error={health.error} again={health.again}>
          <Body of={health.answer?.data} error={health.error}>
            {(found) => <HealthList rows={found} />}
          </Body>
        </Panel>
        <Panel title={w.topo} contract={topo.answer?.contract} error={topo.error} again={topo.again}>
          <Body of={topo.answer?.data} error={topo.error}>
            {(found) => <TopoList rows={found} />}
          </Body>
        </Panel>
      </div>
    </>
  );
}

/** Returns what the daemon of each node costs: CPU in percent of a core, and memory. */
function useCosts(): Map<string, { cpu: number | null; rss: number | null }> {
  const [costs, setCosts] = useState(new Map<string, { cpu: number | null; rss: number | null }>());
  useEffect(() => {
    const stop = new AbortController();
    post<QueryResult>("query", { sql: COST, all_nodes: session.value?.all_nodes ?? false }, stop.signal)
      .then(({ data }) => setCosts(new Map(data.rows.map(([node, cpu, rss]) => [String(node), { cpu: typeof cpu === "number" ? cpu : null, rss: rss === null ? null : Number(rss) }]))))
      .catch((error: unknown) => {
        // The column stays empty; the panel's other figures do not depend on it.
        if (!(error instanceof RequestError) && !stop.signal.aborted) throw error;
      });
    return () => stop.abort();
  }, []);
  return costs;
}

function StatusTable({ rows, members, costs }: { rows: readonly Status[]; members: readonly Row[]; costs: Map<string, { cpu: number | null; rss: number | null }> }) {
  const w = words.value.nodes;
  const known = new Set(rows.map((row) => row.node));
  const away = members.filter((member) => typeof member["member"] === "string" && !known.has(member["member"]) && member["state"] !== "healthy");
  return (
    <div class="scroll" tabIndex={0} role="region" aria-label={w.title}>
      <table>
        <thead>
          <tr>
            <th scope="col">{w.node}</th>
            <th scope="col">{w.state}</th>
            <th scope="col">{w.sources}</th>
            <th scope="col" class="number">{w.cost}</th>
            <th scope="col" class="number">{words.value.columns["rss_bytes"]}</th>
            <th scope="col" class="number">{w.store}</th>
            <th scope="col" class="number">{w.processes}</th>
            <th scope="col" class="number">{w.up}</th>
            <th scope="col">{w.version}</th>
            <th scope="col">{w.address}</th>
          </tr>
        </thead>
        <tbody>
          {away.slice(0, 200).map((member) => (
            <tr class="row-warning">
              <th scope="row">{visible(String(member["member"]), 60)}</th>
              <td><Badge tone="error" text={String(member["state"] ?? "?")} /></td>
              <td colSpan={7} />
              <td>{visible(String(member["address"] ?? ""), 80)}</td>
            </tr>
          ))}
          {rows.slice(0, 2000).map((row) => {
            const cost = costs.get(row.node);
            const bad = row.sources.filter((source) => source.state === "degraded");
            return (
              <tr>
                <th scope="row">{visible(row.node, 60)}</th>
                <td>
                  <Badge tone={row.state === "running" ? "ok" : row.state === "paused" ? "soft" : "warning"} text={row.state} />
                  {row.reason ? <div class="soft small">{visible(row.reason, 300)}</div> : null}
                </td>
                <td>
                  {bad.length === 0 ? <span class="soft">{w.ok}</span> : bad.slice(0, 8).map((source) => (
                    <div class="small"><b>{visible(source.name, 40)}</b> {visible(source.state, 30)}{source.reason ? `: ${visible(source.reason, 200)}` : ""}</div>
                  ))}
                </td>
                <td class="number">{percent(cost?.cpu)}</td>
                <td class="number">{bytes(cost?.rss)}</td>
                <td class="number">{bytes(row.store_bytes)}</td>
                <td class="number">{number(row.processes)}</td>
                <td class="number">{duration(row.uptime_ns)}</td>
                <td>{visible(row.version, 30)}</td>
                <td>{visible(row.address, 80)}</td>
              </tr>
            );
          })}
        </tbody>
      </table>
    </div>
  );
}

const CHECK_TONES: Record<string, "error" | "warning" | "ok"> = { fail: "error", warn: "warning", pass: "ok" };
const CHECK_ORDER = ["fail", "warn", "skipped", "pass"];

function Checks({ report }: { report: Preflight }) {
  const w = words.value.nodes;
  const rows = [...report.results].sort((a, b) => CHECK_ORDER.indexOf(a.state) - CHECK_ORDER.indexOf(b.state));
  return (
    <>
      <p>{report.ok ? `✓ ${w.fit}` : `✕ ${w.unfit}`}</p>
      <div class="scroll" tabIndex={0} role="region" aria-label={w.preflight}>
        <table class="checks">
          <tbody>
            {rows.slice(0, 500).map((row) => (
              <tr>
                <td><Badge tone={CHECK_TONES[row.state] ?? "soft"} text={w.checks[row.state] ?? row.state} /></td>
                <th scope="row">{visible(row.check, 60)}</th>
                <td>
                  {visible(row.text, 600)}
                  {row.hint ? <div class="soft small"><WithCommands text={row.hint} /></div> : null}
                </td>
                <td class="soft">{visible(row.nodes.slice(0, 8).join(", "), 300)}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </>
  );
}

function HealthList({ rows }: { rows: readonly Health[] }) {
  const w = words.value.nodes;
  const findings = rows.flatMap((row) => row.findings.map((finding) => ({ node: row.node, finding })));
  const missing = rows.flatMap((row) => row.missing.map((text) => ({ node: row.node, text })));
  const sum = (name: "gpus" | "ports" | "disks") => rows.reduce((total, row) => total + (row[name] ?? 0), 0);
  return (
    <>
      {findings.length === 0 ? <p>✓ {w.healthy}</p> : null}
      <ul class="health">
        {findings.slice(0, 100).map(({ node, finding }) => (
          <li>
            <p>
              <Badge tone={toneOf(finding.severity)} text={words.value.severity[finding.severity] ?? finding.severity} /> <b>{visible(node, 60)}</b> {headline(finding, 400)} <Original finding={finding} longest={400} />
            </p>
            <ul>
              {finding.evidence.slice(0, 10).map((line) => <li class="soft">{visible(line, 300)}</li>)}
              {finding.next_steps.slice(0, 5).map((line) => <li><WithCommands text={line} /></li>)}
            </ul>
          </li>
        ))}
      </ul>
      <p class="soft">{w.looked(sum("gpus"), sum("ports"), sum("disks"))}</p>
      {missing.length ? (
        <details>
          <summary>{w.unread} ({missing.length})</summary>
          <ul>{missing.slice(0, 100).map(({ node, text }) => <li><b>{visible(node, 60)}</b> {visible(text, 300)}</li>)}</ul>
        </details>
      ) : null}
    </>
  );
}

function TopoList({ rows }: { rows: readonly Topo[] }) {
  const w = words.value.nodes;
  const full = rows.filter((row) => row.gpus.length > 0);
  if (!full.length) return <p class="soft">{w.noGpus}</p>;
  return (
    <div class="scroll" tabIndex={0} role="region" aria-label={w.topo}>
      <table>
        <thead>
          <tr>
            <th scope="col">{w.node}</th>
            <th scope="col">{w.gpu}</th>
            <th scope="col">{w.ranks}</th>
            <th scope="col" class="number">{w.lanes}</th>
            <th scope="col" class="number">{w.numa}</th>
            <th scope="col">{w.links}</th>
          </tr>
        </thead>
        <tbody>
          {full.slice(0, 500).flatMap((row) =>
            row.gpus.map((gpu, index) => (
              <tr>
                <th scope="row">{index === 0 ? visible(row.node, 60) : ""}</th>
                <td>{gpu.device_id} <span class="soft">{visible(gpu.name ?? "", 60)}</span></td>
                <td>{(gpu.ranks ?? []).slice(0, 16).join(", ")}</td>
                <td class="number">{gpu.pcie_gen ? `gen ${gpu.pcie_gen} ×${gpu.pcie_width ?? "?"}` : "–"}</td>
                <td class="number">{gpu.numa_node ?? "–"}</td>
                <td>{visible(linksOf(row, gpu.device_id), 200)}</td>
              </tr>
            )),
          )}
        </tbody>
      </table>
    </div>
  );
}

/** The other ends of the links of a GPU, with their kind. */
function linksOf(row: Topo, device: number): string {
  return row.links
    .filter((link) => link["device_id"] === device)
    .slice(0, 18)
    .map((link) => `${String(link["kind"] ?? link["link"] ?? "")} ${String(link["peer"] ?? link["peer_device_id"] ?? link["nic"] ?? "")}`.trim())
    .filter(Boolean)
    .join(", ");
}

/** A job: its finding first, then its ranks, who waits for whom, step times, balance, earlier findings. */
import { useEffect } from "preact/hooks";
import { url } from "../api.ts";
import { words } from "../i18n/index.ts";
import { BalanceBars } from "../job/BalancePanel.tsx";
import { FindingHead, FindingRest, Others, SameByCommand, StackPair, Who, WhoInBrief } from "../job/Finding.tsx";
import { History } from "../job/History.tsx";
import { RankGrid } from "../job/RankGrid.tsx";
import { StepsChart } from "../job/StepsPanel.tsx";
import { WaitsGraph } from "../job/WaitsPanel.tsx";
import { useAsked, useLive } from "../live.ts";
import { href } from "../location.ts";
import { StateBadge } from "../parts/Badge.tsx";
import { ContractLine } from "../parts/Contract.tsx";
import { Body, Empty, Loading, Panel, Trouble } from "../parts/Panel.tsx";
import { headline } from "../parts/Sentence.tsx";
import { visible } from "../text/escape.ts";
import { rate } from "../text/format.ts";
import type { Balance, Finding, HistoryRow, JobEvent, Steps, Waits } from "../types.ts";

const SELDOM_MS = 30_000;
// The answers of more nodes take the server so long that the diagnosis comes before the other panels.
const AT_ONCE_NODES = 100;

export function Job({ job }: { job: string }) {
  const w = words.value;
  const { data: live, error: refused } = useLive<JobEvent>("live/job", "job", { job });
  const brief = live?.job?.finding ?? null;
  const news = brief?.finding_id ?? "";
  const diagnosed = useAsked<Finding>("diagnose", { job }, SELDOM_MS, news);
  const found = diagnosed.answer?.data;
  // An answer from before the newest finding would hide whom it names.
  const finding = found?.verdict && (brief === null || diagnosed.key === news) ? found : null;
  const hangs = brief !== null || (finding?.victims.length ?? 0) > 0;
  const few = (live?.contract?.asked ?? 0) <= AT_ONCE_NODES;
  const told = diagnosed.answer !== null || diagnosed.error !== null;
  const rest = refused !== null || (live !== null && few) || told;
  const waits = useAsked<Waits>(hangs && rest ? "waits" : null, { job }, SELDOM_MS / 2, news);
  const steps = useAsked<Steps>(rest ? "steps" : null, { job, since: "10m" }, SELDOM_MS);
  const balance = useAsked<Balance[]>(rest ? "balance" : null, { job, since: "5m" }, SELDOM_MS);
  const history = useAsked<HistoryRow[]>(rest ? "history" : null, { job }, 0, news);
  const culprits = finding?.culprits.flatMap((culprit) => (culprit.rank === null ? [] : [culprit.rank])) ?? brief?.culprits ?? [];
  const victims = finding?.victims ?? brief?.victims ?? [];
  const began = finding?.since ?? brief?.opened;
  const shown = brief ?? finding;
  const title = shown ? headline(shown, 120) : visible(job, 80);
  useEffect(() => {
    document.title = `${title} · probing`;
  }, [title]);
  return (
    <>
      {(live?.notes ?? []).slice(0, 10).map((note) => (
        <p class="note">▲ {visible(note, 500)}</p>
      ))}
      <section class="finding panel" aria-label={w.finding.title}>
        {finding || brief ? <FindingHead finding={finding} brief={brief} /> : diagnosed.error ? <Trouble error={diagnosed.error} again={diagnosed.again} /> : <Loading />}
        {diagnosed.error && (finding || brief) ? <Trouble error={diagnosed.error} again={diagnosed.again} /> : null}
        {finding ? (
          <>
            {finding.culprits.length || finding.victims.length ? <Who finding={finding} /> : brief ? <WhoInBrief brief={brief} job={job} /> : null}
            <StackPair finding={finding} />
            <FindingRest finding={finding} />
            <Others finding={finding} />
          </>
        ) : brief ? (
          <>
            <WhoInBrief brief={brief} job={job} />
            {diagnosed.error ? null : <Loading />}
          </>
        ) : null}
        <p class="finding-foot">
          <SameByCommand job={job} />
          <a href={url("finding.html", { job })} download={`finding-${job.replace(/[^\w.-]+/g, "_")}.html`}>
            {w.finding.mail}
          </a>
          {began ? <a href={href({ screen: "timeline", job }, around(began))}>{w.finding.around}</a> : null}
        </p>
        {diagnosed.answer ? <ContractLine contract={diagnosed.answer.contract} /> : null}
      </section>
      <div class="columns">
        <div>
          <Panel title={w.grid.title} contract={live?.contract} live error={refused} actions={live?.job ? <JobFacts live={live} /> : null}>
            {live ? live.job ? <RankGrid job={job} ranks={live.ranks} culprits={culprits} victims={victims} /> : <Empty title={w.grid.none} /> : refused ? null : <Loading />}
          </Panel>
          {hangs ? (
            <Panel title={w.waits.title} contract={waits.answer?.contract} error={waits.error} again={waits.again}>
              <Body of={waits.answer?.data} error={waits.error}>
                {(data) => <WaitsGraph waits={data} culprits={culprits} />}
              </Body>
            </Panel>
          ) : null}
          <Panel title={w.finding.history} contract={history.answer?.contract} error={history.error} again={history.again}>
            <Body of={history.answer?.data} error={history.error}>
              {(rows) => <History rows={rows} />}
            </Body>
          </Panel>
        </div>
        <div>
          <Panel title={w.steps.title} contract={steps.answer?.contract} error={steps.error} again={steps.again}>
            <Body of={steps.answer?.data} error={steps.error}>
              {(data) => <StepsChart steps={data} />}
            </Body>
          </Panel>
          <Panel title={w.balance.title} contract={balance.answer?.contract} error={balance.error} again={balance.again}>
            <Body of={balance.answer?.data} error={balance.error}>
              {(data) => (data.length ? data.slice(0, 3).map((one) => <BalanceBars balance={one} job={job} />) : <p class="soft">{w.balance.none}</p>)}
            </Body>
          </Panel>
        </div>
      </div>
    </>
  );
}

// Before and after the begin of a finding, ms.
const [BEFORE_MS, AFTER_MS] = [30_000, 30_000];

/** Returns the range of time around the begin of a finding. */
function around(since: string): { from: string; to: string } | Record<string, never> {
  const at = Date.parse(since.replace(/(\.\d{3})\d+/, "$1"));
  if (Number.isNaN(at)) return {};
  return { from: new Date(at - BEFORE_MS).toISOString(), to: new Date(Math.min(at + AFTER_MS, Date.now())).toISOString() };
}

function JobFacts({ live }: { live: JobEvent }) {
  const { job } = live;
  if (!job) return null;
  return (
    <span class="job-facts">
      <StateBadge state={job.state} />
      <span>{job.world_size === null ? job.ranks : words.value.jobs.of(job.ranks, job.world_size)} {words.value.jobs.ranks.toLowerCase()}</span>
      {job.steps_per_s === null ? null : <span>{rate(job.steps_per_s)}</span>}
    </span>
  );
}

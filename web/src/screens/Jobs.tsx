/** All jobs, the worst first: state, ranks, nodes, rate of steps, and what is wrong. */
import { useEffect } from "preact/hooks";
import { words } from "../i18n/index.ts";
import { useLive } from "../live.ts";
import { href } from "../location.ts";
import { StateBadge, toneOf } from "../parts/Badge.tsx";
import { now } from "../parts/now.ts";
import { Empty, Loading, Panel } from "../parts/Panel.tsx";
import { headline, Original } from "../parts/Sentence.tsx";
import { Sparkline } from "../parts/Sparkline.tsx";
import { visible } from "../text/escape.ts";
import { clock, elapsed, rate, since } from "../text/format.ts";
import type { JobLine, JobsEvent } from "../types.ts";

const QUIET = new Set(["OK", "ENDED", "PAUSED"]);

export function Jobs() {
  const { data: live, error } = useLive<JobsEvent>("live/jobs", "jobs", {});
  const w = words.value.jobs;
  const jobs = live?.jobs ?? [];
  const trouble = jobs.filter((job) => !QUIET.has(job.state)).length;
  useEffect(() => {
    document.title = live ? `${trouble ? `(${trouble}) ` : ""}${w.title} · probing` : `${w.title} · probing`;
  }, [live, trouble, w]);
  return (
    <>
      <h1 class="screen-title">
        {w.title}
        {live && jobs.length > 0 ? <small>{w.trouble(trouble, jobs.length)}</small> : null}
      </h1>
      {(live?.notes ?? []).slice(0, 10).map((note) => (
        <p class="note">{visible(note, 500)}</p>
      ))}
      <Panel title={w.title} contract={live?.contract} live error={error} class="untitled">
        {live === null ? (
          error ? null : <Loading />
        ) : jobs.length === 0 ? (
          <Empty title={w.none} hint={w.noneHint} />
        ) : (
          <table class="jobs">
            <thead>
              <tr>
                <th scope="col">{w.state}</th>
                <th scope="col">{w.job}</th>
                <th scope="col">{w.finding}</th>
                <th scope="col">{w.since}</th>
                <th scope="col" class="number">
                  {w.ranks}
                </th>
                <th scope="col">{w.nodes}</th>
                <th scope="col" class="number">
                  {w.steps}
                </th>
                <th scope="col">
                  <span class="hidden-label">{w.steps}</span>
                </th>
              </tr>
            </thead>
            <tbody>
              {jobs.slice(0, 1000).map((job) => (
                <JobRow key={`${job.job}\0${job.run}`} job={job} />
              ))}
            </tbody>
          </table>
        )}
      </Panel>
    </>
  );
}

function JobRow({ job }: { job: JobLine }) {
  const w = words.value.jobs;
  const { finding } = job;
  const address = href({ screen: "job", job: job.job });
  const quiet = finding === null;
  const opened = since(finding?.opened, now.value);
  return (
    <tr class={finding ? `row-${toneOf(finding.severity)}` : ""}>
      <td class="c-state">
        <StateBadge state={job.state} />
      </td>
      <th scope="row" class="c-job">
        <a href={address}>{visible(job.job, 80)}</a>
        <span class="soft run">{visible(job.run, 40)}</span>
      </th>
      <td class="c-finding">
        {finding ? (
          <>
            <a href={address} class={`sentence ${toneOf(finding.severity)}`}>
              {headline(finding, 300)}
            </a>
            <Original finding={finding} longest={300} />
          </>
        ) : (
          <span class="soft">{job.ended ? clock(job.ended) : job.state === "OK" ? w.healthy : ""}</span>
        )}
      </td>
      <td class="c-since">{quiet ? "" : <time title={finding?.opened ?? ""}>{elapsed(opened)}</time>}</td>
      <td class="number c-ranks">
        <span class="only-small">{w.ranks} </span>
        {job.world_size === null ? job.ranks : w.of(job.ranks, job.world_size)}
      </td>
      <td class="c-nodes" title={job.nodes.slice(0, 50).map((node) => visible(node, 60)).join(", ")}>
        {job.nodes.slice(0, 2).map((node) => visible(node, 40)).join(", ")}
        {job.nodes.length > 2 ? ` +${job.nodes.length - 2}` : ""}
      </td>
      <td class="number c-rate">{job.steps_per_s === null ? "" : rate(job.steps_per_s)}</td>
      <td class="c-spark">
        <Sparkline values={job.steps_series} label={`${w.steps}: ${rate(job.steps_per_s)}`} />
      </td>
    </tr>
  );
}

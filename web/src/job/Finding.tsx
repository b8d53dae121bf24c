/** The page of a finding: the sentence, who, the stacks side by side, evidence, doubts, and what to do next. */
import { words } from "../i18n/index.ts";
import { href } from "../location.ts";
import { Badge, toneOf } from "../parts/Badge.tsx";
import { Copy, WithCommands } from "../parts/Copy.tsx";
import { now } from "../parts/now.ts";
import { headline, Original } from "../parts/Sentence.tsx";
import { StackView } from "../parts/StackView.tsx";
import { faultyFrame, parting } from "../stacks/parting.ts";
import { visible } from "../text/escape.ts";
import { clock, elapsed, fileName, ranges, share, since } from "../text/format.ts";
import type { Culprit, Finding, FindingBrief, FindingStack, Frame } from "../types.ts";

const QUIET = new Set(["healthy", "cannot_tell"]);

interface FindingProps {
  finding: Finding | null;
  /** The newest sentence, which comes before the whole page of it. */
  brief: FindingBrief | null;
}

/** What must be seen first: one sentence, and when it began. */
export function FindingHead({ finding, brief }: FindingProps) {
  const w = words.value.finding;
  const current = brief !== null && (finding === null || QUIET.has(finding.verdict) || brief.verdict === finding.verdict);
  const told = current || finding === null ? brief : finding;
  const severity = current ? brief.severity : (finding?.severity ?? null);
  const tone = severity ? toneOf(severity) : finding?.verdict === "healthy" ? "ok" : "soft";
  const began = finding?.since ?? brief?.opened ?? null;
  const verdict = current ? brief.verdict : finding?.verdict;
  return (
    <div class={`finding-head ${tone}`}>
      {told ? <h1 class="sentence">{headline(told, 1000)}</h1> : null}
      {told ? <Original finding={told} longest={1000} /> : null}
      <p class="facts">
        {severity ? <Badge tone={tone} text={words.value.severity[severity] ?? severity} /> : <Badge tone={tone} text={verdict === "healthy" ? w.healthy : w.cannotTell} />}
        {verdict && !QUIET.has(verdict) ? <span>{w.verdict} <code>{visible(verdict, 60)}</code></span> : null}
        {began && !QUIET.has(verdict ?? "") ? <span>{w.since} {clock(began)} ({elapsed(since(began, now.value))})</span> : null}
        {finding && !QUIET.has(finding.verdict) ? <span>{w.confidence} {share(finding.confidence)}, {level(finding.confidence)}</span> : null}
        {finding ? <span class="soft">{w.run} {visible(finding.run, 60)}</span> : null}
      </p>
    </div>
  );
}

function level(confidence: number): string {
  const w = words.value.finding;
  return confidence >= 0.85 ? w.high : confidence >= 0.6 ? w.medium : w.low;
}

/** The ranks at fault, each with the line of Python it is in; and those that wait. */
export function Who({ finding }: { finding: Finding }) {
  const w = words.value.finding;
  const shown = finding.culprits.slice(0, 12);
  const peer = finding.victims[0];
  return (
    <ul class="who">
      {shown.map((culprit) => {
        const stack = finding.stacks.find((s) => s.role === "culprit" && s.pid === culprit.pid && s.node === culprit.node);
        const frame = stack ? faultyFrame(stack.frames, culprit.why) : null;
        const line = frame ? `${fileName(frame.file)}:${frame.lineno ?? "?"}` : (/[\w.-]+\.py:\d+/.exec(culprit.why)?.[0] ?? null);
        return (
          <li class="culprit">
            <span class="sign" aria-hidden="true">!</span>
            <span class="who-rank">
              {culprit.rank === null ? null : <a href={href({ screen: "rank", job: finding.job, rank: String(culprit.rank) }, { node: culprit.node, pid: culprit.pid === null ? null : String(culprit.pid) })}>{w.rank(culprit.rank)}</a>}
              <span class="soft">
                {culprit.node ? ` ${w.node} ${visible(culprit.node, 60)}` : ""}
                {culprit.pid ? `, ${w.pid} ${culprit.pid}` : ""}
              </span>
            </span>
            <span class="why"><Why culprit={culprit} /></span>
            {line ? (
              <code class="line" title={visible(frame?.file, 400)}>
                {visible(line, 200)} {frame ? <span class="soft">{visible(frame.func, 120)}</span> : null}
              </code>
            ) : null}
            {culprit.rank !== null && peer !== undefined && finding.verdict === "slow_rank" ? (
              <a href={href({ screen: "flame", job: finding.job }, { rank: String(culprit.rank), against: String(peer), wall: "1" })}>{w.compare(peer)}</a>
            ) : null}
          </li>
        );
      })}
      {finding.culprits.length > shown.length ? <li class="soft">{words.value.grid.more(finding.culprits.length - shown.length)}</li> : null}
      {finding.victims.length ? (
        <li class="victim">
          <span class="sign" aria-hidden="true">·</span>
          <span>{w.waits(finding.victims.length, ranges(finding.victims))}</span>
        </li>
      ) : null}
    </ul>
  );
}

/** What a culprit does, and its kind where the page's language is not the server's. */
function Why({ culprit }: { culprit: Culprit }) {
  const kind = words.value.activity(culprit.activity ?? "");
  const why = visible(culprit.why, 400);
  return kind === null ? <>{why}</> : <>{kind} <span class="original" lang="en">{why}</span></>;
}

/** The ranks at fault as far as they are known before the whole page of the finding. */
export function WhoInBrief({ brief, job }: { brief: FindingBrief; job: string }) {
  const w = words.value.finding;
  return (
    <ul class="who">
      {brief.culprits.slice(0, 12).map((rank) => (
        <li class="culprit">
          <span class="sign" aria-hidden="true">!</span>
          <span class="who-rank">
            <a href={href({ screen: "rank", job, rank: String(rank) })}>{w.rank(rank)}</a>
          </span>
        </li>
      ))}
    </ul>
  );
}

/** Stacks of a culprit and a victim side by side, with the frame where they part. */
export function StackPair({ finding }: { finding: Finding }) {
  const w = words.value.finding;
  const culprit = finding.stacks.find((stack) => stack.role === "culprit");
  const victim = finding.stacks.find((stack) => stack.role === "victim");
  if (!culprit && !victim) return null;
  const { common } = culprit && victim ? parting(culprit.frames, victim.frames) : { common: 0 };
  const both = culprit !== undefined && victim !== undefined;
  return (
    <section class="stack-pair" aria-label={w.stacks}>
      {culprit ? <SideOfPair stack={culprit} title={w.culprit} tone="culprit" common={common} parted={both} fault={faultyFrame(culprit.frames, finding.culprits.find((one) => one.pid === culprit.pid)?.why ?? "")} /> : null}
      {victim ? <SideOfPair stack={victim} title={w.victim} tone="victim" common={common} parted={both} fault={null} /> : null}
    </section>
  );
}

interface SideProps {
  stack: FindingStack;
  title: string;
  tone: string;
  common: number;
  parted: boolean;
  fault: Frame | null;
}

function SideOfPair({ stack, title, tone, common, parted, fault }: SideProps) {
  const w = words.value.finding;
  const rest = since(stack.since, now.value);
  return (
    <div class={`side ${tone}`}>
      <h3>
        <span class="sign" aria-hidden="true">{tone === "culprit" ? "!" : "·"}</span> {title}: {stack.rank === null ? `${w.pid} ${stack.pid}` : w.rank(stack.rank)}
        <span class="soft"> {w.node} {visible(stack.node, 60)}, {visible(stack.thread, 60)}</span>
      </h3>
      {stack.since || stack.moving ? (
        <p class="soft small">
          {stack.since ? w.inFrame(elapsed(rest)) : ""}
          {stack.moving ? `${stack.since ? "; " : ""}${w.moving}` : ""}
        </p>
      ) : null}
      <StackView frames={stack.frames} common={common} parted={parted && stack.frames.length > common} fault={fault} folded />
      {stack.native_missing ? <p class="soft small">{visible(stack.native_missing, 300)}</p> : null}
    </div>
  );
}

export function FindingRest({ finding }: { finding: Finding }) {
  const w = words.value.finding;
  return (
    <div class="finding-rest">
      <Lines title={w.next} lines={finding.next_steps} class="next" extra={finding.ends ? <li>{w.ends}: {clock(finding.ends.at)}, {visible(finding.ends.by, 200)}</li> : null} />
      <Lines title={w.evidence} lines={finding.evidence} class="evidence" />
      <Lines title={w.missing} lines={finding.missing} class="missing" />
      <Lines title={w.refute} lines={finding.refuted_by} class="refute" />
    </div>
  );
}

function Lines({ title, lines, class: name, extra = null }: { title: string; lines: readonly string[]; class: string; extra?: preact.ComponentChild }) {
  if (!lines.length && !extra) return null;
  return (
    <section class={`lines ${name}`}>
      <h3>{title}</h3>
      <ul>
        {lines.slice(0, 100).map((line) => (
          <li>
            <WithCommands text={line} />
          </li>
        ))}
        {extra}
      </ul>
    </section>
  );
}

export function Others({ finding }: { finding: Finding }) {
  const others = (finding.others ?? []).filter((other) => other.job === finding.job);
  if (!others.length) return null;
  return (
    <section class="lines others">
      <h3>{words.value.finding.others}</h3>
      <ul>
        {others.slice(0, 20).map((other) => (
          <li>
            <Badge tone={toneOf(other.severity)} text={words.value.severity[other.severity ?? ""] ?? other.verdict} /> {headline(other, 500)} <Original finding={other} longest={500} />
          </li>
        ))}
      </ul>
    </section>
  );
}

/** The command that prints this page, to hand on. */
export function SameByCommand({ job }: { job: string }) {
  const command = `probingctl diagnose --all-nodes --job ${/^[\w.:@/-]+$/.test(job) ? job : `'${job.replace(/'/g, "'\\''")}'`}`;
  return (
    <span class="command">
      <code>{visible(command, 300)}</code>
      <Copy text={command} />
    </span>
  );
}

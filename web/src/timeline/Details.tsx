/** Below the timeline: the chosen operation on all its ranks, and figures of the selected range. */
import { useMemo } from "preact/hooks";
import { words } from "../i18n/index.ts";
import { visible } from "../text/escape.ts";
import { bytes, duration, number } from "../text/format.ts";
import { textAt, type RankOf } from "./columns.ts";
import { OPEN } from "./model.ts";
import { opName, sampleAt, type Scene } from "./scene.ts";
import { figures, sameOperation } from "./stats.ts";
import type { Chosen } from "./TimelineView.tsx";
import type { View } from "./view.ts";

const MOST = 64;
const NS = 1e3;

/** `rankHref`: the address of a rank; null: there is none. */
export function ChosenOperation({ scene, chosen, rankHref }: { scene: Scene; chosen: Chosen; rankHref: ((rank: RankOf) => string) | null }) {
  const w = words.value.timeline;
  const { ops, columns } = scene;
  const i = chosen.op;
  const same = useMemo(() => (i < 0 ? [] : sameOperation(ops, i)), [scene, i]);
  const sample = chosen.time !== null && chosen.row >= 0 ? sampleAt(scene, chosen.row, chosen.time) : -1;
  const python = sample < 0 ? null : textAt(columns.frames, scene.samples.frame[sample]);
  const text = (value: number) => (Number.isFinite(value) ? duration(value * NS) : "–");
  const lengthText = (op: number) => {
    if (ops.open[op]) return ops.open[op] === OPEN ? w.open : w.unknown;
    const error = (ops.end[op] as number) - (ops.sure[op] as number);
    const length = text((ops.end[op] as number) - (ops.ready[op] as number));
    return error > 0 ? `≤ ${length}` : length;
  };
  const runText = (op: number) => (ops.open[op] ? lengthText(op) : `${w.runs} ${lengthText(op)}`);
  return (
    <div aria-live="polite">
      {i < 0 ? null : (
        <p class="chosen">
          <b>{visible(opName(scene, i), 100)}</b> {visible(textAt(columns.comms, ops.comm[i]), 80)} · {words.value.columns["rank"]} {columns.ranks[ops.rank[i] as number]?.rank ?? "?"} · {w.waits} {text((ops.ready[i] as number) - (ops.start[i] as number))} · {runText(i)} · {bytes(ops.bytes[i])}
        </p>
      )}
      {python ? (
        <p class="soft">
          {w.sample}: <code>{visible(python, 200)}</code>
        </p>
      ) : null}
      {same.length > 1 ? (
        <div class="scroll" tabIndex={0} role="region" aria-label={w.group}>
          <table>
            <caption>{w.group}</caption>
            <thead>
              <tr>
                <th scope="col" class="number">{w.rank}</th>
                <th scope="col">{w.node}</th>
                <th scope="col" class="number">{w.late}</th>
                <th scope="col" class="number">{w.waiting}</th>
                <th scope="col" class="number">{w.runs}</th>
              </tr>
            </thead>
            <tbody>
              {[...same].reverse().slice(0, MOST).map((other) => {
                const rank = columns.ranks[ops.rank[other] as number];
                return (
                  <tr class={other === i ? "row-chosen" : ""}>
                    <th scope="row" class="number">
                      {rank?.rank === null || rank === undefined ? "?" : rankHref ? <a href={rankHref(rank)}>{rank.rank}</a> : rank.rank}
                    </th>
                    <td>{visible(rank?.node ?? "?", 60)}</td>
                    <td class="number">{text((ops.start[other] as number) - (ops.begun[other] as number))}</td>
                    <td class="number">{text((ops.ready[other] as number) - (ops.start[other] as number))}</td>
                    <td class="number">{lengthText(other)}</td>
                  </tr>
                );
              })}
            </tbody>
          </table>
        </div>
      ) : null}
    </div>
  );
}

/** `flame`: the address of the range's flame graph, or empty. */
export function RangeFigures({ scene, range, flame, clear }: { scene: Scene; range: View | null; flame: string; clear: () => void }) {
  const w = words.value.timeline;
  const found = useMemo(() => (range ? figures(scene.ops, scene.columns.ranks.length, range) : null), [scene, range]);
  if (!range || !found) return <p class="soft">{w.noStats}</p>;
  const length = range.to - range.from;
  return (
    <>
      <p class="range-head">
        <b>{duration(length * NS)}</b>
        {flame ? <a href={flame}>{w.flame}</a> : null}
        <button type="button" onClick={clear}>{w.clear}</button>
      </p>
      <div class="scroll two" tabIndex={0} role="region" aria-label={w.stats}>
        <table>
          <thead>
            <tr>
              <th scope="col">{words.value.rank.op}</th>
              <th scope="col" class="number">{w.count}</th>
              <th scope="col" class="number">{w.busy}</th>
              <th scope="col" class="number">{w.waiting}</th>
              <th scope="col" class="number">{w.longest}</th>
              <th scope="col" class="number">{words.value.rank.size}</th>
            </tr>
          </thead>
          <tbody>
            {found.ops.slice(0, MOST).map((op) => (
              <tr>
                <th scope="row">{visible(`${textAt(scene.columns.ops, op.op)} · ${textAt(scene.columns.comms, op.comm)}`, 100)}</th>
                <td class="number">{number(op.count)}</td>
                <td class="number">{duration(op.busy * NS)}</td>
                <td class="number">{duration(op.waiting * NS)}</td>
                <td class="number">{duration(op.longest * NS)}</td>
                <td class="number">{bytes(op.bytes)}</td>
              </tr>
            ))}
          </tbody>
        </table>
        <table>
          <thead>
            <tr>
              <th scope="col" class="number">{w.rank}</th>
              <th scope="col" class="number">{w.count}</th>
              <th scope="col" class="number">{w.lastCount}</th>
              <th scope="col" class="number">{w.waiting}</th>
              <th scope="col" class="number">{w.busy}</th>
            </tr>
          </thead>
          <tbody>
            {found.ranks.slice(0, MOST).map((rank) => (
              <tr>
                <th scope="row" class="number">{scene.columns.ranks[rank.row]?.rank ?? "?"}</th>
                <td class="number">{number(rank.count)}</td>
                <td class="number">{number(rank.last)}</td>
                <td class="number">{duration(rank.waiting * NS)}</td>
                <td class="number">{duration(rank.busy * NS)}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </>
  );
}

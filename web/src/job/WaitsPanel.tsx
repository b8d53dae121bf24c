/** Who waits for whom, as boxes and arrows; the same as a list for those who do not see them. */
import { useMemo, useRef } from "preact/hooks";
import { boxes, waitGraph, type Group } from "../charts/waits.ts";
import { words } from "../i18n/index.ts";
import { useWidth } from "../parts/canvas.ts";
import { visible } from "../text/escape.ts";
import { duration, ranges } from "../text/format.ts";
import type { Waits } from "../types.ts";

const [HEIGHT, GAP_Y] = [52, 16];
const NARROW = 460;
const MOST = 60;

export function WaitsGraph({ waits, culprits }: { waits: Waits; culprits: readonly number[] }) {
  const w = words.value.waits;
  const graph = useMemo(() => waitGraph(waits), [waits]);
  const box = useRef<HTMLDivElement>(null);
  const room = useWidth(box);
  const narrow = room > 0 && room < NARROW;
  const [width, gap] = narrow ? [126, 84] : [196, 120];
  const bad = new Set(culprits);
  const placed = boxes(graph, width, HEIGHT, gap, GAP_Y);
  const drawn = graph.groups.length <= MOST;
  const isCulprit = (group: Group) => group.ranks.some((rank) => bad.has(rank));
  if (!graph.groups.length) return <p class="soft">{w.none}</p>;
  return (
    <div ref={box}>
      {graph.cycle ? <p class="bad-news">▲ {w.cycle}</p> : null}
      {drawn ? (
        <div class="scroll waits" tabIndex={0} role="region" aria-label={w.title}>
          <svg width={placed.width + 4} height={placed.height + 4} viewBox={`-2 -2 ${placed.width + 4} ${placed.height + 4}`} role="img" aria-label={w.label(graph.groups.length)}>
            <defs>
              <marker id="arrow" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" orient="auto">
                <path d="M0 0L8 4L0 8z" class="arrow-head" />
              </marker>
            </defs>
            {graph.groups.flatMap((group, from) => group.targets.map((to) => <Arrow from={placed.boxes[from]} to={placed.boxes[to]} width={width} text={`${narrow ? "" : (group.op ?? "")}${group.seq === null ? "" : ` #${group.seq}`}`} />))}
            {placed.boxes.map((box) => {
              const group = graph.groups[box.group] as Group;
              return (
                <g class={`wait-box${isCulprit(group) ? " culprit" : ""}`} transform={`translate(${box.x} ${box.y})`}>
                  <rect width={width} height={HEIGHT} rx={3} />
                  <text x={10} y={21} class="wait-ranks">
                    {isCulprit(group) ? "! " : ""}
                    {w.ranks(group.ranks.length)} {ranges(group.ranks, narrow ? 2 : 4)}
                  </text>
                  <text x={10} y={40} class="wait-what">
                    {group.targets.length ? narrow ? duration(group.age) : `${visible(group.comm ?? "", 18)} · ${duration(group.age)}` : w.free}
                  </text>
                </g>
              );
            })}
          </svg>
        </div>
      ) : null}
      <ul class={drawn ? "hidden-label" : ""}>
        {graph.groups.filter((group) => group.targets.length).slice(0, 200).map((group) => (
          <li>
            {w.ranks(group.ranks.length)} {ranges(group.ranks)} {w.for} {ranges(group.targets.flatMap((target) => graph.groups[target]?.ranks ?? []))}: {visible(`${group.op} #${group.seq ?? "?"} ${group.comm}`, 120)}, {duration(group.age)}
          </li>
        ))}
      </ul>
    </div>
  );
}

function Arrow({ from, to, text, width }: { width: number; from: { x: number; y: number } | undefined; to: { x: number; y: number } | undefined; text: string }) {
  if (!from || !to) return null;
  const forward = to.x > from.x;
  const [x0, y0] = [forward ? from.x + width : from.x + width / 2, forward ? from.y + HEIGHT / 2 : from.y + (to.y > from.y ? HEIGHT : 0)];
  const [x1, y1] = [forward ? to.x : to.x + width / 2, forward ? to.y + HEIGHT / 2 : to.y + (to.y > from.y ? 0 : HEIGHT)];
  const bend = forward ? (x1 - x0) / 2 : 40;
  const path = forward ? `M${x0} ${y0}C${x0 + bend} ${y0} ${x1 - bend} ${y1} ${x1} ${y1}` : `M${x0} ${y0}C${x0 + bend} ${y0} ${x1 + bend} ${y1} ${x1} ${y1}`;
  return (
    <g class="wait-arrow">
      <path d={path} marker-end="url(#arrow)" />
      {forward ? (
        <text x={(x0 + x1) / 2} y={(y0 + y1) / 2 - 6} text-anchor="middle">
          {visible(text, 20)}
        </text>
      ) : null}
    </g>
  );
}

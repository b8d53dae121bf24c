/** The panels of a timeline, for its screen and for the timeline as a file: the canvas with what is chosen, and figures. */
import { useState } from "preact/hooks";
import { words } from "../i18n/index.ts";
import { ContractLine } from "../parts/Contract.tsx";
import { Empty, Panel } from "../parts/Panel.tsx";
import { visible } from "../text/escape.ts";
import { duration } from "../text/format.ts";
import type { RankOf } from "./columns.ts";
import { contractOf } from "./contract.ts";
import { ChosenOperation, RangeFigures } from "./Details.tsx";
import type { Scene } from "./scene.ts";
import { TimelineView, type Chosen } from "./TimelineView.tsx";
import type { View } from "./view.ts";

const NOTHING: Chosen = { op: -1, time: null, row: -1 };

interface TimelinePanelsProps {
  scene: Scene;
  /** The view to begin with. */
  view: View;
  onView: (view: View) => void;
  range: View | null;
  onRange: (range: View | null) => void;
  /** Addresses of the page; left out where there is no page. */
  rankHref?: (rank: RankOf) => string;
  flameHref?: (range: View) => string;
}

export function TimelinePanels({ scene, view, onView, range, onRange, rankHref, flameHref }: TimelinePanelsProps) {
  const w = words.value.timeline;
  const [last, setLast] = useState({ scene, chosen: NOTHING });
  if (scene.ops.count === 0 && scene.samples.order.length === 0) return <Empty title={w.none} hint={w.noneHint} />;
  return (
    <>
      {scene.notes.map((note) => (
        <p class="note">▲ {visible(note, 300)}</p>
      ))}
      <section class="panel" aria-label={w.title}>
        <TimelineView scene={scene} view={view} onView={onView} range={range} onRange={onRange} onChosen={(chosen) => setLast({ scene, chosen })} />
        <Signs scene={scene} />
        <ChosenOperation scene={scene} chosen={last.scene === scene ? last.chosen : NOTHING} rankHref={rankHref ?? null} />
        <ContractLine contract={contractOf(scene)} />
      </section>
      <Panel title={w.stats}>
        <RangeFigures scene={scene} range={range} flame={range && flameHref ? flameHref(range) : ""} clear={() => onRange(null)} />
      </Panel>
    </>
  );
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

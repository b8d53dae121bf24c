/** Chooses the workers of a group from those that are connected, by click or by keys. */
import { words } from "../i18n/index.ts";
import { visible } from "../text/escape.ts";
import type { WorkerRow } from "../types.ts";
import { choicesOf, toggled, type Choice } from "./form.ts";

const MOST_NODES = 1000;

interface PickerProps {
  rows: readonly WorkerRow[];
  chosen: readonly string[];
  onChange: (chosen: string[]) => void;
}

export function WorkerPicker({ rows, chosen, onChange }: PickerProps) {
  const w = words.value.groups;
  const nodes = [...choicesOf(rows, chosen)];
  const all = nodes.flatMap(([, choices]) => choices.map((choice) => choice.worker));
  const others = new Set(rows.filter((row) => !row.mine).map((row) => row.worker)).size;
  return (
    <fieldset class="picker">
      <legend>
        {w.workers} <span class="soft">{w.chosen(chosen.length, all.length)}</span>
      </legend>
      {all.length === 0 ? (
        <p class="soft">{w.noWorkers}</p>
      ) : (
        <p class="picker-all">
          <button type="button" class="small" onClick={() => onChange(toggled(chosen, all, true))}>{w.all}</button>
          <button type="button" class="small" onClick={() => onChange([])}>{w.noneOf}</button>
        </p>
      )}
      <div class="picker-nodes">
        {nodes.slice(0, MOST_NODES).map(([node, choices]) => (
          <NodeWorkers key={node} node={node} choices={choices} chosen={chosen} onChange={onChange} />
        ))}
      </div>
      {others > 0 ? <p class="soft small">{w.others(others)}</p> : null}
    </fieldset>
  );
}

function NodeWorkers({ node, choices, chosen, onChange }: { node: string; choices: readonly Choice[]; chosen: readonly string[]; onChange: (chosen: string[]) => void }) {
  const w = words.value.groups;
  const own = choices.map((choice) => choice.worker);
  const every = own.every((worker) => chosen.includes(worker));
  return (
    <div class="picker-node" role="group" aria-label={visible(node, 80)}>
      <label class="picker-whole">
        <input type="checkbox" checked={every} aria-label={w.toggle(visible(node, 80))} onChange={() => onChange(toggled(chosen, own, !every))} />
        {visible(node, 80)}
      </label>
      {choices.map(({ worker, group, away }) => (
        <label key={worker}>
          <input type="checkbox" checked={chosen.includes(worker)} onChange={(event) => onChange(toggled(chosen, [worker], event.currentTarget.checked))} />
          {visible(worker, 80)}
          {away ? <span class="small bad-news"> {w.away}</span> : group ? <span class="small"> {w.inGroup(visible(group, 63))}</span> : null}
        </label>
      ))}
    </div>
  );
}

/** The ranks of a job as a grid: a strip of cells a node, coloured by a column that can be chosen. */
import { useMemo, useRef, useState } from "preact/hooks";
import { cellAt, cellBeside, gridLayout, type GridLayout } from "../charts/grid.ts";
import { contrast } from "../charts/contrast.ts";
import { between, position, scaleOf, type Scale } from "../charts/scale.ts";
import { words } from "../i18n/index.ts";
import { go, href, params, setParams } from "../location.ts";
import { useDrawing, useWidth } from "../parts/canvas.ts";
import { Empty } from "../parts/Panel.tsx";
import { visible } from "../text/escape.ts";
import { colour } from "../theme.ts";
import type { Columns } from "../types.ts";
import { cellText, colourable, rankRows, sign, type RankRow } from "./rankRows.ts";
import { RankTable } from "./RankTable.tsx";

const MOST_HEIGHT = 400;

export function RankGrid({ job, ranks, culprits, victims }: { job: string; ranks: Columns; culprits: readonly number[]; victims: readonly number[] }) {
  const w = words.value.grid;
  const rows = useMemo(() => {
    const found = rankRows(ranks);
    // The finding of all nodes knows more than the rows of each.
    const [bad, waits] = [new Set(culprits), new Set(victims)];
    for (const row of found) if (!row.blame && row.rank !== null) row.blame = bad.has(row.rank) ? "culprit" : waits.has(row.rank) ? "victim" : "";
    return found;
  }, [ranks, culprits.join(), victims.join()]);
  const choices = useMemo(() => colourable(rows), [rows]);
  const asked = params.value.get("by") ?? "";
  const by = choices.includes(asked) ? asked : "state";
  const asTable = params.value.get("ranks") === "table";
  if (!rows.length) return <Empty title={w.none} />;
  return (
    <>
      <div class="grid-controls">
        <label>
          {w.by}{" "}
          <select value={by} onChange={(event) => setParams({ by: event.currentTarget.value === "state" ? null : event.currentTarget.value })}>
            {choices.map((name) => (
              <option value={name}>{words.value.columns[name] ?? name}</option>
            ))}
          </select>
        </label>
        <button type="button" aria-pressed={asTable} onClick={() => setParams({ ranks: asTable ? null : "table" })}>
          {asTable ? w.picture : w.table}
        </button>
      </div>
      {asTable ? <RankTable job={job} rows={rows} /> : <Grid job={job} rows={rows} by={by} />}
    </>
  );
}

function Grid({ job, rows, by }: { job: string; rows: RankRow[]; by: string }) {
  const w = words.value.grid;
  const box = useRef<HTMLDivElement>(null);
  const canvas = useRef<HTMLCanvasElement>(null);
  const width = useWidth(box);
  const [focus, setFocus] = useState(-1);
  const [hover, setHover] = useState(-1);
  const nodes = useMemo(() => strips(rows), [rows]);
  const shape = nodes.map((strip) => `${strip.node}:${strip.count}`).join();
  const layout = useMemo(() => gridLayout(nodes, Math.max(width, 80), MOST_HEIGHT), [shape, width]);
  const scale = useMemo(() => (by === "state" ? null : scaleOf(rows.map((row) => asNumber(row.values[by])))), [rows, by]);
  const shown = hover >= 0 ? hover : focus;
  useDrawing(canvas, Math.max(width, 80), layout.height, (context) => drawGrid(context, layout, rows, by, scale, shown), [rows, layout, by, scale, shown]);
  const open = (index: number) => {
    const row = rows[index];
    if (row) go(href({ screen: "rank", job, rank: String(row.rank ?? row.pid) }, { node: row.node, pid: String(row.pid) }));
  };
  const at = (event: MouseEvent) => cellAt(layout, event.offsetX, event.offsetY);
  const onKey = (event: KeyboardEvent) => {
    const direction = ({ ArrowLeft: "left", ArrowRight: "right", ArrowUp: "up", ArrowDown: "down" } as const)[event.key];
    if (direction) {
      setFocus(focus < 0 ? 0 : cellBeside(layout, focus, direction));
      event.preventDefault();
    } else if (event.key === "Enter" && focus >= 0) open(focus);
  };
  const column = words.value.columns[by] ?? by;
  const row = rows[shown];
  return (
    <div class="grid-box" ref={box}>
      <canvas
        ref={canvas}
        tabIndex={0}
        role="application"
        aria-label={w.label(rows.length, column)}
        onKeyDown={onKey}
        onMouseMove={(event) => setHover(at(event))}
        onMouseLeave={() => setHover(-1)}
        onClick={(event) => open(at(event))}
        onFocus={() => setFocus((old) => (old < 0 ? Math.max(0, rows.findIndex((one) => sign(one) === "!")) : old))}
        onBlur={() => setFocus(-1)}
      />
      <p class="grid-shown" aria-live="polite">
        {row ? describe(row, by) : scale ? w.sum(rows.length, column, cellText(by, scale.low), cellText(by, scale.high)) : `${rows.length} ${words.value.jobs.ranks.toLowerCase()}`}
      </p>
      <Legend scale={scale} by={by} rows={rows} />
    </div>
  );
}

function describe(row: RankRow, by: string): string {
  const w = words.value;
  const parts = [`${w.columns["rank"]} ${row.rank ?? "?"}`, `${w.columns["node"]} ${row.node}`, row.state];
  if (by !== "state") parts.push(`${w.columns[by] ?? by} ${cellText(by, row.values[by])}`);
  if (row.blame === "culprit") parts.push(w.grid.culprit);
  if (row.blame === "victim") parts.push(w.grid.victim);
  for (const name of ["op", "age_ns", "python"]) {
    const value = row.values[name];
    if (value !== null && value !== undefined && value !== "" && name !== by) parts.push(cellText(name, value));
  }
  return visible(parts.filter(Boolean).join(" · "), 400);
}

function strips(rows: readonly RankRow[]): { node: string; count: number }[] {
  const found: { node: string; count: number }[] = [];
  for (const row of rows) {
    const last = found[found.length - 1];
    if (last && last.node === row.node) last.count += 1;
    else found.push({ node: row.node, count: 1 });
  }
  return found;
}

function asNumber(value: unknown): number | null {
  return typeof value === "number" && Number.isFinite(value) ? value : null;
}

const STATE_TONES: Record<string, string> = { "!": "error", "·": "waits", x: "gone", "?": "away", "": "cell" };

export function sequence(): string[] {
  return ["seq-0", "seq-1", "seq-2", "seq-3", "seq-4"].map(colour);
}

function drawGrid(context: CanvasRenderingContext2D, layout: GridLayout, rows: readonly RankRow[], by: string, scale: Scale | null, shown: number): void {
  const { cell } = layout;
  const [soft, error, text, panel, unknown] = [colour("soft"), colour("error"), colour("text"), colour("panel"), colour("unknown")];
  const stops = sequence();
  const tones = Object.fromEntries(Object.entries(STATE_TONES).map(([key, name]) => [key, colour(name)]));
  context.font = "11px system-ui, sans-serif";
  context.textBaseline = "top";
  context.textAlign = "left";
  context.fillStyle = soft;
  for (const label of layout.labels) context.fillText(cutTo(context, visible(label.node, 60), label.width), label.x, label.y);
  context.textAlign = "center";
  context.textBaseline = "middle";
  rows.forEach((row, index) => {
    const [x, y] = [layout.x[index] as number, layout.y[index] as number];
    const mark = sign(row);
    const value = scale ? asNumber(row.values[by]) : null;
    const fill = scale ? (value === null ? unknown : between(stops, position(scale, value))) : (tones[mark] ?? unknown);
    context.fillStyle = fill;
    context.fillRect(x, y, cell, cell);
    if (mark === "!") {
      // Seen at first sight also where cells are small, and without colours.
      context.strokeStyle = error;
      context.lineWidth = cell >= 14 ? 3 : 2;
      context.strokeRect(x - 1, y - 1, cell + 2, cell + 2);
    }
    if (cell >= 14) {
      context.fillStyle = contrast(fill);
      const small = cell < 26;
      context.font = `${mark === "!" ? "700 " : ""}${small ? 10 : 12}px system-ui, sans-serif`;
      const label = small ? mark : `${row.rank ?? "?"}${mark === "" ? "" : ` ${mark}`}`;
      context.fillText(label, x + cell / 2, y + cell / 2 + 0.5);
    }
    if (index === shown) {
      context.strokeStyle = panel;
      context.lineWidth = 4;
      context.strokeRect(x - 2, y - 2, cell + 4, cell + 4);
      context.strokeStyle = text;
      context.lineWidth = 2;
      context.strokeRect(x - 2, y - 2, cell + 4, cell + 4);
    }
  });
  if (cell < 14) drawArrow(context, layout, rows, error);
}

/** A ring around the first culprits, for cells too small to be noticed. */
function drawArrow(context: CanvasRenderingContext2D, layout: GridLayout, rows: readonly RankRow[], error: string): void {
  const culprits = rows.flatMap((row, index) => (row.blame === "culprit" ? [index] : [])).slice(0, 20);
  context.strokeStyle = error;
  context.lineWidth = 2;
  for (const index of culprits) {
    context.beginPath();
    context.arc((layout.x[index] as number) + layout.cell / 2, (layout.y[index] as number) + layout.cell / 2, layout.cell + 5, 0, 2 * Math.PI);
    context.stroke();
  }
}

/** Returns `text` cut with a mark to a width in pixels. */
export function cutTo(context: CanvasRenderingContext2D, text: string, width: number): string {
  if (context.measureText(text).width <= width) return text;
  let [low, high] = [0, text.length];
  while (low < high) {
    const middle = (low + high + 1) >>> 1;
    if (context.measureText(`${text.slice(0, middle)}…`).width <= width) low = middle;
    else high = middle - 1;
  }
  return low > 0 ? `${text.slice(0, low)}…` : "";
}

function Legend({ scale, by, rows }: { scale: Scale | null; by: string; rows: readonly RankRow[] }) {
  const w = words.value.grid;
  const marks = new Set(rows.map(sign));
  const names = { "!": w.culprit, "·": w.victim, x: w.ended, "?": w.away } as const;
  return (
    <p class="legend">
      {scale ? (
        <span class="scale">
          {cellText(by, scale.low)}
          {[0, 1, 2, 3, 4].map((step) => (
            <i class={`swatch seq-${step}`} aria-hidden="true" />
          ))}
          {cellText(by, scale.high)}
        </span>
      ) : null}
      {(Object.keys(names) as (keyof typeof names)[])
        .filter((mark) => marks.has(mark))
        .map((mark) => (
          <span>
            <i class={`swatch state-${STATE_TONES[mark]}`} aria-hidden="true">{mark}</i> {names[mark]}
          </span>
        ))}
    </p>
  );
}

/** The timeline itself: a canvas with rows of ranks, its keys and buttons, and what is chosen on it. */
import { effect } from "@preact/signals";
import { useEffect, useMemo, useReducer, useRef, useState } from "preact/hooks";
import { words } from "../i18n/index.ts";
import { sized, useWidth } from "../parts/canvas.ts";
import { colourEpoch } from "../theme.ts";
import { attach } from "./gestures.ts";
import { firstStarting, intervalAt } from "./model.ts";
import { AXIS, COUNTER_HEIGHT, GUTTER, Painter, type Picture } from "./painter.ts";
import { firstBelow, heightOf, rowsOf, type TimelineRow } from "./rows.ts";
import type { Scene } from "./scene.ts";
import { moved, within, zoomed, type View } from "./view.ts";

export interface Chosen {
  op: number;
  time: number | null;
  row: number;
}

interface TimelineViewProps {
  scene: Scene;
  view: View;
  onView: (view: View) => void;
  range: View | null;
  onRange: (range: View | null) => void;
  onChosen: (chosen: Chosen) => void;
}

const MOST_HEIGHT = 640;

/** Zoom, pan and choice change many times a second: they live here, and not in the state of a component. */
class Control {
  view: View;
  range: View | null;
  top = 0;
  folded = new Set<string>();
  selected = -1;
  hovered = -1;
  focusRow = -1;
  cursor: number | null = null;
  selecting = false;
  rows: TimelineRow[];
  width = 0;
  height = 0;

  constructor(
    readonly scene: Scene,
    view: View,
    range: View | null,
  ) {
    this.view = within(view, scene.length);
    this.range = range;
    this.rows = rowsOf(scene.columns.ranks, this.folded);
    this.focusRow = this.rows.findIndex((row) => row.kind === "rank");
  }

  fold(node: string): void {
    if (!this.folded.delete(node)) this.folded.add(node);
    this.rows = rowsOf(this.scene.columns.ranks, this.folded);
    this.focusRow = Math.min(this.focusRow, this.rows.length - 1);
    this.scroll(0);
  }

  get counters(): number {
    return Math.min(this.scene.counters.length, 8) * COUNTER_HEIGHT;
  }

  scroll(dy: number): boolean {
    const before = this.top;
    const room = Math.max(0, heightOf(this.rows) - (this.height - AXIS - this.counters));
    this.top = Math.min(room, Math.max(0, this.top + dy));
    return this.top !== before;
  }

  time(x: number): number {
    return this.view.from + ((x - GUTTER) / Math.max(1, this.width - GUTTER)) * (this.view.to - this.view.from);
  }

  rowAt(y: number): number {
    if (y < AXIS || y > this.height - this.counters) return -1;
    const index = firstBelow(this.rows, y - AXIS + this.top);
    return index < this.rows.length && (this.rows[index] as TimelineRow).y <= y - AXIS + this.top ? index : -1;
  }

  opAt(x: number, y: number): number {
    const row = this.rows[this.rowAt(y)];
    if (!row || row.kind !== "rank" || x < GUTTER) return -1;
    const pixel = (this.view.to - this.view.from) / Math.max(1, this.width - GUTTER);
    return intervalAt(this.scene.ops, row.rank, this.time(x), 3 * pixel);
  }

  /** Chooses the operation before or after the chosen one in its row. */
  step(by: 1 | -1): void {
    const row = this.rows[this.focusRow];
    if (!row || row.kind !== "rank") return;
    const { ops } = this.scene;
    const [first, end] = [ops.first[row.rank] as number, ops.first[row.rank + 1] as number];
    if (first === end) return;
    const known = this.selected >= 0 && ops.rank[this.selected] === row.rank;
    let place = known ? firstStarting(ops, row.rank, ops.start[this.selected] as number) : firstStarting(ops, row.rank, (this.view.from + this.view.to) / 2) - (by > 0 ? 1 : 0);
    if (known) while (place < end - 1 && ops.order[place] !== this.selected) place += 1;
    const next = Math.min(end - 1, Math.max(first, place + by));
    this.selected = ops.order[next] as number;
    this.show(this.selected);
  }

  /** Moves the view so that an operation is in it. */
  show(i: number): void {
    const [start, end] = [this.scene.ops.start[i] as number, this.scene.ops.end[i] as number];
    const size = this.view.to - this.view.from;
    this.cursor = start;
    if (start < this.view.from || Math.min(end, start + size / 2) > this.view.to) this.view = within({ from: start - size / 3, to: start + (2 * size) / 3 }, this.scene.length);
  }

  moveRow(by: 1 | -1): void {
    for (let index = this.focusRow + by; index >= 0 && index < this.rows.length; index += by) {
      const row = this.rows[index] as TimelineRow;
      this.focusRow = index;
      const visible = this.height - AXIS - this.counters;
      if (row.y < this.top) this.top = row.y;
      if (row.y + row.height > this.top + visible) this.top = row.y + row.height - visible;
      return;
    }
  }
}

export function TimelineView(props: TimelineViewProps) {
  const { scene } = props;
  const w = words.value.timeline;
  const box = useRef<HTMLDivElement>(null);
  const canvas = useRef<HTMLCanvasElement>(null);
  const width = useWidth(box);
  const [, refresh] = useReducer<number, void>((n) => n + 1, 0);
  const control = useMemo(() => new Control(scene, props.view, props.range), [scene]);
  const [selecting, setSelecting] = useState(false);
  const latest = useRef(props);
  latest.current = props;
  const height = Math.min(MOST_HEIGHT, AXIS + heightOf(control.rows) + 4 + control.counters);
  control.width = width;
  control.height = height;
  control.selecting = selecting;

  const drawing = useMemo(() => {
    const painter = new Painter();
    let frame = 0;
    let told = 0;
    const paint = () => {
      frame = 0;
      const element = canvas.current;
      if (!element || control.width < 120) return;
      const context = sized(element, control.width, control.height);
      const picture: Picture = { ...fieldsOf(control), scene };
      if (context) painter.draw(context, control.width, control.height, element.width / control.width, picture);
    };
    return {
      painter,
      /** Draws with the next frame; tells the address of the page a little later. */
      soon: () => {
        if (!frame) frame = requestAnimationFrame(paint);
        clearTimeout(told);
        told = window.setTimeout(() => latest.current.onView(control.view), 250);
      },
      stop: () => {
        cancelAnimationFrame(frame);
        clearTimeout(told);
      },
    };
  }, [control]);
  useEffect(() => {
    drawing.soon();
    const ended = effect(() => {
      void colourEpoch.value;
      drawing.painter.recolour();
      drawing.soon();
    });
    return () => {
      ended();
      drawing.stop();
    };
  }, [drawing, width, height]);

  const tell = () => latest.current.onChosen({ op: control.selected, time: control.cursor, row: rankOf(control) });
  useEffect(() => {
    if (!canvas.current) return undefined;
    return attach(canvas.current, {
      pan: (dx, dy) => {
        control.view = moved(control.view, -dx / Math.max(1, control.width - GUTTER), scene.length);
        control.scroll(-dy);
        drawing.soon();
      },
      zoom: (factor, x) => {
        control.view = zoomed(control.view, factor, control.time(Math.max(x, GUTTER)), scene.length);
        drawing.soon();
      },
      hover: (at) => {
        control.hovered = at ? control.opAt(at.x, at.y) : -1;
        control.cursor = at && at.x >= GUTTER ? control.time(at.x) : null;
        drawing.soon();
      },
      pick: (x, y) => {
        const index = control.rowAt(y);
        const row = control.rows[index];
        if (row?.kind === "node") {
          control.fold(row.node);
          refresh();
        } else if (row) {
          control.focusRow = index;
          control.selected = control.opAt(x, y);
          control.cursor = control.time(x);
          tell();
        }
        drawing.soon();
      },
      range: (x0, x1, done) => {
        const [from, to] = [control.time(Math.min(x0, x1)), control.time(Math.max(x0, x1))];
        control.range = { from: Math.max(0, from), to: Math.min(scene.length, to) };
        if (done) {
          latest.current.onRange(control.range);
          setSelecting(false);
        }
        drawing.soon();
      },
      selecting: () => control.selecting,
      scroll: (dy) => {
        const scrolled = control.scroll(dy);
        if (scrolled) drawing.soon();
        return scrolled;
      },
    });
  }, [control, drawing]);

  if (props.range === null && control.range !== null && !selecting) {
    control.range = null;
    drawing.soon();
  }
  const zoom = (factor: number) => {
    control.view = zoomed(control.view, factor, (control.view.from + control.view.to) / 2, scene.length);
    drawing.soon();
  };
  const fit = () => {
    control.view = { from: 0, to: scene.length };
    drawing.soon();
  };
  const onKey = (event: KeyboardEvent) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const far = event.shiftKey ? 0.8 : 0.15;
    const keys: Record<string, () => void> = {
      ArrowLeft: () => (control.view = moved(control.view, -far, scene.length)),
      ArrowRight: () => (control.view = moved(control.view, far, scene.length)),
      ArrowUp: () => control.moveRow(-1),
      ArrowDown: () => control.moveRow(1),
      "+": () => zoom(0.6),
      "=": () => zoom(0.6),
      "-": () => zoom(1 / 0.6),
      Home: fit,
      "0": fit,
      ",": () => control.step(-1),
      ".": () => control.step(1),
      Enter: () => {
        const row = control.rows[control.focusRow];
        if (row?.kind === "node") control.fold(row.node);
        else control.step(1);
        refresh();
      },
      "[": () => setRange("from"),
      "]": () => setRange("to"),
      Escape: () => {
        control.selected = -1;
        control.range = null;
        latest.current.onRange(null);
      },
    };
    const act = keys[event.key];
    if (!act) return;
    act();
    event.preventDefault();
    tell();
    drawing.soon();
  };
  const setRange = (side: "from" | "to") => {
    const at = control.cursor ?? (control.view.from + control.view.to) / 2;
    const old = control.range ?? { from: side === "from" ? at : control.view.from, to: side === "to" ? at : control.view.to };
    const range = { ...old, [side]: at };
    control.range = range.from < range.to ? range : side === "from" ? { from: at, to: control.view.to } : { from: control.view.from, to: at };
    latest.current.onRange(control.range);
  };
  return (
    <div class="timeline-box" ref={box}>
      <div class="timeline-tools">
        <button type="button" onClick={() => zoom(0.6)} aria-label={w.zoomIn}>+</button>
        <button type="button" onClick={() => zoom(1 / 0.6)} aria-label={w.zoomOut}>−</button>
        <button type="button" onClick={fit}>{w.fit}</button>
        <button type="button" aria-pressed={selecting} onClick={() => setSelecting(!selecting)} title={w.selectHint}>{w.select}</button>
        <span class="soft small">{w.selectHint}</span>
      </div>
      <canvas ref={canvas} tabIndex={0} role="application" aria-label={w.label} onKeyDown={onKey} class={selecting ? "selecting" : ""} />
    </div>
  );
}

function rankOf(control: Control): number {
  const row = control.rows[control.focusRow];
  return row?.kind === "rank" ? row.rank : -1;
}

function fieldsOf(control: Control): Omit<Picture, "scene"> {
  const { rows, view, top, folded, selected, hovered, focusRow, cursor, range } = control;
  return { rows, view, top, folded, selected, hovered, focusRow, cursor, range };
}

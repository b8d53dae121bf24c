/** The timeline itself: a canvas with rows of ranks, its keys and buttons, and what is chosen on it. */
import { effect } from "@preact/signals";
import { useEffect, useMemo, useReducer, useRef, useState } from "preact/hooks";
import { words } from "../i18n/index.ts";
import { sized, useWidth } from "../parts/canvas.ts";
import { colourEpoch } from "../theme.ts";
import { Control } from "./control.ts";
import { attach } from "./gestures.ts";
import { Painter } from "./painter.ts";
import { AXIS, GUTTER } from "./picture.ts";
import { heightOf } from "./rows.ts";
import type { Scene } from "./scene.ts";
import { moved, zoomed, type View } from "./view.ts";

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
      if (context) painter.draw(context, control.width, control.height, element.width / control.width, control);
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

  const tell = () => latest.current.onChosen({ op: control.selected, time: control.cursor, row: control.rank });
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

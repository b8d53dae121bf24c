/** A flame graph on a canvas, growing down: zoom, search, keys; colours by file, by ranks or by difference. */
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { contrast } from "../charts/contrast.ts";
import { between } from "../charts/scale.ts";
import { words } from "../i18n/index.ts";
import { useDrawing, useWidth } from "../parts/canvas.ts";
import { visible } from "../text/escape.ts";
import { numbersOf, share } from "../text/format.ts";
import { colour } from "../theme.ts";
import { frameAt, layout, neighbour, search, seen, type Flame, type FlameTree } from "./layout.ts";

const ROW = 19;
const COLOURS = 8;

export type Colouring = "file" | "ranks" | "difference";

interface FlameViewProps {
  tree: FlameTree;
  colouring: Colouring;
  find: string;
  format: (value: number) => string;
  /** Number of ranks of the whole, for the colouring by ranks. */
  ranks?: number;
}

export function FlameView({ tree, colouring, find, format, ranks = 0 }: FlameViewProps) {
  const w = words.value.flame;
  const box = useRef<HTMLDivElement>(null);
  const canvas = useRef<HTMLCanvasElement>(null);
  const width = useWidth(box);
  const flame = useMemo(() => layout(tree), [tree]);
  const matches = useMemo(() => search(flame, find), [flame, find]);
  const [zoom, setZoom] = useState(0);
  const [focus, setFocus] = useState(0);
  const [hover, setHover] = useState(-1);
  useEffect(() => {
    setZoom(0);
    setFocus(0);
  }, [flame]);
  const zoomAt = zoom < flame.nodes.length ? zoom : 0;
  const shown = hover >= 0 ? hover : focus;
  const height = useMemo(() => Math.min(depthSeen(flame, zoomAt, width), 120) * ROW + 2, [flame, zoomAt, width]);
  useDrawing(canvas, width, height, (context) => drawFlame(context, flame, zoomAt, width, { colouring, matches: find.trim() ? matches.found : null, shown, ranks }), [flame, zoomAt, colouring, matches, shown, ranks]);
  const at = (event: MouseEvent) => frameAt(flame, zoomAt, event.offsetX / Math.max(1, width), Math.floor(event.offsetY / ROW));
  const onKey = (event: KeyboardEvent) => {
    const direction = ({ ArrowLeft: "left", ArrowRight: "right", ArrowUp: "up", ArrowDown: "down" } as const)[event.key];
    if (direction) setFocus(neighbour(flame, focus, direction));
    else if (event.key === "Enter") setZoom(focus);
    else if (event.key === "Escape") setZoom(0);
    else return;
    event.preventDefault();
  };
  const node = flame.nodes[shown];
  return (
    <div class="flame-box">
      <p class="flame-shown" aria-live="polite">
        {node ? (
          <>
            <b>{visible(node.name, 300)}</b> {format(node.value)}, {share((flame.x1[shown] as number) - (flame.x0[shown] as number))} {w.of} {w.root}
            {node.ranks ? ` · ${words.value.jobs.ranks} ${visible(node.ranks, 100)}` : ""}
            {typeof node.base === "number" ? ` · ${change(node)}` : ""}
          </>
        ) : null}
        {find.trim() ? <span class="badge accent">{w.found(share(matches.share))}</span> : null}
        {zoomAt ? (
          <button type="button" onClick={() => setZoom(0)}>{w.reset}</button>
        ) : null}
      </p>
      <div ref={box} class="flame-canvas">
        <canvas ref={canvas} tabIndex={0} role="application" aria-label={w.label} onKeyDown={onKey} onMouseMove={(event) => setHover(at(event))} onMouseLeave={() => setHover(-1)} onClick={(event) => {
          const index = at(event);
          if (index < 0) return;
          setFocus(index);
          setZoom(index === zoomAt ? Math.max(0, flame.parent[index] as number) : index);
        }} />
      </div>
    </div>
  );
}

function change(node: FlameTree): string {
  const difference = node.value - (node.base ?? 0);
  return `${difference >= 0 ? "+" : "−"}${share(Math.abs(difference))}`;
}

interface Style {
  colouring: Colouring;
  matches: Uint8Array | null;
  shown: number;
  ranks: number;
}

function drawFlame(context: CanvasRenderingContext2D, flame: Flame, zoom: number, width: number, style: Style): void {
  const palette = Array.from({ length: COLOURS }, (_, i) => colour(`flame-${i}`));
  const [panel, text, accent, ring] = [colour("panel"), colour("text"), colour("accent"), colour("text")];
  const diverging = [colour("less"), colour("even"), colour("more")];
  const minority = [colour("minority"), colour("flame-0")];
  context.font = "12px system-ui, sans-serif";
  context.textBaseline = "middle";
  const end = lastBelow(flame, zoom);
  for (let i = 0; i < flame.nodes.length; i++) {
    const above = isAbove(flame, i, zoom);
    if (!above && (i < zoom || i >= end)) continue;
    const { left, right } = above ? { left: 0, right: 1 } : seen(flame, i, zoom);
    const [x0, x1] = [left * width, right * width];
    if (x1 - x0 < 0.6) continue;
    const node = flame.nodes[i] as FlameTree;
    const y = (flame.depth[i] as number) * ROW;
    let fill = palette[hash(fileOf(node.name)) % COLOURS] as string;
    if (style.colouring === "difference") fill = between(diverging, 0.5 + Math.max(-0.5, Math.min(0.5, (node.value - (node.base ?? node.value)) * 2)));
    if (style.colouring === "ranks" && style.ranks > 0) fill = between(minority, Math.min(1, (numbersOf(node.ranks).length - 1) / Math.max(1, style.ranks - 1)) ** 0.5);
    if (style.matches) fill = style.matches[i] ? accent : mixHex(fill, panel);
    context.fillStyle = fill;
    context.globalAlpha = above && i !== zoom ? 0.6 : 1;
    context.fillRect(x0, y, Math.max(0.6, x1 - x0 - 1), ROW - 1);
    context.globalAlpha = 1;
    if (x1 - x0 > 30) {
      const room = Math.floor((x1 - x0 - 8) / 6.6);
      const label = visible(node.name, 160);
      context.fillStyle = contrast(fill);
      context.fillText(label.length > room ? `${label.slice(0, Math.max(1, room - 1))}…` : label, x0 + 4, y + ROW / 2, x1 - x0 - 6);
    }
    if (i === style.shown) {
      context.strokeStyle = ring;
      context.lineWidth = 2;
      context.strokeRect(x0 + 1, y + 1, Math.max(2, x1 - x0 - 3), ROW - 3);
    }
  }
  context.fillStyle = text;
}

function isAbove(flame: Flame, index: number, zoom: number): boolean {
  return index <= zoom && (flame.x0[index] as number) <= (flame.x0[zoom] as number) && (flame.x1[index] as number) >= (flame.x1[zoom] as number) && (flame.depth[index] as number) <= (flame.depth[zoom] as number);
}

// Frames that are narrower are slivers; a zoom shows what is below them.
const LEAST_PX = 4;

/** Returns the number of levels that have a frame wide enough to be seen. */
function depthSeen(flame: Flame, zoom: number, width: number): number {
  let depth = (flame.depth[zoom] as number) + 1;
  const end = lastBelow(flame, zoom);
  for (let i = zoom; i < end; i++) {
    const { left, right } = seen(flame, i, zoom);
    if ((right - left) * width >= LEAST_PX) depth = Math.max(depth, (flame.depth[i] as number) + 1);
  }
  return depth;
}

/** Returns the first frame behind all that are below `index`. */
function lastBelow(flame: Flame, index: number): number {
  let end = index + 1;
  while (end < flame.nodes.length && (flame.depth[end] as number) > (flame.depth[index] as number)) end += 1;
  return end;
}

function fileOf(name: string): string {
  return /([\w./-]+\.\w+)(?::\d+)?\)?$/.exec(name)?.[1] ?? name;
}

function hash(text: string): number {
  let value = 2166136261;
  for (let i = 0; i < text.length; i++) value = Math.imul(value ^ text.charCodeAt(i), 16777619);
  return value >>> 0;
}

function mixHex(one: string, other: string): string {
  return between([one, other], 0.65);
}

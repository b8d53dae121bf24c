/** Draws the part of a timeline that is seen: rows of operations as pixels, and texts and marks above them. */
import { colour } from "../theme.ts";
import { spans } from "./detail.ts";
import { drawCounter, drawGutter } from "./margins.ts";
import { drawAxis, drawCursor, drawGaps, drawLabels, drawMarks } from "./marks.ts";
import { firstStarting, OPEN } from "./model.ts";
import { AXIS, COUNTER_HEIGHT, GUTTER, type Area, type Label, type Picture } from "./picture.ts";
import { mix, packed, Pixels } from "./pixels.ts";
import { firstBelow, type TimelineRow } from "./rows.ts";
import { opName, type Scene } from "./scene.ts";
import { ticks, type View } from "./view.ts";

interface Shade {
  strong: number;
  pale: number;
  hex: string;
}

interface Palette {
  panel: number;
  quiet: number;
  grid: number;
  comms: Shade[];
  several: Shade;
  frames: number[];
  step: number;
}

const COMMS = 8;

export class Painter {
  private pixels: Pixels | null = null;
  private palette: Palette | null = null;

  /** Colours are read anew at the next picture. */
  recolour(): void {
    this.palette = null;
  }

  /** Draws into a canvas whose context is scaled by `ratio`; sizes in CSS pixels. */
  draw(context: CanvasRenderingContext2D, width: number, height: number, ratio: number, picture: Picture): void {
    const palette = (this.palette ??= readPalette());
    const counters = Math.min(picture.scene.counters.length, 8);
    const bottom = height - counters * COUNTER_HEIGHT;
    const area = { x: GUTTER, y: AXIS, width: Math.max(1, width - GUTTER), height: Math.max(1, bottom - AXIS) };
    context.fillStyle = colour("panel");
    context.fillRect(0, 0, width, height);
    const labels = this.drawRows(context, area, ratio, picture, palette);
    drawAxis(context, area, picture);
    drawLabels(context, area, labels);
    drawGaps(context, area, picture);
    drawMarks(context, area, picture);
    drawGutter(context, area, picture);
    picture.scene.counters.slice(0, counters).forEach((lane, index) => drawCounter(context, area, bottom + index * COUNTER_HEIGHT, lane, picture.view));
    drawCursor(context, area, height, picture);
  }

  private drawRows(context: CanvasRenderingContext2D, area: Area, ratio: number, picture: Picture, palette: Palette): Label[] {
    const [across, down] = [Math.round(area.width * ratio), Math.round(area.height * ratio)];
    if (this.pixels?.width !== across || this.pixels.height !== down) this.pixels = new Pixels(across, down);
    const pixels = this.pixels;
    pixels.clear(palette.panel);
    const labels: Label[] = [];
    const { rows, scene, view, top } = picture;
    for (const time of ticks(view, area.width).at) {
      const x = Math.round(((time - view.from) / (view.to - view.from)) * across);
      pixels.fill(x, x + Math.max(1, Math.round(ratio)), 0, down, palette.grid);
    }
    for (let index = firstBelow(rows, top); index < rows.length; index++) {
      const row = rows[index] as TimelineRow;
      const y = row.y - top;
      if (y >= area.height) break;
      if (row.kind === "node") {
        pixels.fill(0, across, Math.round(y * ratio), Math.round((y + row.height - 1) * ratio), palette.quiet);
        continue;
      }
      const line = Math.max(1, Math.round(ratio));
      const [y0, y1] = [Math.round((y + 2) * ratio), Math.round((y + 15) * ratio)];
      this.drawOps(pixels, scene, row.rank, view, across, y0, y1, palette, ratio, labels, y);
      drawStrip(pixels, scene, row.rank, view, across, Math.round((y + 16) * ratio), Math.round((y + 19) * ratio), palette);
      drawSteps(pixels, scene, row.rank, view, across, Math.round(y * ratio), Math.round((y + 21) * ratio), line, palette);
    }
    context.putImageData(pixels.image, Math.round(area.x * ratio), Math.round(area.y * ratio));
    return labels;
  }

  private drawOps(pixels: Pixels, scene: Scene, rank: number, view: View, across: number, y0: number, y1: number, palette: Palette, ratio: number, labels: Label[], y: number): void {
    const { ops } = scene;
    const scale = across / (view.to - view.from);
    const several = scene.columns.comms.length > 1;
    spans(ops, rank, view, across, (x0, x1, encoded, busy, waiting) => {
      const i = encoded < 0 ? ~encoded : encoded;
      // Several operations have the colour of none, unless there is one communicator.
      const own = encoded < 0 && several ? palette.several : (palette.comms[(ops.comm[i] as number) % COMMS] as Shade);
      if (busy < 1 || encoded < 0) {
        const pale = mix(palette.panel, own.pale, Math.min(1, busy));
        pixels.fill(x0, x1, y0, y1, mix(pale, own.strong, Math.max(0, busy - waiting)));
        return;
      }
      const ready = Math.round(((ops.ready[i] as number) - view.from) * scale);
      const turn = Math.max(x0, Math.min(x1, ready));
      if (turn > x0) pixels.hatch(x0, turn, y0, y1, own.pale, mix(own.pale, palette.panel, 0.55), Math.round(6 * ratio));
      pixels.fill(turn, x1, y0, y1, own.strong);
      // Neighbours stay apart where there is room.
      if (x1 - x0 > 3) pixels.fill(x1 - 1, x1, y0, y1, palette.panel);
      // It ended somewhere in here.
      const sure = Math.max(turn, Math.round(((ops.sure[i] as number) - view.from) * scale));
      if (x1 - sure > 2) pixels.fill(sure, x1 - 1, y0, y1, mix(own.strong, palette.panel, 0.45));
      if (ops.open[i] === OPEN) pixels.fill(x0, x1, y1 - Math.round(2 * ratio), y1, own.strong);
      if (x1 - x0 > 44 * ratio && labels.length < 500) {
        // In the longer part, in the colour that is read on it.
        const [left, right, back] = turn - x0 > x1 - turn ? [x0, turn, ""] : [turn, x1, own.hex];
        labels.push({ x: left / ratio, width: (right - left) / ratio, y, text: opName(scene, i), back });
      }
    });
  }
}

function readPalette(): Palette {
  const panel = packed(colour("panel"));
  const shade = (hex: string): Shade => ({ hex, strong: packed(hex), pale: mix(panel, packed(hex), 0.42) });
  const names = Array.from({ length: COMMS }, (_, i) => colour(`comm-${i}`));
  return {
    panel,
    quiet: packed(colour("bg")),
    grid: packed(colour("grid")),
    comms: names.map(shade),
    several: shade(colour("several")),
    frames: Array.from({ length: COMMS }, (_, i) => mix(panel, packed(colour(`comm-${i}`)), 0.75)),
    step: packed(colour("soft")),
  };
}

function drawStrip(pixels: Pixels, scene: Scene, rank: number, view: View, across: number, y0: number, y1: number, palette: Palette): void {
  const { samples } = scene;
  if (!samples.order.length) return;
  const scale = across / (view.to - view.from);
  let place = firstStarting(samples, rank, view.from);
  const end = samples.first[rank + 1] as number;
  while (place < end) {
    const i = samples.order[place] as number;
    const time = samples.start[i] as number;
    if (time >= view.to) break;
    const x = Math.max(0, Math.floor((time - view.from) * scale));
    const wide = Math.max(1, Math.round(((samples.end[i] as number) - time) * scale));
    // A prime spreads neighbours over the colours.
    pixels.fill(x, x + wide, y0, y1, palette.frames[((samples.frame[i] as number) * 5) % COMMS] as number);
    place = Math.max(place + 1, firstStarting(samples, rank, view.from + (x + 1) / scale, place + 1));
  }
}

function drawSteps(pixels: Pixels, scene: Scene, rank: number, view: View, across: number, y0: number, y1: number, line: number, palette: Palette): void {
  const { steps } = scene;
  if (!steps.order.length) return;
  const scale = across / (view.to - view.from);
  let place = firstStarting(steps, rank, view.from);
  const last = firstStarting(steps, rank, view.to, place);
  // Where steps are denser than this, their lines say nothing.
  if ((last - place) * 24 > across) return;
  for (; place < last; place++) {
    const x = Math.round(((steps.start[steps.order[place] as number] as number) - view.from) * scale);
    pixels.fill(x, x + line, y0, y1, palette.step);
  }
}

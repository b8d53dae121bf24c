/** What one picture of the timeline shows, and where its parts lie. Sizes in CSS pixels. */
import type { TimelineRow } from "./rows.ts";
import type { Scene } from "./scene.ts";
import type { View } from "./view.ts";

export const GUTTER = 92;
export const AXIS = 32;
export const COUNTER_HEIGHT = 36;

export interface Picture {
  scene: Scene;
  rows: readonly TimelineRow[];
  view: View;
  /** How far the rows are scrolled, in pixels. */
  top: number;
  folded: ReadonlySet<string>;
  selected: number;
  hovered: number;
  focusRow: number;
  cursor: number | null;
  range: View | null;
}

/** The rows: right of their names, below the axis. */
export interface Area {
  x: number;
  y: number;
  width: number;
  height: number;
}

/** A text on an operation; `back`: the colour below it, or empty for stripes. */
export interface Label {
  x: number;
  y: number;
  width: number;
  text: string;
  back: string;
}

/** Returns where a time lies. */
export function xOf(area: Area, view: View, time: number): number {
  return area.x + ((time - view.from) / (view.to - view.from)) * area.width;
}

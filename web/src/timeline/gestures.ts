/** Mouse, touch and wheel on a timeline: pan, zoom, choose, select a range. */

export interface Gestures {
  /** Moves by pixels to the right and down. */
  pan(dx: number, dy: number): void;
  /** Scales by `factor` around the place `x`. */
  zoom(factor: number, x: number): void;
  /** The pointer is at a place, or left. */
  hover(at: { x: number; y: number } | null): void;
  /** A click at a place. */
  pick(x: number, y: number): void;
  /** A range is drawn from one place to another; `done`: it is complete. */
  range(x0: number, x1: number, done: boolean): void;
  /** Whether a drag selects, also without the key. */
  selecting(): boolean;
  /** Scrolls rows by pixels; returns false where there is nothing to scroll, so that the page scrolls. */
  scroll(dy: number): boolean;
}

const CLICK_PX = 4;

/** Attaches to an element; returns what detaches again. */
export function attach(element: HTMLElement, gestures: Gestures): () => void {
  const pointers = new Map<number, { x: number; y: number }>();
  let [startX, startY, moved, mode] = [0, 0, false, "pan" as "pan" | "range"];
  const place = (event: MouseEvent) => {
    const box = element.getBoundingClientRect();
    return { x: event.clientX - box.left, y: event.clientY - box.top };
  };
  const down = (event: PointerEvent) => {
    if (event.button !== 0) return;
    element.setPointerCapture(event.pointerId);
    const at = place(event);
    pointers.set(event.pointerId, at);
    if (pointers.size > 1) return;
    [startX, startY, moved] = [at.x, at.y, false];
    mode = event.shiftKey || gestures.selecting() ? "range" : "pan";
  };
  const move = (event: PointerEvent) => {
    const at = place(event);
    const before = pointers.get(event.pointerId);
    if (!before) {
      gestures.hover(at);
      return;
    }
    if (Math.hypot(at.x - startX, at.y - startY) > CLICK_PX) moved = true;
    if (pointers.size === 2) pinch(event.pointerId, before, at);
    else if (moved && mode === "range") gestures.range(startX, at.x, false);
    else if (moved) gestures.pan(at.x - before.x, at.y - before.y);
    pointers.set(event.pointerId, at);
  };
  const pinch = (id: number, before: { x: number; y: number }, at: { x: number; y: number }) => {
    const other = [...pointers].find(([key]) => key !== id)?.[1];
    if (!other) return;
    moved = true;
    const [was, is] = [Math.abs(before.x - other.x), Math.abs(at.x - other.x)];
    if (was > 8 && is > 8) gestures.zoom(was / is, (at.x + other.x) / 2);
    gestures.pan((at.x - before.x) / 2, (at.y - before.y) / 2);
  };
  const up = (event: PointerEvent) => {
    if (!pointers.delete(event.pointerId)) return;
    const at = place(event);
    if (event.type === "pointercancel") return;
    if (!moved) gestures.pick(at.x, at.y);
    else if (mode === "range") gestures.range(startX, at.x, true);
  };
  const leave = () => gestures.hover(null);
  const wheel = (event: WheelEvent) => {
    const unit = event.deltaMode === 1 ? 16 : event.deltaMode === 2 ? 400 : 1;
    const [dx, dy] = [event.deltaX * unit, event.deltaY * unit];
    if (event.ctrlKey || event.metaKey || event.altKey) {
      gestures.zoom(Math.exp(Math.max(-120, Math.min(120, dy)) * 0.004), place(event).x);
    } else if (Math.abs(dx) > Math.abs(dy) || event.shiftKey) {
      gestures.pan(-(dx || dy), 0);
    } else if (!gestures.scroll(dy)) {
      return;
    }
    event.preventDefault();
  };
  element.addEventListener("pointerdown", down);
  element.addEventListener("pointermove", move);
  element.addEventListener("pointerup", up);
  element.addEventListener("pointercancel", up);
  element.addEventListener("pointerleave", leave);
  element.addEventListener("wheel", wheel, { passive: false });
  return () => {
    element.removeEventListener("pointerdown", down);
    element.removeEventListener("pointermove", move);
    element.removeEventListener("pointerup", up);
    element.removeEventListener("pointercancel", up);
    element.removeEventListener("pointerleave", leave);
    element.removeEventListener("wheel", wheel);
  };
}

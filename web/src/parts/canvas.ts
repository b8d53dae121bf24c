/** A canvas that fills its box, sharp on each screen, drawn again when its size or the colours change. */
import { useSignalEffect } from "@preact/signals";
import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import { colourEpoch } from "../theme.ts";

/** Returns the width of an element in CSS pixels, 0 before it is laid out. */
export function useWidth(ref: { readonly current: HTMLElement | null }): number {
  const [width, setWidth] = useState(0);
  useLayoutEffect(() => {
    const element = ref.current;
    if (!element) return undefined;
    const measure = () => setWidth(Math.floor(element.clientWidth));
    measure();
    const observer = new ResizeObserver(measure);
    observer.observe(element);
    return () => observer.disconnect();
  }, []);
  return width;
}

/** Calls `draw` with a context in CSS pixels, once a frame at most, whenever `deps` or the colours change. */
export function useDrawing(
  ref: { readonly current: HTMLCanvasElement | null },
  width: number,
  height: number,
  draw: (context: CanvasRenderingContext2D, width: number, height: number) => void,
  deps: readonly unknown[],
): void {
  const latest = useRef(draw);
  latest.current = draw;
  const paint = () => {
    const canvas = ref.current;
    if (!canvas || width <= 0 || height <= 0) return;
    const context = sized(canvas, width, height);
    context?.clearRect(0, 0, width, height);
    if (context) latest.current(context, width, height);
  };
  useEffect(() => {
    const frame = requestAnimationFrame(paint);
    return () => cancelAnimationFrame(frame);
  }, [width, height, ...deps]);
  useSignalEffect(() => {
    void colourEpoch.value;
    paint();
  });
}

/** Sets the size of a canvas; returns its context, scaled to CSS pixels. */
export function sized(canvas: HTMLCanvasElement, width: number, height: number): CanvasRenderingContext2D | null {
  const ratio = Math.min(window.devicePixelRatio || 1, 3);
  const [across, down] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== across) canvas.width = across;
  if (canvas.height !== down) canvas.height = down;
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context?.setTransform(ratio, 0, 0, ratio, 0, 0);
  return context;
}

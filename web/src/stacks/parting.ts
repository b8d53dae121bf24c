/** Where two stacks part: the frames that a culprit and a victim have in common, from the outermost inwards. */
import { fileName } from "../text/format.ts";
import type { Frame } from "../types.ts";

export interface Parting {
  /** Outermost frames that are the same line of both. */
  common: number;
  /** Whether the next frame of both is the same function, at another line. */
  sameFunction: boolean;
}

/** Compares stacks whose frames are innermost first. */
export function parting(one: readonly Frame[], other: readonly Frame[]): Parting {
  const most = Math.min(one.length, other.length);
  let common = 0;
  while (common < most && same(outer(one, common), outer(other, common), true)) common += 1;
  return { common, sameFunction: common < most && same(outer(one, common), outer(other, common), false) };
}

function outer(frames: readonly Frame[], depth: number): Frame {
  return frames[frames.length - 1 - depth] as Frame;
}

function same(a: Frame, b: Frame, line: boolean): boolean {
  return a.func === b.func && a.file === b.file && (!line || a.lineno === b.lineno);
}

const LIBRARY = /\/(site-packages|dist-packages)\/|\/lib\/python\d|^<frozen /;

/** Returns the frame of a culprit to look at: the line that `why` names, else the innermost one outside of libraries. */
export function faultyFrame(frames: readonly Frame[], why: string): Frame | null {
  const python = frames.filter((frame) => frame.frame_type.toLowerCase() === "python");
  const named = python.find((frame) => frame.lineno !== null && why.includes(`${fileName(frame.file)}:${frame.lineno}`));
  return named ?? python.find((frame) => !LIBRARY.test(frame.file)) ?? python[0] ?? null;
}

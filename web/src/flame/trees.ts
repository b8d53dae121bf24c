/** Trees of frames from what the server answers: profiles, and stacks merged over ranks. */
import { fileName, ranges } from "../text/format.ts";
import type { MergedFrame, MergedTree, ProfileNode } from "../types.ts";
import type { FlameTree } from "./layout.ts";

/** Returns the name of a frame as profiles have it: `func (file:line)`. */
export function frameName(frame: { func: string; file: string; lineno: number | null }): string {
  const file = fileName(frame.file);
  return file ? `${frame.func} (${file}${frame.lineno === null ? "" : `:${frame.lineno}`})` : frame.func;
}

/** Returns a profile as a tree of frames; of two selections as shares of each, since they differ in length. */
export function profileTree(root: ProfileNode): FlameTree {
  if (typeof root.base !== "number") return { ...root, children: root.children ?? [] };
  return shares(root, Math.max(root.value, 1), Math.max(root.base, 1));
}

function shares(node: ProfileNode, whole: number, base: number): FlameTree {
  return { name: node.name, value: node.value / whole, base: (node.base ?? 0) / base, children: (node.children ?? []).map((child) => shares(child, whole, base)) };
}

/** Returns merged stacks as a tree: a frame is as wide as it has stacks, its `ranks` are those that are in it. */
export function mergedTree(trees: readonly MergedTree[], root: string): FlameTree {
  const children = trees.map((tree) => ({
    name: tree.thread,
    value: tree.threads,
    ranks: ranges(tree.ranks),
    children: tree.children.map(mergedFrame),
  }));
  const value = children.reduce((sum, child) => sum + child.value, 0);
  return children.length === 1 ? (children[0] as FlameTree) : { name: root, value, children };
}

function mergedFrame(frame: MergedFrame): FlameTree {
  return { name: frameName(frame), value: frame.threads, ranks: ranges(frame.ranks), children: frame.children.map(mergedFrame) };
}

/** A flame graph as an icicle: frames of a tree as typed arrays in the order in which they are drawn. */

export interface FlameTree {
  name: string;
  value: number;
  ranks?: string | null;
  /** The value of the other selection, as a share of it. */
  base?: number | null;
  children?: FlameTree[];
}

export interface Flame {
  nodes: FlameTree[];
  parent: Int32Array;
  depth: Uint16Array;
  /** From 0 to 1 of the whole. */
  x0: Float64Array;
  x1: Float64Array;
  depths: number;
}

/** Deepest level and most frames that are laid out. */
export const MOST_DEPTH = 512;
export const MOST_FRAMES = 200_000;

/** Returns the layout of a tree, siblings from the largest to the smallest. */
export function layout(root: FlameTree): Flame {
  const nodes: FlameTree[] = [];
  const [parent, depth, x0, x1]: number[][] = [[], [], [], []];
  const total = Math.max(root.value, sumOf(root.children), Number.MIN_VALUE);
  let depths = 0;
  const stack: { node: FlameTree; parent: number; depth: number; from: number; to: number }[] = [
    { node: root, parent: -1, depth: 0, from: 0, to: 1 },
  ];
  while (stack.length && nodes.length < MOST_FRAMES) {
    const at = stack.pop() as (typeof stack)[number];
    const index = nodes.push(at.node) - 1;
    parent?.push(at.parent);
    depth?.push(at.depth);
    x0?.push(at.from);
    x1?.push(at.to);
    depths = Math.max(depths, at.depth + 1);
    if (at.depth + 1 >= MOST_DEPTH) continue;
    const children = [...(at.node.children ?? [])].filter((child) => child.value > 0).sort((a, b) => b.value - a.value);
    let from = at.from;
    const placed = children.map((node) => {
      const to = Math.min(at.to, from + node.value / total);
      const entry = { node, parent: index, depth: at.depth + 1, from, to };
      from = to;
      return entry;
    });
    // The last is taken first: the largest comes next in the order.
    for (let i = placed.length - 1; i >= 0; i--) stack.push(placed[i] as (typeof placed)[number]);
  }
  return {
    nodes,
    parent: Int32Array.from(parent ?? []),
    depth: Uint16Array.from(depth ?? []),
    x0: Float64Array.from(x0 ?? []),
    x1: Float64Array.from(x1 ?? []),
    depths,
  };
}

function sumOf(children: FlameTree[] | undefined): number {
  return (children ?? []).reduce((sum, child) => sum + Math.max(0, child.value), 0);
}

/** A frame as it is seen after a zoom: left and right on a width of 1. */
export function seen(flame: Flame, index: number, zoom: number): { left: number; right: number } {
  const [from, to] = [flame.x0[zoom] as number, flame.x1[zoom] as number];
  const scale = 1 / Math.max(to - from, Number.MIN_VALUE);
  return { left: ((flame.x0[index] as number) - from) * scale, right: ((flame.x1[index] as number) - from) * scale };
}

/** Returns the frame at a share of the width and a level, or -1. */
export function frameAt(flame: Flame, zoom: number, x: number, level: number): number {
  const [from, to] = [flame.x0[zoom] as number, flame.x1[zoom] as number];
  const at = from + x * (to - from);
  for (let i = 0; i < flame.nodes.length; i++) {
    if (flame.depth[i] === level && (flame.x0[i] as number) <= at && at < (flame.x1[i] as number)) return i;
  }
  return -1;
}

/** Returns which frames a text is in, without case, and their share of the whole; nested ones count once. */
export function search(flame: Flame, text: string): { found: Uint8Array; share: number } {
  const found = new Uint8Array(flame.nodes.length);
  const inside = new Uint8Array(flame.nodes.length);
  const wanted = text.trim().toLowerCase();
  let share = 0;
  if (!wanted) return { found, share };
  for (let i = 0; i < flame.nodes.length; i++) {
    const above = flame.parent[i] as number;
    const covered = above >= 0 && inside[above] === 1;
    if (flame.nodes[i]?.name.toLowerCase().includes(wanted)) {
      found[i] = 1;
      if (!covered) share += (flame.x1[i] as number) - (flame.x0[i] as number);
    }
    inside[i] = covered || found[i] ? 1 : 0;
  }
  return { found, share };
}

/** Returns the next frame in a direction, or the same one where there is none. */
export function neighbour(flame: Flame, index: number, direction: "up" | "down" | "left" | "right"): number {
  if (direction === "up") return Math.max(0, flame.parent[index] as number);
  if (direction === "down") {
    for (let i = index + 1; i < flame.nodes.length && (flame.depth[i] as number) > (flame.depth[index] as number); i++) {
      if (flame.parent[i] === index) return i;
    }
    return index;
  }
  const step = direction === "left" ? -1 : 1;
  for (let i = index + step; i >= 0 && i < flame.nodes.length; i += step) {
    if (flame.parent[i] === flame.parent[index]) return i;
    if (step > 0 && (flame.depth[i] as number) < (flame.depth[index] as number)) break;
    if (step < 0 && i <= (flame.parent[index] as number)) break;
  }
  return index;
}

/** Returns time by function, the largest own time first; a function within itself counts once. */
export function functions(flame: Flame): { name: string; self: number; total: number }[] {
  const found = new Map<string, { name: string; self: number; total: number }>();
  for (let i = 1; i < flame.nodes.length; i++) {
    const node = flame.nodes[i] as FlameTree;
    let entry = found.get(node.name);
    if (!entry) found.set(node.name, (entry = { name: node.name, self: 0, total: 0 }));
    entry.self += Math.max(0, node.value - sumOf(node.children));
    let above = flame.parent[i] as number;
    while (above > 0 && flame.nodes[above]?.name !== node.name) above = flame.parent[above] as number;
    if (above <= 0) entry.total += node.value;
  }
  return [...found.values()].sort((a, b) => b.self - a.self);
}

/** The grid of ranks: a strip of cells a node, strips in columns, as large as fits. Pure arithmetic. */

export interface GridLayout {
  cell: number;
  gap: number;
  x: Float32Array;
  y: Float32Array;
  labels: { x: number; y: number; node: string; width: number }[];
  width: number;
  height: number;
}

const CELLS = [40, 32, 26, 22, 18, 14, 12, 10, 8, 7, 6, 5, 4, 3];
const MOST_ACROSS = 16;
const LABEL = 16;

/**
 * Returns the places of cells within `width`, in the largest size at which the grid is not higher than `most`; the
 * smallest size may be higher. `nodes` has the number of ranks of each node, in the order of the cells.
 */
export function gridLayout(nodes: readonly { node: string; count: number }[], width: number, most: number): GridLayout {
  let best: GridLayout | null = null;
  for (const cell of CELLS) {
    best = placed(nodes, width, cell);
    if (best.height <= most && best.width <= width) return best;
  }
  return best ?? placed(nodes, width, 3);
}

function placed(nodes: readonly { node: string; count: number }[], width: number, cell: number): GridLayout {
  const gap = cell >= 18 ? 3 : cell >= 8 ? 2 : 1;
  const step = cell + gap;
  const label = cell >= 14 ? LABEL : 0;
  const widest = Math.max(1, ...nodes.map(({ count }) => Math.min(count, MOST_ACROSS)));
  const strip = Math.max(widest * step, label ? 64 : 0);
  const margin = Math.max(4, gap * 3);
  const across = Math.max(1, Math.floor((width + margin) / (strip + margin)));
  const total = nodes.reduce((sum, { count }) => sum + count, 0);
  const [x, y] = [new Float32Array(total), new Float32Array(total)];
  const labels: GridLayout["labels"] = [];
  let [index, top, row, right] = [0, 0, 0, 0];
  nodes.forEach(({ node, count }, n) => {
    const column = n % across;
    if (column === 0 && n > 0) {
      top += row;
      row = 0;
    }
    const left = column * (strip + margin);
    if (label) labels.push({ x: left, y: top, node, width: strip });
    for (let i = 0; i < count; i++) {
      x[index] = left + (i % MOST_ACROSS) * step;
      y[index] = top + label + Math.floor(i / MOST_ACROSS) * step;
      index += 1;
    }
    right = Math.max(right, left + widest * step);
    row = Math.max(row, label + Math.ceil(count / MOST_ACROSS) * step + (label ? 4 : gap));
  });
  return { cell, gap, x, y, labels, width: Math.max(right, labels.length ? strip : 0), height: top + row };
}

/** Returns the cell at a point, or -1. */
export function cellAt(layout: GridLayout, x: number, y: number): number {
  const reach = layout.cell + layout.gap / 2;
  for (let i = 0; i < layout.x.length; i++) {
    const [dx, dy] = [x - (layout.x[i] as number), y - (layout.y[i] as number)];
    if (dx >= -layout.gap / 2 && dy >= -layout.gap / 2 && dx < reach && dy < reach) return i;
  }
  return -1;
}

/** Returns the nearest cell in a direction, or the same one. */
export function cellBeside(layout: GridLayout, from: number, direction: "left" | "right" | "up" | "down"): number {
  const [x, y] = [layout.x[from] as number, layout.y[from] as number];
  let [best, distance] = [from, Number.POSITIVE_INFINITY];
  for (let i = 0; i < layout.x.length; i++) {
    const [dx, dy] = [(layout.x[i] as number) - x, (layout.y[i] as number) - y];
    const ahead = direction === "left" ? -dx : direction === "right" ? dx : direction === "up" ? -dy : dy;
    const aside = direction === "left" || direction === "right" ? Math.abs(dy) : Math.abs(dx);
    if (ahead <= 0.5) continue;
    const away = ahead + aside * 4;
    if (away < distance) [best, distance] = [i, away];
  }
  return best;
}

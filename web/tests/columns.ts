/** Writes PRBCOLS1, for tests: the truth that the decoder is held to is in SPEC's words, not in the decoder. */

export interface Col {
  name: string;
  type: "f64" | "f32" | "i32" | "u32" | "u16" | "u8";
  values: ArrayLike<number>;
}

const SIZES = { f64: 8, f32: 4, i32: 4, u32: 4, u16: 2, u8: 1 } as const;

export function encode(sections: Record<string, Col[]>, rest: Record<string, unknown> = {}): ArrayBuffer {
  let offset = 0;
  const header = { sections: {} as Record<string, unknown>, dictionaries: {}, from_ns: "0", losses: [], clocks: [], ...rest };
  const places: { col: Col; offset: number }[] = [];
  for (const [name, cols] of Object.entries(sections)) {
    const columns = cols.map((col) => {
      offset = Math.ceil(offset / 8) * 8;
      places.push({ col, offset });
      const entry = { name: col.name, type: col.type, offset };
      offset += col.values.length * SIZES[col.type];
      return entry;
    });
    header.sections[name] = { rows: cols[0]?.values.length ?? 0, columns };
  }
  const text = new TextEncoder().encode(JSON.stringify(header));
  const base = Math.ceil((12 + text.length) / 8) * 8;
  const bytes = new ArrayBuffer(base + offset);
  const view = new DataView(bytes);
  new Uint8Array(bytes).set(new TextEncoder().encode("PRBCOLS1"));
  view.setUint32(8, text.length, true);
  new Uint8Array(bytes).set(text, 12);
  for (const { col, offset: at } of places) {
    for (let i = 0; i < col.values.length; i++) {
      const [place, value] = [base + at + i * SIZES[col.type], col.values[i] as number];
      if (col.type === "f64") view.setFloat64(place, value, true);
      else if (col.type === "f32") view.setFloat32(place, value, true);
      else if (col.type === "i32") view.setInt32(place, value, true);
      else if (col.type === "u32") view.setUint32(place, value, true);
      else if (col.type === "u16") view.setUint16(place, value, true);
      else view.setUint8(place, value);
    }
  }
  return bytes;
}

export interface Op {
  rank: number;
  comm?: number;
  op?: number;
  seq: number;
  call: number;
  done: number;
}

/** Returns a timeline of operations. */
export function timeline(ops: Op[], ranks: number): ArrayBuffer {
  const f64 = (name: string, values: number[]): Col => ({ name, type: "f64", values });
  const comms = Math.max(0, ...ops.map((op) => op.comm ?? 0)) + 1;
  return encode(
    {
      ops: [
        { name: "rank", type: "u32", values: ops.map((op) => op.rank) },
        { name: "comm", type: "u16", values: ops.map((op) => op.comm ?? 0) },
        { name: "op", type: "u16", values: ops.map((op) => op.op ?? 0) },
        f64("seq", ops.map((op) => op.seq)),
        f64("call", ops.map((op) => op.call)),
        f64("start", ops.map(() => Number.NaN)),
        f64("done_lo", ops.map((op) => op.done)),
        f64("done_hi", ops.map((op) => op.done)),
        f64("bytes", ops.map(() => 4096)),
        { name: "state", type: "u8", values: ops.map(() => 0) },
        { name: "step", type: "i32", values: ops.map(() => -1) },
      ],
    },
    {
      dictionaries: {
        comms: Array.from({ length: comms }, (_, i) => `comm ${i}`),
        ops: ["all_reduce", "barrier"],
        ranks: Array.from({ length: ranks }, (_, rank) => ({ rank, node: `n${rank >> 3}`, pid: 1000 + rank })),
      },
    },
  );
}

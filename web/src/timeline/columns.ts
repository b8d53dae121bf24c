/**
 * Decodes `application/x-probing-columns`: a magic, the length of a JSON header, the header, and little-endian
 * columns that stay typed arrays over the received bytes. Everything is checked, for a node wrote it.
 */

export type TypedArray = Float64Array | Float32Array | Int32Array | Uint32Array | Uint16Array | Uint8Array;

const TYPES = {
  f64: Float64Array,
  f32: Float32Array,
  i32: Int32Array,
  u32: Uint32Array,
  u16: Uint16Array,
  u8: Uint8Array,
} as const;

export interface Section {
  rows: number;
  columns: ReadonlyMap<string, TypedArray>;
}

export interface RankOf {
  rank: number | null;
  node: string;
  pid: number;
}

export interface Loss {
  node?: string;
  /** Null: all processes of the node. */
  pid?: number | null;
  table?: string;
  from_us?: number;
  to_us?: number;
  rows?: number | null;
  reason?: string;
}

export interface Clock {
  node: string;
  offset_ns: number | null;
  bound_ns: number | null;
}

export interface Columns {
  sections: ReadonlyMap<string, Section>;
  comms: string[];
  ops: string[];
  frames: string[];
  ranks: RankOf[];
  /** Other lists of texts by name. */
  dictionaries: ReadonlyMap<string, unknown[]>;
  fromNs: bigint;
  losses: Loss[];
  clocks: Clock[];
  header: Record<string, unknown>;
}

const MAGIC = "PRBCOLS1";

/** Returns the columns of `bytes`; throws an Error that says what is wrong with them. */
export function decode(bytes: ArrayBuffer): Columns {
  if (bytes.byteLength < 12) throw new Error("the answer is cut: it has no header");
  const magic = String.fromCharCode(...new Uint8Array(bytes, 0, 8));
  if (magic !== MAGIC) throw new Error("the answer is of another format or version");
  const length = new DataView(bytes).getUint32(8, true);
  if (12 + length > bytes.byteLength) throw new Error("the answer is cut within its header");
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(bytes, 12, length))) as Record<string, unknown>;
  const base = Math.ceil((12 + length) / 8) * 8;
  const sections = new Map<string, Section>();
  for (const [name, given] of Object.entries((header["sections"] ?? {}) as Record<string, RawSection>)) {
    sections.set(name, section(name, given, bytes, base));
  }
  const dictionaries = new Map(Object.entries((header["dictionaries"] ?? {}) as Record<string, unknown[]>));
  const texts = (name: string) => (dictionaries.get(name) ?? []).map((entry) => String(entry));
  return {
    sections,
    comms: texts("comms"),
    ops: texts("ops"),
    frames: texts("frames"),
    ranks: (dictionaries.get("ranks") ?? []) as RankOf[],
    dictionaries,
    fromNs: BigInt(String(header["from_ns"] ?? "0")),
    losses: (header["losses"] ?? []) as Loss[],
    clocks: (header["clocks"] ?? []) as Clock[],
    header,
  };
}

interface RawSection {
  rows: number;
  columns: { name: string; type: string; offset: number }[];
}

function section(name: string, given: RawSection, bytes: ArrayBuffer, base: number): Section {
  const { rows } = given;
  if (!Number.isInteger(rows) || rows < 0) throw new Error(`section ${name} has no number of rows`);
  const columns = new Map<string, TypedArray>();
  for (const column of given.columns) {
    const Type = TYPES[column.type as keyof typeof TYPES];
    if (!Type) throw new Error(`column ${name}.${column.name} has the unknown type ${column.type}`);
    const start = base + column.offset;
    const end = start + rows * Type.BYTES_PER_ELEMENT;
    if (!Number.isInteger(start) || column.offset < 0 || end > bytes.byteLength) {
      throw new Error(`column ${name}.${column.name} reaches beyond the answer`);
    }
    // An array needs an aligned start; a copy is the way out for a sender that did not align.
    const aligned = start % Type.BYTES_PER_ELEMENT === 0;
    columns.set(column.name, aligned ? new Type(bytes, start, rows) : new Type(bytes.slice(start, end)));
  }
  return { rows, columns };
}

/** Returns a column, or one of `fill` where the section or column is missing. */
export function column(columns: Columns, sectionName: string, name: string, fill = Number.NaN): TypedArray {
  const found = columns.sections.get(sectionName);
  return found?.columns.get(name) ?? new Float64Array(found?.rows ?? 0).fill(fill);
}

/** Returns the text at `index` of a list, or `?`. */
export function textAt(list: readonly string[], index: number | undefined): string {
  return index === undefined ? "?" : (list[index] ?? "?");
}

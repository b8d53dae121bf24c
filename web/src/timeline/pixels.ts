/** Drawing of spans into pixels: a frame of the timeline is one image, written in place. */

/** A colour as a 32-bit number in the order of ImageData, from `#rrggbb`. */
export function packed(hex: string): number {
  const value = Number.parseInt(hex.replace("#", "").slice(0, 6), 16) || 0;
  return (255 << 24) | ((value & 255) << 16) | (value & 0xff00) | (value >> 16);
}

/** Returns `over` laid over `under`, `share` of it. */
export function mix(under: number, over: number, share: number): number {
  const part = (shift: number) => {
    const from = (under >>> shift) & 255;
    return Math.round(from + (((over >>> shift) & 255) - from) * share) << shift;
  };
  return (255 << 24) | part(16) | part(8) | part(0);
}

export class Pixels {
  readonly data: Uint32Array;
  readonly image: ImageData;

  constructor(
    readonly width: number,
    readonly height: number,
  ) {
    this.image = new ImageData(Math.max(1, width), Math.max(1, height));
    this.data = new Uint32Array(this.image.data.buffer);
  }

  clear(colour: number): void {
    this.data.fill(colour);
  }

  /** Fills columns `x0` to before `x1` of lines `y0` to before `y1`. */
  fill(x0: number, x1: number, y0: number, y1: number, colour: number): void {
    const [left, right] = [Math.max(0, x0), Math.min(this.width, x1)];
    if (left >= right) return;
    for (let y = Math.max(0, y0); y < Math.min(this.height, y1); y++) this.data.fill(colour, y * this.width + left, y * this.width + right);
  }

  /** As `fill`, in slanting stripes of two colours. */
  hatch(x0: number, x1: number, y0: number, y1: number, one: number, other: number, size: number): void {
    const [left, right] = [Math.max(0, x0), Math.min(this.width, x1)];
    for (let y = Math.max(0, y0); y < Math.min(this.height, y1); y++) {
      const line = y * this.width;
      for (let x = left; x < right; x++) this.data[line + x] = (x + y) % size < size / 2 ? one : other;
    }
  }
}

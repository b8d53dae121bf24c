/** Reads columns that a document carries as text: lines of base64, of bytes that are deflated (RFC 1950). */

/** Returns the bytes of `text`; throws an Error where it is cut or the browser cannot inflate. */
export async function unpacked(text: string): Promise<ArrayBuffer> {
  if (typeof DecompressionStream === "undefined") throw new Error("this browser is too old for this file: use one of 2023 or later");
  const lines = text.split("\n").filter(Boolean).values();
  const packed = new ReadableStream<Uint8Array<ArrayBuffer>>({
    pull(controller) {
      const line = lines.next();
      if (line.done) controller.close();
      else controller.enqueue(bytesOf(line.value));
    },
  });
  try {
    return await new Response(packed.pipeThrough(new DecompressionStream("deflate"))).arrayBuffer();
  } catch {
    throw new Error("this file is cut or changed: its data cannot be read");
  }
}

function bytesOf(line: string): Uint8Array<ArrayBuffer> {
  const text = atob(line);
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  return bytes;
}

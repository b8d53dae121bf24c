/** A button that copies a text; and texts in which the commands, set in backticks, can be copied. */
import { useState } from "preact/hooks";
import { words } from "../i18n/index.ts";
import { visible } from "../text/escape.ts";

export function Copy({ text }: { text: string }) {
  const [state, setState] = useState<"copy" | "done" | "failed">("copy");
  const w = words.value.copy;
  const copy = async () => {
    try {
      await navigator.clipboard.writeText(text);
      setState("done");
    } catch {
      setState("failed");
    }
    setTimeout(() => setState("copy"), 2000);
  };
  return (
    <button type="button" class="copy" onClick={copy} aria-label={`${w.copy}: ${visible(text, 200)}`}>
      {w[state]}
    </button>
  );
}

/** Splits a text at backticks: odd parts are commands. */
export function commandsIn(text: string): string[] {
  const parts = text.split("`");
  // A single backtick is no pair.
  return parts.length % 2 === 1 ? parts : [text];
}

export function WithCommands({ text }: { text: string }) {
  return (
    <>
      {commandsIn(text).map((part, index) =>
        index % 2 === 0 ? (
          // A full stop behind a button belongs to nothing.
          index > 0 && part === "." ? null : visible(part)
        ) : (
          <span class="command">
            <code>{visible(part)}</code>
            {part.includes(" ") ? <Copy text={part} /> : null}
          </span>
        ),
      )}
    </>
  );
}

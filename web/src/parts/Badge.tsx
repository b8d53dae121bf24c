/** States in a word, with a sign beside the colour. */
import { words } from "../i18n/index.ts";
import { visible } from "../text/escape.ts";

const TONES: Record<string, "error" | "warning" | "ok" | "soft"> = {
  STUCK: "error",
  FAILED: "error",
  SLOW: "warning",
  WARNING: "warning",
  WAITS: "warning",
  AWAY: "warning",
  PAUSED: "soft",
  OK: "ok",
  ENDED: "soft",
};
const SIGNS = { error: "✕", warning: "▲", ok: "✓", soft: "○" };

export function StateBadge({ state }: { state: string }) {
  const tone = TONES[state] ?? "soft";
  return <Badge tone={tone} text={words.value.states[state] ?? state} />;
}

export function Badge({ tone, text }: { tone: "error" | "warning" | "ok" | "soft"; text: string }) {
  return (
    <span class={`badge ${tone}`}>
      <span aria-hidden="true">{SIGNS[tone]}</span> {visible(text, 60)}
    </span>
  );
}

export function toneOf(severity: string | null | undefined): "error" | "warning" | "ok" | "soft" {
  return severity === "error" ? "error" : severity === "warning" ? "warning" : "soft";
}

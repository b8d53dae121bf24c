/** States of groups, launchers and ranks as badges. */
import { words } from "../i18n/index.ts";
import { Badge } from "../parts/Badge.tsx";

type Tone = "error" | "warning" | "ok" | "soft";

const PHASES: Record<string, Tone> = { running: "ok", ending: "warning", failed: "error" };
const LAUNCHERS: Record<string, Tone> = { healthy: "ok", suspect: "warning", failed: "error", none: "error" };
const RANKS: Record<string, Tone> = { running: "ok", starting: "warning", ending: "warning", waiting: "warning", refused: "error", fenced: "error" };

export function PhaseBadge({ phase }: { phase: string }) {
  return <Badge tone={PHASES[phase] ?? "soft"} text={words.value.groups.phases[phase] ?? phase} />;
}

export function LauncherBadge({ state }: { state: string }) {
  return <Badge tone={LAUNCHERS[state] ?? "soft"} text={words.value.groups.states[state] ?? state} />;
}

export function RankBadge({ state, exit = null }: { state: string; exit?: number | null }) {
  const failed = state === "ended" && exit !== null && exit !== 0;
  return <Badge tone={failed ? "error" : (RANKS[state] ?? "soft")} text={words.value.groups.states[state] ?? state} />;
}

/** Light or dark: as the system says, or as chosen; and the colours of the style sheet for canvases. */
import { effect, signal } from "@preact/signals";
import { keep, kept } from "./kept.ts";

export type Theme = "auto" | "light" | "dark";

const dark = matchMedia("(prefers-color-scheme: dark)");
const start = kept("theme");

export const theme = signal<Theme>(start === "light" || start === "dark" ? start : "auto");
/** Grows when colours change, so that canvases are drawn again. */
export const colourEpoch = signal(0);

export function choose(chosen: Theme): void {
  theme.value = chosen;
  keep("theme", chosen);
}

effect(() => {
  const chosen = theme.value;
  const isDark = chosen === "dark" || (chosen === "auto" && dark.matches);
  document.documentElement.dataset["theme"] = isDark ? "dark" : "light";
  colourEpoch.value = colourEpoch.peek() + 1;
});

dark.addEventListener("change", () => {
  if (theme.peek() !== "auto") return;
  document.documentElement.dataset["theme"] = dark.matches ? "dark" : "light";
  colourEpoch.value = colourEpoch.peek() + 1;
});

/** Returns the value of a colour of the style sheet, as `--accent`. */
export function colour(name: string): string {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

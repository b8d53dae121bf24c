/** The words of the page in the language that was chosen, kept in this browser. */
import { computed, signal } from "@preact/signals";
import { kept, keep } from "../kept.ts";
import { en, type Words } from "./en.ts";
import { zh } from "./zh.ts";

export type Language = "en" | "zh";

const DICTIONARIES: Record<Language, Words> = { en, zh };

function first(): Language {
  const chosen = kept("language");
  if (chosen === "en" || chosen === "zh") return chosen;
  return navigator.language.toLowerCase().startsWith("zh") ? "zh" : "en";
}

export const language = signal<Language>(first());
export const words = computed<Words>(() => DICTIONARIES[language.value]);

export function speak(chosen: Language): void {
  language.value = chosen;
  keep("language", chosen);
}

/** The sentence of a finding in the language of the page, and the server's English sentence, which has the details. */
import { words } from "../i18n/index.ts";
import { visible } from "../text/escape.ts";
import { capital, numbersOf, ranges } from "../text/format.ts";

interface Told {
  verdict: string;
  sentence: string;
  /** Numbers of ranks, or culprits as `diagnose` has them. */
  culprits?: readonly (number | { rank: number | null })[] | null;
  /** The ranks of culprits as ranges, in stored rows. */
  ranks?: string | null;
  victims?: readonly number[] | string | null;
}

/** Returns the sentence of `finding` in the language of the page: the server's where the language is English. */
export function headline(finding: Told, longest: number): string {
  return translated(finding) ?? visible(capital(finding.sentence), longest);
}

/** The server's sentence, where `headline` shows a translation. */
export function Original({ finding, longest }: { finding: Told; longest: number }) {
  if (translated(finding) === null) return null;
  return <span class="original" lang="en">{visible(capital(finding.sentence), longest)}</span>;
}

function translated({ verdict, culprits, ranks, victims }: Told): string | null {
  const named = culprits ? listed(culprits).map((one) => (typeof one === "number" ? one : one?.rank)) : listed(ranks);
  return words.value.verdict(verdict, ranges(named.filter((rank) => typeof rank === "number")), listed(victims).length);
}

// The JSON of a stored row may be anything if a node was taken over.
function listed<T>(value: readonly T[] | string | null | undefined): readonly (T | number)[] {
  return Array.isArray(value) ? (value as readonly T[]) : numbersOf(typeof value === "string" ? value : null);
}

/** The line that each panel carries: nodes asked and answered, age, rows lost, clock error. */
import { words } from "../i18n/index.ts";
import { visible } from "../text/escape.ts";
import { duration, elapsed, number, since } from "../text/format.ts";
import type { Contract } from "../types.ts";
import { now } from "./now.ts";

const OLD_NS = 15e9;

export function ContractLine({ contract, live = false }: { contract: Contract; live?: boolean }) {
  const w = words.value.contract;
  const age = since(contract.at, now.value);
  const partial = contract.answered < contract.asked || contract.failures.length > 0;
  const parts = [
    contract.asked === 0 ? null : (
      <span class={partial ? "bad-news" : ""}>
        {partial ? "▲ " : ""}
        {w.asked(contract.answered, contract.asked)}
      </span>
    ),
    <span class={live && age !== null && age > OLD_NS ? "bad-news" : ""}>{w.age(elapsed(age))}</span>,
    contract.lost_rows === null ? null : contract.lost_rows > 0 ? (
      <span class="late-news">▲ {w.lost(number(contract.lost_rows))}</span>
    ) : (
      <span>{w.lostNone}</span>
    ),
    contract.clock_error_ns === null ? null : <span>{w.clock(duration(contract.clock_error_ns))}</span>,
  ].filter((part) => part !== null);
  return (
    <div class="contract" aria-label={w.label} role="note">
      <span class="contract-parts">{parts}</span>
      {contract.failures.length > 0 && (
        <details>
          <summary>
            {contract.failures.length} {w.failed}
          </summary>
          <ul>
            {contract.failures.slice(0, 50).map((failure) => (
              <li>
                {failure.node ? <b>{visible(failure.node, 200)}: </b> : null}
                {visible(failure.error, 500)}
              </li>
            ))}
          </ul>
        </details>
      )}
    </div>
  );
}

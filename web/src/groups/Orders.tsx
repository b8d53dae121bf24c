/** The owner's orders: start, stop, restart and delete; what ends ranks is asked for twice. */
import { useState } from "preact/hooks";
import { asRequestError, post, type RequestError, session } from "../api.ts";
import { words } from "../i18n/index.ts";
import { WithCommands } from "../parts/Copy.tsx";
import { Trouble } from "../parts/Panel.tsx";
import { visible } from "../text/escape.ts";
import type { OrderAnswer } from "../types.ts";

type Action = "start" | "stop" | "restart" | "delete";

/** Returns whether this page's server can sign for its visitor. */
export function maySign(): boolean {
  return session.value?.can?.includes("groups") ?? false;
}

/** The commands to use where the page cannot sign. */
export function NoKey({ commands }: { commands: readonly string[] }) {
  return (
    <div class="note no-key">
      {words.value.groups.noKey}
      <ul>{commands.map((command) => <li><WithCommands text={`\`${command}\``} /></li>)}</ul>
    </div>
  );
}

export function Orders({ name, phase, onDone }: { name: string; phase: string; onDone: (action: Action) => void }) {
  const w = words.value.groups;
  const [asked, setAsked] = useState<Action | null>(null);
  const [busy, setBusy] = useState(false);
  const [failures, setFailures] = useState<{ action: Action; texts: string[] } | null>(null);
  const [said, setSaid] = useState("");
  const [error, setError] = useState<RequestError | null>(null);
  const labels: Record<Action, string> = { start: w.start, stop: w.stop, restart: w.restart, delete: w.remove };
  const runs = phase === "running" || phase === "ending";
  const actions: Action[] = runs ? ["stop", "restart", "delete"] : ["start", "delete"];
  const order = async (action: Action, force = false) => {
    setBusy(true);
    setAsked(null);
    setError(null);
    setFailures(null);
    setSaid("");
    try {
      const { data } = await post<OrderAnswer>(`group/${action}`, { name, force });
      if (data.said === null) setFailures({ action, texts: data.failures });
      else {
        setSaid(data.said);
        onDone(action);
      }
    } catch (problem) {
      setError(asRequestError(problem));
    } finally {
      setBusy(false);
    }
  };
  return (
    <div class="orders">
      <div class="controls">
        {actions.map((action) => (
          <button type="button" class={action === "start" ? "primary" : ""} disabled={busy} onClick={() => (action === "start" ? void order(action) : setAsked(action))}>
            {labels[action]}
          </button>
        ))}
        <span role="status" class="soft">{busy ? w.working : visible(said, 300)}</span>
      </div>
      {asked !== null ? (
        <div class="confirm" role="group" aria-label={w.sure[asked]}>
          <span>{w.sure[asked]}</span>
          <button type="button" class="primary" ref={focused} onClick={() => void order(asked)}>{labels[asked]} {visible(name, 63)}</button>
          <button type="button" onClick={() => setAsked(null)}>{w.back}</button>
        </div>
      ) : null}
      {failures ? (
        <div class="trouble" role="alert">
          <b>{w.failed}</b>
          <ul>{failures.texts.slice(0, 50).map((text) => <li>{visible(text, 500)}</li>)}</ul>
          <button type="button" onClick={() => void order(failures.action, true)}>{w.anyway}</button>
        </div>
      ) : null}
      {error ? <Trouble error={error} /> : null}
    </div>
  );
}

function focused(button: HTMLButtonElement | null): void {
  button?.focus();
}

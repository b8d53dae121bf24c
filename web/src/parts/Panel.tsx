/** A part of a screen with its title, its contract, and each state: loading, empty, partial, refused, gone. */
import type { ComponentChildren } from "preact";
import { useEffect, useId, useState } from "preact/hooks";
import type { RequestError } from "../api.ts";
import { words } from "../i18n/index.ts";
import { visible } from "../text/escape.ts";
import type { Contract } from "../types.ts";
import { ContractLine } from "./Contract.tsx";

interface PanelProps {
  title: string;
  contract?: Contract | null | undefined;
  live?: boolean;
  error?: RequestError | null;
  again?: () => void;
  actions?: ComponentChildren;
  class?: string;
  children?: ComponentChildren;
}

export function Panel({ title, contract, live = false, error, again, actions, class: name = "", children }: PanelProps) {
  const id = useId();
  return (
    <section class={`panel ${name}`} aria-labelledby={id}>
      <header class="panel-head">
        <h2 id={id}>{title}</h2>
        {actions ? <div class="actions">{actions}</div> : null}
      </header>
      {error ? <Trouble error={error} again={again} /> : null}
      <div class="panel-body">{children}</div>
      {contract ? <ContractLine contract={contract} live={live} /> : null}
    </section>
  );
}

/** Why there is no answer, or why the last one is old. */
export function Trouble({ error, again }: { error: RequestError; again?: (() => void) | undefined }) {
  const w = words.value.state;
  const title = error.kind === "gone" ? w.gone : error.kind === "refused" ? w.refused : w.error;
  const hint = error.kind === "gone" ? w.goneHint : error.hint;
  return (
    <div class={`trouble ${error.kind}`} role="alert">
      <b>{title}</b>
      {error.kind === "gone" ? null : <span>{visible(error.message, 1000)}</span>}
      {hint ? <span class="soft">{visible(hint, 1000)}</span> : null}
      {again ? (
        <button type="button" onClick={again}>
          {w.retry}
        </button>
      ) : null}
    </div>
  );
}

/** Shown while the first answer is awaited; says nothing in the first quarter of a second. */
export function Loading() {
  const [stage, setStage] = useState(0);
  useEffect(() => {
    const timers = [setTimeout(() => setStage(1), 250), setTimeout(() => setStage(2), 5000)];
    return () => timers.forEach(clearTimeout);
  }, []);
  const w = words.value.state;
  return (
    <p class="loading" role="status">
      {stage === 0 ? "" : stage === 1 ? w.loading : `${w.loading} ${w.slow}`}
    </p>
  );
}

export function Empty({ title, hint }: { title: string; hint?: string }) {
  return (
    <div class="empty">
      <p>{title}</p>
      {hint ? <p class="soft">{hint}</p> : null}
    </div>
  );
}

/** The body of a panel of one answer: loading, empty or its content. */
export function Body<T>({ of, error, empty, children }: { of: T | null | undefined; error?: RequestError | null; empty?: ComponentChildren; children: (data: T) => ComponentChildren }) {
  if (of === null || of === undefined) return error ? null : <Loading />;
  const content = children(of);
  return <>{content ?? empty ?? <Empty title={words.value.state.nothing} />}</>;
}

/** The form of a new group, or of the change of a stopped one: fields, then the table of ranks, then the change. */
import type { ComponentChildren } from "preact";
import { useState } from "preact/hooks";
import { asRequestError, post, type RequestError } from "../api.ts";
import { words } from "../i18n/index.ts";
import { useAsked } from "../live.ts";
import { Body, Panel, Trouble } from "../parts/Panel.tsx";
import { visible } from "../text/escape.ts";
import type { Answer, GroupPreview, WorkerRow } from "../types.ts";
import { bodyOf, nodeOf, type FormFields } from "./form.ts";
import { PlannedRanks } from "./RankTable.tsx";
import { WorkerPicker } from "./WorkerPicker.tsx";

interface FormProps {
  first: FormFields;
  onDone: (name: string) => void;
  onCancel: () => void;
}

export function GroupForm({ first, onDone, onCancel }: FormProps) {
  const w = words.value.groups;
  const isNew = first.version === null;
  const workers = useAsked<WorkerRow[]>("workers", {}, 5000);
  const [fields, setFields] = useState(first);
  const [preview, setPreview] = useState<Answer<GroupPreview> | null>(null);
  const [busy, setBusy] = useState(false);
  const [error, setError] = useState<RequestError | null>(null);
  const change = (changed: Partial<FormFields>) => {
    setFields({ ...fields, ...changed });
    // What was previewed is not what would be made.
    setPreview(null);
  };
  const attempt = async (act: () => Promise<void>) => {
    setBusy(true);
    setError(null);
    try {
      await act();
    } catch (problem) {
      setError(asRequestError(problem));
    } finally {
      setBusy(false);
    }
  };
  const show = (event: SubmitEvent) => {
    event.preventDefault();
    void attempt(async () => setPreview(await post<GroupPreview>("group/preview", bodyOf(fields))));
  };
  const make = () =>
    attempt(async () => {
      await post(isNew ? "group/create" : "group/change", bodyOf(fields));
      onDone(fields.name);
    });
  return (
    <Panel title={isNew ? w.create : `${w.change} ${visible(first.name, 63)}`} contract={workers.answer?.contract} error={workers.error} again={workers.again}>
      <form class="group-form" onSubmit={show}>
        {isNew ? (
          <Field label={w.name}>
            <input value={fields.name} required maxLength={63} autocomplete="off" spellcheck={false} onInput={(event) => change({ name: event.currentTarget.value.trim() })} />
          </Field>
        ) : null}
        <Body of={workers.answer?.data} error={workers.error}>
          {(rows) => <WorkerPicker rows={rows} chosen={fields.workers} onChange={(chosen) => change({ workers: chosen })} />}
        </Body>
        <Field label={w.command} hint={w.commandHint} wide>
          <input class="code" value={fields.command} required autocomplete="off" spellcheck={false} onInput={(event) => change({ command: event.currentTarget.value })} />
        </Field>
        <Settings fields={fields} change={change} />
        <div class="controls">
          <button type="submit" class={preview ? "" : "primary"} disabled={busy || fields.workers.length === 0}>{w.preview}</button>
          <button type="button" onClick={onCancel}>{w.back}</button>
          <span role="status" class="soft">{busy ? w.working : ""}</span>
        </div>
      </form>
      {error ? <Trouble error={error} /> : null}
      {preview ? (
        <section class="preview" aria-label={w.previewed}>
          <h3>{w.previewed}</h3>
          {preview.data.clashes.slice(0, 20).map((text) => <p class="note">▲ {visible(text, 400)}</p>)}
          <PlannedRanks ranks={preview.data.ranks} />
          <div class="controls">
            <button type="button" class="primary" disabled={busy} onClick={() => void make()}>{isNew ? w.make : w.save}</button>
          </div>
        </section>
      ) : null}
    </Panel>
  );
}

function Settings({ fields, change }: { fields: FormFields; change: (changed: Partial<FormFields>) => void }) {
  const w = words.value.groups;
  const text = (name: "world_size" | "master_port" | "cwd" | "max_restarts" | "min_nodes" | "grace" | "fence" | "save" | "save_time") => ({
    value: fields[name],
    autocomplete: "off",
    onInput: (event: { currentTarget: HTMLInputElement }) => change({ [name]: event.currentTarget.value }),
  });
  return (
    <div class="form-grid">
      <Field label={w.master}>
        <Choices value={fields.master} options={{ "": w.masterFirst, ...named([...fields.workers.map(nodeOf), ...fields.workers]) }} onChoose={(master) => change({ master })} />
      </Field>
      <Field label={w.worldSize} hint={w.worldSizeHint}>
        <input type="number" min={1} max={16384} {...text("world_size")} />
      </Field>
      <Field label={w.port}>
        <input type="number" min={1} max={65535} required {...text("master_port")} />
      </Field>
      <Field label={w.backend}>
        <Choices value={fields.backend} options={named(["nccl", "gloo"])} onChoose={(backend) => change({ backend })} />
      </Field>
      <Field label={w.policy}>
        <Choices value={fields.restart} options={w.policies} onChoose={(restart) => change({ restart })} />
      </Field>
      <Field label={w.hang}>
        <Choices value={fields.on_hang} options={w.hangs} onChoose={(on_hang) => change({ on_hang })} />
      </Field>
      <Field label={w.cwd} hint={w.cwdHint}>
        <input class="code" spellcheck={false} {...text("cwd")} />
      </Field>
      <Field label={w.env} hint={w.envHint}>
        <textarea class="code" rows={3} spellcheck={false} value={fields.env} onInput={(event) => change({ env: event.currentTarget.value })} />
      </Field>
      <details class="wide">
        <summary>{w.more}</summary>
        <div class="form-grid">
          <Field label={w.maxRestarts}>
            <input type="number" min={0} max={100} required {...text("max_restarts")} />
          </Field>
          <Field label={w.minNodes} hint={w.minNodesHint}>
            <input type="number" min={1} max={16384} {...text("min_nodes")} />
          </Field>
          <Field label={w.grace}>
            <input required {...text("grace")} />
          </Field>
          <Field label={w.fence} hint={w.fenceHint}>
            <input required {...text("fence")} />
          </Field>
          <Field label={w.saveCommand} hint={w.saveHint}>
            <input class="code" spellcheck={false} {...text("save")} />
          </Field>
          <Field label={w.saveTime}>
            <input required {...text("save_time")} />
          </Field>
        </div>
      </details>
    </div>
  );
}

function Field({ label, hint, wide = false, children }: { label: string; hint?: string; wide?: boolean; children: ComponentChildren }) {
  return (
    <label class={wide ? "field wide" : "field"}>
      <span>{label}{hint ? <span class="small"> ({hint})</span> : null}</span>
      {children}
    </label>
  );
}

function Choices({ value, options, onChoose }: { value: string; options: Record<string, string>; onChoose: (value: string) => void }) {
  const all = value in options ? options : { ...options, [value]: value };
  return (
    <select value={value} onChange={(event) => onChoose(event.currentTarget.value)}>
      {Object.entries(all).map(([name, label]) => <option value={name}>{visible(label, 80)}</option>)}
    </select>
  );
}

function named(names: readonly string[]): Record<string, string> {
  return Object.fromEntries(names.map((name) => [name, name]));
}

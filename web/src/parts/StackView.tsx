/** A stack of frames, innermost first, with its variables where they were asked for. */
import { words } from "../i18n/index.ts";
import { visible } from "../text/escape.ts";
import { fileName } from "../text/format.ts";
import type { Frame } from "../types.ts";

const MOST = 200;

interface StackViewProps {
  frames: readonly Frame[];
  /** Outermost frames that another stack shares; they are folded. */
  common?: number;
  /** Whether the frame before those is where both part. */
  parted?: boolean;
  /** The line to look at. */
  fault?: Frame | null;
  /** Whether frames of C and C++ are folded. */
  folded?: boolean;
}

export function StackView({ frames, common = 0, parted = false, fault = null, folded = false }: StackViewProps) {
  const w = words.value.finding;
  if (!frames.length) return <p class="soft">{w.noFrames}</p>;
  const own = frames.slice(0, frames.length - common);
  const shared = frames.slice(frames.length - common);
  const last = own.slice(0, MOST).length - 1;
  return (
    <ol class="stack">
      {runs(own.slice(0, MOST), folded).map(({ frames: run, foreign }) =>
        foreign ? (
          <FoldedFrames frames={run} parted={parted && run[run.length - 1] === own[last]} />
        ) : (
          run.map((frame) => <FrameLine frame={frame} parted={parted && frame === own[last]} fault={frame === fault} />)
        ),
      )}
      {own.length > MOST ? <li class="soft">{w.more(own.length - MOST)}</li> : null}
      {shared.length > 0 ? (
        <li class="stack-common">
          <details>
            <summary>{w.common(shared.length)}</summary>
            <ol class="stack">
              {shared.slice(0, MOST).map((frame) => (
                <FrameLine frame={frame} />
              ))}
            </ol>
          </details>
        </li>
      ) : null}
    </ol>
  );
}

interface Run {
  frames: Frame[];
  foreign: boolean;
}

/** Returns frames in groups: those of C and C++ that follow each other, and those of Python. */
function runs(frames: readonly Frame[], folded: boolean): Run[] {
  const found: Run[] = [];
  for (const frame of frames) {
    const foreign = folded && !isPython(frame);
    const before = found[found.length - 1];
    if (before && before.foreign === foreign) before.frames.push(frame);
    else found.push({ frames: [frame], foreign });
  }
  return found;
}

function isPython(frame: Frame): boolean {
  return frame.frame_type.toLowerCase() === "python";
}

/** Frames of C and C++ as one line with the innermost function that has a name. */
function FoldedFrames({ frames, parted }: { frames: readonly Frame[]; parted: boolean }) {
  const w = words.value.finding;
  const named = frames.find((frame) => !/\+0x[\da-f]+$/.test(frame.func))?.func ?? frames[0]?.func ?? "";
  return (
    <li class={`frame foreign folded${parted ? " parted" : ""}`}>
      <details>
        <summary>
          {w.foreign(frames.length)} <code>{visible(named.replace(/\(.*$/s, ""), 60)}</code>
        </summary>
        <ol class="stack">
          {frames.map((frame) => (
            <FrameLine frame={frame} />
          ))}
        </ol>
      </details>
      {parted ? <span class="parted-sign">◂ {w.parted}</span> : null}
    </li>
  );
}

function FrameLine({ frame, parted = false, fault = false }: { frame: Frame; parted?: boolean; fault?: boolean }) {
  const python = isPython(frame);
  const place = frame.file ? `${fileName(frame.file)}${frame.lineno === null ? "" : `:${frame.lineno}`}` : "";
  return (
    <li class={`frame${parted ? " parted" : ""}${fault ? " fault" : ""}${python ? "" : " foreign"}`}>
      <span class="func">
        {fault ? <span aria-hidden="true">! </span> : null}
        {visible(frame.func, 300)}
      </span>
      {place ? (
        <span class="place" title={visible(frame.file, 500)}>
          {visible(place, 300)}
        </span>
      ) : null}
      {python ? null : <span class="kind">{visible(frame.frame_type, 20)}</span>}
      {parted ? <span class="parted-sign">◂ {words.value.finding.parted}</span> : null}
      {frame.locals?.length ? (
        <details class="locals">
          <summary>
            {frame.locals.length} {words.value.rank.locals}
          </summary>
          <dl>
            {frame.locals.slice(0, MOST).map((local) => (
              <>
                <dt>{visible(local.name, 100)}</dt>
                <dd>{local.value === null ? <i>{visible(local.reason ?? "?", 200)}</i> : visible(local.value, 1000)}</dd>
              </>
            ))}
          </dl>
        </details>
      ) : null}
    </li>
  );
}

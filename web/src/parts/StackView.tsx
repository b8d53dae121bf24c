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
}

export function StackView({ frames, common = 0, parted = false, fault = null }: StackViewProps) {
  const w = words.value.finding;
  if (!frames.length) return <p class="soft">{w.noFrames}</p>;
  const own = frames.slice(0, frames.length - common);
  const shared = frames.slice(frames.length - common);
  return (
    <ol class="stack">
      {own.slice(0, MOST).map((frame, index) => (
        <FrameLine frame={frame} first={index === 0} parted={parted && index === own.length - 1} fault={frame === fault} />
      ))}
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

function FrameLine({ frame, first = false, parted = false, fault = false }: { frame: Frame; first?: boolean; parted?: boolean; fault?: boolean }) {
  const python = frame.frame_type.toLowerCase() === "python";
  const place = frame.file ? `${fileName(frame.file)}${frame.lineno === null ? "" : `:${frame.lineno}`}` : "";
  return (
    <li class={`frame${first ? " innermost" : ""}${parted ? " parted" : ""}${fault ? " fault" : ""}${python ? "" : " foreign"}`}>
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

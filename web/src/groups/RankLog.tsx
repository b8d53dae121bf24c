/** The last lines of a rank's log; what is written to it comes while the tab is seen. */
import { useEffect, useRef, useState } from "preact/hooks";
import { asRequestError, get, type RequestError } from "../api.ts";
import { words } from "../i18n/index.ts";
import { Loading, Panel } from "../parts/Panel.tsx";
import { visible } from "../text/escape.ts";
import type { Contract, LogPart } from "../types.ts";
import { linesOf } from "./log.ts";

const EVERY_MS = 1000;
const AFTER_ERROR_MS = 5000;
const MOST_CHARACTERS = 64 * 1024;

export function RankLog({ name, rank, node }: { name: string; rank: number; node: string }) {
  const w = words.value.groups;
  const { text, contract, error, missing } = useLog(name, rank, node);
  const box = useRef<HTMLPreElement>(null);
  const atEnd = useRef(true);
  useEffect(() => {
    if (box.current && atEnd.current) box.current.scrollTop = box.current.scrollHeight;
  }, [text]);
  return (
    <Panel title={w.logOf(rank)} contract={contract} error={error} live class="rank-log">
      <p class="soft small">{w.logLive}</p>
      {text === null && missing !== null ? (
        <p class="soft">{visible(missing, 300)}</p>
      ) : text === null ? (
        error ? null : <Loading />
      ) : text === "" ? (
        <p class="soft">{w.logNone}</p>
      ) : (
        <pre
          ref={box}
          class="log"
          tabIndex={0}
          role="log"
          aria-label={w.logOf(rank)}
          onScroll={({ currentTarget: { scrollTop, scrollHeight, clientHeight } }) => {
            atEnd.current = scrollTop + clientHeight > scrollHeight - 24;
          }}
        >
          {linesOf(text).join("\n")}
        </pre>
      )}
    </Panel>
  );
}

interface Log {
  text: string | null;
  contract: Contract | null;
  error: RequestError | null;
  /** Why there is no log, as before the first start of a rank. */
  missing: string | null;
}

const NO_LOG: Log = { text: null, contract: null, error: null, missing: null };

function useLog(name: string, rank: number, node: string): Log {
  const [log, setLog] = useState<Log>(NO_LOG);
  useEffect(() => {
    const stop = new AbortController();
    let timer = 0;
    let position: number | null = null;
    let running = false;
    const read = async () => {
      clearTimeout(timer);
      if (document.hidden || running) return;
      running = true;
      let pause = EVERY_MS;
      const from = position;
      try {
        const { data, contract } = await get<LogPart>("group/log", { name, rank, node, from }, stop.signal);
        // A log that was rotated is shorter than before, and is read from its end again.
        const shorter = from !== null && data.end < from;
        position = shorter ? null : data.end;
        if (!shorter) setLog((old) => ({ text: ((from === null ? "" : (old.text ?? "")) + data.text).slice(-MOST_CHARACTERS), contract, error: null, missing: null }));
      } catch (problem) {
        if (stop.signal.aborted) return;
        const error = asRequestError(problem);
        // A rank has no log before its first start, and for a moment when it starts again.
        const missing = error.status === 404;
        pause = missing ? EVERY_MS : AFTER_ERROR_MS;
        setLog((old) => (missing ? { ...old, error: null, missing: error.message } : { ...old, error }));
      } finally {
        running = false;
      }
      timer = window.setTimeout(read, pause);
    };
    setLog(NO_LOG);
    void read();
    const seen = () => void read();
    document.addEventListener("visibilitychange", seen);
    return () => {
      document.removeEventListener("visibilitychange", seen);
      clearTimeout(timer);
      stop.abort();
    };
  }, [name, rank, node]);
  return log;
}

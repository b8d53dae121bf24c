/** Live data by server-sent events, while the tab is seen; and answers that are asked for again. */
import { signal } from "@preact/signals";
import { useEffect, useRef, useState } from "preact/hooks";
import { asRequestError, contractOf, get, type Query, refusalOf, type RequestError, serverGone, url } from "./api.ts";
import type { Answer, Contract } from "./types.ts";

/** Whether live data comes in: `hidden` while the tab is not seen. */
export const liveState = signal<"on" | "off" | "hidden">("off");

const RETRY_MS = 2000;
// The answers of more nodes are asked for more seldom.
const OFTEN_NODES = 250;

export interface Live<T> {
  /** The newest data; null before the first. */
  data: T | null;
  /** Why there is no stream. */
  error: RequestError | null;
}

/** Returns the newest data of an event stream. */
export function useLive<T extends { contract?: Contract }>(path: string, event: string, query: Query): Live<T> {
  const [newest, setNewest] = useState<T | null>(null);
  const [error, setError] = useState<RequestError | null>(null);
  const address = url(path, query);
  useEffect(() => {
    let source: EventSource | null = null;
    let timer = 0;
    let ended = false;
    setNewest(null);
    setError(null);
    const open = () => {
      close();
      if (document.hidden) {
        liveState.value = "hidden";
        return;
      }
      source = new EventSource(address);
      source.addEventListener(event, (message) => {
        liveState.value = "on";
        serverGone.value = false;
        setError(null);
        try {
          const data = JSON.parse((message as MessageEvent<string>).data) as T;
          setNewest({ ...data, contract: contractOf(data.contract) });
        } catch {
          // The next event replaces a broken one.
        }
      });
      source.onerror = () => {
        liveState.value = "off";
        if (source?.readyState !== EventSource.CLOSED) serverGone.value = true;
        if (source?.readyState !== EventSource.CLOSED) return;
        // The browser tries again by itself, but not after an error status: perhaps the session has ended.
        void refusalOf(address).then((refusal) => {
          if (!ended && refusal?.kind !== "gone") setError(refusal);
        });
        timer = window.setTimeout(open, RETRY_MS);
      };
    };
    const close = () => {
      source?.close();
      source = null;
      clearTimeout(timer);
    };
    open();
    document.addEventListener("visibilitychange", open);
    return () => {
      ended = true;
      document.removeEventListener("visibilitychange", open);
      close();
      liveState.value = "off";
    };
  }, [address, event]);
  return { data: newest, error };
}

export interface Asked<T> {
  answer: Answer<T> | null;
  /** The `key` with which the answer was asked for. */
  key: unknown;
  error: RequestError | null;
  loading: boolean;
  again: () => void;
}

/**
 * Returns the answer of `/api/PATH`, asked again every `everyMs` while the tab is seen, and when `key` changes.
 * A new answer replaces the old one only when it has come; a path of null asks nothing.
 */
export function useAsked<T>(path: string | null, query: Query = {}, everyMs = 0, key: unknown = ""): Asked<T> {
  const [state, setState] = useState<{ of: string; answer: Answer<T> | null; key: unknown; error: RequestError | null; loading: boolean }>(
    { of: "", answer: null, key: null, error: null, loading: path !== null },
  );
  const address = path === null ? "" : url(path, query);
  const askNow = useRef<() => void>(() => undefined);
  useEffect(() => {
    if (path === null) return undefined;
    let timer = 0;
    let stop = new AbortController();
    let [running, asked] = [false, false];
    const ask = async () => {
      clearTimeout(timer);
      if (document.hidden || running) return;
      [running, asked] = [true, true];
      stop = new AbortController();
      setState((old) => ({ ...old, of: address, answer: old.of === address ? old.answer : null, error: old.of === address ? old.error : null, loading: true }));
      let [failed, nodes] = [false, 0];
      try {
        const answer = await get<T>(path, query, stop.signal);
        nodes = answer.contract.asked;
        setState({ of: address, answer, key, error: null, loading: false });
      } catch (error) {
        if (stop.signal.aborted) return;
        failed = true;
        const known = asRequestError(error);
        setState((old) => ({ ...old, error: known, loading: false }));
      } finally {
        running = false;
      }
      const pause = failed ? Math.max(everyMs, 5000) : everyMs * Math.max(1, nodes / OFTEN_NODES);
      if (pause > 0) timer = window.setTimeout(ask, pause);
    };
    const seen = () => {
      // A tab that was opened in the background has asked nothing yet.
      if (!document.hidden && (everyMs > 0 || !asked)) void ask();
    };
    askNow.current = () => void ask();
    void ask();
    document.addEventListener("visibilitychange", seen);
    return () => {
      document.removeEventListener("visibilitychange", seen);
      clearTimeout(timer);
      stop.abort();
    };
    // `address` stands for path and query.
  }, [address, everyMs, key]);
  return { answer: state.of === address ? state.answer : null, key: state.key, error: state.error, loading: state.loading, again: () => askNow.current() };
}

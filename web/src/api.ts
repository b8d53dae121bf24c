/** Requests to the server of the page, and their errors in words. */
import { signal } from "@preact/signals";
import type { Answer, Contract, Session } from "./types.ts";

/** Why a request has no answer: `gone`: no server; `refused`: no right to it; `failed`: anything else. */
export class RequestError extends Error {
  constructor(
    readonly kind: "gone" | "refused" | "failed",
    message: string,
    readonly hint: string = "",
    readonly status: number = 0,
  ) {
    super(message);
  }
}

/** Whether the last request found a server. */
export const serverGone = signal(false);
export const session = signal<Session | null>(null);
/** The server wants a token before it answers. */
export const loginNeeded = signal(false);

export type Query = Record<string, string | number | boolean | null | undefined>;

export function url(path: string, query: Query = {}): string {
  const params = new URLSearchParams();
  for (const [name, value] of Object.entries(query)) {
    if (value === null || value === undefined || value === "") continue;
    params.set(name, value === true ? "1" : value === false ? "0" : String(value));
  }
  const text = params.toString();
  return text ? `/api/${path}?${text}` : `/api/${path}`;
}

async function request(address: string, options: RequestInit): Promise<Response> {
  let response: Response;
  try {
    response = await fetch(address, { credentials: "same-origin", ...options });
  } catch (error) {
    if (options.signal?.aborted) throw error;
    serverGone.value = true;
    throw new RequestError("gone", "no answer");
  }
  serverGone.value = false;
  if (response.ok) return response;
  throw await errorOf(response);
}

async function errorOf(response: Response): Promise<RequestError> {
  let [message, hint] = [`HTTP ${response.status} ${response.statusText}`.trim(), ""];
  try {
    const body: unknown = await response.json();
    if (body && typeof body === "object") {
      const { error, hint: advice } = body as { error?: unknown; hint?: unknown };
      if (typeof error === "string") message = error;
      if (typeof advice === "string") hint = advice;
    }
  } catch {
    // No JSON: the status has to do.
  }
  if (response.status === 401) loginNeeded.value = true;
  const refused = response.status === 401 || response.status === 403;
  return new RequestError(refused ? "refused" : "failed", message, hint, response.status);
}

/** Returns what was thrown as the error that a panel shows. */
export function asRequestError(problem: unknown): RequestError {
  return problem instanceof RequestError ? problem : new RequestError("failed", String(problem));
}

/** Returns the answer of a GET of `/api/PATH`. */
export async function get<T>(path: string, query: Query = {}, signal: AbortSignal | null = null): Promise<Answer<T>> {
  const response = await request(url(path, query), { signal });
  return answerOf<T>(await response.json());
}

/** Returns the answer of a POST. */
export async function post<T>(path: string, body: unknown, signal: AbortSignal | null = null): Promise<Answer<T>> {
  return answerOf<T>(await (await posted(path, body, signal)).json());
}

/** Returns the response of a POST, for files. */
export function posted(path: string, body: unknown, signal: AbortSignal | null = null): Promise<Response> {
  const headers = { "Content-Type": "application/json", "X-Probing": "1" };
  return request(url(path), { method: "POST", headers, body: JSON.stringify(body), signal });
}

/** Returns the bytes of a GET. */
export async function bytesOf(path: string, query: Query, signal: AbortSignal | null = null): Promise<ArrayBuffer> {
  return (await request(url(path, query), { signal })).arrayBuffer();
}

/** Returns why a stream of events was refused, or null where it would be opened now. */
export async function refusalOf(address: string): Promise<RequestError | null> {
  const stop = new AbortController();
  try {
    const response = await request(address, { signal: stop.signal });
    await response.body?.cancel();
    return null;
  } catch (error) {
    return error instanceof RequestError ? error : null;
  } finally {
    stop.abort();
  }
}

function answerOf<T>(body: unknown): Answer<T> {
  if (!body || typeof body !== "object" || !("data" in body)) throw new RequestError("failed", "an answer without data");
  const { data, contract } = body as { data: T; contract?: Partial<Contract> };
  return { data, contract: contractOf(contract) };
}

/** Returns a contract with each field. */
export function contractOf(given: Partial<Contract> | undefined): Contract {
  return {
    asked: given?.asked ?? 0,
    answered: given?.answered ?? 0,
    failures: given?.failures ?? [],
    at: given?.at ?? new Date().toISOString(),
    lost_rows: given?.lost_rows ?? null,
    clock_error_ns: given?.clock_error_ns ?? null,
  };
}

/** Saves a file that a POST answers with. */
export async function download(path: string, body: unknown, name: string): Promise<void> {
  const response = await posted(path, body);
  const address = URL.createObjectURL(await response.blob());
  const link = document.createElement("a");
  link.href = address;
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}

export async function openSession(): Promise<void> {
  const response = await request(url("session"), {});
  const body = (await response.json()) as Session | { data: Session };
  const found = "data" in body ? body.data : body;
  session.value = found;
  loginNeeded.value = found.login_needed;
}

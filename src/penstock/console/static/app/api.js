// Every call to the server. Paths are relative to where the console is mounted, so that it works below any prefix.
import { leaveForSignIn } from "./store.js";

const READ_LIMIT_S = 30;

const root = new URL("../", document.baseURI);

/** An answer that is an error, in words a reader can use. */
export class ApiError extends Error {
  /** @param {number} status @param {string} message @param {string | null} code */
  constructor(status, message, code) {
    super(message);
    this.name = "ApiError";
    this.status = status;
    this.code = code;
  }
}

/** A number whose digits would be lost as a JavaScript number: shown as it was sent. */
export class Exact {
  /** @param {string} text */
  constructor(text) {
    this.text = text;
  }

  toString() {
    return this.text;
  }
}

/** @typedef {Record<string, string | number | boolean | null | undefined>} Values */

/**
 * Address of a call, also for `src` and `href`.
 * @param {string} path without a slash at its beginning: `api/work`
 * @param {Values} [values] empty ones are left out
 */
export function address(path, values = {}) {
  const url = new URL(path, root);
  for (const [name, value] of Object.entries(values)) {
    if (value !== null && value !== undefined && value !== "") url.searchParams.set(name, String(value));
  }
  return url;
}

/**
 * Parse JSON, keeping numbers that JavaScript cannot hold as `Exact`.
 * @param {string} text
 */
export function parseExact(text) {
  /** @type {(key: string, value: any, context?: any) => any} */
  const keep = (_key, value, context) => {
    if (typeof value !== "number" || !context || String(value) === context.source) return value;
    return new Exact(context.source);
  };
  return JSON.parse(text, keep);
}

/**
 * @param {"GET" | "POST" | "PUT" | "PATCH" | "DELETE"} method
 * @param {string} path
 * @param {{query?: Values, body?: unknown, form?: FormData, signal?: AbortSignal, exact?: boolean, key?: string}} [options]
 *   `exact` keeps every digit of numbers; `key` is an idempotency key
 * @returns {Promise<any>} the answer's JSON, or null
 */
export async function call(method, path, { query, body, form, signal, exact = false, key } = {}) {
  /** @type {Record<string, string>} */
  const headers = { accept: "application/json", "x-penstock-console": "1" };
  if (body !== undefined) headers["content-type"] = "application/json";
  if (key) headers["idempotency-key"] = key;
  let answer;
  let text;
  try {
    answer = await fetch(address(path, query), {
      method,
      headers,
      body: form ?? (body === undefined ? undefined : JSON.stringify(body)),
      signal,
      credentials: "same-origin",
      cache: "no-store",
    });
    text = await answer.text();
  } catch (error) {
    // Told by the signal: a body that is cut off while it is read may fail as if nobody waited for it.
    if (signal?.reason?.name === "TimeoutError") throw new ApiError(0, `The server has not answered for ${READ_LIMIT_S} seconds.`, "timeout");
    if (isAbort(error)) throw error;
    throw new ApiError(0, "The server does not answer. Is it running?", "unreachable");
  }
  if (!answer.ok) {
    if (answer.status === 401 && path !== "console/session") leaveForSignIn();
    throw readError(answer, text);
  }
  if (text === "") return null;
  return exact ? parseExact(text) : JSON.parse(text);
}

/** @param {Response} answer @param {string} text */
function readError(answer, text) {
  let message = "";
  let code = null;
  try {
    const { error } = JSON.parse(text);
    message = typeof error === "string" ? error : error.message;
    code = error.code ?? null;
  } catch {
    // No JSON: a proxy's page, perhaps. Its status says more than its markup.
  }
  return new ApiError(answer.status, message || `The server answered ${answer.status}.`, code);
}

/**
 * A read has an end though its connection was lost and nobody said so: what waits for it would wait for ever.
 * @param {string} path @param {Values} [query] @param {{signal?: AbortSignal, exact?: boolean}} [options]
 */
export function get(path, query, { signal, exact } = {}) {
  const limit = AbortSignal.timeout(1000 * READ_LIMIT_S);
  return call("GET", path, { query, exact, signal: signal ? AbortSignal.any([signal, limit]) : limit });
}

/** @param {string} path @param {unknown} [body] @param {{query?: Values, key?: string}} [options] */
export const post = (path, body, options) => call("POST", path, { body, ...options });

/** Whether an error only says that nobody waits for the answer any more. @param {unknown} error */
export const isAbort = (error) => error instanceof DOMException && error.name === "AbortError";

/** @param {unknown} error */
export const explain = (error) => (error instanceof Error ? error.message : String(error));

/** A key for a request that may be repeated. On plain HTTP browsers have no `crypto.randomUUID`. */
export const newKey = () => [...crypto.getRandomValues(new Uint8Array(16))].map((byte) => byte.toString(16).padStart(2, "0")).join("");

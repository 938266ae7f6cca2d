// The one stream of a tab: the server says what moved, at most four times a second, in sums. It is closed while the tab
// is hidden, because a browser gives an origin six connections, and opened again when it is looked at.
import { effect, signal } from "@preact/signals";
import { address, get } from "./api.js";
import { paused } from "./store.js";

/** @typedef {"live" | "connecting" | "paused" | "off"} LiveState */

const FIRST_RETRY_MS = 1000;
const MAX_RETRY_MS = 15_000;

/** Whether what is on the screen is kept current. */
export const live = signal(/** @type {LiveState} */ ("off"));

/** @typedef {{query: Record<string, string>, onTick: (data: any) => void, onOpen?: () => void, onGone?: () => void}} Topic */

/** @type {Topic | null} */
let topic = null;
/** @type {EventSource | null} */
let source = null;
let retryMs = FIRST_RETRY_MS;
/** @type {ReturnType<typeof setTimeout> | undefined} */
let timer;

/**
 * Follow one piece of work, or the list of all. A page follows one topic; the next page's takes its place.
 * @param {Topic} wanted
 * @returns {() => void} stops it
 */
export function follow(wanted) {
  topic = wanted;
  reopen();
  return () => {
    if (topic !== wanted) return;
    topic = null;
    reopen();
  };
}

function close() {
  clearTimeout(timer);
  source?.close();
  source = null;
}

function reopen() {
  close();
  retryMs = FIRST_RETRY_MS;
  if (topic === null) live.value = "off";
  else if (paused.peek()) live.value = "paused";
  else if (document.hidden) live.value = "connecting";
  else open(topic);
}

/** @param {Topic} wanted */
function open(wanted) {
  live.value = "connecting";
  const opened = new EventSource(address("api/ticks", wanted.query), { withCredentials: true });
  source = opened;
  opened.onopen = () => {
    retryMs = FIRST_RETRY_MS;
    live.value = "live";
    wanted.onOpen?.();
  };
  opened.onmessage = (event) => {
    if (source === opened) wanted.onTick(JSON.parse(event.data));
  };
  opened.addEventListener("gone", () => wanted.onGone?.());
  opened.onerror = () => {
    if (source !== opened) return;
    live.value = "connecting";
    // The browser tries again by itself unless the answer was an error: then it gives up, and we do not.
    if (opened.readyState !== EventSource.CLOSED) return;
    close();
    // A stream does not tell why: a call does, and leads to the sign-in if that has ended.
    get("api/me").catch(() => null);
    timer = setTimeout(() => open(wanted), retryMs);
    retryMs = Math.min(MAX_RETRY_MS, retryMs * 2);
  };
}

document.addEventListener("visibilitychange", reopen);
addEventListener("pagehide", close);
effect(() => {
  paused.value;
  reopen();
});

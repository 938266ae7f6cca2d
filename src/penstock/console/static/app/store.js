// What all pages know: who is signed in, notices, the theme, whether updates are paused.
import { computed, effect, signal } from "@preact/signals";
import { go, link, path, query } from "./route.js";

/**
 * @typedef {object} Me
 * @property {string} owner
 * @property {"admin" | "user" | string} role
 * @property {boolean} signedIn
 * @property {boolean} keyless
 * @property {string} version
 * @property {boolean} pendingDashboard
 * @property {{name: string, models: string[]}[]} providers
 * @property {{name: string}[]} processors
 */

/** Who looks; null until the server has said so. */
export const me = signal(/** @type {Me | null} */ (null));
export const isAdmin = computed(() => me.value?.role === "admin");

/** Where to go after signing in. */
export function leaveForSignIn() {
  me.value = null;
  if (path.value === "/sign-in") return;
  const next = link(path.value, query.value).slice(1);
  go(link("/sign-in", { next: next === "/" ? null : next }), { replace: true });
}

// -- notices

/** @typedef {{id: number, tone: "good" | "bad" | "calm", text: string, detail?: any}} NoticeEntry */

const MAX_NOTICES = 4;
const SHOWN_MS = 6000;
let lastNotice = 0;
export const notices = signal(/** @type {NoticeEntry[]} */ ([]));

/**
 * Tell the reader something in passing. What went wrong stays until it is closed.
 * @param {"good" | "bad" | "calm"} tone @param {string} text @param {any} [detail]
 */
export function notify(tone, text, detail) {
  const entry = { id: ++lastNotice, tone, text, detail };
  notices.value = [...notices.value.filter((each) => each.text !== text), entry].slice(-MAX_NOTICES);
  if (tone !== "bad") setTimeout(() => dismiss(entry.id), SHOWN_MS);
}

/** @param {number} id */
export function dismiss(id) {
  notices.value = notices.value.filter((entry) => entry.id !== id);
}

// -- theme

/** @typedef {"system" | "light" | "dark"} Theme */
const THEMES = /** @type {const} */ (["system", "light", "dark"]);
export const theme = signal(/** @type {Theme} */ (document.documentElement.dataset.theme ?? "system"));

/** Moves whenever colours change, for what is painted rather than styled. */
export const painted = signal(0);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => painted.value++);

export function nextTheme() {
  theme.value = THEMES[(THEMES.indexOf(theme.value) + 1) % THEMES.length];
}

effect(() => {
  const chosen = theme.value;
  if (chosen === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = chosen;
  try {
    if (chosen === "system") localStorage.removeItem("penstock.theme");
    else localStorage.setItem("penstock.theme", chosen);
  } catch {
    // Storage is closed to this page: the theme lasts as long as the tab.
  }
  painted.value = painted.peek() + 1;
});

// -- updates

/** Whether the reader has stopped updates, to look at something in peace. */
export const paused = signal(false);

import { html } from "../html.js";

/** @typedef {"good" | "bad" | "warn" | "busy" | "calm" | "retry"} Tone */

/**
 * A word on a coloured ground. The word says it; the colour only helps.
 * @param {{tone?: Tone, title?: string, dot?: boolean, children?: any}} props
 */
export function Chip({ tone = "calm", title, dot = true, children }) {
  return html`<span class="chip" data-tone=${tone} title=${title}>${dot && html`<i aria-hidden="true"></i>`}${children}</span>`;
}

/** @type {Record<string, [Tone, string]>} */
const STATES = {
  INGESTING: ["busy", "Reading"],
  VALIDATING: ["busy", "Validating"],
  QUEUED: ["calm", "Queued"],
  RUNNING: ["busy", "Running"],
  IN_PROGRESS: ["busy", "Running"],
  FINALIZING: ["busy", "Finalizing"],
  PAUSED: ["warn", "Paused"],
  DONE: ["good", "Done"],
  COMPLETED: ["good", "Done"],
  FAILED: ["bad", "Failed"],
  EXPIRED: ["warn", "Expired"],
  CANCELLING: ["calm", "Cancelling"],
  CANCELLED: ["calm", "Cancelled"],
};

/** @type {Record<string, [Tone, string]>} */
const STATUSES = {
  PENDING: ["calm", "Pending"],
  PROCESSING: ["busy", "Claimed"],
  DONE: ["good", "Done"],
  ERROR: ["bad", "Failed"],
  NOT_FOUND: ["warn", "Not found"],
  SKIPPED: ["calm", "Skipped"],
  CANCELLED: ["calm", "Cancelled"],
  EXPIRED: ["warn", "Expired"],
};

/** State of a job or batch. @param {{state: string}} props */
export function StateChip({ state }) {
  const [tone, text] = STATES[state.toUpperCase()] ?? ["calm", state];
  return html`<${Chip} tone=${tone}>${text}<//>`;
}

/** Status of a row. @param {{status: string}} props */
export function StatusChip({ status }) {
  const [tone, text] = STATUSES[status] ?? ["calm", status];
  return html`<${Chip} tone=${tone}>${text}<//>`;
}

/** What a row's status is called. @param {string} status */
export const statusName = (status) => STATUSES[status]?.[1] ?? status;

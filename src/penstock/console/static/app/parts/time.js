import { now } from "../clock.js";
import { ago, duration, full, moment } from "../format.js";
import { html } from "../html.js";

/**
 * How long ago something was; the moment itself on pointing at it.
 * @param {{at: string | number | null | undefined, plain?: boolean}} props `plain` shows the moment, and how long ago beside it
 */
export function Time({ at, plain = false }) {
  if (at === null || at === undefined) return html`<span class="faint">–</span>`;
  const ms = moment(at);
  const iso = new Date(ms).toISOString();
  if (plain) {
    return html`<time datetime=${iso} title=${iso}>${full(ms)} <span class="soft">(${ago(ms, now.value)})</span></time>`;
  }
  return html`<time datetime=${iso} title="${full(ms)} (${iso})">${ago(ms, now.value)}</time>`;
}

/**
 * How long something took, or has taken so far.
 * @param {{from: string | number, to?: string | number | null}} props
 */
export function Elapsed({ from, to }) {
  const end = to === null || to === undefined ? now.value : moment(to);
  return html`<span>${duration((end - moment(from)) / 1000)}</span>`;
}

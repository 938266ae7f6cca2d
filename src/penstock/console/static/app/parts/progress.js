import { count, percent } from "../format.js";
import { html } from "../html.js";

/** @typedef {Record<string, number>} Counts */

/** Segments in the order of a row's life, backwards: what is decided is on the left. A worker claims more rows than it calls at a time: what is called shows the chart of calls in flight. */
export const SEGMENTS = /** @type {const} */ ([
  ["done", "Done", "good"],
  ["failed", "Failed", "bad"],
  ["notFound", "Not found", "warn"],
  ["skipped", "Skipped", "calm"],
  ["cancelled", "Cancelled", "calm"],
  ["expired", "Expired", "warn"],
  ["retrying", "Retrying", "retry"],
  ["inFlight", "Claimed", "busy"],
  ["pending", "Pending", "rest"],
]);

/** Rows that have an outcome. @param {Counts} counts */
export const settled = (counts) =>
  ["done", "failed", "notFound", "skipped"].reduce((sum, name) => sum + (counts[name] ?? 0), 0);

/**
 * Progress by outcome. What is not empty is at least a hair wide.
 * @param {{counts: Counts, total: number, tall?: boolean}} props
 */
export function Progress({ counts, total, tall = false }) {
  const spoken = SEGMENTS.filter(([name]) => counts[name]).map(([name, label]) => `${count(counts[name])} ${label.toLowerCase()}`);
  return html`<div class="progress ${tall ? "tall" : ""}" role="img" aria-label=${spoken.join(", ") || "nothing yet"}>
    ${SEGMENTS.map(
      ([name, label, tone]) =>
        counts[name] > 0 &&
        html`<span
          key=${name}
          data-tone=${tone}
          title="${label}: ${count(counts[name])} (${percent(counts[name], total)})"
          style=${{ flexGrow: counts[name] / Math.max(1, total) }}
        ></span>`,
    )}
  </div>`;
}

/**
 * The same in numbers. Those that are always of interest are shown even at zero, so that nothing jumps.
 * @param {{counts: Counts, onPick?: (name: string) => string | undefined}} props `onPick` gives the address behind a number
 */
export function Legend({ counts, onPick }) {
  const always = new Set(["done", "failed", "inFlight", "pending"]);
  return html`<ul class="legend">
    ${SEGMENTS.filter(([name]) => always.has(name) || counts[name] > 0).map(([name, label, tone]) => {
      const href = onPick?.(name);
      const title = name === "inFlight" ? "Rows that workers hold: those they call now, and those they call next" : undefined;
      const inside = html`<i data-tone=${tone} aria-hidden="true"></i><span class="soft">${label}</span> <b data-count=${name}>${count(counts[name] ?? 0)}</b>`;
      return html`<li key=${name} title=${title}>${href ? html`<a href=${href}>${inside}</a>` : inside}</li>`;
    })}
  </ul>`;
}

import { html } from "../html.js";
import { dismiss, notices } from "../store.js";
import { Button } from "./button.js";
import { Icon } from "./icon.js";

const ICONS = { good: "circle-check", bad: "circle-alert", warn: "triangle-alert", calm: "info", busy: "info" };

/**
 * A notice in its place on the page.
 * @param {{tone?: keyof typeof ICONS, children?: any, action?: any}} props
 */
export function Notice({ tone = "calm", children, action }) {
  return html`<div class="notice" data-tone=${tone} role=${tone === "bad" ? "alert" : "status"}>
    <${Icon} name=${ICONS[tone]} />
    <div class="grow">${children}</div>
    ${action}
  </div>`;
}

/** Notices in passing, in a corner. */
export function Notices() {
  return html`<div class="notices" aria-live="polite">
    ${notices.value.map(
      (entry) => html`<div key=${entry.id} class="notice" data-tone=${entry.tone} role=${entry.tone === "bad" ? "alert" : "status"}>
        <${Icon} name=${ICONS[entry.tone]} />
        <div class="grow">${entry.text}${entry.detail && html`<div class="soft small">${entry.detail}</div>`}</div>
        <${Button} kind="quiet" small icon="x" label="Close notice" onClick=${() => dismiss(entry.id)} />
      </div>`,
    )}
  </div>`;
}

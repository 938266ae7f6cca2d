import { html } from "../html.js";
import { Icon } from "./icon.js";

/**
 * Nothing is here: why, and what to do next.
 * @param {{icon?: string, title: string, children?: any, action?: any}} props
 */
export function Empty({ icon = "inbox", title, children, action }) {
  return html`<div class="empty">
    <${Icon} name=${icon} size=${28} />
    <h2>${title}</h2>
    ${children && html`<div class="soft">${children}</div>`} ${action && html`<div class="line wrap">${action}</div>`}
  </div>`;
}

/** Grey bars in the place of what is being loaded. @param {{lines?: number}} props */
export function Skeleton({ lines = 3 }) {
  return html`<div class="skeleton" role="status" aria-label="Loading">
    ${Array.from({ length: lines }, (_, at) => html`<i key=${at}></i>`)}
  </div>`;
}

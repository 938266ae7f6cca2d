import { useState } from "preact/hooks";
import { explain } from "../api.js";
import { html } from "../html.js";
import { notify } from "../store.js";
import { Icon } from "./icon.js";

/**
 * A button, or a link that looks like one if it has an `href`. While `onClick` runs it is busy, and a second click does
 * nothing; what it throws is shown to the reader.
 * @param {{
 *   kind?: "primary" | "plain" | "quiet" | "danger",
 *   icon?: string, href?: string, download?: boolean, title?: string, disabled?: boolean, type?: "button" | "submit",
 *   pressed?: boolean, small?: boolean, label?: string, class?: string,
 *   onClick?: (event: MouseEvent) => unknown, children?: any, [more: string]: any,
 * }} props `label` names a button that shows an icon alone
 */
export function Button({
  kind = "plain", icon, href, title, disabled, type = "button", pressed, small, label, class: extra = "", onClick, children, ...more
}) {
  const [busy, setBusy] = useState(false);
  const alone = children === undefined || children === null;
  const classes = `button ${kind} ${small ? "small" : ""} ${alone ? "alone" : ""} ${extra}`;
  const inside = html`${busy ? html`<${Icon} name="loader-circle" class="spin" />` : icon && html`<${Icon} name=${icon} />`}${children}`;
  if (href !== undefined) {
    return html`<a class=${classes} href=${href} title=${title ?? label} aria-label=${label} onClick=${onClick} ...${more}>${inside}</a>`;
  }
  const run = async (/** @type {MouseEvent} */ event) => {
    const result = onClick?.(event);
    if (!(result instanceof Promise)) return;
    setBusy(true);
    try {
      await result;
    } catch (error) {
      notify("bad", explain(error));
    } finally {
      setBusy(false);
    }
  };
  return html`<button
    type=${type}
    class=${classes}
    title=${title ?? label}
    aria-label=${label}
    aria-pressed=${pressed}
    aria-busy=${busy || undefined}
    disabled=${disabled || busy}
    onClick=${run}
    ...${more}
  >${inside}</button>`;
}

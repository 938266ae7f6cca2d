import { html } from "../html.js";

/**
 * Tabs as links: each is a place in the URL.
 * @param {{label: string, now: string, tabs: {id: string, label: string, href: string, count?: string | number | null}[]}} props
 */
export function Tabs({ label, now, tabs }) {
  return html`<nav class="tabs" aria-label=${label}>
    ${tabs.map(
      (tab) => html`<a key=${tab.id} href=${tab.href} aria-current=${tab.id === now ? "page" : undefined}>
        ${tab.label}${tab.count !== null && tab.count !== undefined && html`<span class="badge">${tab.count}</span>`}
      </a>`,
    )}
  </nav>`;
}

/**
 * A choice of a few, all visible.
 * @param {{label: string, now: string, options: {id: string, label: string}[], onPick: (id: string) => void}} props
 */
export function Segments({ label, now, options, onPick }) {
  return html`<div class="segments" role="group" aria-label=${label}>
    ${options.map(
      (option) => html`<button type="button" key=${option.id} aria-pressed=${option.id === now} onClick=${() => onPick(option.id)}>
        ${option.label}
      </button>`,
    )}
  </div>`;
}

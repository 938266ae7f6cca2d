import { useEffect } from "preact/hooks";
import { html } from "../html.js";

/**
 * A page below the bar: title, what can be done, content. Its title is the tab's.
 * @param {{title: string, heading?: any, intro?: any, actions?: any, full?: boolean, children?: any}} props
 *   `heading` replaces the title on the page; `full` fills the window, so that a grid in it has the scrollbar
 */
export function Page({ title, heading, intro, actions, full = false, children }) {
  useEffect(() => {
    document.title = title === "Penstock" ? title : `${title} · Penstock`;
  }, [title]);
  return html`<main class="page ${full ? "full" : ""}" id="main" tabindex="-1">
    <header class="page-head">
      <div class="grow">${heading ?? html`<h1>${title}</h1>`}${intro && html`<p class="soft">${intro}</p>`}</div>
      ${actions && html`<div class="line wrap">${actions}</div>`}
    </header>
    ${children}
  </main>`;
}

import { html } from "./html.js";
import { bindings } from "./keys.js";
import { Dialog } from "./parts/dialog.js";

/** The keys that are in force here. @param {{onClose: () => void}} props */
export function Help({ onClose }) {
  const shown = new Map(bindings.value.filter(({ key }) => key !== "Escape").map((binding) => [binding.key, binding.label]));
  return html`<${Dialog} title="Keys" onClose=${onClose}>
    <dl class="keys">
      ${[...shown].map(([key, label]) => html`<div key=${key}><dt><kbd>${key}</kbd></dt><dd>${label}</dd></div>`)}
      <div><dt><kbd>Esc</kbd></dt><dd>Close what is open</dd></div>
    </dl>
    <p class="soft small">In the grid: arrow keys, Page Up and Down, Home and End move; Enter opens a row; Space selects it.</p>
  <//>`;
}

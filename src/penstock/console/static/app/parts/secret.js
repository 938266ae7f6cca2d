import { html } from "../html.js";
import { Button } from "./button.js";
import { Copy } from "./copy.js";
import { Dialog } from "./dialog.js";
import { Notice } from "./notice.js";

/**
 * A secret that the server tells once: it stays until the reader says it is kept.
 * @param {{title: string, secret: string, onClose: () => void, children?: any}} props
 */
export function Secret({ title, secret, onClose, children }) {
  const actions = html`<${Button} kind="primary" onClick=${onClose}>I have kept it<//>`;
  return html`<${Dialog} title=${title} actions=${actions}>
    <div class="secret line"><code class="grow" data-secret>${secret}</code><${Copy} text=${secret} label="Copy the secret" /></div>
    <${Notice} tone="warn">It is shown now and never again: the server keeps only enough to know it by.<//>
    ${children}
  <//>`;
}

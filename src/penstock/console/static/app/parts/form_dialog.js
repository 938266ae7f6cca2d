import { useId, useState } from "preact/hooks";
import { explain } from "../api.js";
import { html } from "../html.js";
import { Button } from "./button.js";
import { Dialog } from "./dialog.js";
import { Notice } from "./notice.js";

/**
 * A dialog with fields. It stays until what it asks for is done; if that fails, it says why.
 * @param {{title: string, action: string, onSubmit: () => Promise<unknown>, onClose: () => void, children?: any}} props
 */
export function FormDialog({ title, action, onSubmit, onClose, children }) {
  const id = useId();
  const [problem, setProblem] = useState("");
  const [busy, setBusy] = useState(false);
  const submit = async (/** @type {SubmitEvent} */ event) => {
    event.preventDefault();
    setBusy(true);
    setProblem("");
    try {
      await onSubmit();
    } catch (error) {
      setProblem(explain(error));
    } finally {
      setBusy(false);
    }
  };
  const actions = html`
    <${Button} disabled=${busy} onClick=${onClose}>Back<//>
    <${Button} kind="primary" type="submit" form=${id} disabled=${busy} data-submit>${action}<//>`;
  return html`<${Dialog} title=${title} onClose=${onClose} busy=${busy} actions=${actions}>
    <form id=${id} class="stack" onSubmit=${submit}>
      ${children} ${problem && html`<${Notice} tone="bad">${problem}<//>`}
    </form>
  <//>`;
}

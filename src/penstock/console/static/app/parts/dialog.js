import { signal } from "@preact/signals";
import { useEffect, useRef } from "preact/hooks";
import { explain } from "../api.js";
import { html } from "../html.js";
import { Button } from "./button.js";
import { Notice } from "./notice.js";

/**
 * A modal dialog; Escape and the ground behind it close it.
 * @param {{title: string, onClose: () => void, wide?: boolean, children?: any, actions?: any}} props
 */
export function Dialog({ title, onClose, wide = false, children, actions }) {
  const ref = useRef(/** @type {HTMLDialogElement | null} */ (null));
  useEffect(() => {
    const dialog = ref.current;
    const before = document.activeElement;
    if (dialog && !dialog.open) dialog.showModal();
    return () => {
      if (before instanceof HTMLElement) before.focus();
    };
  }, []);
  return html`<dialog
    ref=${ref}
    class="dialog ${wide ? "wide" : ""}"
    aria-labelledby="dialog-title"
    onClose=${onClose}
    onClick=${(/** @type {MouseEvent} */ event) => event.target === ref.current && onClose()}
  >
    <div class="dialog-inside">
      <header class="line">
        <h2 id="dialog-title" class="grow">${title}</h2>
        <${Button} kind="quiet" icon="x" label="Close" onClick=${onClose} />
      </header>
      <div class="dialog-body">${children}</div>
      ${actions && html`<footer class="line wrap">${actions}</footer>`}
    </div>
  </dialog>`;
}

/**
 * @typedef {{title: string, text: any, action: string, danger?: boolean, run: () => unknown, done: (made: boolean) => void}} Question
 */

const question = signal(/** @type {Question | null} */ (null));
const problem = signal("");

/**
 * Ask before something that cannot be taken back, then do it. The dialog stays until it is done; if it fails, it says so.
 * @param {{title: string, text: any, action: string, danger?: boolean, run: () => unknown}} asked
 * @returns {Promise<boolean>} whether it was done
 */
export function confirm(asked) {
  return new Promise((resolve) => {
    problem.value = "";
    question.value = {
      ...asked,
      done: (made) => {
        question.value = null;
        resolve(made);
      },
    };
  });
}

/** The place of `confirm` on the page. */
export function Confirmation() {
  const asked = question.value;
  if (!asked) return null;
  const actions = html`
    <${Button} onClick=${() => asked.done(false)}>Back<//>
    <${Button}
      kind=${asked.danger ? "danger" : "primary"}
      data-confirm
      onClick=${async () => {
        problem.value = "";
        try {
          await asked.run();
          asked.done(true);
        } catch (error) {
          problem.value = explain(error);
        }
      }}
    >${asked.action}<//>`;
  return html`<${Dialog} title=${asked.title} onClose=${() => asked.done(false)} actions=${actions}>${asked.text}${problem.value && html`<${Notice} tone="bad">${problem.value}<//>`}<//>`;
}

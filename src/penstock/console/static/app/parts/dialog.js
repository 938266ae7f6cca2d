import { signal } from "@preact/signals";
import { useEffect, useRef } from "preact/hooks";
import { explain } from "../api.js";
import { html } from "../html.js";
import { Button } from "./button.js";
import { Notice } from "./notice.js";

/**
 * A modal dialog. Escape, its cross and a click on the ground behind it close it, unless it is busy; without `onClose`
 * only its actions do.
 * @param {{title: string, onClose?: () => void, busy?: boolean, children?: any, actions?: any}} props
 */
export function Dialog({ title, onClose, busy = false, children, actions }) {
  const ref = useRef(/** @type {HTMLDialogElement | null} */ (null));
  const pressedOnGround = useRef(false);
  const close = busy ? undefined : onClose;
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
    class="dialog"
    aria-labelledby="dialog-title"
    onCancel=${(/** @type {Event} */ event) => !close && event.preventDefault()}
    onClose=${() => {
      if (close) close();
      else ref.current?.showModal(); // browsers close at the second Escape, whatever the page says to it
    }}
    onPointerDown=${(/** @type {PointerEvent} */ event) => (pressedOnGround.current = event.target === ref.current)}
    onClick=${(/** @type {MouseEvent} */ event) => {
      // Text that is selected beyond the edge of the dialog ends in a click on the ground too.
      if (event.target === ref.current && pressedOnGround.current) close?.();
    }}
  >
    <div class="dialog-inside">
      <header class="line">
        <h2 id="dialog-title" class="grow">${title}</h2>
        ${onClose && html`<${Button} kind="quiet" icon="x" label="Close" disabled=${busy} onClick=${onClose} />`}
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
const running = signal(false);

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
    <${Button} disabled=${running.value} onClick=${() => asked.done(false)}>Back<//>
    <${Button}
      kind=${asked.danger ? "danger" : "primary"}
      data-confirm
      onClick=${async () => {
        problem.value = "";
        running.value = true;
        try {
          await asked.run();
          asked.done(true);
        } catch (error) {
          problem.value = explain(error);
        } finally {
          running.value = false;
        }
      }}
    >${asked.action}<//>`;
  return html`<${Dialog} title=${asked.title} onClose=${() => asked.done(false)} busy=${running.value} actions=${actions}>${asked.text}${problem.value && html`<${Notice} tone="bad">${problem.value}<//>`}<//>`;
}

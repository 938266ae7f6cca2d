import { useEffect, useRef } from "preact/hooks";
import { html } from "../html.js";
import { useKeys } from "../keys.js";
import { Button } from "./button.js";

/**
 * A pane at the right edge that leaves the page usable; on a narrow screen it covers it.
 * @param {{title: any, label: string, onClose: () => void, tools?: any, children?: any}} props
 */
export function Drawer({ title, label, onClose, tools, children }) {
  const ref = useRef(/** @type {HTMLElement | null} */ (null));
  const before = useRef(document.activeElement);
  useEffect(
    () => () => {
      // The reader goes on where the drawer was opened from, unless the focus is elsewhere by now.
      if (before.current instanceof HTMLElement && document.activeElement === document.body) before.current.focus();
    },
    [],
  );
  useKeys([{ key: "Escape", label: "Close what is open", run: onClose }]);
  return html`<aside
    class="drawer"
    ref=${ref}
    aria-label=${label}
    onKeyDown=${(/** @type {KeyboardEvent} */ event) => {
      if (event.key !== "Escape") return;
      event.preventDefault();
      onClose();
    }}
  >
    <header class="line">
      <h2 class="grow line">${title}</h2>
      ${tools}
      <${Button} kind="quiet" icon="x" label="Close" onClick=${onClose} />
    </header>
    <div class="drawer-body" tabindex="0" role="group" aria-label=${label}>${children}</div>
  </aside>`;
}

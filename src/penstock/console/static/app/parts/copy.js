import { useState } from "preact/hooks";
import { html } from "../html.js";
import { notify } from "../store.js";
import { Button } from "./button.js";

const DONE_MS = 1500;

/**
 * Put text on the clipboard. On plain HTTP browsers have no clipboard for pages: there the old way still works.
 * @param {string} text
 */
export async function copyText(text) {
  if (navigator.clipboard && isSecureContext) {
    try {
      await navigator.clipboard.writeText(text);
      return;
    } catch {
      // Refused by a setting of the browser: try the other way.
    }
  }
  const area = document.createElement("textarea");
  area.value = text;
  area.className = "only-read";
  area.setAttribute("readonly", "");
  const host = document.querySelector("dialog[open]:modal") ?? document.body;
  host.append(area);
  area.select();
  const copied = document.execCommand("copy");
  area.remove();
  if (!copied) throw new Error("The browser did not let the page copy. Select the text and copy it by hand.");
}

/**
 * @param {{text: string | (() => string | Promise<string>), label?: string, children?: any, small?: boolean}} props
 */
export function Copy({ text, label = "Copy", children, small = true }) {
  const [done, setDone] = useState(false);
  const run = async () => {
    await copyText(typeof text === "string" ? text : await text());
    setDone(true);
    setTimeout(() => setDone(false), DONE_MS);
    if (children) notify("calm", "Copied.");
  };
  return html`<${Button} kind="quiet" small=${small} icon=${done ? "check" : "copy"} label=${label} onClick=${run}>${children}<//>`;
}

/** An id that can be copied. @param {{id: string, short?: boolean | string}} props `short` is what is shown of it, if its ends do not tell it from others */
export function Id({ id, short = false }) {
  const text = typeof short === "string" ? short : short && id.length > 16 ? `${id.slice(0, 8)}…${id.slice(-4)}` : id;
  return html`<span class="id"><code title=${id}>${text}</code><${Copy} text=${id} label="Copy ${id}" /></span>`;
}

import { useEffect, useId, useState } from "preact/hooks";
import { html } from "../html.js";
import { Icon } from "./icon.js";

/**
 * A labelled control with room for a hint and for what is wrong with it.
 * @param {{label: string, hint?: any, problem?: string | null, optional?: boolean, children: (id: string, describedBy: string | undefined) => any}} props
 */
export function Field({ label, hint, problem, optional = false, children }) {
  const id = useId();
  const told = problem || hint ? `${id}-told` : undefined;
  return html`<div class="field" data-problem=${problem ? "" : undefined}>
    <label for=${id}>${label}${optional && html` <span class="faint">optional</span>`}</label>
    ${children(id, told)}
    ${told && html`<div id=${told} class=${problem ? "problem" : "hint"}>${problem || hint}</div>`}
  </div>`;
}

/**
 * @param {{label: string, value: string, onInput: (value: string) => void, hint?: any, problem?: string | null,
 *   optional?: boolean, type?: string, area?: boolean, rows?: number, mono?: boolean, [more: string]: any}} props
 */
export function TextField({ label, value, onInput, hint, problem, optional, type = "text", area, mono, ...more }) {
  const input = (/** @type {any} */ event) => onInput(event.currentTarget.value);
  return html`<${Field} label=${label} hint=${hint} problem=${problem} optional=${optional}>
    ${(/** @type {string} */ id, /** @type {string | undefined} */ told) => {
      const shared = { id, value, onInput: input, class: mono ? "mono" : "", "aria-describedby": told, "aria-invalid": problem ? "true" : undefined };
      return area ? html`<textarea ...${shared} ...${more}></textarea>` : html`<input type=${type} ...${shared} ...${more} />`;
    }}
  <//>`;
}

/**
 * @param {{label: string, value: string, onPick: (value: string) => void, options: {id: string, label: string}[],
 *   hint?: any, problem?: string | null, [more: string]: any}} props
 */
export function SelectField({ label, value, onPick, options, hint, problem, ...more }) {
  return html`<${Field} label=${label} hint=${hint} problem=${problem}>
    ${(/** @type {string} */ id, /** @type {string | undefined} */ told) => html`<${Options} id=${id} told=${told} value=${value} onPick=${onPick} options=${options} ...${more} />`}
  <//>`;
}

/** @param {any} props */
function Options({ id, told, value, onPick, options, ...more }) {
  return html`<select id=${id} value=${value} aria-describedby=${told} onChange=${(/** @type {any} */ event) => onPick(event.currentTarget.value)} ...${more}>
    ${options.map((/** @type {{id: string, label: string}} */ option) => html`<option key=${option.id} value=${option.id}>${option.label}</option>`)}
  </select>`;
}

/**
 * A choice in a row of filters: its label is read aloud, not shown.
 * @param {{label: string, value: string, onPick: (value: string) => void, options: {id: string, label: string}[]}} props
 */
export function Pick({ label, value, onPick, options }) {
  return html`<select class="pick" aria-label=${label} title=${label} value=${value} onChange=${(/** @type {any} */ event) => onPick(event.currentTarget.value)}>
    ${options.map((option) => html`<option key=${option.id} value=${option.id}>${option.label}</option>`)}
  </select>`;
}

/**
 * Text of a control that is told on at its end, not on every letter. It is kept here while it is typed: a page that is
 * drawn anew meanwhile, as a live one is several times a second, would put the old value back.
 * @param {string} value
 */
export function useDraft(value) {
  const [draft, setDraft] = useState(value);
  useEffect(() => setDraft(value), [value]);
  return { value: draft, onInput: (/** @type {any} */ event) => setDraft(event.currentTarget.value) };
}

/**
 * A search box. It asks on Enter and when it is left, not on every letter. `/` brings the reader to the one marked `main`.
 * @param {{label: string, value: string, onSearch: (value: string) => void, placeholder?: string, main?: boolean, width?: string}} props
 */
export function Search({ label, value, onSearch, placeholder, main = false, width }) {
  const ask = (/** @type {HTMLInputElement} */ input) => {
    if (input.value.trim() !== value) onSearch(input.value.trim());
  };
  return html`<label class="search" style=${width ? { width } : undefined}>
    <${Icon} name="search" size=${14} />
    <span class="only-read">${label}</span>
    <input
      type="search"
      ...${useDraft(value)}
      placeholder=${placeholder ?? label}
      data-main-search=${main ? "" : undefined}
      onKeyDown=${(/** @type {any} */ event) => event.key === "Enter" && ask(event.currentTarget)}
      onChange=${(/** @type {any} */ event) => ask(event.currentTarget)}
    />
  </label>`;
}

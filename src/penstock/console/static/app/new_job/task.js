import { useRef } from "preact/hooks";
import { html } from "../html.js";
import { SelectField, TextField } from "../parts/field.js";
import { Notice } from "../parts/notice.js";
import { Segments } from "../parts/tabs.js";
import { me } from "../store.js";
import { namedModels, reference } from "./draft.js";

/** @typedef {import("./draft.js").Draft} Draft */

const MAX_INSERTS = 500;
const WAYS = [
  { id: "prompt", label: "Prompt" },
  { id: "processor", label: "Processor" },
  { id: "definition", label: "Definition" },
];
const EXAMPLE = `{
  "type": "http",
  "provider": "shop",
  "method": "GET",
  "path": "/prices/{{ sku }}",
  "columns": {"price": "offers[0].price"}
}`;

/**
 * What is done with each row.
 * @param {{draft: Draft, columns: string[], onChange: (changes: Partial<Draft>) => void}} props
 */
export function Task({ draft, columns, onChange }) {
  return html`<div class="stack">
    <${Segments} label="What is done with each row" now=${draft.how} options=${WAYS} onPick=${(/** @type {any} */ how) => onChange({ how })} />
    ${draft.how === "prompt" && html`<${Prompt} draft=${draft} columns=${columns} onChange=${onChange} />`}
    ${draft.how === "processor" && html`<${Processor} draft=${draft} onChange=${onChange} />`}
    ${draft.how === "definition" &&
    html`<${TextField} label="Definition" area rows="12" mono value=${draft.definition} placeholder=${EXAMPLE} spellcheck=${false} onInput=${(/** @type {string} */ definition) => onChange({ definition })} hint="JSON: an HTTP request of a provider, or a chat with strategies and parameters." />`}
  </div>`;
}

/** @param {{draft: Draft, columns: string[], onChange: (changes: Partial<Draft>) => void}} props */
function Prompt({ draft, columns, onChange }) {
  const box = useRef(/** @type {HTMLElement | null} */ (null));
  const providers = me.value?.providers ?? [];
  if (!providers.length) return html`<${Notice} tone="warn">This server has no provider. Its operator names one with <code>--base-url</code> or in <code>penstock.toml</code>.<//>`;
  const find = (/** @type {string} */ name) => providers.find((provider) => provider.name === name);
  const models = find(draft.provider)?.models ?? [];
  const named = namedModels(find(draft.provider));
  const insert = (/** @type {string} */ column) => {
    const area = box.current?.querySelector("textarea[data-prompt]");
    const at = area instanceof HTMLTextAreaElement ? area.selectionEnd : draft.prompt.length;
    onChange({ prompt: `${draft.prompt.slice(0, at)}${reference(column)}${draft.prompt.slice(at)}` });
    if (area instanceof HTMLTextAreaElement) area.focus();
  };
  return html`<div class="stack" ref=${box}>
    <div class="pair">
      ${providers.length > 1 && html`<${SelectField} label="Provider" value=${draft.provider} onPick=${(/** @type {string} */ provider) => onChange({ provider, model: namedModels(find(provider))[0] ?? "" })} options=${providers.map(({ name }) => ({ id: name, label: name }))} />`}
      ${named.length && named.length === models.length
        ? html`<${SelectField} label="Model" value=${draft.model} onPick=${(/** @type {string} */ model) => onChange({ model })} options=${named.map((name) => ({ id: name, label: name }))} />`
        : html`<${TextField} label="Model" value=${draft.model} onInput=${(/** @type {string} */ model) => onChange({ model })} mono placeholder="name of a model" autocomplete="off" />`}
    </div>
    <${TextField} label="Prompt" area rows="5" data-prompt value=${draft.prompt} placeholder=${`Which category is ${reference(columns[0] ?? "title")}?`} onInput=${(/** @type {string} */ prompt) => onChange({ prompt })} />
    ${columns.length > 0 && html`<div class="inserts" role="group" aria-label="Insert a column">${columns.slice(0, MAX_INSERTS).map((name) => html`<button type="button" key=${name} class="insert" title="Insert ${reference(name)}" onClick=${() => insert(name)}>${name}</button>`)}</div>`}
    <details><summary>System prompt, answer as columns</summary>
      <div class="stack">
        <${TextField} label="System prompt" area rows="2" optional value=${draft.system} onInput=${(/** @type {string} */ system) => onChange({ system })} />
        <${TextField} label="JSON schema of the answer" area rows="6" optional mono spellcheck=${false} value=${draft.schema} placeholder=${`{"type": "object", "properties": {"category": {"type": "string"}}, "required": ["category"]}`} onInput=${(/** @type {string} */ schema) => onChange({ schema })} hint="Its properties become columns of the result; an answer that does not fit is asked for again." />
      </div>
    </details>
  </div>`;
}

/** @param {{draft: Draft, onChange: (changes: Partial<Draft>) => void}} props */
function Processor({ draft, onChange }) {
  const processors = me.value?.processors ?? [];
  if (!processors.length) return html`<${Notice} tone="warn">No processor is registered on this server. Its operator names Python functions as <code>[[processors]]</code> in <code>penstock.toml</code>.<//>`;
  return html`<${SelectField} label="Processor" value=${draft.processor} onPick=${(/** @type {string} */ processor) => onChange({ processor })} options=${processors.map(({ name }) => ({ id: name, label: name }))} hint="A Python function of this server that gets each row." />`;
}

/** @param {{draft: Draft, onChange: (changes: Partial<Draft>) => void}} props */
export function Options({ draft, onChange }) {
  const field = (/** @type {"jobType" | "maxConcurrency" | "maxAttempts" | "priority"} */ name, /** @type {any} */ props) =>
    html`<${TextField} optional value=${draft[name]} onInput=${(/** @type {string} */ value) => onChange({ [name]: value })} ...${props} />`;
  return html`<details><summary>More: type, limits, priority</summary>
    <div class="pair">
      ${field("jobType", { label: "Type of job", placeholder: "job", maxlength: "100", hint: "A word to find it by." })}
      ${field("maxConcurrency", { label: "Rows in flight at most", type: "number", min: "1", max: "100000" })}
      ${field("maxAttempts", { label: "Attempts of a row at most", type: "number", min: "1", max: "100" })}
      ${field("priority", { label: "Priority", type: "number", min: "-100", max: "100", placeholder: "0" })}
    </div>
  </details>`;
}

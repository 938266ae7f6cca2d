import { count } from "../format.js";
import { html } from "../html.js";
import { useDraft } from "../parts/field.js";
import { cellName, cellText } from "../parts/value.js";

/**
 * @typedef {import("./draft.js").ColumnChoice} ColumnChoice
 * @typedef {import("./draft.js").FoundColumn} FoundColumn
 */

const TYPES = [
  ["", "as found"],
  ["text", "text"],
  ["integer", "integer"],
  ["number", "number"],
  ["boolean", "yes or no"],
];

/**
 * The first rows, and above them what becomes of each column.
 * @param {{columns: FoundColumn[], shown: FoundColumn[], rows: Record<string, any>[], choices: Record<string, ColumnChoice>,
 *   fixed: boolean, onChoice: (name: string, choice: ColumnChoice) => void}} props
 *   `columns` as found; `shown` as they are with the choices; `fixed` for images, whose columns are given
 */
export function Columns({ columns, shown, rows, choices, fixed, onChoice }) {
  // Those that are kept come in the same order, each perhaps under another name.
  const kept = columns.filter((column) => !choices[column.name]?.dropped);
  const names = new Map(kept.map((column, at) => [column.name, shown[at]?.name ?? ""]));
  return html`<div class="table-frame preview" tabindex="0" role="region" aria-label="First rows">
    <table class="cells">
      <thead>
        <tr>
          ${columns.map((column) => html`<th key=${column.name} scope="col" data-dropped=${choices[column.name]?.dropped ? "" : undefined}>${fixed ? html`<span class="mono">${column.name}</span>` : html`<${Head} column=${column} choice=${choices[column.name] ?? {}} onChoice=${onChoice} />`}</th>`)}
        </tr>
      </thead>
      <tbody>
        ${rows.map(
          (row, at) => html`<tr key=${at}>
            ${columns.map((column) => {
              const value = row[names.get(column.name) ?? ""];
              const dropped = choices[column.name]?.dropped;
              return html`<td key=${column.name} data-dropped=${dropped ? "" : undefined} title=${cellText(value)}>${dropped ? "" : value === null || value === undefined ? html`<span class="faint">empty</span>` : cellText(value)}</td>`;
            })}
          </tr>`,
        )}
      </tbody>
    </table>
    ${rows.length === 0 && html`<p class="soft none">The file has columns and no rows.</p>`}
  </div>
  <p class="soft small">The first ${count(rows.length)} rows. Templates name columns as they are called here.</p>`;
}

/** @param {{column: FoundColumn, choice: ColumnChoice, onChoice: (name: string, choice: ColumnChoice) => void}} props */
function Head({ column, choice, onChoice }) {
  const change = (/** @type {ColumnChoice} */ changes) => onChoice(column.name, { ...choice, ...changes });
  return html`<div class="column-head">
    <label class="line" ><input type="checkbox" checked=${!choice.dropped} aria-label="Keep ${column.name}" onChange=${() => change({ dropped: !choice.dropped })} /><span class="cut faint"><bdi>${cellName(column.name)}</bdi></span></label>
    <input type="text" class="mono" aria-label="Name of ${column.name}" ...${useDraft(choice.name ?? column.name)} disabled=${choice.dropped} onChange=${(/** @type {any} */ event) => change({ name: event.currentTarget.value })} />
    <select aria-label="Type of ${column.name}" value=${choice.type ?? ""} disabled=${choice.dropped} onChange=${(/** @type {any} */ event) => change({ type: event.currentTarget.value || undefined })}>
      ${TYPES.map(([id, label]) => html`<option key=${id} value=${id}>${label}</option>`)}
    </select>
  </div>`;
}

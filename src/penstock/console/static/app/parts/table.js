import { useRef } from "preact/hooks";
import { html } from "../html.js";
import { useKeys } from "../keys.js";

/**
 * @template Row
 * @typedef {{id: string, label: string, unlabelled?: boolean, number?: boolean, class?: string, narrow?: "hide" | "title" | "line" | "bare", cell: (row: Row) => any}} Column
 * `unlabelled`: the label is read aloud, not shown; `narrow`: where the cell goes on a narrow screen, on which each row is a card
 */

/**
 * A table of some dozens of rows. `j` and `k` move through the links of its rows.
 * @template Row
 * @param {{label: string, columns: Column<Row>[], rows: Row[], rowKey: (row: Row) => string, selected?: (row: Row) => boolean, fixed?: boolean}} props
 *   `fixed` keeps the widths that the style gives, whatever the cells hold
 */
export function Table({ label, columns, rows, rowKey, selected, fixed = false }) {
  const body = useRef(/** @type {HTMLTableSectionElement | null} */ (null));
  const move = (/** @type {number} */ by) => {
    const lines = [...(body.current?.rows ?? [])];
    const at = lines.findIndex((line) => line.contains(document.activeElement));
    const next = lines[Math.min(lines.length - 1, Math.max(0, at === -1 ? 0 : at + by))];
    /** @type {HTMLElement | null | undefined} */ (next?.querySelector("a, button"))?.focus();
  };
  useKeys([
    { key: "j", label: "Next row", run: () => move(1) },
    { key: "k", label: "Row before", run: () => move(-1) },
  ]);
  return html`<div class="table-frame">
    <table class="table ${fixed ? "fixed" : ""}" aria-label=${label}>
      <thead>
        <tr>${columns.map((column) => html`<th key=${column.id} scope="col" class="${column.number ? "number" : ""} ${column.class ?? ""}">${column.unlabelled ? html`<span class="only-read">${column.label}</span>` : column.label}</th>`)}</tr>
      </thead>
      <tbody ref=${body}>
        ${rows.map(
          (row) => html`<tr key=${rowKey(row)} aria-selected=${selected ? selected(row) : undefined}>
            ${columns.map(
              (column) => html`<td
                key=${column.id}
                data-label=${column.label}
                data-narrow=${column.narrow ?? "line"}
                class="${column.number ? "number" : ""} ${column.class ?? ""}"
              >${column.cell(row)}</td>`,
            )}
          </tr>`,
        )}
      </tbody>
    </table>
  </div>`;
}

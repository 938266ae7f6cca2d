import { useEffect, useState } from "preact/hooks";
import { explain, get } from "../api.js";
import { html } from "../html.js";
import { StateChip, StatusChip } from "../parts/chip.js";
import { Skeleton } from "../parts/empty.js";
import { Notice } from "../parts/notice.js";
import { cellName, cellText } from "../parts/value.js";

export const TRIAL_ROWS = 10;
const EVERY_MS = 700;
const MAX_COLUMNS = 5;
const ENDED = new Set(["DONE", "FAILED", "CANCELLED"]);

/** How the first rows fare, as a job of their own. @param {{id: string}} props */
export function Trial({ id }) {
  const [job, setJob] = useState(/** @type {any} */ (null));
  const [items, setItems] = useState(/** @type {any[]} */ ([]));
  const [problem, setProblem] = useState("");
  useEffect(() => {
    const controller = new AbortController();
    /** @type {ReturnType<typeof setTimeout> | undefined} */
    let timer;
    const look = async () => {
      try {
        // One after the other: rows that are read before the end may be older than it, and nobody looks again.
        const state = await get(`api/jobs/${id}`, {}, { signal: controller.signal });
        const page = await get(`api/jobs/${id}/items`, { from: 1, pageSize: TRIAL_ROWS }, { signal: controller.signal, exact: true });
        setJob(state);
        setItems(page.items);
        setProblem("");
        if (ENDED.has(state.state)) return;
      } catch (error) {
        if (controller.signal.aborted) return;
        setProblem(explain(error));
      }
      timer = setTimeout(look, EVERY_MS);
    };
    look();
    return () => {
      controller.abort();
      clearTimeout(timer);
    };
  }, [id]);
  if (!job) return problem ? html`<${Notice} tone="bad">${problem}<//>` : html`<${Skeleton} lines=${3} />`;
  return html`<div class="stack" data-trial=${job.state}>
    <div class="line"><h2 class="grow">Trial</h2><${StateChip} state=${job.state} /><a href="#/work/${id}" target="_blank" title="In a tab of its own: what is written here stays">Open</a></div>
    ${problem && html`<${Notice} tone="bad">${problem}<//>`}
    <${Results} items=${items} />
  </div>`;
}

/** @param {{items: any[]}} props */
function Results({ items }) {
  const columns = [...new Set(items.flatMap((item) => (item.result && typeof item.result === "object" ? Object.keys(item.result) : [])))].slice(0, MAX_COLUMNS);
  return html`<div class="table-frame preview" tabindex="0" role="region" aria-label="Results of the trial">
    <table class="cells">
      <thead><tr><th scope="col" class="number">Row</th><th scope="col">Status</th>${columns.map((name) => html`<th key=${name} scope="col">${cellName(name)}</th>`)}</tr></thead>
      <tbody>
        ${items.map(
          (item) => html`<tr key=${item.row}>
            <td class="number">${item.row}</td>
            <td><${StatusChip} status=${item.status} /></td>
            ${item.error ? html`<td class="bad wide" colspan=${Math.max(1, columns.length)} title=${cellText(errorText(item.error))}>${cellText(errorText(item.error))}</td>` : columns.map((name) => html`<td key=${name} title=${cellText(item.result?.[name])}>${cellText(item.result?.[name])}</td>`)}
          </tr>`,
        )}
      </tbody>
    </table>
  </div>`;
}

/** @param {any} error */
const errorText = (error) => (typeof error === "string" ? error : (error.message ?? error.code ?? ""));

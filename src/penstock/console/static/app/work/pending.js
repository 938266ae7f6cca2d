import { get } from "../api.js";
import { html } from "../html.js";
import { settled } from "../parts/progress.js";
import { askedText } from "./row_columns.js";
import { PendingList } from "../pending/list.js";

/** Rows of one job or batch that wait or are claimed. @param {{work: import("../work_types.js").WorkDetail}} props */
export function Pending({ work }) {
  const load = async (/** @type {string | undefined} */ after, /** @type {AbortSignal} */ signal) => {
    const page = await get(`api/jobs/${encodeURIComponent(work.id)}/items`, { statuses: "PENDING,PROCESSING", sort: "updatedAt", pageSize: 100, cellBytes: 100, after }, { signal, exact: true });
    return { ...page, items: page.items.map((/** @type {any} */ item) => ({ ...item, jobId: work.id, summary: summary(work, item.input) })) };
  };
  return html`<${PendingList}
    load=${load}
    asked=${work.id}
    moved=${work.total + settled(work.counts)}
    empty="Every row of it is decided. Rows that failed can be run again: see Errors."
  />`;
}

/** What a row is about: the columns that tell, or the first ones. @param {import("../work_types.js").WorkDetail} work @param {any} input */
function summary(work, input) {
  if (work.kind === "batch") return askedText(input);
  const telling = ["title", "name", "brand", "sku"].filter((name) => input?.[name] !== null && input?.[name] !== undefined);
  const names = telling.length ? telling : Object.keys(input ?? {}).slice(0, 3);
  return names.map((name) => input[name]).filter((value) => value !== null && value !== undefined).join(" · ");
}

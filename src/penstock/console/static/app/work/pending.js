import { get } from "../api.js";
import { plural } from "../format.js";
import { html } from "../html.js";
import { Button } from "../parts/button.js";
import { Empty } from "../parts/empty.js";
import { settled } from "../parts/progress.js";
import { link } from "../route.js";
import { canRunAgain, shownStatus, unrunStatus } from "./actions.js";
import { askedText } from "./row_columns.js";
import { PendingList } from "../pending/list.js";

/** Rows of one job or batch that wait or are claimed. @param {{work: import("../work_types.js").WorkDetail}} props */
export function Pending({ work }) {
  if (shownStatus(work, "PENDING") !== "PENDING" && !work.counts.inFlight) return html`<${GivenUp} work=${work} />`;
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

/** What was never run of work that was given up: it does not wait. @param {{work: import("../work_types.js").WorkDetail}} props */
function GivenUp({ work }) {
  const left = work.counts.cancelled + work.counts.expired;
  const show = left > 0 && html`<${Button} href=${link(`/work/${encodeURIComponent(work.id)}`, { status: unrunStatus(work) })}>Show them<//>`;
  return html`<div class="card"><${Empty} icon="ban" title="Nothing waits any more" action=${show}>${plural(left, "row")} ${left === 1 ? "was" : "were"} never run.${work.kind === "job" && canRunAgain(work, "ERROR") && left > 0 && " “Run failures again” runs them, too."}<//></div>`;
}

/** What a row is about: the columns that tell, or the first ones. @param {import("../work_types.js").WorkDetail} work @param {any} input */
function summary(work, input) {
  if (work.kind === "batch") return askedText(input);
  const telling = ["title", "name", "brand", "sku"].filter((name) => input?.[name] !== null && input?.[name] !== undefined);
  const names = telling.length ? telling : Object.keys(input ?? {}).slice(0, 3);
  return names.map((name) => input[name]).filter((value) => value !== null && value !== undefined).join(" · ");
}

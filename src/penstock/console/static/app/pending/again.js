// Rows of a list that was read a while ago, run again: those of them that have failed by now.
import { get, newKey, post } from "../api.js";
import { plural } from "../format.js";
import { html } from "../html.js";
import { confirm } from "../parts/dialog.js";
import { notify } from "../store.js";
import { batchPath, workPath } from "../work/actions.js";

/** @typedef {import("./rows.js").PendingRow} PendingRow */

const WINDOW_ROWS = 100;
const FAILED = new Set(["ERROR", "NOT_FOUND"]);
const OPEN = new Set(["PENDING", "PROCESSING"]);

/** Windows of row numbers that hold all of these. @param {number[]} rows in ascending order */
function windows(rows) {
  /** @type {[number, number][]} */
  const found = [];
  for (const row of rows) {
    const last = found.at(-1);
    if (last && row - last[0] < WINDOW_ROWS) last[1] = row;
    else found.push([row, row]);
  }
  return found;
}

/** What the rows of one job are now. @param {string} job @param {PendingRow[]} items */
async function readStatuses(job, items) {
  const wanted = new Set(items.map((item) => item.row));
  const statuses = new Map();
  for (const [first, last] of windows([...wanted].sort((a, b) => a - b))) {
    for (let from = first; from <= last; ) {
      const page = await get(`api/jobs/${job}/items`, { from, pageSize: last - from + 1, cellBytes: 40 });
      for (const item of page.items) if (wanted.has(item.row)) statuses.set(item.id, item.status);
      if (page.next === null || !page.items.length) break;
      from = page.items.at(-1).row + 1; // a page of large rows has fewer
    }
  }
  return statuses;
}

/**
 * @param {PendingRow[]} selected
 * @returns {Promise<boolean>} whether some are run again
 */
export async function askAgain(selected) {
  const jobs = Map.groupBy(selected, (item) => item.jobId);
  /** @type {Map<string, string[]>} */
  const failed = new Map();
  let open = 0;
  let done = 0;
  for (const [job, items] of jobs) {
    const statuses = await readStatuses(job, items);
    failed.set(job, items.filter((item) => FAILED.has(statuses.get(item.id))).map((item) => item.id));
    open += items.filter((item) => OPEN.has(statuses.get(item.id))).length;
    done += items.filter((item) => !FAILED.has(statuses.get(item.id)) && !OPEN.has(statuses.get(item.id))).length;
  }
  const total = [...failed.values()].reduce((sum, ids) => sum + ids.length, 0);
  const rest = [open && `${plural(open, "row")} still wait or are claimed: they run by themselves.`, done && `${plural(done, "row")} are done.`].filter(Boolean).join(" ");
  if (!total) {
    notify("calm", "None of the selected rows has failed.", rest);
    return false;
  }
  return confirm({
    title: `Run ${plural(total, "row")} again?`,
    text: html`<p>They have failed since the list was read. Each keeps its result until it has a new one.</p>${rest && html`<p class="soft">${rest}</p>`}`,
    action: "Run again",
    run: async () => {
      for (const [job, itemIds] of failed) {
        if (!itemIds.length) continue;
        if (job.startsWith("job_")) await post(workPath(job, "/reprocess"), { scope: "items", itemIds }, { key: newKey() });
        else await post(`${batchPath(job)}/retry`, { request_ids: itemIds });
      }
      notify("good", `${plural(total, "row")} are put back to run again.`);
    },
  });
}

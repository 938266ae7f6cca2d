// Rows of a list that was read a while ago, run again: those of them that have failed by now.
import { newKey, post } from "../api.js";
import { plural } from "../format.js";
import { html } from "../html.js";
import { confirm } from "../parts/dialog.js";
import { notify } from "../store.js";
import { batchPath, workPath } from "../work/actions.js";
import { readStatuses } from "../work/row_statuses.js";

/** @typedef {import("./rows.js").PendingRow} PendingRow */

const FAILED = new Set(["ERROR", "NOT_FOUND"]);
const OPEN = new Set(["PENDING", "PROCESSING"]);

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
    const now = await readStatuses(job, items.map((item) => item.row));
    const count = (/** @type {Set<string>} */ of) => items.filter((item) => of.has(now.get(item.row)?.status ?? "")).length;
    failed.set(job, items.filter((item) => FAILED.has(now.get(item.row)?.status ?? "")).map((item) => item.id));
    open += count(OPEN);
    done += items.length - count(OPEN) - count(FAILED);
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

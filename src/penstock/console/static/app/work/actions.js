// What can be done with a piece of work.
import { address, call, get, newKey, post } from "../api.js";
import { count, plural } from "../format.js";
import { html, withCode } from "../html.js";
import { confirm } from "../parts/dialog.js";
import { notify } from "../store.js";
import { readStatuses } from "./row_statuses.js";

/** @typedef {import("../work_types.js").WorkEntry} WorkEntry */
/** @typedef {import("../work_types.js").WorkDetail} WorkDetail */
/** @typedef {import("../work_types.js").Operation} Operation */
/** @typedef {{scope: "job" | "items", itemIds?: string[], statuses?: string[], fingerprint?: string, resetAttempts?: boolean}} Wish */

const ENDED = new Set(["DONE", "FAILED", "CANCELLED", "EXPIRED"]);
const POLL_MS = 1000;

/** @param {string} id @param {string} [rest] */
export const workPath = (id, rest = "") => `api/jobs/${encodeURIComponent(id)}${rest}`;

/** @param {{state: string}} work */
export const hasEnded = (work) => ENDED.has(work.state);

/** @param {WorkEntry} work @param {"pause" | "resume" | "cancel"} verb */
export const steer = (work, verb) => post(`api/work/${encodeURIComponent(work.id)}/${verb}`);

/** Where requests of a batch are found in the dialect that it was made in. @param {string} id */
export const batchPath = (id) => (id.startsWith("msgbatch_") ? `v1/messages/batches/${encodeURIComponent(id)}` : `v1/batches/${encodeURIComponent(id)}`);

/**
 * What can be downloaded, with its address. A batch has files once it has ended.
 * @param {WorkEntry} work
 * @returns {Promise<[string, string][]>}
 */
export async function findExports(work) {
  if (work.kind === "job") {
    const sheet = (/** @type {string} */ format) => address(workPath(work.id, "/export"), { format }).href;
    return [["Excel (.xlsx)", sheet("xlsx")], ["CSV (.csv)", sheet("csv")], ["JSON lines (.jsonl)", sheet("jsonl")]];
  }
  if (!hasEnded(work)) return [];
  if (work.id.startsWith("msgbatch_")) return [["Results (.jsonl)", address(`${batchPath(work.id)}/results`).href]];
  const batch = await get(batchPath(work.id));
  /** @type {[string, string | null][]} */
  const files = [["Answers (.jsonl)", batch.output_file_id], ["Failed requests (.jsonl)", batch.error_file_id]];
  return files.flatMap(([label, id]) => (id === null ? [] : [[label, address(`v1/files/${encodeURIComponent(id)}/content`).href]]));
}

/**
 * What a row is to the reader: what was never run of a job that was given up does not wait, though it can be run still.
 * @param {{state: string}} work @param {string} status
 */
export const shownStatus = (work, status) => (status === "PENDING" && /^(CANCELLED|EXPIRED)$/.test(work.state) ? work.state : status);

/** By which status rows that were never run are asked for: of a job that was given up they are PENDING still. @param {{kind: string, state: string}} work */
export const unrunStatus = (work) => (work.kind === "batch" ? shownStatus(work, "PENDING") : "PENDING");

/** Whether rows of this status can be run again. @param {WorkEntry} work @param {string} status */
export const canRunAgain = (work, status) => !work.id.startsWith("msgbatch_") && (work.kind === "job" ? /^(DONE|ERROR|NOT_FOUND|SKIPPED)$/ : /^ERROR$/).test(status);

/** @param {WorkEntry} work */
export const askCancel = (work) =>
  confirm({
    title: "Cancel this work?",
    text: html`<p>Nothing more of <b><bdi>${work.name}</bdi></b> is started. Calls in flight end and keep their results; ${plural(work.counts.pending ?? 0, "row")} will not be run.</p>`,
    action: "Cancel it",
    danger: true,
    run: () => steer(work, "cancel"),
  });

/** @param {WorkEntry} work */
export const askDelete = (work) =>
  confirm({
    title: "Delete it with all its results?",
    text: html`<p><b><bdi>${work.name}</bdi></b>, its rows and its results are erased. This cannot be undone.</p>`,
    action: "Delete",
    danger: true,
    run: () => call("DELETE", work.kind === "job" ? workPath(work.id) : batchPath(work.id)),
  });

/**
 * Ask, then run rows again: rows of a job as an operation of the server's, which goes on if this page is closed.
 * @param {WorkDetail} work
 * @param {Wish} wish
 * @param {string} what which rows, in words: "812 failed rows"
 * @param {() => void} [onStart]
 */
export function askReprocess(work, wish, what, onStart) {
  const isJob = work.kind === "job";
  let resetAttempts = false;
  return confirm({
    title: `Run ${what} again?`,
    text: html`
      <p>Each row keeps its result until it has a new one. Rows that have had all their attempts are left as they are.</p>
      ${work.idle && html`<p>${withCode(work.idle)}</p>`}
      ${isJob && html`<label class="line"><input type="checkbox" onChange=${(/** @type {any} */ event) => (resetAttempts = event.currentTarget.checked)} />Give them all their attempts again</label>`}`,
    action: "Run again",
    run: async () => {
      if (isJob) {
        const { operationId } = await post(workPath(work.id, "/reprocess"), resetAttempts ? { ...wish, resetAttempts } : wish, { key: newKey() });
        watchOperation(work, operationId);
      } else {
        await post(`${batchPath(work.id)}/retry`, wish.itemIds ? { request_ids: wish.itemIds } : wish.fingerprint ? { fingerprint: wish.fingerprint } : {});
        if (work.idle) notify("calm", "The failed requests wait to be run again.", withCode(work.idle));
        else notify("good", "The failed requests are run again.");
      }
      onStart?.();
    },
  });
}

/**
 * Ask, then run those of some rows again that can be: the server refuses all of them if it is asked for one that cannot.
 * @param {WorkDetail} work
 * @param {number[]} rows
 * @param {{current: (row: number) => {id: string, status: string} | undefined, query: import("../api.js").Values}} source
 *   knows some of them; of the others, those that no longer fit its query are left out
 * @param {() => void} onStart
 */
export async function askReprocessRows(work, rows, source, onStart) {
  const known = rows.flatMap((row) => source.current(row) ?? []);
  const others = await readStatuses(work.id, rows.filter((row) => !source.current(row)), source.query);
  const able = [...known, ...others.values()].filter(({ status }) => canRunAgain(work, status));
  if (!able.length) {
    notify("calm", "None of the selected rows can be run again.", work.kind === "job" ? "They have not ended yet, or no longer fit the filter." : "Of a batch, failed rows can.");
    return;
  }
  const what = able.length === rows.length ? plural(rows.length, "selected row") : `${count(able.length)} of ${plural(rows.length, "selected row")}`;
  const statuses = [...new Set(able.map(({ status }) => status))];
  await askReprocess(work, { scope: "items", itemIds: able.map(({ id }) => id), statuses }, what, onStart);
}

/** Operations that were stopped on this page, which has said so. @type {Set<string>} */
const stopped = new Set();

/** Put no more rows back. Those that were put back run. @param {WorkEntry} work @param {string} id */
export async function stopOperation(work, id) {
  stopped.add(id);
  try {
    /** @type {Operation} */
    const operation = await post(workPath(work.id, `/operations/${encodeURIComponent(id)}/cancel`));
    notify("calm", "Stopped.", `${plural(operation.requeued, "row")} had been put back and ${operation.requeued === 1 ? "runs" : "run"} again. All others keep their results.`);
  } catch (error) {
    stopped.delete(id);
    throw error;
  }
}

/** Say how an operation ended, once it has. @param {WorkDetail} work @param {string} id */
async function watchOperation(work, id) {
  notify("calm", "The rows are being put back.", "You can leave this page: the server goes on with it.");
  for (;;) {
    await new Promise((resolve) => setTimeout(resolve, POLL_MS));
    if (document.hidden) continue;
    /** @type {Operation} */
    let operation;
    try {
      operation = await get(workPath(work.id, `/operations/${encodeURIComponent(id)}`));
    } catch {
      return; // deleted, signed out, or the server is away: the page says so itself
    }
    if (operation.state === "RUNNING") continue;
    if (stopped.has(id)) return;
    const worn = operation.wornOut ? ` ${count(operation.wornOut)} have no attempts left.` : "";
    if (operation.state === "DONE") notify(work.idle ? "calm" : "good", `${plural(operation.requeued, "row")} put back to run again.${worn}`, work.idle && withCode(work.idle));
    else notify("bad", operation.error ?? `The operation was ${operation.state.toLowerCase()}.`);
    return;
  }
}

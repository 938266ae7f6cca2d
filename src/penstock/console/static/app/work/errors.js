import { useEffect, useRef } from "preact/hooks";
import { get } from "../api.js";
import { count, plural } from "../format.js";
import { html } from "../html.js";
import { Button } from "../parts/button.js";
import { Chip } from "../parts/chip.js";
import { Empty } from "../parts/empty.js";
import { Loading } from "../parts/load.js";
import { More, usePages } from "../parts/more.js";
import { Table } from "../parts/table.js";
import { Time } from "../parts/time.js";
import { readable, visible } from "../parts/value.js";
import { link } from "../route.js";
import { askReprocess, canRunAgain, hasEnded, workPath } from "./actions.js";

/** @typedef {import("../work_types.js").WorkDetail} WorkDetail */
/** @typedef {{fingerprint: string, code: string, status: number | null, count: number, firstSeen: string, lastSeen: string, sample: {row: number, message: string}}} Group */

const REFRESH_MS = 2000;

/** Failures in groups. @param {{work: WorkDetail, onChange: () => void}} props */
export function Errors({ work, onChange }) {
  const groups = usePages(async (after, signal) => {
    const { errors, next } = await get(workPath(work.id, "/errors"), { pageSize: 200, after }, { signal });
    return { data: errors, has_more: next !== null, last_id: next };
  }, [work.id]);
  const last = useRef(Date.now());
  const failures = work.counts.failed + work.counts.notFound;
  useEffect(() => {
    const timer = setTimeout(() => {
      last.current = Date.now();
      groups.reload();
    }, Math.max(0, last.current + REFRESH_MS - Date.now()));
    return () => clearTimeout(timer);
  }, [failures]);
  const rows = (/** @type {Group} */ group) => link(`/work/${encodeURIComponent(work.id)}`, { fingerprint: group.fingerprint });
  const again = (/** @type {Group} */ group) => askReprocess(work, { scope: "job", fingerprint: group.fingerprint }, plural(group.count, "row"), onChange);
  // Imported ones, and those of an earlier version. While rows fail, figures and groups are not of one moment.
  const ungrouped = groups.hasMore || !hasEnded(work) ? 0 : failures - groups.rows.reduce((sum, /** @type {Group} */ group) => sum + group.count, 0);
  const failed = link(`/work/${encodeURIComponent(work.id)}`, { status: "ERROR" });
  const columns = [
    { id: "count", label: "Rows", number: true, class: "error-count", narrow: "bare", cell: (/** @type {Group} */ group) => html`<b>${count(group.count)}</b>` },
    { id: "kind", label: "Kind", class: "error-kind", narrow: "bare", cell: kind },
    { id: "message", label: "Message of one of them", narrow: "title", cell: (/** @type {Group} */ group) => html`<a class="name message" href=${rows(group)}><bdi>${readable(group.sample.message)}</bdi></a>` },
    { id: "first", label: "First", number: true, class: "error-time", cell: (/** @type {Group} */ group) => html`<${Time} at=${group.firstSeen} />` },
    { id: "last", label: "Last", number: true, class: "error-time", cell: (/** @type {Group} */ group) => html`<${Time} at=${group.lastSeen} />` },
    { id: "act", label: "Action", unlabelled: true, class: "error-act", narrow: "bare", cell: (/** @type {Group} */ group) => canRunAgain(work, "ERROR") && html`<${Button} small icon="rotate-ccw" onClick=${() => again(group)}>Run this group again<//>` },
  ];
  return html`<${Loading} of=${groups.loaded} lines=${5}>
    ${() =>
      groups.rows.length
        ? html`<${Table} label="Groups of errors" columns=${columns} rows=${groups.rows} rowKey=${(/** @type {Group} */ group) => group.fingerprint} fixed />
            <${More} of=${groups} />
            ${ungrouped > 0 && html`<p class="soft">${plural(ungrouped, "failure")} more ${ungrouped === 1 ? "is" : "are"} in no group. <a href=${failed}>Show the failed rows</a></p>`}`
        : ungrouped > 0
          ? html`<div class="card"><${Empty} icon="circle-alert" title="${plural(failures, "failure")}, in no group" action=${html`<${Button} href=${failed}>Show the failed rows<//>`}>Failures that were imported, or written by an earlier version, are not grouped.<//></div>`
          : html`<div class="card"><${Empty} icon="circle-check" title="No row has failed" action=${html`<${Button} href=${link(`/work/${encodeURIComponent(work.id)}`)}>Show the rows<//>`}>Failures are grouped here by code, HTTP status and message.<//></div>`}
  <//>`;
}

/** @param {Group} group */
function kind(group) {
  return html`<${Chip} tone=${group.code === "not_found" ? "warn" : "bad"} dot=${false}>${visible(group.code)}<//>${group.status !== null && html` <span class="soft small">HTTP ${group.status}</span>`}`;
}

import { useSignal } from "@preact/signals";
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { count, percent, plural } from "../format.js";
import { html } from "../html.js";
import { useKeys } from "../keys.js";
import { Button } from "../parts/button.js";
import { Chip, StatusChip } from "../parts/chip.js";
import { Id } from "../parts/copy.js";
import { Empty, Skeleton } from "../parts/empty.js";
import { fixedPx, Grid, GridCheck } from "../parts/grid.js";
import { Notice } from "../parts/notice.js";
import { settled } from "../parts/progress.js";
import { Time } from "../parts/time.js";
import { readable, visible } from "../parts/value.js";
import { go, link } from "../route.js";
import { askAgain } from "./again.js";
import { PendingRows } from "./rows.js";

/**
 * @typedef {import("./rows.js").PendingRow} PendingRow
 * @typedef {import("../work_types.js").WorkEntry} WorkEntry
 * @typedef {import("../parts/grid.js").GridColumn} GridColumn
 */

/** @param {PendingRow} item */
const rowLink = (item) => link(`/work/${encodeURIComponent(item.jobId)}`, { row: item.row });

/**
 * Rows that wait or are claimed, those that changed longest ago first, as they were when the list was opened.
 * @param {{load: import("./rows.js").Load, asked: string, moved: number, works?: Map<string, WorkEntry>, empty: any}} props
 *   `asked` names the query: another is another list; `moved` counts what has changed in the database; `works` are the
 *   jobs by id, where rows of several are shown
 */
export function PendingList({ load, asked, moved, works, empty }) {
  const [opened, setOpened] = useState(0);
  const source = useMemo(() => new PendingRows(load), [asked, opened]);
  useEffect(() => () => source.close(), [source]);
  source.version.value;
  const since = useRef({ source, moved });
  if (since.current.source !== source || moved < since.current.moved) since.current = { source, moved };
  const changes = moved - since.current.moved;
  const active = useSignal(-1);
  const selected = useSignal(/** @type {Map<string, PendingRow>} */ (new Map()));
  useEffect(() => {
    active.value = -1;
    selected.value = new Map();
  }, [source]);
  const refresh = () => setOpened((before) => before + 1);
  const handle = useRef(/** @type {import("../parts/grid.js").GridHandle | null} */ (null));
  const isSelected = (/** @type {number} */ index) => selected.value.has(source.get(index)?.id ?? "");
  const toggle = (/** @type {number} */ index) => {
    const item = source.get(index);
    if (!item) return;
    const next = new Map(selected.value);
    if (!next.delete(item.id)) next.set(item.id, item);
    selected.value = next;
    active.value = index;
  };
  const onActive = (/** @type {number} */ index, /** @type {boolean} */ extend) => {
    if (extend) {
      const next = new Map(selected.value);
      for (let at = Math.min(index, active.value < 0 ? index : active.value); at <= Math.max(index, active.value); at++) {
        const item = source.get(at);
        if (item) next.set(item.id, item);
      }
      selected.value = next;
    }
    active.value = index;
  };
  const open = (/** @type {number} */ index) => {
    const item = source.get(index);
    if (item) go(rowLink(item));
  };
  useKeys([
    { key: "j", label: "Next row", run: (event) => handle.current?.move(1, event.shiftKey) },
    { key: "k", label: "Row before", run: (event) => handle.current?.move(-1, event.shiftKey) },
    { key: "x", label: "Select the row", run: () => active.value >= 0 && toggle(active.value) },
    { key: "r", label: "Refresh", run: refresh },
    { key: "Enter", label: "Go to the row in its job", run: () => active.value >= 0 && open(active.value) },
  ]);
  const again = async () => {
    if (await askAgain([...selected.value.values()])) refresh();
  };
  const retried = ![...selected.value.values()].some((item) => item.jobId.startsWith("msgbatch_")); // these have no retry
  const problem = source.problem.value;
  return html`<section class="rows" aria-label="Pending rows">
    <div class="line wrap pending-line">
      <span class="soft" role="status">${plural(source.total, "row")}${source.ended ? "" : " so far"}, as they were when the list was opened</span>
      <${Button} small kind=${changes ? "primary" : "plain"} icon="refresh-cw" onClick=${refresh}>${changes ? `${plural(changes, "change")} – refresh` : "Refresh"}<//>
      <span class="grow"></span>
      ${selected.value.size > 0 && html`<span>${plural(selected.value.size, "row")} selected</span>${retried && html`<${Button} small icon="rotate-ccw" onClick=${again}>Run selected again<//>`}<${Button} small kind="quiet" onClick=${() => (selected.value = new Map())}>Clear<//>`}
      ${works && active.value >= 0 && source.get(active.value) && html`<${Button} small icon="arrow-right" href=${link(`/work/${encodeURIComponent(source.get(active.value).jobId)}`)}>Go to job<//>`}
    </div>
    ${problem && html`<${Notice} tone="bad" action=${html`<${Button} small onClick=${() => source.load()}>Try again<//>`}>${problem}<//>`}
    ${source.total === 0
      ? source.ended ? html`<${Empty} icon="circle-check" title="Nothing is pending">${empty}<//>` : !problem && html`<${Skeleton} lines=${8} />`
      : html`<${Grid}
          label="Pending rows"
          total=${source.total}
          columns=${columns(isSelected, works)}
          get=${source.get}
          active=${active.value}
          onActive=${onActive}
          onOpen=${open}
          onToggle=${toggle}
          isSelected=${isSelected}
          onWindow=${source.want}
          handle=${(/** @type {any} */ given) => (handle.current = given)}
        />`}
    ${source.full && html`<p class="small soft">The list ends here, at ${count(source.total)} rows. A filter shows others.</p>`}
  </section>`;
}

/**
 * @param {(index: number) => boolean} isSelected
 * @param {Map<string, WorkEntry>} [works]
 * @returns {GridColumn[]}
 */
function columns(isSelected, works) {
  /** @type {GridColumn[]} */
  const first = [
    { id: "check", label: "", width: fixedPx(34), pinned: true, cell: (_item, index) => html`<${GridCheck} index=${index} selected=${isSelected(index)} />` },
    { id: "item", label: "Row", width: fixedPx(92), pinned: true, number: true, cell: (/** @type {PendingRow} */ item) => item && html`<a href=${rowLink(item)} title=${item.id}>${count(item.row)}</a>` },
    { id: "status", label: "Status", width: fixedPx(108), pinned: true, cell: (/** @type {PendingRow} */ item) => item && html`<${StatusChip} status=${item.status} />` },
  ];
  /** @type {GridColumn[]} */
  const last = [
    { id: "summary", label: "Title", width: { minPx: 200, maxPx: 2000 }, cell: (/** @type {PendingRow} */ item) => html`<bdi title=${item.summary ?? ""}>${readable(item.summary ?? "")}</bdi>` },
    { id: "attempts", label: "Attempts", width: fixedPx(76), number: true, cell: (/** @type {PendingRow} */ item) => count(item.attempts) },
    { id: "locked", label: "Locked by", width: fixedPx(104), cell: (/** @type {PendingRow} */ item) => (item.lockedBy ? html`<code title=${item.lockedBy}>${item.lockedBy.slice(0, 8)}</code>` : html`<span class="faint">–</span>`) },
    { id: "updated", label: "Updated", width: fixedPx(104), number: true, cell: (/** @type {PendingRow} */ item) => html`<span class="soft"><${Time} at=${item.updatedAt} /></span>` },
  ];
  if (!works) return [...first, ...last];
  /** @type {GridColumn[]} */
  const ofJob = [
    { id: "itemId", label: "Item id", width: fixedPx(134), cell: (/** @type {PendingRow} */ item) => html`<${IdCell} id=${item.id} short=${`…${item.id.split("_")[2].slice(-4)}_${item.row}`} />` },
    { id: "jobId", label: "Job id", width: fixedPx(142), cell: (/** @type {PendingRow} */ item) => html`<${IdCell} id=${item.jobId} short />` },
    { id: "type", label: "Type", width: fixedPx(110), cell: (/** @type {PendingRow} */ item) => html`<${Chip} dot=${false}><bdi class="cut">${visible(item.jobType ?? "")}</bdi><//>` },
    { id: "job", label: "Job", width: fixedPx(210), cell: (/** @type {PendingRow} */ item) => html`<${JobCell} item=${item} work=${works.get(item.jobId)} />` },
  ];
  return [...first, last[0], ...ofJob, ...last.slice(1)];
}

/** An id whose copying does not open the row. @param {{id: string, short: boolean | string}} props */
function IdCell({ id, short }) {
  const keep = (/** @type {Event} */ event) => event.stopPropagation();
  return html`<span class="id-cell" onClick=${keep} onKeyDown=${(/** @type {KeyboardEvent} */ event) => (event.key === "Enter" || event.key === " ") && keep(event)}><${Id} id=${id} short=${short} /></span>`;
}

/** @param {{item: PendingRow, work: WorkEntry | undefined}} props */
function JobCell({ item, work }) {
  const name = work ? work.name : `${item.jobId.slice(0, 12)}…`;
  return html`<span class="job-cell"><a class="cut" href=${link(`/work/${encodeURIComponent(item.jobId)}`)} title=${item.jobId}><bdi>${visible(name)}</bdi></a>
    ${work && html`<span class="pill" title="${count(settled(work.counts))} of ${count(work.total)} rows"><i style=${{ width: `${(100 * settled(work.counts)) / Math.max(1, work.total)}%` }}></i><b>${percent(settled(work.counts), work.total)}</b></span>`}</span>`;
}

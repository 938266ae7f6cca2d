import { signal, useSignal } from "@preact/signals";
import { useCallback, useEffect, useMemo, useRef, useState } from "preact/hooks";
import { count, plural, short } from "../format.js";
import { html } from "../html.js";
import { useKeys } from "../keys.js";
import { Button } from "../parts/button.js";
import { statusName } from "../parts/chip.js";
import { Empty } from "../parts/empty.js";
import { Pick, Search } from "../parts/field.js";
import { Grid } from "../parts/grid.js";
import { Icon } from "../parts/icon.js";
import { Notice } from "../parts/notice.js";
import { query, setQuery } from "../route.js";
import { notify } from "../store.js";
import { askReprocess, askReprocessRows, canRunAgain, shownStatus, unrunStatus } from "./actions.js";
import { rowColumns } from "./row_columns.js";
import { RowDrawer } from "./row_drawer.js";
import { AllRows, FilteredRows, movesOf } from "./row_source.js";

/** @typedef {import("../work_types.js").WorkDetail} WorkDetail */
/** @typedef {import("../work_types.js").Item} Item */
/** @typedef {import("../parts/grid.js").GridHandle} GridHandle */

const MAX_SELECTED = 10_000;
const MAX_SAMPLE = 60;
const COUNT_OF = /** @type {Record<string, string[]>} */ ({
  DONE: ["done"], ERROR: ["failed"], NOT_FOUND: ["notFound"], SKIPPED: ["skipped"], PROCESSING: ["inFlight"], PENDING: ["pending", "retrying", "cancelled", "expired"],
});

/** Every row of the work, live. @param {{work: WorkDetail, onChange: () => void}} props */
export function Rows({ work, onChange }) {
  const { status = "", fingerprint = "", find = "", from = "", row = "" } = query.value;
  const filtered = Boolean(status || fingerprint || find);
  const [refreshes, setRefreshes] = useState(0);
  const source = useSource(work, { status, fingerprint, find, from: Number(from) || 1 }, filtered, refreshes);
  source.version.value;
  const total = filtered ? source.total : work.total;
  if (source instanceof AllRows) source.total = total;
  // No row of another list is active in this one.
  const active = useMemo(() => signal(row && !filtered ? Number(row) - 1 : -1), [source]);
  const isActive = active.value >= 0 && active.value < total;
  const selection = useSelection(source, active);
  const handle = useRef(/** @type {GridHandle | null} */ (null));
  const columns = useColumns(work, source, selection.isSelected);
  const open = (/** @type {number} */ index) => {
    active.value = index;
    const item = source.get(index);
    setQuery({ row: item ? item.row : index + 1 });
  };
  const onActive = (/** @type {number} */ index, /** @type {boolean} */ extend) => {
    if (extend) selection.extend(index);
    active.value = index;
    // An open drawer follows the reader.
    if (query.value.row) open(index);
  };
  const jump = (/** @type {string} */ text) => {
    const wanted = Math.round(Number(text.replace(/[,. ]/g, "")));
    if (!(wanted >= 1 && wanted <= work.total)) return notify("bad", `There are rows 1 to ${count(work.total)}.`);
    if (filtered) return setQuery({ from: wanted });
    active.value = wanted - 1;
    handle.current?.show(wanted - 1);
    handle.current?.focus();
  };
  const refresh = () => {
    onChange();
    setRefreshes((before) => before + 1);
    if (source instanceof AllRows) source.reload();
  };
  useKeys([
    { key: "j", label: "Next row", run: (event) => handle.current?.move(1, event.shiftKey) },
    { key: "k", label: "Row before", run: (event) => handle.current?.move(-1, event.shiftKey) },
    { key: "x", label: "Select the row", run: () => isActive && selection.toggle(active.value) },
    { key: "r", label: "Refresh", run: refresh },
    { key: "Enter", label: "Open the row", run: () => isActive && open(active.value) },
    { key: "Escape", label: "Close the row, or clear the selection", run: () => (query.value.row ? setQuery({ row: null }) : selection.clear()) },
  ]);
  useEffect(() => {
    if (row && !filtered) handle.current?.show(Number(row) - 1);
  }, []);
  return html`<section class="rows" aria-label="Rows">
    <${Toolbar} work=${work} source=${source} filtered=${filtered} onJump=${jump} selection=${selection} onChange=${onChange} />
    ${source.problem.value && html`<${Notice} tone="bad" action=${html`<${Button} small onClick=${() => source.retry()}>Try again<//>`}>${source.problem.value}<//>`}
    ${total === 0
      ? html`<${NoRows} work=${work} source=${source} filtered=${filtered} />`
      : html`<${Grid}
          label="Rows of ${work.name}"
          total=${total}
          columns=${columns}
          get=${source.get}
          active=${active.value}
          onActive=${onActive}
          onOpen=${open}
          onToggle=${selection.toggle}
          isSelected=${selection.isSelected}
          onWindow=${source.want}
          handle=${(/** @type {GridHandle} */ given) => (handle.current = given)}
        />`}
    ${source.more !== null && html`<div class="line small soft">Shown are ${count(total)} rows.<${Button} small onClick=${() => setQuery({ from: source.more })}>Go on from row ${count(source.more)}<//></div>`}
    ${row && html`<${RowDrawer} work=${work} row=${Number(row)} refreshes=${refreshes} onMove=${(/** @type {number} */ by) => handle.current?.move(by)} onClose=${() => (setQuery({ row: null }), handle.current?.focus())} onChange=${onChange} />`}
  </section>`;
}

/**
 * @param {WorkDetail} work
 * @param {{status: string, fingerprint: string, find: string, from: number}} wanted
 * @param {boolean} filtered
 * @param {number} refreshes so often a filtered list was asked for anew
 * @returns {AllRows | FilteredRows}
 */
function useSource(work, { status, fingerprint, find, from }, filtered, refreshes) {
  const now = movesOf(work);
  const source = useMemo(
    () => (filtered ? new FilteredRows(work.id, now, { status, fingerprint, customId: find, from }) : new AllRows(work.id, now, work.total)),
    [work.id, status, fingerprint, find, from, filtered && refreshes],
  );
  useEffect(() => () => source.close(), [source]);
  useEffect(() => source.follow(now), [source, now.changes, now.reruns]);
  return source;
}

/**
 * Rows that are selected, by number: ids follow from numbers, so that a range may span rows that were never loaded.
 * @param {AllRows | FilteredRows} source
 * @param {{value: number}} active
 */
function useSelection(source, active) {
  const rows = useSignal(/** @type {Set<number>} */ (new Set()));
  const anchor = useRef(-1);
  useEffect(() => {
    rows.value = new Set();
    anchor.current = -1;
  }, [source]);
  const numberAt = (/** @type {number} */ index) => source.get(index)?.row ?? index + 1;
  const isSelected = (/** @type {number} */ index) => rows.value.has(numberAt(index));
  const toggle = useCallback((/** @type {number} */ index) => {
    const next = new Set(rows.value);
    if (!next.delete(numberAt(index))) next.add(numberAt(index));
    anchor.current = index;
    active.value = index;
    keep(next);
  }, [source]);
  const extend = (/** @type {number} */ index) => {
    const start = anchor.current >= 0 ? anchor.current : Math.max(0, active.value);
    anchor.current = start;
    const next = new Set(rows.value);
    for (let at = Math.min(start, index); at <= Math.max(start, index) && next.size <= MAX_SELECTED; at++) next.add(numberAt(at));
    keep(next);
  };
  const keep = (/** @type {Set<number>} */ next) => {
    if (next.size > MAX_SELECTED) notify("bad", `At most ${count(MAX_SELECTED)} rows can be selected; a status filter takes all of them.`);
    else rows.value = next;
  };
  return { rows, isSelected, toggle, extend, clear: () => (rows.value = new Set()) };
}

/** @param {WorkDetail} work @param {AllRows | FilteredRows} source @param {(index: number) => boolean} isSelected */
function useColumns(work, source, isSelected) {
  const sample = useRef(/** @type {Map<string, Item>} */ (new Map()));
  const known = useRef({ shape: "", columns: /** @type {any[]} */ ([]) });
  // Columns and widths stay as they are until rows of another shape come: nothing moves under the reader.
  for (const item of source.sample) {
    const shape = `${keys(item.input)}|${keys(item.result)}|${item.error !== null}`;
    const at = [...sample.current.keys()].filter((key) => key.startsWith(shape)).length;
    if (at < MAX_SAMPLE / 3 && sample.current.size < 4 * MAX_SAMPLE) sample.current.set(`${shape}#${item.row}`, item);
  }
  const rows = [...sample.current.values()];
  const shape = JSON.stringify([[...new Set(rows.map((item) => `${keys(item.input)}|${keys(item.result)}|${item.error !== null}`))].sort(), work.inputColumns, work.columns, count(work.total).length, shownStatus(work, "PENDING")]);
  if (shape !== known.current.shape) known.current = { shape, columns: rowColumns(rows, { kind: work.kind, total: work.total, inputColumns: work.inputColumns ?? [], columns: work.columns ?? [], statusOf: (status) => shownStatus(work, status), isSelected: (index) => latest.current(index) }) };
  const latest = useRef(isSelected);
  latest.current = isSelected;
  return known.current.columns;
}

/** @param {any} value */
const keys = (value) => (value !== null && typeof value === "object" ? Object.keys(value).join(",") : typeof value);

/** @param {any} props */
function Toolbar({ work, source, filtered, onJump, selection, onChange }) {
  const { status = "", fingerprint = "", find = "", from = "" } = query.value;
  const counted = (/** @type {string} */ name) => (COUNT_OF[name] ?? COUNT_OF.PENDING).reduce((sum, key) => sum + (work.counts[key] ?? 0), 0);
  const statuses = [
    { id: "", label: `All rows (${short(work.total)})` },
    ...Object.keys(COUNT_OF).map((id) => ({ id: id === "PENDING" ? unrunStatus(work) : id, label: `${statusName(shownStatus(work, id))} (${short(counted(id))})` })),
  ];
  const selected = selection.rows.value.size;
  const again = canRunAgain(work, status) && counted(status) > 0;
  const clear = { status: null, fingerprint: null, find: null, from: null, row: null };
  return html`<div class="filters rows-tools">
    <${Pick} label="Status" value=${status} options=${statuses} onPick=${(/** @type {string} */ id) => setQuery({ ...clear, status: id })} />
    <${JumpBox} onJump=${onJump} total=${work.total} main=${work.kind === "job"} />
    ${work.kind === "batch" && html`<${Search} main label="Find a custom id" value=${find} onSearch=${(/** @type {string} */ text) => setQuery({ ...clear, find: text })} width="220px" />`}
    ${fingerprint && html`<span class="chip filter-chip" data-tone="bad">One group of errors</span>`}
    ${filtered && html`<${Button} kind="quiet" icon="x" onClick=${() => setQuery(clear)}>Clear<//>`}
    <span class="grow"></span>
    ${selected > 0
      ? html`<span class="soft">${plural(selected, "row")} selected</span>
          ${canRunAgain(work, "ERROR") && html`<${Button} small icon="rotate-ccw" onClick=${() => askReprocessRows(work, [...selection.rows.value], source, () => (selection.clear(), onChange()))}>Run again<//>`}
          <${Button} small kind="quiet" icon="x" label="Clear the selection" onClick=${selection.clear} />`
      : fingerprint
        ? canRunAgain(work, "ERROR") && html`<${Button} small icon="rotate-ccw" onClick=${() => askReprocess(work, { scope: "job", fingerprint }, "this group", onChange)}>Run this group again<//>`
        : again && html`<${Button} small icon="rotate-ccw" onClick=${() => askReprocess(work, { scope: "job", statuses: [status] }, `${count(counted(status))} rows (${statusName(status).toLowerCase()})`, onChange)}>Run all ${short(counted(status))} again<//>`}
    ${filtered && source.total > 0 && html`<span class="soft small">${count(source.total)} shown${Number(from) > 1 ? ` from row ${count(Number(from))} on` : ""}${source.ended ? "" : ", more below"}</span>`}
  </div>`;
}

/** @param {{onJump: (text: string) => void, total: number, main: boolean}} props `/` brings the reader to the box that is `main` */
function JumpBox({ onJump, total, main }) {
  return html`<label class="search jump">
    <${Icon} name="hash" size=${14} />
    <span class="only-read">Jump to row</span>
    <input
      type="text"
      inputmode="numeric"
      placeholder="Jump to row"
      title="1 to ${count(total)}"
      data-main-search=${main ? "" : undefined}
      onKeyDown=${(/** @type {any} */ event) => {
        if (event.key !== "Enter" || !event.currentTarget.value.trim()) return;
        onJump(event.currentTarget.value);
        event.currentTarget.value = "";
        event.currentTarget.blur();
      }}
    />
  </label>`;
}

/** @param {any} props */
function NoRows({ work, source, filtered }) {
  if (filtered && !source.ended) return html`<div class="card grow"><${Empty} icon="hourglass" title="Looking for rows…" /></div>`;
  if (filtered) {
    const clear = html`<${Button} onClick=${() => setQuery({ status: null, fingerprint: null, find: null, from: null })}>Show all rows<//>`;
    return html`<div class="card grow"><${Empty} icon="search" title="No row fits this filter" action=${clear}>Rows change their status while the work runs.<//></div>`;
  }
  if (work.state === "FAILED") return html`<div class="card grow"><${Empty} icon="circle-alert" title="No rows were read" action=${html`<${Button} kind="primary" href="#/new">New job<//>`}>${work.ingest?.problem ?? work.lastError ?? "Nothing of the file was taken."}<//></div>`;
  return html`<div class="card grow"><${Empty} icon="hourglass" title="The rows are being read">They appear here as soon as the first are stored.<//></div>`;
}

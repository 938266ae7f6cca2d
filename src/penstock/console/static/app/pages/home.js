import { useCallback, useEffect, useRef, useState } from "preact/hooks";
import { get } from "../api.js";
import { clientExample, jobExample } from "../examples.js";
import { count, duration, percent, rate } from "../format.js";
import { html } from "../html.js";
import { useKeys } from "../keys.js";
import { Button } from "../parts/button.js";
import { Chip, StateChip } from "../parts/chip.js";
import { Empty } from "../parts/empty.js";
import { Pick, Search } from "../parts/field.js";
import { Icon } from "../parts/icon.js";
import { Loading, useLoad } from "../parts/load.js";
import { Page } from "../parts/page.js";
import { Progress, settled } from "../parts/progress.js";
import { Table } from "../parts/table.js";
import { Segments } from "../parts/tabs.js";
import { Time } from "../parts/time.js";
import { visible } from "../parts/value.js";
import { link, query, setQuery } from "../route.js";
import { isAdmin, me } from "../store.js";
import { follow } from "../ticks.js";

/** @typedef {import("../work_types.js").WorkEntry} WorkEntry */
/** @typedef {{work: WorkEntry[], next: string | null}} WorkPage */
/** @typedef {{work: WorkEntry[], gone: string[]}} Tick */

const PAGE_SIZE = 50;
const KINDS = [
  { id: "", label: "All" },
  { id: "job", label: "Jobs" },
  { id: "batch", label: "Batches" },
];
const STATES = ["", "RUNNING", "QUEUED", "INGESTING", "PAUSED", "DONE", "FAILED", "CANCELLED", "EXPIRED"].map((id) => ({
  id,
  label: id === "" ? "Any state" : { INGESTING: "Reading" }[id] ?? id[0] + id.slice(1).toLowerCase(),
}));

/** @param {string} owner */
const owners = (owner) => [{ id: "", label: "Mine" }, { id: "*", label: "Everyone's" }, ...(owner && owner !== "*" ? [{ id: owner, label: owner }] : [])];

/** All jobs and batches, newest first. */
export function Home() {
  const { kind = "", state = "", q = "", owner = "" } = query.value;
  const filtered = Boolean(kind || state || q || owner);
  const { list, showOlder } = useWork({ kind, state, q, owner });
  const [arrived, setArrived] = useState(0);
  useLive(list, Boolean(kind || state || q), owner, setArrived);
  useKeys([{ key: "r", label: "Refresh", run: () => list.reload() }]);
  const refresh = useCallback(() => {
    setArrived(0);
    return list.reload();
  }, [list.reload]);
  const newJob = html`<${Button} kind="primary" icon="plus" href="#/new">New job<//>`;
  return html`<${Page} title="Work" actions=${newJob}>
    <div class="filters">
      <${Search} main label="Search by name or id" value=${q} onSearch=${(/** @type {string} */ text) => setQuery({ q: text })} width="min(280px, 100%)" />
      <${Segments} label="Kind" now=${kind} options=${KINDS} onPick=${(/** @type {string} */ id) => setQuery({ kind: id })} />
      <${Pick} label="State" value=${state} options=${STATES} onPick=${(/** @type {string} */ id) => setQuery({ state: id })} />
      ${isAdmin.value && !me.value?.keyless && html`<${Pick} label="Owner" value=${owner} options=${owners(owner)} onPick=${(/** @type {string} */ id) => setQuery({ owner: id })} />`}
      ${filtered && html`<${Button} kind="quiet" icon="x" onClick=${() => setQuery({ kind: null, state: null, q: null, owner: null })}>Clear<//>`}
      <span class="grow"></span>
      ${arrived > 0 && html`<${Button} small icon="refresh-cw" onClick=${refresh}>${count(arrived)} new<//>`}
    </div>
    <${Loading} of=${list} lines=${10}>
      ${(/** @type {WorkPage} */ page) => (page.work.length ? html`<${WorkTable} page=${page} onMore=${showOlder} />` : filtered ? html`<${NoMatch} />` : html`<${Welcome} />`)}
    <//>
  <//>`;
}

/**
 * The list, of which as many pages are read again as are shown. What begins while a page is read stays on top.
 * @param {{kind: string, state: string, q: string, owner: string}} filters
 */
function useWork(filters) {
  const depends = Object.values(filters);
  const shown = useRef(1);
  const data = useRef(/** @type {WorkPage | null} */ (null));
  const read = (/** @type {string | undefined} */ after, /** @type {AbortSignal} */ signal) =>
    /** @type {Promise<WorkPage>} */ (get("api/work", { ...filters, pageSize: PAGE_SIZE, after }, { signal }));
  const list = useLoad(async (signal) => {
    const before = new Set(data.current?.work.map((entry) => entry.id));
    let page = await read(undefined, signal);
    for (let pages = 1; page.next && pages < shown.current; pages++) page = join(page, await read(page.next, signal));
    const begun = (data.current?.work ?? []).filter((entry) => !before.has(entry.id));
    return join({ work: begun, next: null }, page);
  }, depends);
  data.current = list.data;
  useEffect(() => {
    shown.current = 1;
  }, depends);
  const showOlder = async () => {
    const after = data.current?.next;
    if (!after) return;
    const older = await read(after, new AbortController().signal);
    if (data.current?.next !== after) return; // another list, or one that was read again meanwhile
    shown.current++;
    list.set(join(data.current, older));
  };
  return { list, showOlder };
}

/** @param {WorkPage} first @param {WorkPage} second @returns {WorkPage} */
function join(first, second) {
  const known = new Set(first.work.map((entry) => entry.id));
  return { work: [...first.work, ...second.work.filter((entry) => !known.has(entry.id))], next: second.next };
}

/** Ids are in the order of creation, behind the prefix of their kind. @param {WorkEntry} one @param {WorkEntry | undefined} other */
const isNewer = (one, other) => !other || one.id.slice(one.id.indexOf("_")) > other.id.slice(other.id.indexOf("_"));

/**
 * Keep the list current: what is shown changes in its place; what is new is put on top, or counted while a filter is on,
 * because only the server knows whether it fits.
 * @param {import("../parts/load.js").Loaded<WorkPage>} list
 * @param {boolean} filtered
 * @param {string} owner
 * @param {(change: (before: number) => number) => void} setArrived
 */
function useLive(list, filtered, owner, setArrived) {
  const { set, reload } = list;
  const data = useLatest(list.data);
  const narrowed = useLatest(filtered);
  const waiting = useRef(/** @type {Tick[]} */ ([]));
  const seen = useRef(/** @type {Set<string> | null} */ (null));
  /** Take the ticks so far, once there is a list: they may come before it. */
  const take = () => {
    while (data.current && waiting.current.length) {
      const page = data.current;
      const { work, gone } = /** @type {Tick} */ (waiting.current.shift());
      // The first tick has what there was before, and what began since the list was read.
      seen.current ??= new Set(work.filter((entry) => narrowed.current || !isNewer(entry, page.work[0])).map(({ id }) => id));
      const known = new Set([...seen.current, ...page.work.map(({ id }) => id)]);
      // Where newer work is deleted, older work moves up into the tick.
      const fresh = work.filter((entry) => !known.has(entry.id) && (!page.next || isNewer(entry, page.work.at(-1))));
      for (const { id } of work) seen.current.add(id);
      if (narrowed.current && fresh.length) setArrived((before) => before + fresh.length);
      const changed = new Map(work.map((entry) => [entry.id, entry]));
      const left = new Set(gone);
      const merged = page.work.map((entry) => changed.get(entry.id) ?? entry).filter(({ id }) => !left.has(id));
      data.current = { ...page, work: narrowed.current ? merged : [...fresh, ...merged].sort((one, other) => (isNewer(one, other) ? -1 : 1)) };
      set(data.current);
    }
  };
  useEffect(take, [list.data]);
  useEffect(() => {
    waiting.current = [];
    seen.current = null;
    let opened = false;
    return follow({
      query: { home: "true", ...(owner ? { owner } : {}) },
      onOpen: () => {
        if (opened) reload();
        opened = true;
      },
      onTick: (tick) => {
        waiting.current.push(tick);
        take();
      },
    });
  }, [owner]);
}

/** @template T @param {T} value @returns {{current: T}} the value of the latest rendering, for callbacks that outlive one */
function useLatest(value) {
  const [box] = useState({ current: value });
  box.current = value;
  return box;
}

/** @param {{page: WorkPage, onMore: () => Promise<void>}} props */
function WorkTable({ page, onMore }) {
  const columns = [
    { id: "name", label: "Name", narrow: "title", class: "work-name", cell: nameCell },
    { id: "state", label: "State", narrow: "bare", class: "work-state", cell: (/** @type {WorkEntry} */ work) => html`<${StateChip} state=${work.state} />` },
    { id: "progress", label: "Progress", narrow: "title", class: "work-progress", cell: progressCell },
    { id: "rate", label: "Rows/s", number: true, class: "work-rate", cell: (/** @type {WorkEntry} */ work) => work.ratePerSecond !== null && rate(work.ratePerSecond) },
    { id: "eta", label: "Time left", number: true, class: "work-eta", cell: (/** @type {WorkEntry} */ work) => work.etaSeconds !== null && duration(work.etaSeconds) },
    { id: "owner", label: "Owner", narrow: "hide", class: "work-owner", cell: (/** @type {WorkEntry} */ work) => html`<div class="cut" title=${work.owner}>${work.owner}</div>` },
    { id: "created", label: "Created", number: true, narrow: "bare", class: "work-created", cell: (/** @type {WorkEntry} */ work) => html`<${Time} at=${work.createdAt} />` },
  ];
  return html`
    <${Table} label="Jobs and batches" columns=${columns} rows=${page.work} rowKey=${(/** @type {WorkEntry} */ work) => work.id} fixed />
    ${page.next && html`<div class="more"><${Button} onClick=${onMore}>Show older<//></div>`}`;
}

/** @param {WorkEntry} work */
function nameCell(work) {
  const told = [work.fileName !== work.name && work.fileName, work.name !== work.id && work.id].filter(Boolean).join(" · ");
  return html`<div class="line">
    <${Icon} name=${work.kind === "batch" ? "scroll-text" : "table-2"} class="faint" title=${work.kind === "batch" ? "Batch" : "Job"} />
    <div class="grow">
      <div class="line">
        <a class="cut name" href=${link(`/work/${encodeURIComponent(work.id)}`)} title=${work.name}><bdi>${visible(work.name)}</bdi></a>
        ${work.jobType && html`<${Chip} dot=${false}><bdi>${visible(work.jobType)}</bdi><//>`}
      </div>
      <div class="cut small faint" title=${told}><bdi>${visible(told)}</bdi></div>
    </div>
  </div>`;
}

/** @param {WorkEntry} work */
function progressCell(work) {
  const done = settled(work.counts);
  const failed = work.counts.failed ?? 0;
  return html`<div class="progress-cell">
    <${Progress} counts=${work.counts} total=${work.total} />
    <div class="line small">
      <span class="grow soft"><b>${count(done)}</b> of ${count(work.total)}${failed > 0 && html` · <span class="failed">${count(failed)} failed</span>`}</span>
      <span class="soft">${percent(done, work.total)}</span>
    </div>
  </div>`;
}

function NoMatch() {
  const clear = html`<${Button} onClick=${() => setQuery({ kind: null, state: null, q: null, owner: null })}>Clear the filters<//>`;
  return html`<div class="card"><${Empty} icon="search" title="Nothing fits these filters" action=${clear}>No job or batch is of this kind, state, name and owner.<//></div>`;
}

/** The first visit: what to do next, in the browser or at a prompt. */
function Welcome() {
  const action = html`<${Button} kind="primary" icon="upload" href="#/new">New job from a table or images<//>`;
  return html`<div class="card">
    <${Empty} icon="layers" title="No work yet" action=${action}>
      <p>Drop a CSV, XLSX or JSONL table, or images, and say what to do with each row. Every row is stored first, then worked off, and its answer recorded exactly once.</p>
    <//>
    <div class="welcome">
      <h3>Or from a terminal</h3>
      <pre class="code">${jobExample()}</pre>
      <h3>Or with an OpenAI client</h3>
      <pre class="code">${clientExample()}</pre>
    </div>
  </div>`;
}

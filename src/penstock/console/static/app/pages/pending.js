import { useEffect, useRef, useState } from "preact/hooks";
import { get } from "../api.js";
import { html } from "../html.js";
import { Button } from "../parts/button.js";
import { Pick, Search, useDraft } from "../parts/field.js";
import { Page } from "../parts/page.js";
import { settled } from "../parts/progress.js";
import { Segments } from "../parts/tabs.js";
import { PendingList } from "../pending/list.js";
import { query, setQuery } from "../route.js";
import { isAdmin, me } from "../store.js";
import { follow } from "../ticks.js";

/** @typedef {import("../work_types.js").WorkEntry} WorkEntry */

const STATUSES = [
  { id: "", label: "All" },
  { id: "PENDING", label: "Pending" },
  { id: "PROCESSING", label: "Claimed" },
];
const OWNERS = [
  { id: "", label: "My jobs" },
  { id: "all", label: "Everybody's jobs" },
];
const FILTERS = ["status", "type", "job", "from", "to"];

/** What waits and what workers have claimed, over all jobs. */
export function PendingPage() {
  const { status = "", type = "", job = "", from = "", to = "", owner = "" } = query.value;
  const { works, moved } = useJobs(owner, (work) => work.kind === "job" && (!type || work.jobType === type) && (!job || work.id === job));
  const asked = { statuses: status, jobType: type, jobId: job, userId: owner || "me", from: asMoment(from), to: asMoment(to), pageSize: 100 };
  const load = (/** @type {string | undefined} */ after, /** @type {AbortSignal} */ signal) => get("api/pending", { ...asked, after }, { signal });
  const filtered = FILTERS.some((name) => query.value[name]);
  return html`<${Page} title="Pending" full>
    <div class="filters">
      <${Segments} label="Status" now=${status} options=${STATUSES} onPick=${(/** @type {string} */ id) => setQuery({ status: id || null })} />
      <${Search} label="Job type" value=${type} onSearch=${(/** @type {string} */ text) => setQuery({ type: text || null })} main width="150px" />
      <${Search} label="Job id" value=${job} onSearch=${(/** @type {string} */ text) => setQuery({ job: text || null })} width="200px" />
      <${Moment} label="Changed from" value=${from} onPick=${(/** @type {string} */ text) => setQuery({ from: text || null })} />
      <${Moment} label="Changed until" value=${to} onPick=${(/** @type {string} */ text) => setQuery({ to: text || null })} />
      ${isAdmin.value && !me.value?.keyless && html`<${Pick} label="Whose jobs" value=${owner} options=${OWNERS} onPick=${(/** @type {string} */ id) => setQuery({ owner: id || null })} />`}
      ${filtered && html`<${Button} kind="quiet" icon="x" onClick=${() => setQuery(Object.fromEntries(FILTERS.map((name) => [name, null])))}>Clear<//>`}
    </div>
    <${PendingList}
      load=${load}
      asked=${JSON.stringify(asked)}
      moved=${moved}
      works=${works}
      empty=${filtered ? "No row fits these filters now." : html`Every row of every job is decided. <a href="#/new">Start another job</a>, or look at <a href="#/">what was done</a>.`}
    />
  <//>`;
}

/** Time of day as the browser's field has it, for the server. @param {string} text */
function asMoment(text) {
  const ms = Date.parse(text);
  return text && Number.isFinite(ms) ? new Date(ms).toISOString() : undefined;
}

/** @param {{label: string, value: string, onPick: (value: string) => void}} props */
function Moment({ label, value, onPick }) {
  return html`<label class="moment"><span class="soft small">${label}</span><input type="datetime-local" ...${useDraft(value)} onChange=${(/** @type {any} */ event) => onPick(event.currentTarget.value)} /></label>`;
}

/**
 * Jobs by id, kept current, and how often a row of those that are `shown` has moved since.
 * @param {string} owner @param {(work: WorkEntry) => boolean} shown
 */
function useJobs(owner, shown) {
  const [jobs, setJobs] = useState({ works: /** @type {Map<string, WorkEntry>} */ (new Map()), moved: 0 });
  const latest = useRef(shown);
  latest.current = shown;
  useEffect(() => {
    // The first tick has what there was before.
    let first = true;
    return follow({
      query: { home: "true", ...(owner ? { owner: "*" } : {}) },
      onTick: (/** @type {{work: WorkEntry[]}} */ { work }) => {
        const isFirst = first;
        first = false;
        setJobs(({ works, moved }) => {
          for (const entry of work.filter(latest.current)) {
            const before = works.get(entry.id);
            if (before) moved += Math.max(0, progress(entry) - progress(before));
            else if (!isFirst) moved += open(entry);
          }
          return { works: new Map([...works, ...work.map((entry) => /** @type {const} */ ([entry.id, entry]))]), moved };
        });
      },
    });
  }, [owner]);
  return jobs;
}

/** A figure that grows whenever rows of the work come or are decided. @param {WorkEntry} work */
const progress = (work) => work.total + settled(work.counts);

/** Rows that wait or are claimed. @param {WorkEntry} work */
const open = ({ counts }) => counts.pending + counts.retrying + counts.inFlight;

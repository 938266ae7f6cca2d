import { get } from "../api.js";
import { now } from "../clock.js";
import { count, duration, moment, plural } from "../format.js";
import { html } from "../html.js";
import { Chip } from "../parts/chip.js";
import { Empty } from "../parts/empty.js";
import { Loading } from "../parts/load.js";
import { Page } from "../parts/page.js";
import { usePolled } from "../parts/poll.js";
import { Table } from "../parts/table.js";
import { Time } from "../parts/time.js";
import { visible } from "../parts/value.js";

/**
 * @typedef {{id: string, pool: string, host: string, pid: number, startedAt: string, heartbeatAt: string,
 *   alive: boolean, draining: boolean, leases: number, items: number, routes: string[]}} Worker
 */

const SHOWN_ROUTES = 3;

/** Who works, what they hold, and since when they were not heard of. */
export function Workers() {
  const loaded = usePolled((signal) => get("api/workers", { pageSize: 200 }, { signal }), []);
  return html`<${Page} title="Workers" intro="Processes that claim and call. What a silent one holds is taken back after its grace, and run by another.">
    <${Loading} of=${loaded}>
      ${(/** @type {{workers: Worker[]}} */ { workers }) =>
        workers.length ? html`<${Summary} workers=${workers} /><${WorkerTable} workers=${workers} />` : html`<${Empty} icon="cpu" title="No worker is alive">Nothing is worked off without one. Start the server with <code>--workers 1</code>, or <code>penstock worker</code> on any machine that reaches the database.<//>`}
    <//>
  <//>`;
}

/** @param {{workers: Worker[]}} props */
function Summary({ workers }) {
  const processes = new Set(workers.map((worker) => `${worker.host} ${worker.pid}`)).size;
  const hosts = new Set(workers.map((worker) => worker.host)).size;
  const items = workers.reduce((sum, worker) => sum + worker.items, 0);
  return html`<p class="soft"><b class="strong">${plural(processes, "process", "processes")}</b> on ${plural(hosts, "machine")}, with a worker for each pool they serve; they hold <b class="strong">${plural(items, "row")}</b>.</p>`;
}

/** @param {{workers: Worker[]}} props */
function WorkerTable({ workers }) {
  return html`<${Table}
    label="Workers"
    rows=${workers}
    rowKey=${(/** @type {Worker} */ worker) => worker.id}
    columns=${[
      { id: "host", label: "Machine", narrow: "title", cell: (/** @type {Worker} */ worker) => html`<b class="strong"><bdi>${visible(worker.host)}</bdi></b> <span class="faint">pid ${worker.pid}</span>` },
      { id: "state", label: "State", cell: (/** @type {Worker} */ worker) => html`<${WorkerState} worker=${worker} />` },
      { id: "beat", label: "Heartbeat", cell: (/** @type {Worker} */ worker) => html`<span class=${worker.alive ? "" : "bad"}><${Time} at=${worker.heartbeatAt} /></span>` },
      { id: "pool", label: "Pool", cell: (/** @type {Worker} */ worker) => html`<bdi>${visible(worker.pool)}</bdi>` },
      { id: "items", label: "Rows held", number: true, cell: (/** @type {Worker} */ worker) => count(worker.items) },
      { id: "leases", label: "Leases", number: true, cell: (/** @type {Worker} */ worker) => count(worker.leases) },
      { id: "routes", label: "Works on", cell: (/** @type {Worker} */ worker) => routes(worker.routes) },
      { id: "since", label: "Up for", cell: (/** @type {Worker} */ worker) => html`<span title=${worker.startedAt}>${duration((now.value - moment(worker.startedAt)) / 1000)}</span>` },
      { id: "id", label: "Id", narrow: "hide", cell: (/** @type {Worker} */ worker) => html`<code class="faint" title=${worker.id}>${worker.id.slice(0, 8)}</code>` },
    ]}
  />`;
}

/** @param {{worker: Worker}} props */
function WorkerState({ worker }) {
  if (!worker.alive) return html`<${Chip} tone="bad" title="Not heard of for longer than its grace: what it holds goes to others.">Lost<//>`;
  if (worker.draining) return html`<${Chip} tone="warn" title="It finishes what it holds and ends.">Draining<//>`;
  return worker.items ? html`<${Chip} tone="busy">Working<//>` : html`<${Chip} tone="good">Idle<//>`;
}

/** @param {string[]} names */
function routes(names) {
  if (!names.length) return html`<span class="faint">nothing now</span>`;
  const more = names.length - SHOWN_ROUTES;
  return html`<span title=${names.join(", ")}><bdi>${visible(names.slice(0, SHOWN_ROUTES).join(", "))}</bdi>${more > 0 && html` <span class="faint">and ${more} more</span>`}</span>`;
}

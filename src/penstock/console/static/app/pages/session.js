import { useEffect, useRef, useState } from "preact/hooks";
import { call, get, post } from "../api.js";
import { count, plural } from "../format.js";
import { html } from "../html.js";
import { Button } from "../parts/button.js";
import { Chip } from "../parts/chip.js";
import { Copy, Id } from "../parts/copy.js";
import { confirm } from "../parts/dialog.js";
import { Drawer } from "../parts/drawer.js";
import { Empty } from "../parts/empty.js";
import { Loading, useLoad } from "../parts/load.js";
import { More, usePages } from "../parts/more.js";
import { Notice } from "../parts/notice.js";
import { Page } from "../parts/page.js";
import { useEvery } from "../parts/poll.js";
import { Table } from "../parts/table.js";
import { Segments } from "../parts/tabs.js";
import { Elapsed, Time } from "../parts/time.js";
import { cellText, fullText, stringify, visible } from "../parts/value.js";
import { go, query, setQuery } from "../route.js";
import { notify } from "../store.js";
import { answeredText } from "../work/row_columns.js";
import { SessionState } from "./sessions.js";

/**
 * @typedef {{id: string, sequence: number, status: string, attempts: number, created_at: number, completed_at: number | null,
 *   response: {status_code: number | null, body: any} | null, error: {code: string, message: string} | null}} SessionRequest
 * @typedef {SessionRequest & {request: {endpoint: string, body: any} | null}} AskedRequest
 * @typedef {import("./sessions.js").Session} Session
 */

const MAX_SHOWN_CHARS = 50_000;
const FILTERS = [
  { id: "", label: "All" },
  { id: "pending", label: "Waiting" },
  { id: "completed", label: "Answered" },
  { id: "failed", label: "Failed" },
  { id: "cancelled", label: "Cancelled" },
];

/** @type {Record<string, [import("../parts/chip.js").Tone, string]>} */
const STATUSES = {
  pending: ["calm", "Waiting"],
  processing: ["busy", "In flight"],
  completed: ["good", "Answered"],
  failed: ["bad", "Failed"],
  cancelled: ["calm", "Cancelled"],
};

/** @param {{status: string}} props */
function RequestStatus({ status }) {
  const [tone, text] = STATUSES[status] ?? ["calm", status];
  return html`<${Chip} tone=${tone}>${text}<//>`;
}

/** One session: its requests, the newest first, the one in flight, what to do about it. @param {{name: string}} props */
export function SessionPage({ name }) {
  const root = `v1/sessions/${encodeURIComponent(name)}`;
  const status = query.value.status ?? "";
  const leaving = useRef(false);
  const now = useLoad(async (signal) => {
    const [session, busy] = await Promise.all([get(root, {}, { signal }), get(`${root}/requests`, { status: "processing", limit: 1 }, { signal })]);
    return { session, busy: /** @type {SessionRequest | null} */ (busy.data[0] ?? null) };
  }, [name]);
  useEvery(async () => {
    if (!leaving.current) await now.reload();
  });
  const requests = usePages((after, signal) => get(`${root}/requests`, { limit: 50, after, status, order: "desc" }, { signal }), [name, status]);
  const { session, busy } = now.data ?? { session: null, busy: null };
  const moved = session && `${session.status} ${session.queued} ${busy?.id} ${busy?.attempts}`;
  useEffect(() => {
    if (moved) requests.reload();
  }, [moved]);
  const remove = async () => {
    // Nobody asks any more for what is about to be gone.
    leaving.current = true;
    now.stop();
    try {
      await call("DELETE", root);
    } catch (error) {
      leaving.current = false;
      throw error;
    }
    notify("good", `Deleted ${visible(name)}.`);
    go("#/sessions");
  };
  const refresh = () => Promise.all([now.reload(), requests.reload()]);
  if (!session && now.problem) {
    const others = html`<${Button} kind="primary" href="#/sessions">To the list of sessions<//><${Button} icon="refresh-cw" onClick=${refresh}>Try again<//>`;
    return html`<${Page} title="Session"><${Empty} icon="search" title="It cannot be shown" action=${others}>${visible(now.problem)}<//><//>`;
  }
  const heading = html`<div class="line wrap heading"><a href="#/sessions" class="soft">Sessions</a><span class="faint" aria-hidden="true">/</span><h1 class="cut" title=${visible(name)}><bdi>${visible(name)}</bdi></h1></div>`;
  return html`<${Page} title=${visible(name)} heading=${heading} intro="A session: one request at a time, in the order they came." actions=${session && html`<${Actions} session=${session} onDelete=${remove} onChange=${refresh} />`}>
    <${Loading} of=${now} lines=${3}>${() => html`<${Facts} session=${session} busy=${busy} />`}<//>
    ${session?.status === "blocked" && html`<${Blocked} root=${root} onChange=${refresh} />`}
    <div class="filters"><${Segments} label="Requests" now=${status} options=${FILTERS} onPick=${(/** @type {string} */ id) => setQuery({ status: id || null })} /></div>
    <${Loading} of=${requests.loaded}>
      ${() => (requests.rows.length ? html`<${RequestTable} rows=${requests.rows} root=${root} onChange=${refresh} /><${More} of=${requests} />` : html`<${Empty} icon="messages-square" title="No such requests">${status ? "No request of this session is in that state now." : "This session has no requests yet."}<//>`)}
    <//>
    ${query.value.request && html`<${RequestDrawer} key=${query.value.request} root=${root} id=${query.value.request} onChange=${refresh} />`}
  <//>`;
}

/** @param {{session: Session, onDelete: () => Promise<void>, onChange: () => void}} props */
function Actions({ session, onDelete, onChange }) {
  const remove = () =>
    confirm({
      title: "Delete this session?",
      text: html`<p>What waits in <b><bdi>${visible(session.key)}</bdi></b> is cancelled, and all of its requests and answers are erased.</p>`,
      action: "Delete",
      danger: true,
      run: onDelete,
    });
  return html`<${Button} icon="refresh-cw" onClick=${onChange}>Refresh<//><${Button} kind="danger" icon="trash-2" onClick=${() => void remove()}>Delete<//>`;
}

/** @param {{session: Session, busy: SessionRequest | null}} props */
function Facts({ session, busy }) {
  const settings = [session.on_dead_head === "block" ? "stands still when one fails" : "goes on when one fails"];
  if (session.priority) settings.push(`priority ${session.priority}`);
  if (session.max_queued !== null) settings.push(`at most ${count(session.max_queued)} queued`);
  if (session.wait_timeout_s !== null) settings.push(`callers wait ${session.wait_timeout_s} s`);
  return html`<div class="card session-now">
    <div class="line wrap"><${SessionState} session=${session} /><span class="soft">${settings.join(" · ")}</span></div>
    <div class="figures">
      <div><b>${count(session.queued)}</b><span class="soft">queued</span></div>
      <div><b>${count(session.in_flight)}</b><span class="soft">in flight</span></div>
      <div><b><${Time} at=${session.created_at} /></b><span class="soft">created</span></div>
    </div>
    ${busy && html`<p class="in-flight">Request <a href="#/sessions/${encodeURIComponent(session.key)}?request=${busy.id}">${count(busy.sequence)}</a> is being answered, for <b class="strong"><${Elapsed} from=${busy.created_at} /></b>, attempt ${count(busy.attempts + 1)}.</p>`}
  </div>`;
}

/** @param {{root: string, onChange: () => void}} props */
function Blocked({ root, onChange }) {
  const resume = async (/** @type {boolean} */ again) => {
    await post(`${root}/resume`, { retry_head: again });
    notify("good", again ? "The failed request is run again." : "The session goes on with the next request.");
    onChange();
  };
  const actions = html`<span class="line wrap"><${Button} small kind="primary" onClick=${() => resume(true)}>Run it again<//><${Button} small onClick=${() => resume(false)}>Go on with the next<//></span>`;
  return html`<${Notice} tone="bad" action=${actions}><b>Blocked.</b> Its head failed for good, and this session stands still until someone decides. It goes on accepting requests.<//>`;
}

/** @param {{rows: SessionRequest[], root: string, onChange: () => void}} props */
function RequestTable({ rows, root, onChange }) {
  return html`<${Table}
    label="Requests"
    rows=${rows}
    rowKey=${(/** @type {SessionRequest} */ one) => one.id}
    selected=${(/** @type {SessionRequest} */ one) => one.id === query.value.request}
    columns=${[
      { id: "sequence", label: "#", number: true, narrow: "title", class: "sequence", cell: (/** @type {SessionRequest} */ one) => html`<button type="button" class="link" onClick=${() => setQuery({ request: one.id })} aria-label="Open request ${one.sequence}">${count(one.sequence)}</button>` },
      { id: "status", label: "Status", cell: (/** @type {SessionRequest} */ one) => html`<${RequestStatus} status=${one.status} />` },
      { id: "answer", label: "Answer", class: "wide-cell", narrow: "title", cell: (/** @type {SessionRequest} */ one) => html`<bdi class="cut one-line ${one.error ? "bad" : "soft"}">${summary(one)}</bdi>` },
      { id: "attempts", label: "Attempts", number: true, cell: (/** @type {SessionRequest} */ one) => count(one.attempts) },
      { id: "accepted", label: "Accepted", cell: (/** @type {SessionRequest} */ one) => html`<${Time} at=${one.created_at} />` },
      { id: "took", label: "Took", number: true, cell: (/** @type {SessionRequest} */ one) => took(one) },
      { id: "act", label: "", class: "act", cell: (/** @type {SessionRequest} */ one) => one.status === "pending" && html`<${Cancel} one=${one} root=${root} onChange=${onChange} />` },
    ]}
  />`;
}

/** Times of the API are whole seconds. @param {SessionRequest} one */
function took(one) {
  if (one.status === "cancelled") return html`<span class="faint">–</span>`;
  return one.completed_at === one.created_at ? "< 1 s" : html`<${Elapsed} from=${one.created_at} to=${one.completed_at} />`;
}

/** An answer in a line: its text, if it has the shape of a chat. @param {SessionRequest} one */
function summary(one) {
  if (one.error) return cellText(`${one.error.code}: ${one.error.message}`);
  return one.response ? answeredText(one.response.body) : "";
}

/** @param {{one: SessionRequest, root: string, onChange: () => void}} props */
function Cancel({ one, root, onChange }) {
  const cancel = async () => {
    await call("DELETE", `${root}/requests/${one.id}`);
    notify("good", `Request ${one.sequence} is cancelled.`);
    onChange();
  };
  return html`<${Button} small aria-label="Cancel request ${one.sequence}" onClick=${cancel}>Cancel<//>`;
}

/** @param {{root: string, id: string, onChange: () => void}} props */
function RequestDrawer({ root, id, onChange }) {
  const loaded = useLoad((signal) => get(`${root}/requests/${id}`, { include: "request" }, { signal, exact: true }), [id]);
  const one = loaded.data;
  return html`<${Drawer} title=${one ? `Request ${one.sequence}` : "Request"} label="Request" onClose=${() => setQuery({ request: null })}>
    <${Loading} of=${loaded}>
      ${(/** @type {AskedRequest} */ found) => html`
        <dl class="facts">
          <dt>Status</dt><dd class="line"><${RequestStatus} status=${found.status} />${found.status === "pending" && html`<${Cancel} one=${found} root=${root} onChange=${() => {
            loaded.reload();
            onChange();
          }} />`}</dd>
          <dt>Id</dt><dd><${Id} id=${found.id} /></dd>
          <dt>Attempts</dt><dd>${plural(found.attempts, "attempt")}</dd>
          <dt>Accepted</dt><dd><${Time} at=${found.created_at} plain /></dd>
          <dt>Ended</dt><dd>${found.completed_at === null ? html`<span class="faint">not yet</span>` : html`<${Time} at=${found.completed_at} plain />`}</dd>
          ${found.response && html`<dt>Answered</dt><dd>${found.response.status_code ?? "–"}</dd>`}
        </dl>
        ${found.error && html`<${Notice} tone="bad"><b>${found.error.code}</b> <bdi>${visible(found.error.message)}</bdi><//>`}
        ${found.request ? html`<${Body} title="Question" value=${found.request.body}><code class="soft">${found.request.endpoint}</code><//>` : html`<p class="soft">What it asked is erased.</p>`}
        ${found.response && html`<${Body} title="Answer" value=${found.response.body} />`}
      `}
    <//>
  <//>`;
}

/** @param {{title: string, value: any, children?: any}} props */
function Body({ title, value, children }) {
  const [all, setAll] = useState(false);
  const text = fullText(value);
  const long = text.length > MAX_SHOWN_CHARS && !all;
  return html`<section class="stack" aria-label=${title}>
    <div class="line"><h3>${title}</h3><span class="grow">${children}</span><${Copy} text=${() => (typeof value === "string" ? value : (stringify(value, 2) ?? ""))} label="Copy the ${title.toLowerCase()}" /></div>
    <pre class="code" tabindex="0">${long ? text.slice(0, MAX_SHOWN_CHARS) : text}</pre>
    ${long && html`<${Button} small onClick=${() => setAll(true)}>Show all ${count(text.length)} characters<//>`}
  </section>`;
}

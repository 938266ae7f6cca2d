import { useState } from "preact/hooks";
import { get } from "../api.js";
import { sessionExample } from "../examples.js";
import { count } from "../format.js";
import { html } from "../html.js";
import { Chip } from "../parts/chip.js";
import { Empty } from "../parts/empty.js";
import { Search } from "../parts/field.js";
import { Loading } from "../parts/load.js";
import { More, usePages } from "../parts/more.js";
import { Page } from "../parts/page.js";
import { useEvery } from "../parts/poll.js";
import { Table } from "../parts/table.js";
import { Time } from "../parts/time.js";
import { visible } from "../parts/value.js";
import { go } from "../route.js";
import { notify } from "../store.js";

/**
 * @typedef {{id: string, key: string, status: "open" | "blocked", queued: number, in_flight: number,
 *   on_dead_head: "continue" | "block", max_queued: number | null, wait_timeout_s: number | null, priority: number,
 *   created_at: number}} Session
 */

/** Address of a session's page. @param {string} key */
export const sessionLink = (key) => `#/sessions/${encodeURIComponent(key)}`;

/** Sessions, newest first. */
export function Sessions() {
  const sessions = usePages((after, signal) => get("v1/sessions", { limit: 50, after }, { signal }));
  useEvery(sessions.reload);
  return html`<${Page} title="Sessions" intro="Conversations: one request of each at a time, in the order they came.">
    <div class="filters"><${Find} /></div>
    <${Loading} of=${sessions.loaded}>
      ${() =>
        sessions.rows.length
          ? html`<${SessionTable} rows=${sessions.rows} /><${More} of=${sessions} />`
          : html`<${Empty} icon="messages-square" title="No sessions">A session begins with its first request: give an OpenAI client the header <code>X-Session-Id: chat-1</code>, or try it here:<pre class="code left">${sessionExample()}</pre><//>`}
    <//>
  <//>`;
}

/** A key, and the way to its session. */
function Find() {
  const [key, setKey] = useState("");
  const find = async (/** @type {string} */ wanted) => {
    setKey(wanted);
    if (!wanted) return;
    try {
      await get(`v1/sessions/${encodeURIComponent(wanted)}`);
      go(sessionLink(wanted));
    } catch {
      notify("bad", `There is no session ${visible(wanted)}.`);
    }
  };
  return html`<${Search} label="Find a session" placeholder="Key of a session" value=${key} onSearch=${find} main width="280px" />`;
}

/** What a session does now. @param {{session: Session}} props */
export function SessionState({ session }) {
  if (session.status === "blocked") return html`<${Chip} tone="bad" title="Its head failed for good; it waits for a decision.">Blocked<//>`;
  if (session.in_flight) return html`<${Chip} tone="busy">Answering<//>`;
  return session.queued ? html`<${Chip} tone="warn">Waiting<//>` : html`<${Chip} tone="calm">Quiet<//>`;
}

/** @param {{rows: Session[]}} props */
function SessionTable({ rows }) {
  return html`<${Table}
    label="Sessions"
    rows=${rows}
    rowKey=${(/** @type {Session} */ session) => session.id}
    columns=${[
      { id: "key", label: "Key", narrow: "title", class: "wide-cell", cell: (/** @type {Session} */ session) => html`<a class="strong" href=${sessionLink(session.key)}><bdi>${visible(session.key)}</bdi></a>` },
      { id: "state", label: "State", cell: (/** @type {Session} */ session) => html`<${SessionState} session=${session} />` },
      { id: "queued", label: "Queued", number: true, cell: (/** @type {Session} */ session) => count(session.queued) },
      { id: "flight", label: "In flight", number: true, cell: (/** @type {Session} */ session) => count(session.in_flight) },
      { id: "dead", label: "When one fails", cell: (/** @type {Session} */ session) => html`<span class="soft">${session.on_dead_head === "block" ? "stands still" : "goes on"}</span>` },
      { id: "priority", label: "Priority", number: true, narrow: "hide", cell: (/** @type {Session} */ session) => count(session.priority) },
      { id: "created", label: "Created", cell: (/** @type {Session} */ session) => html`<${Time} at=${session.created_at} />` },
    ]}
  />`;
}

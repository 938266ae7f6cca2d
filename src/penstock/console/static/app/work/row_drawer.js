import { useEffect, useRef, useState } from "preact/hooks";
import { address, Exact, get } from "../api.js";
import { bytes, count, milliseconds } from "../format.js";
import { html } from "../html.js";
import { Button } from "../parts/button.js";
import { Chip, StatusChip } from "../parts/chip.js";
import { Copy, Id } from "../parts/copy.js";
import { Drawer } from "../parts/drawer.js";
import { Loading, useLoad } from "../parts/load.js";
import { Notice } from "../parts/notice.js";
import { Time } from "../parts/time.js";
import { fullText, readable, stringify, visible } from "../parts/value.js";
import { askReprocess, canRunAgain, shownStatus, workPath } from "./actions.js";
import { mayDiffer, movesOf, refreshWaitMs } from "./row_source.js";

/** @typedef {import("../work_types.js").WorkDetail} WorkDetail */
/** @typedef {{method: string, url: string, headers: Record<string, string>, body: any}} SentRequest */
/** @typedef {{attempt: number, at: string, ms: number | null, class: string | null, status: number | null, message: string | null, notBefore: string | null, worker: string | null}} Attempt */

const SHOWN_CHARS = 20_000;

/**
 * Everything of one row.
 * @param {{work: WorkDetail, row: number, onMove: (by: number) => void, onClose: () => void, onChange: () => void, refreshes: number}} props
 *   with another number of `refreshes` it is read anew
 */
export function RowDrawer({ work, row, onMove, onClose, onChange, refreshes }) {
  const now = movesOf(work);
  const read = useRef({ at: now, ms: 0 });
  const load = (/** @type {AbortSignal} */ signal) => {
    read.current = { at: now, ms: Date.now() };
    return get(workPath(work.id, `/items/${row}`), {}, { signal, exact: true });
  };
  const loaded = useLoad(load, [work.id, row]);
  useEffect(() => {
    if (loaded.data) loaded.reload();
  }, [refreshes]);
  useEffect(() => {
    if (loaded.busy || !loaded.data || !mayDiffer(loaded.data.status, read.current.at, now)) return;
    const timer = setTimeout(loaded.reload, refreshWaitMs(read.current.ms));
    return () => clearTimeout(timer);
  }, [now.changes, now.reruns, loaded.busy]);
  const tools = html`
    <${Button} kind="quiet" icon="chevron-up" label="Row before (k)" disabled=${row <= 1} onClick=${() => onMove(-1)} />
    <${Button} kind="quiet" icon="chevron-down" label="Next row (j)" disabled=${row >= work.total} onClick=${() => onMove(1)} />`;
  const title = html`Row ${count(row)} ${loaded.data && html`<${StatusChip} status=${shownStatus(work, loaded.data.status)} />`}`;
  return html`<${Drawer} title=${title} label="Row ${row}" tools=${tools} onClose=${onClose}>
    <${Loading} of=${loaded}>${(/** @type {any} */ item) => html`<${Inside} work=${work} item=${item} onChange=${onChange} />`}<//>
  <//>`;
}

/** @param {{work: WorkDetail, item: any, onChange: () => void}} props */
function Inside({ work, item, onChange }) {
  const history = /** @type {Attempt[]} */ (item.history);
  const again = () => askReprocess(work, { scope: "items", itemIds: [item.id], statuses: [item.status] }, `row ${count(item.row)}`, onChange);
  const result = item.result;
  return html`
    <div class="line wrap small soft">
      <${Id} id=${item.id} />
      ${item.customId && html`<span>custom id <bdi class="mono">${visible(item.customId)}</bdi></span>`}
      <span>changed <${Time} at=${item.updatedAt} /></span>
      ${item.lockedBy && html`<span>held by <${Id} id=${item.lockedBy} short /></span>`}
    </div>
    ${item.error && html`<${Notice} tone=${item.status === "NOT_FOUND" ? "warn" : "bad"}><bdi>${readable(text(item.error))}</bdi><//>`}
    <div class="line wrap">
      ${canRunAgain(work, item.status) && html`<${Button} small icon="rotate-ccw" onClick=${again}>Run again<//>`}
      ${item.request && html`<${Copy} text=${() => curl(item.request)} label="Copy as curl">Copy as curl<//>`}
    </div>
    ${item.image && html`<${Section} title="Image"><${Picture} work=${work} item=${item} /><//>`}
    ${result !== null && result !== undefined && html`<${Section} title="Output" copy=${result}><${Values} value=${result} /><//>`}
    <${Section} title="Input" copy=${item.input}><${Values} value=${item.input} /><//>
    ${differs(item.rawInput, item.input) && html`<${Section} title="Input as it came" copy=${item.rawInput} folded><${Values} value=${item.rawInput} /><//>`}
    ${(history.length > 0 || item.attempts > 0) && html`<${Section} title="Attempts"><${Timeline} item=${item} history=${history} /><//>`}
    ${item.requestProblem && html`<${Notice} tone="warn">No request can be made of this row: ${visible(item.requestProblem)}<//>`}
    ${item.request && html`<${Section} title="Request" copy=${item.request.body} folded><${Sent} request=${item.request} /><//>`}`;
}

/** Whether cells stood differently in the file: trimmed, typed or named otherwise since. @param {any} raw @param {any} input */
function differs(raw, input) {
  if (raw === null || raw === undefined) return false;
  if (!Array.isArray(raw)) return stringify(raw) !== stringify(input);
  const values = Object.values(input ?? {});
  return raw.length !== values.length || raw.some((cell, at) => cell !== (values[at] === null ? "" : String(values[at])));
}

/** @param {unknown} value */
const text = (value) => (typeof value === "string" ? value : stringify(value));

/** @param {{title: string, copy?: unknown, folded?: boolean, children?: any}} props */
function Section({ title, copy, folded = false, children }) {
  return html`<div class="section">
    ${copy !== undefined && html`<div class="section-copy"><${Copy} text=${() => (typeof copy === "string" ? copy : stringify(copy, 2))} label="Copy ${title.toLowerCase()}" /></div>`}
    <details open=${!folded}>
      <summary><h3>${title}</h3></summary>
      ${children}
    </details>
  </div>`;
}

/** An object's values under their names; anything else as text. @param {{value: any}} props */
function Values({ value }) {
  const flat = value !== null && typeof value === "object" && !Array.isArray(value) && Object.getPrototypeOf(value) === Object.prototype;
  const simple = flat && Object.values(value).every((each) => each === null || typeof each !== "object" || each instanceof Exact);
  if (!simple) return html`<${Long} text=${fullText(value)} />`;
  return html`<dl class="facts values">
    ${Object.entries(value).map(([name, each]) => html`<dt key=${name}><bdi>${visible(name)}</bdi></dt><dd><${Long} text=${each === null ? "" : fullText(String(each))} plain /></dd>`)}
  </dl>`;
}

/** Text of any length: its beginning, and the rest on demand. @param {{text: string, plain?: boolean}} props */
function Long({ text, plain = false }) {
  const [all, setAll] = useState(false);
  const cut = !all && text.length > SHOWN_CHARS;
  if (text === "") return html`<span class="faint">empty</span>`;
  const shown = cut ? text.slice(0, SHOWN_CHARS) : text;
  return html`${plain && text.length < 200 ? html`<bdi class="value">${shown}</bdi>` : html`<pre class="code" dir="auto" tabindex="0">${shown}</pre>`}
    ${cut && html`<${Button} small kind="quiet" onClick=${() => setAll(true)}>Show all (${bytes(text.length)})<//>`}`;
}

/** Attempts that failed, then how it ended. @param {{item: any, history: Attempt[]}} props */
function Timeline({ item, history }) {
  return html`<ol class="attempts">
    ${history.map(
      (each) => html`<li key=${`${each.attempt}-${each.at}`} data-tone="bad">
        <div class="line wrap">
          <b>Attempt ${each.attempt}</b>
          <${Chip} tone=${each.status === 429 ? "warn" : "bad"} dot=${false}>${[each.status, each.class].filter(Boolean).join(" ")}<//>
          <span class="soft">${milliseconds(each.ms)}</span>
          <span class="grow"></span>
          <span class="soft small"><${Time} at=${each.at} /></span>
        </div>
        ${each.message && html`<div class="soft"><bdi>${readable(each.message)}</bdi></div>`}
        <div class="small faint">
          ${each.worker && html`worker <span class="mono" title=${each.worker}>${each.worker.slice(0, 8)}</span>`}
          ${each.notBefore && html` · next not before ${new Date(each.notBefore).toLocaleTimeString("en-GB")}`}
        </div>
      </li>`,
    )}
    ${item.status === "DONE" &&
    html`<li data-tone="good">
      <div class="line wrap">
        <b>Attempt ${item.attempts}</b>
        <${Chip} tone="good" dot=${false}>${[item.statusCode, "answered"].filter(Boolean).join(" ")}<//>
        <span class="grow"></span>
        <span class="soft small"><${Time} at=${item.updatedAt} /></span>
      </div>
    </li>`}
  </ol>`;
}

/** @param {{request: SentRequest}} props */
function Sent({ request }) {
  const head = [`${request.method} ${request.url}`, ...Object.entries(request.headers ?? {}).map(([name, value]) => `${name}: ${value}`)].join("\n");
  return html`<${Long} text=${`${visible(head)}\n\n${fullText(request.body ?? "")}`} />`;
}

/** @param {{work: WorkDetail, item: any}} props */
function Picture({ work, item }) {
  const { width, height, type } = item.image;
  const source = address(workPath(work.id, `/items/${item.row}/image`)).href;
  return html`<figure class="picture">
    <a href=${source} target="_blank" rel="noopener"><img src=${source} width=${width} height=${height} alt="Image of row ${item.row}" loading="lazy" /></a>
    <figcaption class="small soft">${[type, width && `${width} × ${height}`].filter(Boolean).join(" · ")}</figcaption>
  </figure>`;
}

/** A request as a command for a shell. Keys are not in it: the server does not give them away. @param {SentRequest} request */
export function curl(request) {
  const quote = (/** @type {string} */ word) => `'${word.replaceAll("'", `'\\''`)}'`;
  const lines = [`curl ${request.method === "GET" ? "" : `-X ${request.method} `}${quote(request.url)}`];
  for (const [name, value] of Object.entries(request.headers ?? {})) lines.push(`-H ${quote(`${name}: ${value}`)}`);
  if (request.body !== null && request.body !== undefined && request.body !== "") lines.push(`--data-raw ${quote(typeof request.body === "string" ? request.body : stringify(request.body))}`);
  return lines.join(" \\\n  ");
}

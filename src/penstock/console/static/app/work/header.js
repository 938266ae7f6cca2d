import { useSignal } from "@preact/signals";
import { useEffect, useRef } from "preact/hooks";
import { now } from "../clock.js";
import { ago, count, duration, milliseconds, moment, percent, rate, short } from "../format.js";
import { html, withCode } from "../html.js";
import { Button } from "../parts/button.js";
import { Chip, StateChip } from "../parts/chip.js";
import { Id } from "../parts/copy.js";
import { Notice } from "../parts/notice.js";
import { Legend, Progress, settled } from "../parts/progress.js";
import { Elapsed, Time } from "../parts/time.js";
import { visible } from "../parts/value.js";
import { link } from "../route.js";
import { isAdmin } from "../store.js";
import { askCancel, askDelete, askReprocess, canRunAgain, findExports, hasEnded, steer, stopOperation, unrunStatus } from "./actions.js";

/** @typedef {import("../work_types.js").WorkDetail} WorkDetail */

/** Statuses of rows behind the numbers of the legend. */
const STATUS_OF = /** @type {Record<string, string>} */ ({
  done: "DONE", failed: "ERROR", notFound: "NOT_FOUND", skipped: "SKIPPED", inFlight: "PROCESSING", retrying: "PENDING", pending: "PENDING",
});

/** @param {{work: WorkDetail}} props */
export function Heading({ work }) {
  return html`
    <div class="line wrap heading">
      <a href="#/" class="soft">Work</a><span class="faint" aria-hidden="true">/</span>
      <h1 class="cut" title=${work.name}><bdi>${visible(work.name)}</bdi></h1>
      <${StateChip} state=${work.state} />
      ${work.jobType && html`<${Chip} dot=${false}><bdi>${visible(work.jobType)}</bdi><//>`}
    </div>
    <div class="line wrap small soft heading-more">
      <${Id} id=${work.id} />
      ${work.fileName && work.fileName !== work.name && html`<span class="cut"><bdi>${visible(work.fileName)}</bdi></span>`}
      <span>by ${work.owner}</span>
      <span>created <${Time} at=${work.createdAt} /></span>
    </div>`;
}

/** @param {{work: WorkDetail, onChange: () => void, onDeleted: () => void}} props */
export function Actions({ work, onChange, onDeleted }) {
  const ended = hasEnded(work);
  const failures = (work.counts.failed ?? 0) + (work.counts.notFound ?? 0);
  const unrun = work.counts.cancelled ?? 0;
  const wish = { scope: /** @type {const} */ ("job"), statuses: ["ERROR", "NOT_FOUND", ...(unrun ? ["PENDING"] : [])] };
  const what = unrun ? `${count(failures + unrun)} failed and cancelled rows` : `${count(failures)} failed and not found rows`;
  const act = (/** @type {() => Promise<unknown>} */ run) => async () => {
    await run();
    onChange();
  };
  return html`
    ${!ended && work.state !== "PAUSED" && html`<${Button} icon="pause" onClick=${act(() => steer(work, "pause"))}>Pause<//>`}
    ${work.state === "PAUSED" && html`<${Button} kind="primary" icon="play" onClick=${act(() => steer(work, "resume"))}>Resume<//>`}
    ${canRunAgain(work, "ERROR") && html`<${Button} icon="rotate-ccw" disabled=${failures + unrun === 0} title=${failures + unrun ? undefined : "No row has failed"} onClick=${act(() => askReprocess(work, wish, what))}>Run failures again<//>`}
    <${Export} work=${work} />
    ${!ended && html`<${Button} kind="danger" icon="ban" onClick=${act(() => askCancel(work))}>Cancel<//>`}
    ${ended && html`<${Button} kind="danger" icon="trash-2" onClick=${async () => (await askDelete(work)) && onDeleted()}>Delete<//>`}`;
}

/** @param {{work: WorkDetail}} props */
function Export({ work }) {
  const open = useSignal(false);
  const box = useRef(/** @type {HTMLElement | null} */ (null));
  useEffect(() => {
    const close = (/** @type {Event} */ event) => {
      if (event instanceof KeyboardEvent ? event.key === "Escape" : !box.current?.contains(/** @type {Node} */ (event.target))) open.value = false;
    };
    addEventListener("pointerdown", close);
    addEventListener("keydown", close);
    return () => {
      removeEventListener("pointerdown", close);
      removeEventListener("keydown", close);
    };
  }, []);
  const files = useSignal(/** @type {[string, string][]} */ ([]));
  const show = async () => {
    if (!open.value) files.value = await findExports(work);
    open.value = !open.value;
  };
  const told = work.kind === "job" ? `The sheet as it is now${hasEnded(work) ? "" : ", while rows are still worked on"}.` : hasEnded(work) ? "One line for each request." : "The files are there once the batch has ended.";
  return html`<div class="menu" ref=${box}>
    <${Button} icon="download" aria-expanded=${open.value} aria-haspopup="true" onClick=${show}>Export<//>
    ${open.value &&
    html`<div class="menu-list">
      ${files.value.map(([label, href]) => html`<a key=${label} href=${href} download="" onClick=${() => (open.value = false)}>${label}</a>`)}
      <p class="small soft">${told}</p>
    </div>`}
  </div>`;
}

/** @param {{work: WorkDetail}} props */
export function Summary({ work }) {
  const ended = hasEnded(work);
  const done = settled(work.counts);
  const range = work.etaRange;
  const pick = (/** @type {string} */ name) => (work.counts[name] > 0 ? link(`/work/${encodeURIComponent(work.id)}`, { status: STATUS_OF[name] ?? unrunStatus(work) }) : undefined);
  return html`<section class="card summary" aria-label="Progress">
    <div class="summary-bar">
      <div class="line"><span class="grow"><b class="summary-done" data-figure="settled">${count(done)}</b> <span class="soft">of <span data-figure="total">${count(work.total)}</span> rows</span></span><b>${percent(done, work.total)}</b></div>
      <${Progress} counts=${work.counts} total=${work.total} tall />
      <${Legend} counts=${work.counts} onPick=${pick} />
    </div>
    <dl class="tiles">
      <${Tile} label="Rows/s" value=${rate(ended ? averageRate(work, done) : work.ratePerSecond)} more=${ended ? "on average" : "last minute"} />
      ${ended
        ? html`<${Tile} label="Took" value=${html`<${Elapsed} from=${work.createdAt} to=${work.endedAt} />`} more=${html`ended <${Time} at=${work.endedAt} />`} />`
        : html`<${Tile} label="Time left" value=${duration(work.etaSeconds)} more=${work.state === "PAUSED" ? "paused" : range ? `${duration(range[0])} to ${duration(range[1])}` : "not known yet"} />`}
      <${Tile} label="Latency" value=${milliseconds(work.latency?.p50)} more=${`p95 ${milliseconds(work.latency?.p95)} · p99 ${milliseconds(work.latency?.p99)}`} title="Median of the calls; 95 and 99 in 100 took less than the others" />
      <${Tile} label="Tokens" value=${short(work.tokens.input)} more=${`in · ${short(work.tokens.output)} out`} title="${count(work.tokens.input)} in, ${count(work.tokens.output)} out" />
      <${LimitTile} work=${work} />
    </dl>
  </section>
  ${work.ingest?.problem && html`<${Notice} tone="bad">The table could not be read: ${visible(work.ingest.problem)}<//>`}
  ${!ended && work.limit?.gate === "halted" && html`<${Halted} work=${work} limit=${work.limit} />`}
  ${!ended && work.idle && html`<${Notice}>${withCode(work.idle)}<//>`}
  ${work.operation && html`<${OperationStrip} work=${work} />`}`;
}

/** @param {WorkDetail} work @param {number} done */
function averageRate(work, done) {
  const seconds = work.endedAt ? (moment(work.endedAt) - moment(work.createdAt)) / 1000 : 0;
  return seconds > 0 && done ? done / seconds : null;
}

/** @param {{label: string, value: any, more: any, title?: string}} props */
function Tile({ label, value, more, title }) {
  return html`<div title=${title}><dt>${label}</dt><dd class="tile-value">${value}</dd><dd class="tile-more">${more}</dd></div>`;
}

/** A limit moves a little at every look, and a reason is kept for large moves alone: it may tell of other figures than those of now. @param {string} why */
const lastMove = (why) => why.replace(/^(\S+ → \S+): /, "last large move: $1, ");

/** How many calls at a time, and why: "last large move: 96 → 67, 429 ×12, 2 min ago". @param {{work: WorkDetail}} props */
function LimitTile({ work }) {
  const limit = work.limit;
  if (!limit) return html`<${Tile} label="Calls at a time" value="–" more="no limit so far" />`;
  const gate = limit.gate === "halted" ? "stopped" : limit.gate === "waiting" && limit.gateUntil ? `waits, goes on ${ago(moment(limit.gateUntil), now.value)}` : null;
  const why = [gate, limit.gate === "waiting" && (limit.gateMessage ?? limit.gateCode), limit.why && lastMove(limit.why), limit.movedAt && ago(moment(limit.movedAt), now.value)].filter(Boolean).join(", ");
  const ended = hasEnded(work);
  const told = ended ? "as it is now" : visible(why) || "as configured";
  const pace = limit.perSecond === null ? null : `${rate(limit.perSecond)}/s`;
  const calls = limit.calls === null ? pace ?? "–" : count(Math.floor(limit.calls));
  const value = html`${calls}${limit.ceiling ? html` <span class="soft small">of ${count(limit.ceiling)}</span>` : null}${pace && limit.calls !== null ? html` <span class="soft small">· ${pace}</span>` : null}`;
  return html`<${Tile} label="Calls at a time" value=${value} more=${told} title=${visible([work.provider, work.model, ended ? "" : why].filter(Boolean).join(" · "))} />`;
}

/** Why nothing of it is called, and who can change that. @param {{work: WorkDetail, limit: import("../work_types.js").Limit}} props */
function Halted({ work, limit }) {
  const providers = isAdmin.value && html`<${Button} small href="#/providers">Providers<//>`;
  return html`<${Notice} tone="bad" action=${providers}><b><bdi>${visible(work.model ?? "The model")}</bdi> is not called:</b> <bdi>${visible(limit.gateMessage ?? limit.gateCode ?? "")}</bdi>
    <div class="soft small">It is tried again now and then. ${isAdmin.value ? "Once the cause is gone, “Call again” under Providers opens it at once." : "An operator who has mended the cause opens it at once."}</div><//>`;
}

/** @param {{work: WorkDetail}} props */
function OperationStrip({ work }) {
  const operation = work.operation;
  if (!operation) return null;
  const counts = { inFlight: operation.row, pending: Math.max(0, work.total - operation.row) };
  return html`<div class="notice operation" data-tone="busy" role="status">
    <span>Putting rows back to run again</span>
    <div class="grow"><${Progress} counts=${counts} total=${work.total} /></div>
    <span class="soft">${count(operation.requeued)} put back</span>
    <${Button} small icon="circle-x" title="Put no more rows back. Those that were put back run again" onClick=${() => stopOperation(work, operation.id)}>Stop<//>
  </div>`;
}

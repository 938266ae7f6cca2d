import { useEffect } from "preact/hooks";
import { get } from "../api.js";
import { count, plural } from "../format.js";
import { html } from "../html.js";
import { Button } from "../parts/button.js";
import { Chip } from "../parts/chip.js";
import { Id } from "../parts/copy.js";
import { Empty } from "../parts/empty.js";
import { Loading, useLoad } from "../parts/load.js";
import { Table } from "../parts/table.js";
import { Elapsed, Time } from "../parts/time.js";
import { visible } from "../parts/value.js";
import { stopOperation, workPath } from "./actions.js";

/** @typedef {import("../work_types.js").WorkDetail} WorkDetail */
/** @typedef {import("../work_types.js").Operation} Operation */

const TONES = { RUNNING: "busy", DONE: "good", FAILED: "bad", CANCELLED: "calm" };

/** What it is, and what was done to it. @param {{work: WorkDetail}} props */
export function Details({ work }) {
  /** @type {[string, any][]} */
  const facts = [
    ["Id", html`<${Id} id=${work.id} />`],
    ["Kind", work.kind === "job" ? "Job: a table or images" : "Batch: a file of requests"],
    ["File", work.fileName && html`<bdi>${visible(work.fileName)}</bdi>`],
    ["Owner", work.owner],
    ["Created", html`<${Time} at=${work.createdAt} plain />`],
    ["Ended", work.endedAt && html`<${Time} at=${work.endedAt} plain />, after <${Elapsed} from=${work.createdAt} to=${work.endedAt} />`],
    ["Rows read", work.ingest && `${count(work.ingest.rows)}${work.ingest.done ? ", all of them" : " so far"}`],
    ["Result columns", work.columns?.length ? html`<bdi>${visible(work.columns.join(", "))}</bdi>` : null],
    ["Provider", work.provider && html`<bdi>${visible(work.provider)}</bdi>`],
    [work.kind === "job" && !work.provider ? "Function" : "Model", work.model && html`<bdi>${visible(work.model)}</bdi>`],
    ["Last error", work.lastError && html`<bdi class="failed">${visible(work.lastError)}</bdi>`],
  ];
  return html`
    <section class="card"><dl class="facts">${facts.filter(([, value]) => value).map(([name, value]) => html`<dt key=${name}>${name}</dt><dd>${value}</dd>`)}</dl></section>
    ${work.kind === "job" && html`<${Operations} work=${work} />`}`;
}

/** What was done to its rows. @param {{work: WorkDetail}} props */
function Operations({ work }) {
  const loaded = useLoad((signal) => /** @type {Promise<{operations: Operation[]}>} */ (get(workPath(work.id, "/operations"), {}, { signal })), [work.id]);
  const moved = work.operation && `${work.operation.id} ${work.operation.row}`;
  useEffect(() => {
    loaded.reload();
  }, [moved]);
  const stop = async (/** @type {Operation} */ one) => {
    await stopOperation(work, one.id);
    await loaded.reload();
  };
  const columns = [
    { id: "what", label: "Operation", narrow: "title", cell: () => "Rows run again" },
    { id: "state", label: "State", narrow: "bare", cell: (/** @type {Operation} */ one) => html`<${Chip} tone=${TONES[one.state]}>${one.state.toLowerCase()}<//>` },
    { id: "requeued", label: "Put back", number: true, cell: (/** @type {Operation} */ one) => count(one.requeued) },
    { id: "worn", label: "Without attempts left", number: true, cell: (/** @type {Operation} */ one) => count(one.wornOut) },
    { id: "at", label: "Started", number: true, cell: (/** @type {Operation} */ one) => html`<${Time} at=${one.createdAt} />` },
    { id: "took", label: "Took", number: true, cell: (/** @type {Operation} */ one) => html`<${Elapsed} from=${one.createdAt} to=${one.endedAt} />` },
    { id: "stop", label: "Action", unlabelled: true, narrow: "bare", cell: (/** @type {Operation} */ one) => one.state === "RUNNING" && html`<${Button} small icon="circle-x" onClick=${() => stop(one)}>Stop<//>` },
  ];
  return html`
    <h2>Operations</h2>
    <${Loading} of=${loaded} lines=${2}>
      ${(/** @type {{operations: Operation[]}} */ page) =>
        page.operations.length
          ? html`<${Table} label="Operations" columns=${columns} rows=${page.operations} rowKey=${(/** @type {Operation} */ one) => one.id} />`
          : html`<div class="card"><${Empty} icon="history" title="Nothing was run again so far">${plural(work.counts.failed ?? 0, "row")} failed. “Run failures again” does so; select rows in the grid to run those alone.<//></div>`}
    <//>`;
}

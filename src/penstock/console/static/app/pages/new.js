import { useEffect, useRef, useState } from "preact/hooks";
import { explain, newKey } from "../api.js";
import { percent } from "../format.js";
import { html } from "../html.js";
import { Columns } from "../new_job/columns.js";
import { emptyDraft, jobSpec, kindOf, processorSpec } from "../new_job/draft.js";
import { Drop } from "../new_job/drop.js";
import { usePreview } from "../new_job/preview.js";
import { Requests } from "../new_job/requests.js";
import { Options, Task } from "../new_job/task.js";
import { Trial, TRIAL_ROWS } from "../new_job/trial.js";
import { firstRequest, jobForm, trialFiles, upload } from "../new_job/upload.js";
import { Button } from "../parts/button.js";
import { Skeleton } from "../parts/empty.js";
import { SelectField } from "../parts/field.js";
import { Icon } from "../parts/icon.js";
import { Notice } from "../parts/notice.js";
import { Page } from "../parts/page.js";
import { fullText, visible } from "../parts/value.js";
import { go } from "../route.js";
import { me } from "../store.js";

/** @typedef {import("../new_job/draft.js").Draft} Draft */

/** A job from a file: look at its rows, say what is done with each, try ten, start. */
export function NewJob() {
  const [draft, setDraft] = useState(() => emptyDraft(/** @type {any} */ (me.peek())));
  const [request, setRequest] = useState(/** @type {{url: string, model: string | null} | null} */ (null));
  const change = (/** @type {Partial<Draft>} */ changes) => setDraft((before) => ({ ...before, ...changes }));
  const takeFiles = (/** @type {File[]} */ files) => {
    change({ files, columns: {}, sheet: "" });
    setRequest(null);
    firstRequest(files[0]).then(setRequest, () => null);
  };
  let content = html`<${Ways} />`;
  if (request) content = html`<${Requests} file=${draft.files[0]} request=${request} onRows=${() => setRequest(null)} />`;
  else if (draft.files.length) content = html`<${Steps} draft=${draft} change=${change} />`;
  return html`<${Page} title="New job" intro="The same done with every row of a table, or every image. Nothing is sent to a provider before you say so.">
    <${Drop} files=${draft.files} onFiles=${takeFiles} />
    ${content}
  <//>`;
}

/** What comes after the file, for who has not chosen one yet. */
function Ways() {
  const ways = [
    ["table-2", "Look at the rows", "The first ten as they will be used; columns can be renamed, typed and left out."],
    ["wrench", "Say what is done with each", "A prompt with {{ columns }} in it, a Python function of this server, or an HTTP request. The first request is shown as it will be sent."],
    ["flask-conical", "Try ten, then start", "Ten rows run for real before all of them do. Every answer is recorded once, and nothing is lost by closing this page."],
    ["scroll-text", "Or bring requests", "A JSONL file in the Batch API's shape needs no more: it is run as it is."],
  ];
  return html`<ul class="ways">${ways.map(([icon, title, text]) => html`<li key=${title} class="card"><${Icon} name=${icon} size=${18} /><h2>${title}</h2><p class="soft">${text}</p></li>`)}</ul>`;
}

/** @param {{draft: Draft, change: (changes: Partial<Draft>) => void}} props */
function Steps({ draft, change }) {
  const { found, preview, problem, busy } = usePreview(draft);
  const kind = kindOf(draft.files);
  const names = preview?.columns.map((column) => column.name) ?? [];
  const wrong = (/** @type {string} */ where) => (preview?.problems ?? []).filter((each) => (each.where === "file") === (where === "file")).map((each) => visible(each.message));
  return html`<div class="steps">
    <div class="stack">
      <section class="card stack" aria-label="Rows">
        <div class="line"><h2 class="grow">${kind === "images" ? "Images" : "Rows"}</h2>
          ${(preview?.sheets?.length ?? 0) > 1 && html`<${Sheets} sheets=${preview?.sheets ?? []} draft=${draft} change=${change} />`}</div>
        ${found?.length && preview ? html`<${Columns} columns=${found} shown=${preview.columns} rows=${preview.rows} choices=${draft.columns} fixed=${kind === "images"} onChoice=${(/** @type {string} */ name, /** @type {any} */ choice) => change({ columns: { ...draft.columns, [name]: choice } })} />` : !problem && !preview && html`<${Skeleton} lines=${5} />`}
        ${[problem, ...wrong("file")].filter(Boolean).map((text) => html`<${Notice} key=${text} tone="bad">${text}<//>`)}
      </section>
      <section class="card stack" aria-label="What to do">
        <h2>What is done with each</h2>
        <${Task} draft=${draft} columns=${names} onChange=${change} />
        <${Options} draft=${draft} onChange=${change} />
      </section>
    </div>
    <div class="stack beside">
      <section class="card stack" aria-label="First request" aria-busy=${busy}>
        <h2>The first request</h2>
        ${wrong("processor").map((text) => html`<${Notice} key=${text} tone="warn">${text}<//>`)}
        <${FirstRequest} request=${preview?.request} how=${draft.how} />
      </section>
      <${Run} draft=${draft} found=${found ?? []} seen=${preview?.rows.length ?? 0} said=${isReady(draft)} wrong=${Boolean(preview?.problems.length)} />
    </div>
  </div>`;
}

/** @param {Draft} draft */
function isReady(draft) {
  try {
    return processorSpec(draft) !== null;
  } catch {
    return false;
  }
}

/** @param {{sheets: string[], draft: Draft, change: (changes: Partial<Draft>) => void}} props */
function Sheets({ sheets, draft, change }) {
  return html`<${SelectField} label="Sheet" value=${draft.sheet || sheets[0]} onPick=${(/** @type {string} */ sheet) => change({ sheet, columns: {} })} options=${sheets.map((name) => ({ id: name, label: name }))} />`;
}

/** @param {{request: any, how: Draft["how"]}} props */
function FirstRequest({ request, how }) {
  if (!request) return html`<p class="soft">${how === "processor" ? "The function gets each row as it stands in the table." : "Say what is done with each row: what would be sent for the first one is shown here."}</p>`;
  const { method, path, headers, body } = request;
  return html`<div class="stack" data-first-request>
    <p class="mono target"><b class="strong">${method}</b> ${path}</p>
    ${headers && Object.keys(headers).length > 0 && html`<dl class="facts small">${Object.entries(headers).map(([name, value]) => html`<dt key=${name}>${name}</dt><dd class="mono">${String(value)}</dd>`)}</dl>`}
    <pre class="code" tabindex="0" role="region" aria-label="Body">${fullText(body ?? "")}</pre>
  </div>`;
}

/** @param {{draft: Draft, found: import("../new_job/draft.js").FoundColumn[], seen: number, said: boolean, wrong: boolean}} props `seen` rows are in the preview; whether it is `said` what is done with each, and something is `wrong` with it or the file */
function Run({ draft, found, seen, said, wrong }) {
  const ready = said && !wrong;
  const [share, setShare] = useState(/** @type {number | null} */ (null));
  const [problem, setProblem] = useState("");
  const [trial, setTrial] = useState("");
  const keys = useRef(/** @type {Map<string, string>} */ (new Map()));
  const shown = useRef(/** @type {HTMLElement | null} */ (null));
  const send = async (/** @type {number | undefined} */ limit) => {
    setProblem("");
    try {
      const spec = jobSpec(draft, found, limit);
      // The same files asked the same are one job, however often a broken upload is repeated.
      const asked = `${JSON.stringify(spec)} ${draft.files.map((file) => `${file.name} ${file.size} ${file.lastModified}`).join("|")}`;
      if (!limit && !keys.current.has(asked)) keys.current.set(asked, newKey());
      setShare(0);
      const files = limit ? await trialFiles(draft.files, kindOf(draft.files), seen >= limit) : draft.files;
      const answer = await upload("api/jobs", jobForm(files, spec), { onProgress: setShare, key: limit ? undefined : keys.current.get(asked) });
      if (limit) setTrial(answer.jobId);
      else go(`#/work/${answer.jobId}`);
    } catch (error) {
      setProblem(explain(error));
    } finally {
      setShare(null);
    }
  };
  useEffect(() => {
    if (trial) shown.current?.scrollIntoView({ block: "nearest", behavior: "smooth" });
  }, [trial]);
  return html`<section class="card stack" aria-label="Run">
    <div class="line wrap">
      <${Button} icon="flask-conical" disabled=${!ready || share !== null} onClick=${() => send(TRIAL_ROWS)}>Try ${TRIAL_ROWS} rows<//>
      <${Button} kind="primary" icon="play" disabled=${!ready || share !== null} onClick=${() => send(undefined)}>Start the job<//>
      ${share !== null && html`<span class="soft" role="status">Uploading ${percent(share, 1)}</span>`}
    </div>
    ${!ready && html`<p class="soft small">${said ? "Correct what is said above first." : draft.how === "prompt" ? "A model and a prompt are needed first." : "What is done with each row is needed first."}</p>`}
    ${problem && html`<${Notice} tone="bad">${problem}<//>`}
    <div ref=${shown}>${trial && html`<${Trial} key=${trial} id=${trial} />`}</div>
  </section>`;
}

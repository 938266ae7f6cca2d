import { useLayoutEffect, useRef, useState } from "preact/hooks";
import { bytes, plural } from "../format.js";
import { html } from "../html.js";
import { Button } from "../parts/button.js";
import { Icon } from "../parts/icon.js";
import { notify } from "../store.js";

const ACCEPTED = ".csv,.tsv,.txt,.xlsx,.jsonl,.ndjson,.json,.zip,.gz,.png,.jpg,.jpeg,.gif,.webp";

/**
 * Where files are dropped or chosen. A file that falls beside it is taken too: the browser would leave the page for it.
 * @param {{files: File[], onFiles: (files: File[]) => void}} props
 */
export function Drop({ files, onFiles }) {
  const input = useRef(/** @type {HTMLInputElement | null} */ (null));
  const [over, setOver] = useState(false);
  const take = (/** @type {Iterable<File>} */ dropped) => {
    const taken = [...dropped].filter((file) => file.size > 0 || file.type);
    if (taken.length) onFiles(taken);
    else notify("bad", "That is no file. Drop a table, images, or a zip of images; a folder can be zipped first.");
  };
  const latest = useRef(take);
  latest.current = take;
  useLayoutEffect(() => {
    const hasFiles = (/** @type {DragEvent} */ event) => event.dataTransfer?.types.includes("Files") ?? false;
    const drag = (/** @type {DragEvent} */ event) => {
      if (!hasFiles(event)) return;
      event.preventDefault();
      setOver(true);
    };
    const leave = (/** @type {DragEvent} */ event) => event.relatedTarget === null && setOver(false);
    const drop = (/** @type {DragEvent} */ event) => {
      if (!hasFiles(event)) return;
      event.preventDefault();
      setOver(false);
      latest.current(event.dataTransfer?.files ?? []);
    };
    addEventListener("dragover", drag);
    addEventListener("dragleave", leave);
    addEventListener("drop", drop);
    return () => {
      removeEventListener("dragover", drag);
      removeEventListener("dragleave", leave);
      removeEventListener("drop", drop);
    };
  }, []);
  const chosen = files.length === 1 ? files[0].name : plural(files.length, "file");
  return html`<div
    class="drop"
    data-over=${over ? "" : undefined}
    data-chosen=${files.length ? "" : undefined}
  >
    <input ref=${input} class="only-read" type="file" multiple accept=${ACCEPTED} tabindex="-1" aria-label="File" onChange=${() => {
      take(input.current?.files ?? []);
      if (input.current) input.current.value = "";
    }} />
    <${Icon} name=${files.length ? "file-spreadsheet" : "file-up"} size=${files.length ? 20 : 30} />
    ${files.length
      ? html`<div class="grow"><b class="strong">${chosen}</b><div class="soft small">${bytes(files.reduce((sum, file) => sum + file.size, 0))}</div></div>
          <${Button} small onClick=${() => input.current?.click()}>Choose another<//>`
      : html`<div><h2>Drop a file here</h2><p class="soft">A table (CSV, TSV, XLSX, JSON Lines), images, or a zip of images</p></div>
          <${Button} kind="primary" icon="upload" onClick=${() => input.current?.click()}>Choose a file<//>`}
  </div>`;
}

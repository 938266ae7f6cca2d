import { useState } from "preact/hooks";
import { post } from "../api.js";
import { percent } from "../format.js";
import { html } from "../html.js";
import { Button } from "../parts/button.js";
import { go } from "../route.js";
import { upload } from "./upload.js";

/**
 * A file of requests in the Batch API's shape: run as it is.
 * @param {{file: File, request: {url: string, model: string | null}, onRows: () => void}} props
 */
export function Requests({ file, request, onRows }) {
  const [share, setShare] = useState(/** @type {number | null} */ (null));
  const run = async () => {
    const form = new FormData();
    form.append("purpose", "batch");
    form.append("file", file, file.name);
    setShare(0);
    try {
      const stored = await upload("v1/files", form, { onProgress: setShare });
      const batch = await post("v1/batches", { input_file_id: stored.id, endpoint: request.url, completion_window: "24h" });
      go(`#/work/${batch.id}`);
    } finally {
      setShare(null);
    }
  };
  return html`<section class="card stack">
    <h2>These are requests</h2>
    <p class="soft">The lines have the Batch API's shape: <code>${request.url}</code>${request.model && html` of the model <b class="strong">${request.model}</b>`}. They need nothing more to run.</p>
    <div class="line wrap">
      <${Button} kind="primary" icon="play" onClick=${run}>${share === null ? "Run the batch" : `Uploading ${percent(share, 1)}`}<//>
      <${Button} kind="quiet" onClick=${onRows}>Use the lines as rows instead<//>
    </div>
  </section>`;
}

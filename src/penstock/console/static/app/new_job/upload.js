// Files on their way to the server. `fetch` does not tell how far an upload is; XMLHttpRequest does.
import { address, ApiError } from "../api.js";
import { leaveForSignIn } from "../store.js";

const PREVIEW_TEXT_BYTES = 256 * 1024;
const PREVIEW_WHOLE_BYTES = 32_000_000;

/**
 * @param {string} path
 * @param {FormData} form
 * @param {{onProgress?: (share: number) => void, key?: string, signal?: AbortSignal}} [options]
 * @returns {Promise<any>}
 */
export function upload(path, form, { onProgress, key, signal } = {}) {
  return new Promise((resolve, reject) => {
    const request = new XMLHttpRequest();
    request.open("POST", address(path));
    request.setRequestHeader("accept", "application/json");
    request.setRequestHeader("x-penstock-console", "1");
    if (key) request.setRequestHeader("idempotency-key", key);
    request.upload.onprogress = (event) => event.lengthComputable && onProgress?.(event.loaded / event.total);
    request.onload = () => {
      let answer = null;
      try {
        answer = JSON.parse(request.responseText);
      } catch {
        // No JSON: a proxy's page, perhaps. Its status says more than its markup.
      }
      if (request.status < 300) return resolve(answer);
      if (request.status === 401) leaveForSignIn();
      const message = answer?.error?.message ?? `The server answered ${request.status}.`;
      return reject(new ApiError(request.status, message, answer?.error?.code ?? null));
    };
    request.onerror = () => reject(new ApiError(0, "The upload broke off. Is the server running, and was the file changed meanwhile?", "unreachable"));
    request.onabort = () => reject(new DOMException("aborted", "AbortError"));
    signal?.addEventListener("abort", () => request.abort());
    request.send(form);
  });
}

/** @param {File[]} files @param {Record<string, any>} spec */
export function jobForm(files, spec) {
  const form = new FormData();
  form.append("spec", JSON.stringify(spec));
  for (const file of files) form.append("file", file, file.name);
  return form;
}

/**
 * As much of the files as a preview needs; null if that is too much.
 * @param {File[]} files
 * @param {"images" | "text" | "whole" | "none"} kind
 */
export function previewForm(files, kind, /** @type {Record<string, any>} */ spec) {
  const [first] = files;
  const form = new FormData();
  form.append("spec", JSON.stringify(spec));
  if (kind === "text" && first.size > PREVIEW_TEXT_BYTES) {
    form.append("cut", "true");
    form.append("file", first.slice(0, PREVIEW_TEXT_BYTES), first.name);
    return form;
  }
  if (first.size > PREVIEW_WHOLE_BYTES) return null;
  form.append("file", first, first.name);
  return form;
}

/**
 * As much of the files as a trial needs. Of a long table that is its beginning, from which the preview has read as many
 * rows already: the server reads the same bytes in the same way, and looks no further.
 * @param {File[]} files
 * @param {"images" | "text" | "whole" | "none"} kind
 * @param {boolean} isEnough whether the preview has as many rows
 */
export async function trialFiles(files, kind, isEnough) {
  const [first] = files;
  if (kind !== "text" || !isEnough || files.length > 1 || first.size <= PREVIEW_TEXT_BYTES) return files;
  const bytes = new Uint8Array(await first.slice(0, PREVIEW_TEXT_BYTES).arrayBuffer());
  return [new File([bytes.slice(0, bytes.lastIndexOf(0x0a) + 1 || undefined)], first.name)];
}

/**
 * What the first line of a file says, if it is a request in the Batch API's shape.
 * @param {File} file
 * @returns {Promise<{url: string, model: string | null} | null>}
 */
export async function firstRequest(file) {
  if (!/\.(jsonl|ndjson|json|txt)$/i.test(file.name)) return null;
  const text = await file.slice(0, PREVIEW_TEXT_BYTES).text();
  const line = text.split("\n").find((each) => each.trim());
  try {
    const { custom_id: id, url, body } = JSON.parse((line ?? "").replace(/^\ufeff/, ""));
    return typeof id === "string" && typeof url === "string" && body && typeof body === "object" ? { url, model: body.model ?? null } : null;
  } catch {
    return null;
  }
}

import { useEffect, useRef, useState } from "preact/hooks";
import { explain, isAbort } from "../api.js";
import { jobSpec, kindOf } from "./draft.js";
import { previewForm, upload } from "./upload.js";

/**
 * @typedef {import("./draft.js").Draft} Draft
 * @typedef {import("./draft.js").FoundColumn} FoundColumn
 * @typedef {{columns: FoundColumn[], rows: Record<string, any>[], sheets?: string[] | null, request?: any, problems: {message: string, where: string}[]}} Preview
 */

const QUIET_MS = 350;

/**
 * What the server makes of the first rows, anew a moment after the last change.
 * @param {Draft} draft
 */
export function usePreview(draft) {
  const [found, setFound] = useState(/** @type {{of: string, columns: FoundColumn[]} | null} */ (null));
  const [preview, setPreview] = useState(/** @type {Preview | null} */ (null));
  const [problem, setProblem] = useState("");
  const [busy, setBusy] = useState(false);
  const running = useRef(/** @type {AbortController | null} */ (null));
  // Columns are found once for each file and sheet, before anything is chosen about them.
  const source = `${draft.files.map((file) => `${file.name} ${file.size} ${file.lastModified}`).join("|")} ${draft.sheet}`;
  const known = found?.of === source ? found.columns : null;
  let spec = "";
  let wrong = "";
  try {
    spec = JSON.stringify(known ? jobSpec(draft, known) : jobSpec(draft, []));
  } catch (error) {
    wrong = explain(error);
  }
  useEffect(() => {
    running.current?.abort();
    if (!draft.files.length || wrong) return undefined;
    const controller = new AbortController();
    running.current = controller;
    const ask = async () => {
      const form = previewForm(draft.files, kindOf(draft.files), JSON.parse(spec));
      if (form === null) {
        setProblem("The file is too large to be looked at here before it is uploaded. Try 10 rows instead.");
        return;
      }
      setBusy(true);
      try {
        const answer = await upload("api/jobs/preview", form, { signal: controller.signal });
        setPreview(answer);
        setProblem("");
        if (known === null) setFound({ of: source, columns: answer.columns });
      } catch (error) {
        if (!isAbort(error)) setProblem(explain(error));
      } finally {
        if (running.current === controller) setBusy(false);
      }
    };
    const timer = setTimeout(ask, known === null ? 0 : QUIET_MS);
    return () => {
      clearTimeout(timer);
      controller.abort();
    };
  }, [source, spec, wrong]);
  return { found: known, preview: known ? preview : null, problem: wrong || problem, busy };
}

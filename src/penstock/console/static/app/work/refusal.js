import { get } from "../api.js";
import { count } from "../format.js";
import { html } from "../html.js";
import { Loading, useLoad } from "../parts/load.js";
import { Notice } from "../parts/notice.js";
import { readable } from "../parts/value.js";
import { batchPath } from "./actions.js";

/** @typedef {{line: number | null, message: string}} Refused what is wrong with a line, or with the file */

const SHOWN = 8;

/** Why nothing of a batch was run: what its validation found wrong with the file. @param {{id: string}} props */
export function Refusal({ id }) {
  const loaded = useLoad((signal) => get(batchPath(id), {}, { signal }), [id]);
  return html`<${Loading} of=${loaded} lines=${2}>
    ${(/** @type {{errors: {data: Refused[]} | null}} */ { errors }) => {
      const found = errors?.data ?? [];
      return html`<${Notice} tone="bad">
        <b>The file was refused, and nothing of it was run.</b> Mend it and upload it again.
        <ul class="refused">${found.slice(0, SHOWN).map((each, at) => html`<li key=${at}>${each.line !== null && `line ${count(each.line)}: `}<bdi>${readable(each.message)}</bdi></li>`)}</ul>
        ${found.length > SHOWN && html`<span class="soft">and ${count(found.length - SHOWN)} more</span>`}
      <//>`;
    }}
  <//>`;
}

import { useState } from "preact/hooks";
import { get, post } from "../api.js";
import { html } from "../html.js";
import { Button } from "../parts/button.js";
import { Chip } from "../parts/chip.js";
import { confirm } from "../parts/dialog.js";
import { Empty } from "../parts/empty.js";
import { SelectField, TextField } from "../parts/field.js";
import { FormDialog } from "../parts/form_dialog.js";
import { Loading } from "../parts/load.js";
import { More, usePages } from "../parts/more.js";
import { Notice } from "../parts/notice.js";
import { Page } from "../parts/page.js";
import { Secret } from "../parts/secret.js";
import { Table } from "../parts/table.js";
import { Time } from "../parts/time.js";
import { visible } from "../parts/value.js";
import { leaveForSignIn, me, notify } from "../store.js";

/**
 * @typedef {{id: string, owner: string, name: string, role: string, prefix: string, created_at: number,
 *   expires_at: number | null, revoked_at: number | null}} Key
 */

const DAY_S = 86_400;
const LIVES = [
  { id: "", label: "Never" },
  { id: String(7 * DAY_S), label: "In 7 days" },
  { id: String(30 * DAY_S), label: "In 30 days" },
  { id: String(90 * DAY_S), label: "In 90 days" },
  { id: String(365 * DAY_S), label: "In a year" },
];
const ROLES = [
  { id: "user", label: "User: its owner's work" },
  { id: "admin", label: "Admin: everybody's work, keys, providers" },
];

/** API keys, for admins. */
export function Keys() {
  const keys = usePages(/** @returns {Promise<any>} */ (after, signal) => get("v1/keys", { limit: 50, after }, { signal }));
  const [making, setMaking] = useState(false);
  const [made, setMade] = useState(/** @type {any} */ (null));
  const make = html`<${Button} kind="primary" icon="plus" onClick=${() => setMaking(true)}>New key<//>`;
  return html`<${Page} title="Keys" intro="Who may call this server. A key belongs to an owner, and everything made with it does too." actions=${make}>
    ${me.value?.keyless && html`<${Notice} tone="warn">This server has no keys: whoever reaches it may do everything. From the first key on every call needs one, for good.<//>`}
    <${Loading} of=${keys.loaded}>
      ${() => (keys.rows.length ? html`<${KeyTable} rows=${keys.rows} onChange=${keys.reload} /><${More} of=${keys} />` : html`<${Empty} icon="key-round" title="No keys" action=${make}>Make the first one for yourself, as an admin, and keep it well.<//>`)}
    <//>
    ${making && html`<${NewKey} onClose=${() => setMaking(false)} onMade=${(/** @type {any} */ key) => {
      setMaking(false);
      setMade(key);
    }} />`}
    ${made && html`<${Secret} title="The key of ${visible(made.owner)}" secret=${made.key} onClose=${() => {
      setMade(null);
      if (me.value?.keyless) leaveForSignIn();
      else keys.reload();
    }} />`}
  <//>`;
}

/** @param {{rows: Key[], onChange: () => void}} props */
function KeyTable({ rows, onChange }) {
  const revoke = (/** @type {Key} */ key) =>
    confirm({
      title: "Revoke this key?",
      text: html`<p><b><bdi>${nameOf(key)}</bdi></b> of <bdi>${visible(key.owner)}</bdi> is refused from then on, and can not be taken back.</p>`,
      action: "Revoke",
      danger: true,
      run: async () => {
        await post(`v1/keys/${key.id}/revoke`);
        notify("good", `Revoked ${nameOf(key)}.`);
        onChange();
      },
    });
  return html`<${Table}
    label="API keys"
    rows=${rows}
    rowKey=${(/** @type {Key} */ key) => key.id}
    columns=${[
      { id: "name", label: "Name", narrow: "title", cell: (/** @type {Key} */ key) => html`<b class="strong">${key.name ? html`<bdi>${visible(key.name)}</bdi>` : html`<span class="faint">without a name</span>`}</b>` },
      { id: "state", label: "State", cell: keyState },
      { id: "owner", label: "Owner", cell: (/** @type {Key} */ key) => html`<bdi>${visible(key.owner)}</bdi>` },
      { id: "role", label: "Role", cell: (/** @type {Key} */ key) => html`<${Chip} tone=${key.role === "admin" ? "retry" : "calm"} dot=${false}>${key.role}<//>` },
      { id: "prefix", label: "Begins with", cell: (/** @type {Key} */ key) => html`<code>${key.prefix}…</code>` },
      { id: "created", label: "Created", cell: (/** @type {Key} */ key) => html`<${Time} at=${key.created_at} />` },
      { id: "ends", label: "Expires", cell: (/** @type {Key} */ key) => (key.expires_at ? html`<${Time} at=${key.expires_at} />` : html`<span class="faint">never</span>`) },
      {
        id: "act",
        label: "",
        class: "act",
        cell: (/** @type {Key} */ key) => !key.revoked_at && html`<${Button} small kind="danger" onClick=${() => void revoke(key)} aria-label="Revoke ${nameOf(key)}">Revoke<//>`,
      },
    ]}
  />`;
}

/** @param {Key} key */
const nameOf = (key) => visible(key.name) || key.prefix;

/** @param {Key} key */
function keyState(key) {
  if (key.revoked_at) return html`<${Chip} tone="bad">Revoked<//>`;
  if (key.expires_at && key.expires_at * 1000 < Date.now()) return html`<${Chip} tone="warn">Expired<//>`;
  return html`<${Chip} tone="good">Good<//>`;
}

/** @param {{onClose: () => void, onMade: (key: any) => void}} props */
function NewKey({ onClose, onMade }) {
  const first = me.value?.keyless ?? false;
  const [owner, setOwner] = useState(first ? (me.value?.owner ?? "") : "");
  const [name, setName] = useState("");
  const [role, setRole] = useState(first ? "admin" : "user");
  const [life, setLife] = useState("");
  const submit = async () => {
    const body = { owner: owner.trim(), name: name.trim(), role, expires_after_s: life ? Number(life) : null };
    onMade(await post("v1/keys", body));
  };
  return html`<${FormDialog} title="New key" action="Make the key" onSubmit=${submit} onClose=${onClose}>
    ${first && html`<${Notice} tone="warn">The first key locks the server: you sign in with it next. Make it an admin's.<//>`}
    <${TextField} label="Owner" value=${owner} onInput=${setOwner} required maxlength="255" hint="A person, team or program. What is made with the key belongs to it." />
    <${TextField} label="Name" value=${name} onInput=${setName} optional maxlength="255" hint="To tell keys of one owner apart, such as laptop or ci." />
    <${SelectField} label="Role" value=${role} onPick=${setRole} options=${ROLES} />
    <${SelectField} label="Expires" value=${life} onPick=${setLife} options=${LIVES} />
  <//>`;
}

import { useState } from "preact/hooks";
import { call, get, post } from "../api.js";
import { count } from "../format.js";
import { html } from "../html.js";
import { Button } from "../parts/button.js";
import { Chip } from "../parts/chip.js";
import { confirm } from "../parts/dialog.js";
import { Drawer } from "../parts/drawer.js";
import { Empty } from "../parts/empty.js";
import { Field, TextField } from "../parts/field.js";
import { FormDialog } from "../parts/form_dialog.js";
import { Loading } from "../parts/load.js";
import { More, usePages } from "../parts/more.js";
import { Page } from "../parts/page.js";
import { Secret } from "../parts/secret.js";
import { Table } from "../parts/table.js";
import { Time } from "../parts/time.js";
import { visible } from "../parts/value.js";
import { link, query, setQuery } from "../route.js";
import { notify } from "../store.js";

/**
 * @typedef {{id: string, name: string, url: string, event_types: string[], created_at: number, signing_secret_hint: string}} Webhook
 * @typedef {{id: string, event_id: string, event_type: string, batch_id: string | null, created_at: number,
 *   status: "pending" | "delivered" | "given_up", attempts: number, next_attempt_at: number | null,
 *   delivered_at: number | null, status_code: number | null, error: string | null}} Delivery
 */

const EVENTS = ["batch.completed", "batch.failed", "batch.expired", "batch.cancelled"];

/** Addresses that are told when a batch ends. */
export function Webhooks() {
  const hooks = usePages((after, signal) => get("v1/webhook_endpoints", { limit: 50, after }, { signal }));
  const [editing, setEditing] = useState(/** @type {Webhook | "new" | null} */ (null));
  const [secret, setSecret] = useState(/** @type {any} */ (null));
  const open = hooks.rows.find((hook) => hook.id === query.value.deliveries);
  const add = html`<${Button} kind="primary" icon="plus" onClick=${() => setEditing("new")}>New webhook<//>`;
  return html`<${Page} title="Webhooks" intro="Addresses of yours that are called, signed, when a batch ends." actions=${add}>
    <${Loading} of=${hooks.loaded}>
      ${() =>
        hooks.rows.length
          ? html`<${HookTable} rows=${hooks.rows} onEdit=${setEditing} onSecret=${setSecret} onChange=${hooks.reload} /><${More} of=${hooks} />`
          : html`<${Empty} icon="webhook" title="No webhooks" action=${add}>A webhook spares you asking whether a batch is done: your address gets <code>batch.completed</code> and the like, signed as Standard Webhooks says.<//>`}
    <//>
    ${editing && html`<${HookForm} hook=${editing === "new" ? null : editing} onClose=${() => setEditing(null)} onDone=${(/** @type {any} */ made) => {
      setEditing(null);
      if (made.signing_secret) setSecret(made);
      hooks.reload();
    }} />`}
    ${secret && html`<${Secret} title="Signing secret of ${visible(secret.name)}" secret=${secret.signing_secret} onClose=${() => setSecret(null)} />`}
    ${open && html`<${Deliveries} key=${open.id} hook=${open} />`}
  <//>`;
}

/** @param {{rows: Webhook[], onEdit: (hook: Webhook) => void, onSecret: (made: any) => void, onChange: () => void}} props */
function HookTable({ rows, onEdit, onSecret, onChange }) {
  const test = async (/** @type {Webhook} */ hook) => {
    const answer = await post(`v1/webhook_endpoints/${hook.id}/test`, { event_type: hook.event_types[0] });
    const taken = answer.status_code >= 200 && answer.status_code < 300;
    notify(taken ? "good" : "bad", `${visible(hook.name)} answered ${answer.status_code}.`, taken ? undefined : "Events are taken as delivered when the answer is 2xx, and sent again otherwise.");
  };
  const rotate = (/** @type {Webhook} */ hook) =>
    confirm({
      title: "Make a new signing secret?",
      text: html`<p>Messages to <b><bdi>${visible(hook.name)}</bdi></b> carry both signatures for a day, so that the receiver can be changed in peace.</p>`,
      action: "Make a new secret",
      run: async () => onSecret(await post(`v1/webhook_endpoints/${hook.id}/rotate_secret`, { keep_old_secret_active_for_24_hours: true })),
    });
  const remove = (/** @type {Webhook} */ hook) =>
    confirm({
      title: "Delete this webhook?",
      text: html`<p><b><bdi>${visible(hook.name)}</bdi></b> gets no further event, and the list of its deliveries goes with it.</p>`,
      action: "Delete",
      danger: true,
      run: async () => {
        await call("DELETE", `v1/webhook_endpoints/${hook.id}`);
        notify("good", `Deleted ${visible(hook.name)}.`);
        onChange();
      },
    });
  return html`<${Table}
    label="Webhooks"
    rows=${rows}
    rowKey=${(/** @type {Webhook} */ hook) => hook.id}
    selected=${(/** @type {Webhook} */ hook) => hook.id === query.value.deliveries}
    columns=${[
      { id: "name", label: "Name", narrow: "title", cell: (/** @type {Webhook} */ hook) => html`<b class="strong"><bdi>${visible(hook.name)}</bdi></b>` },
      { id: "url", label: "Address", narrow: "title", class: "address", cell: (/** @type {Webhook} */ hook) => html`<code class="soft"><bdi>${visible(hook.url)}</bdi></code>` },
      { id: "events", label: "Events", cell: (/** @type {Webhook} */ hook) => html`<span class="line wrap">${hook.event_types.map((type) => html`<${Chip} key=${type} dot=${false}>${type.replace("batch.", "")}<//>`)}</span>` },
      { id: "created", label: "Created", cell: (/** @type {Webhook} */ hook) => html`<${Time} at=${hook.created_at} />` },
      {
        id: "act",
        label: "",
        class: "act",
        narrow: "title",
        cell: (/** @type {Webhook} */ hook) => html`<span class="line">
          <${Button} small onClick=${() => setQuery({ deliveries: hook.id })}>Deliveries<//>
          <${Button} small onClick=${() => test(hook)}>Test<//>
          <${Button} small kind="quiet" icon="pencil" label="Change ${visible(hook.name)}" onClick=${() => onEdit(hook)} />
          <${Button} small kind="quiet" icon="rotate-ccw" label="New secret for ${visible(hook.name)}" onClick=${() => void rotate(hook)} />
          <${Button} small kind="quiet" icon="trash-2" label="Delete ${visible(hook.name)}" onClick=${() => void remove(hook)} />
        </span>`,
      },
    ]}
  />`;
}

/** @param {{hook: Webhook | null, onClose: () => void, onDone: (made: any) => void}} props */
function HookForm({ hook, onClose, onDone }) {
  const [name, setName] = useState(hook?.name ?? "");
  const [url, setUrl] = useState(hook?.url ?? "");
  const [types, setTypes] = useState(hook?.event_types ?? EVENTS.slice(0, 2));
  const submit = async () => {
    const body = { name: name.trim(), url: url.trim(), event_types: types };
    onDone(await post(hook ? `v1/webhook_endpoints/${hook.id}` : "v1/webhook_endpoints", body));
  };
  const toggle = (/** @type {string} */ type) => setTypes(types.includes(type) ? types.filter((each) => each !== type) : [...types, type]);
  return html`<${FormDialog} title=${hook ? `Change ${visible(hook.name)}` : "New webhook"} action=${hook ? "Save" : "Make the webhook"} onSubmit=${submit} onClose=${onClose}>
    <${TextField} label="Name" value=${name} onInput=${setName} required maxlength="256" />
    <${TextField} label="Address" type="url" value=${url} onInput=${setUrl} required mono maxlength="2048" placeholder="https://hooks.example.net/penstock" hint="A public address on port 80, 443, 8080 or 8443, unless the operator allows others." />
    <${Field} label="Events">
      ${(/** @type {string} */ id) => html`<div class="checks" id=${id} role="group" aria-label="Events">
        ${EVENTS.map((type) => html`<label key=${type}><input type="checkbox" checked=${types.includes(type)} onChange=${() => toggle(type)} /> ${type}</label>`)}
      </div>`}
    <//>
  <//>`;
}

/** @type {Record<string, [import("../parts/chip.js").Tone, string]>} */
const DELIVERED = { pending: ["busy", "To be sent"], delivered: ["good", "Delivered"], given_up: ["bad", "Given up"] };

/** @param {{hook: Webhook}} props */
function Deliveries({ hook }) {
  const sent = usePages((after, signal) => get(`v1/webhook_endpoints/${hook.id}/deliveries`, { limit: 30, after }, { signal }), [hook.id]);
  const again = html`<${Button} kind="quiet" icon="refresh-cw" label="Look again" onClick=${sent.reload} />`;
  return html`<${Drawer} title="Deliveries to ${visible(hook.name)}" label="Deliveries" tools=${again} onClose=${() => setQuery({ deliveries: null })}>
    <${Loading} of=${sent.loaded}>
      ${() =>
        sent.rows.length
          ? html`<ul class="timeline">${sent.rows.map((/** @type {Delivery} */ one) => html`<li key=${one.id}><${DeliveryLine} one=${one} /></li>`)}</ul><${More} of=${sent} />`
          : html`<${Empty} icon="send" title="Nothing was sent yet">The next batch of yours that ends is told to this address.<//>`}
    <//>
  <//>`;
}

/** @param {{one: Delivery}} props */
function DeliveryLine({ one }) {
  const [tone, text] = DELIVERED[one.status];
  return html`<div class="line wrap"><${Chip} tone=${tone}>${text}<//><b class="strong">${one.event_type}</b><${Time} at=${one.created_at} /></div>
    <div class="soft small">
      ${one.batch_id && html`<a href=${link("/", { q: one.batch_id })}><code>${one.batch_id}</code></a> · `}${count(one.attempts)} ${one.attempts === 1 ? "attempt" : "attempts"}
      ${one.status_code !== null && ` · answered ${one.status_code}`}${one.error && one.error !== `answered ${one.status_code}` && ` · ${visible(one.error)}`}
      ${one.next_attempt_at !== null && html` · next <${Time} at=${one.next_attempt_at} />`}
    </div>`;
}

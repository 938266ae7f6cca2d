import { get, post } from "../api.js";
import { count, plural, rate } from "../format.js";
import { html } from "../html.js";
import { Button } from "../parts/button.js";
import { Chip } from "../parts/chip.js";
import { confirm } from "../parts/dialog.js";
import { Empty } from "../parts/empty.js";
import { Loading } from "../parts/load.js";
import { Notice } from "../parts/notice.js";
import { Page } from "../parts/page.js";
import { usePolled } from "../parts/poll.js";
import { Table } from "../parts/table.js";
import { Time } from "../parts/time.js";
import { visible } from "../parts/value.js";
import { notify } from "../store.js";

/**
 * @typedef {{model: string, state: "waiting" | "halted", until: number | null, code: string, message: string}} Gate
 * @typedef {{model: string, in_flight: number, max_in_flight: number, floor: number, ceiling: number,
 *   max_per_second: number | null, reason: string, moved_at: number}} Limit
 * @typedef {{name: string, models: string[], max_concurrency: number | null, max_rpm: number | null,
 *   max_tpm: number | null, gates: Gate[], limits: Limit[]}} Provider
 */

/** Upstreams: how much of each is called, what waits, what was halted. */
export function Providers() {
  const loaded = usePolled((signal) => get("v1/providers", {}, { signal }), []);
  return html`<${Page} title="Providers" intro="The upstreams, how many calls each gets at a time, and why. Limits are found out while calling, and hold over all processes.">
    <${Loading} of=${loaded}>
      ${(/** @type {{data: Provider[], unserved: {pool: string, models: string[]}[]}} */ { data, unserved }) => html`
        ${unserved.map((left) => html`<${Notice} key=${left.pool} tone="warn">Work for <bdi>${visible(left.models.join(", "))}</bdi> waits for <b><bdi>${visible(left.pool)}</bdi></b>, which is not configured here and has no live worker. Configure a provider for it, or cancel the work.<//>`)}
        ${data.length ? data.map((provider) => html`<${ProviderCard} key=${provider.name} provider=${provider} onChange=${loaded.reload} />`) : html`<${Empty} icon="plug" title="No provider is configured">Start the server with <code>--base-url</code>, or name providers in <code>penstock.toml</code>.<//>`}
      `}
    <//>
  <//>`;
}

/** @param {{provider: Provider, onChange: () => void}} props */
function ProviderCard({ provider, onChange }) {
  const halted = provider.gates.filter((gate) => gate.state === "halted");
  const waiting = provider.gates.filter((gate) => gate.state === "waiting");
  const resume = () =>
    confirm({
      title: `Call ${provider.name} again?`,
      text: html`<p>Do so once the cause is gone. If it is not, the provider is halted again at its next refusal; no attempt is charged.</p>`,
      action: "Call again",
      run: async () => {
        await post(`v1/providers/${encodeURIComponent(provider.name)}/resume`);
        notify("good", `${provider.name} is called again.`);
        onChange();
      },
    });
  return html`<section class="card stack provider" aria-label="Provider ${provider.name}">
    <header class="line wrap">
      <h2>${provider.name}</h2>
      ${halted.length ? html`<${Chip} tone="bad">Halted<//>` : waiting.length ? html`<${Chip} tone="warn">Waiting<//>` : html`<${Chip} tone="good">Open<//>`}
      <span class="soft grow cut" title=${visible(provider.models.join(", "))}>${provider.models.includes("*") ? "every model" : html`<bdi>${visible(provider.models.join(", "))}</bdi>`}</span>
      <span class="soft small">${ceilings(provider)}</span>
      ${provider.gates.length > 0 && html`<${Button} small kind=${halted.length ? "primary" : "plain"} icon="play" onClick=${() => void resume()}>Call again<//>`}
    </header>
    ${halted.map((gate) => html`<${Notice} key=${gate.model} tone="bad"><b><bdi>${visible(gate.model)}</bdi></b> is not called: <code>${gate.code}</code>. <bdi>${visible(gate.message)}</bdi><div class="soft small">It is tried again now and then; an operator who has mended the cause opens it at once.</div><//>`)}
    ${waiting.map((gate) => html`<${Notice} key=${gate.model} tone="warn"><b><bdi>${visible(gate.model)}</bdi></b> waits${gate.until !== null && html` until <${Time} at=${gate.until} plain />`}: <code>${gate.code}</code>. <bdi>${visible(gate.message)}</bdi><//>`)}
    ${provider.limits.length ? html`<${LimitTable} limits=${provider.limits} />` : html`<p class="soft">Not called lately: a limit is found out with the first calls.</p>`}
  </section>`;
}

/** What the operator allows. @param {Provider} provider */
function ceilings(provider) {
  const told = [];
  if (provider.max_concurrency !== null) told.push(`at most ${plural(provider.max_concurrency, "call")} at a time`);
  if (provider.max_rpm !== null) told.push(`${count(provider.max_rpm)} requests a minute`);
  if (provider.max_tpm !== null) told.push(`${count(provider.max_tpm)} tokens a minute`);
  return told.join(" · ") || "no ceiling set";
}

/** @param {{limits: Limit[]}} props */
function LimitTable({ limits }) {
  return html`<${Table}
    label="Limits"
    rows=${limits}
    rowKey=${(/** @type {Limit} */ limit) => limit.model}
    columns=${[
      { id: "model", label: "Model", narrow: "title", cell: (/** @type {Limit} */ limit) => html`<b class="strong"><bdi>${visible(limit.model)}</bdi></b>` },
      { id: "use", label: "In flight", class: "meter-cell", cell: (/** @type {Limit} */ limit) => html`<${Meter} limit=${limit} />` },
      { id: "span", label: "Between", number: true, cell: (/** @type {Limit} */ limit) => html`<span class="soft">${count(limit.floor)} and ${count(limit.ceiling)}</span>` },
      { id: "pace", label: "Calls a second", number: true, cell: (/** @type {Limit} */ limit) => (limit.max_per_second === null ? html`<span class="faint">not paced</span>` : rate(limit.max_per_second)) },
      { id: "why", label: "Last large move", cell: (/** @type {Limit} */ limit) => html`<span class="why">${visible(limit.reason) || "as it began"}</span>` },
      { id: "when", label: "When", cell: (/** @type {Limit} */ limit) => html`<${Time} at=${limit.moved_at} />` },
    ]}
  />`;
}

/** @param {{limit: Limit}} props */
function Meter({ limit }) {
  const most = Math.max(1, limit.max_in_flight);
  const share = Math.min(1, limit.in_flight / most);
  return html`<div class="meter" role="img" aria-label="${count(limit.in_flight)} of ${count(limit.max_in_flight)} calls in flight">
    <span class="meter-track"><i style=${{ width: `${100 * share}%` }}></i></span>
    <span><b class="strong">${count(limit.in_flight)}</b> of ${count(limit.max_in_flight)}</span>
  </div>`;
}

import { useCallback, useEffect } from "preact/hooks";
import { get } from "../api.js";
import { html } from "../html.js";
import { useKeys } from "../keys.js";
import { Button } from "../parts/button.js";
import { Empty, Skeleton } from "../parts/empty.js";
import { useLoad } from "../parts/load.js";
import { Notice } from "../parts/notice.js";
import { Page } from "../parts/page.js";
import { Tabs } from "../parts/tabs.js";
import { short } from "../format.js";
import { visible } from "../parts/value.js";
import { go, link, query } from "../route.js";
import { notify } from "../store.js";
import { follow } from "../ticks.js";
import { Charts } from "../work/charts.js";
import { Details } from "../work/details.js";
import { Errors } from "../work/errors.js";
import { Actions, Heading, Summary } from "../work/header.js";
import { Pending } from "../work/pending.js";
import { Refusal } from "../work/refusal.js";
import { Rows } from "../work/rows.js";

/** @typedef {import("../work_types.js").WorkDetail} WorkDetail */

const TABS = { rows: Rows, charts: Charts, errors: Errors, pending: Pending, details: Details };

/** One job or batch. @param {{id: string}} props */
export function Work({ id }) {
  const path = `api/work/${encodeURIComponent(id)}`;
  const loaded = useLoad((signal) => /** @type {Promise<WorkDetail>} */ (get(path, {}, { signal })), [id]);
  const { reload, set } = loaded;
  const leave = useCallback(() => {
    notify("calm", "It was deleted.");
    go("#/", { replace: true });
  }, []);
  const known = loaded.data !== null;
  useEffect(() => (known ? follow({ query: { work: id }, onTick: set, onGone: leave }) : undefined), [id, known]);
  const to = (/** @type {string} */ tab) => link(`/work/${encodeURIComponent(id)}`, { tab: tab === "rows" ? null : tab });
  const work = loaded.data;
  useKeys([
    { key: "e", label: "Errors", run: () => go(to("errors")) },
    { key: "r", label: "Refresh", run: () => reload() },
  ]);
  if (!work) {
    const back = html`<${Button} kind="primary" href="#/">To the list of work<//>`;
    return html`<${Page} title="Work">${loaded.problem ? html`<${Empty} icon="search" title="It cannot be shown" action=${back}>${loaded.problem}<//>` : html`<${Skeleton} lines=${9} />`}<//>`;
  }
  const now = query.value.tab in TABS ? query.value.tab : "rows";
  const failures = (work.counts.failed ?? 0) + (work.counts.notFound ?? 0);
  const open = (work.counts.pending ?? 0) + (work.counts.inFlight ?? 0) + (work.counts.retrying ?? 0);
  const tabs = [
    { id: "rows", label: "Rows", count: short(work.total) },
    { id: "charts", label: "Charts" },
    { id: "errors", label: "Errors", count: failures ? short(failures) : null },
    { id: "pending", label: "Pending", count: open ? short(open) : null },
    { id: "details", label: "Details" },
  ].map((tab) => ({ ...tab, href: to(tab.id) }));
  const Tab = TABS[/** @type {keyof typeof TABS} */ (now)];
  const actions = html`<${Actions} work=${work} onChange=${reload} onDeleted=${leave} />`;
  return html`<${Page} title=${visible(work.name)} heading=${html`<${Heading} work=${work} />`} actions=${actions} full=${now === "rows" || now === "pending"}>
    ${loaded.problem && html`<${Notice} tone="bad">${loaded.problem}<//>`}
    <${Summary} work=${work} />
    ${work.state === "FAILED" && work.id.startsWith("batch_") && html`<${Refusal} id=${work.id} />`}
    <${Tabs} label="Views" now=${now} tabs=${tabs} />
    <${Tab} work=${work} onChange=${reload} />
  <//>`;
}

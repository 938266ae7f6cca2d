// The console: loads who is looking, then shows the page that the URL names.
import { useSignal } from "@preact/signals";
import { render } from "preact";
import { useEffect } from "preact/hooks";
import { explain, get } from "./api.js";
import { html } from "./html.js";
import { Help } from "./help.js";
import { useKeys } from "./keys.js";
import { Bar } from "./bar.js";
import { Button } from "./parts/button.js";
import { Confirmation } from "./parts/dialog.js";
import { Empty, Skeleton } from "./parts/empty.js";
import { Notice, Notices } from "./parts/notice.js";
import { Page } from "./parts/page.js";
import { match, path } from "./route.js";
import { ROUTES } from "./routes.js";
import { me, nextTheme, paused } from "./store.js";

/** @type {Map<string, any>} */
const loaded = new Map();

/** The page of the address, once its module is there. */
function Current() {
  const failed = useSignal("");
  const arrived = useSignal(0);
  const here = path.value;
  let found = null;
  let params = null;
  for (const route of ROUTES) {
    params = match(route.pattern, here);
    if (params) {
      found = route;
      break;
    }
  }
  arrived.value;
  const pattern = found?.pattern;
  useEffect(() => {
    if (!found || loaded.has(found.pattern)) return;
    found.load().then(
      (component) => {
        loaded.set(/** @type {string} */ (pattern), component);
        arrived.value++;
      },
      (error) => {
        failed.value = explain(error);
      },
    );
  }, [pattern]);
  if (!found || !params) {
    return html`<${Page} title="Not found">
      <${Empty} icon="search" title="There is no page ${here}" action=${html`<${Button} kind="primary" href="#/">To the list of work<//>`}>The link may be of another version.<//>
    <//>`;
  }
  const component = loaded.get(found.pattern);
  if (component) return html`<${component} key=${here} ...${params} />`;
  if (failed.value) return html`<main class="page" id="main" tabindex="-1"><${Notice} tone="bad">${failed.value}<//></main>`;
  return html`<main class="page" id="main" tabindex="-1"><${Skeleton} lines=${8} /></main>`;
}

function App() {
  const problem = useSignal("");
  const help = useSignal(false);
  const signingIn = path.value === "/sign-in";
  const known = me.value !== null;
  useEffect(() => {
    if (known || signingIn) return;
    problem.value = "";
    get("api/me").then(
      (answer) => {
        me.value = answer;
      },
      (error) => {
        problem.value = explain(error);
      },
    );
  }, [known, signingIn]);
  useKeys([
    { key: "/", label: "Search", run: () => /** @type {HTMLElement | null} */ (document.querySelector("[data-main-search]"))?.focus() },
    { key: "p", label: "Pause and resume updates", run: () => (paused.value = !paused.value) },
    { key: "t", label: "Theme: system, light, dark", run: nextTheme },
    { key: "?", label: "This help", run: () => (help.value = true) },
  ]);
  let content = html`<main class="page" id="main" tabindex="-1"><${Skeleton} lines=${8} /></main>`;
  if (known || signingIn) content = html`<${Current} />`;
  else if (problem.value) {
    const again = html`<${Button} small icon="refresh-cw" onClick=${() => location.reload()}>Try again<//>`;
    content = html`<main class="page" id="main" tabindex="-1"><${Notice} tone="bad" action=${again}>${problem.value}<//></main>`;
  }
  return html`
    <a class="skip" href="#main" onClick=${skip}>To the content</a>
    <${Bar} onHelp=${() => (help.value = true)} />
    ${content}
    <${Notices} />
    <${Confirmation} />
    ${help.value && html`<${Help} onClose=${() => (help.value = false)} />`}
  `;
}

/** The fragment is the route here, so the jump is made by hand. @param {Event} event */
function skip(event) {
  event.preventDefault();
  document.getElementById("main")?.focus();
}

const root = /** @type {HTMLElement} */ (document.getElementById("app"));
root.textContent = "";
render(html`<${App} />`, root);

import { useSignal } from "@preact/signals";
import { useEffect } from "preact/hooks";
import { address, call } from "./api.js";
import { html } from "./html.js";
import { Button } from "./parts/button.js";
import { Icon } from "./parts/icon.js";
import { path } from "./route.js";
import { ROUTES } from "./routes.js";
import { leaveForSignIn, me, nextTheme, paused, theme } from "./store.js";
import { live } from "./ticks.js";

const THEME_ICONS = { system: "monitor", light: "sun", dark: "moon" };
const LIVE = {
  live: ["good", "Live", "Updates arrive as they happen. Pause them with p."],
  connecting: ["warn", "Connecting", "The stream of updates is being opened again."],
  paused: ["calm", "Paused", "Updates are paused. Go on with p."],
  off: ["calm", "", ""],
};

/** The bar of every page: where to go, whether figures are live, who is signed in. @param {{onHelp: () => void}} props */
export function Bar({ onHelp }) {
  const open = useSignal(false);
  const here = path.value;
  useEffect(() => {
    open.value = false;
  }, [here]);
  const who = me.value;
  const entries = ROUTES.filter((route) => route.nav && who && (route.nav.when?.(who) ?? true));
  const now = (/** @type {string} */ pattern) => (pattern === "/" ? here === "/" || /^\/(work|new)(\/|$)/.test(here) : here.startsWith(pattern));
  const escape = (/** @type {KeyboardEvent} */ event) => event.key === "Escape" && (open.value = false);
  return html`<header class="bar" onKeyDown=${escape}>
    <a class="brand" href="#/" aria-label="Penstock, list of work">
      <svg width="22" height="22" viewBox="0 0 24 24" aria-hidden="true"><rect width="24" height="24" rx="6" class="brand-ground" /><path class="brand-pipe" d="M4.5 7.5h4.2l6.6 9h4.2M10.2 3.9v7.2" /></svg>
      <span>Penstock</span>
    </a>
    ${who && html`<${Button} class="menu-button" kind="quiet" icon=${open.value ? "x" : "menu"} label="Menu" aria-expanded=${open.value} onClick=${() => (open.value = !open.value)} />`}
    <nav class="bar-nav" data-open=${open.value ? "" : undefined} aria-label="Pages">
      ${entries.map(
        ({ pattern, nav }) => html`<a key=${pattern} href="#${pattern}" aria-current=${now(pattern) ? "page" : undefined}>
          <${Icon} name=${nav?.icon ?? ""} size=${15} />${nav?.label}
        </a>`,
      )}
    </nav>
    <div class="bar-end">
      <${Live} />
      <${Button} kind="quiet" icon=${THEME_ICONS[theme.value]} label="Theme: ${theme.value}" onClick=${nextTheme} />
      <${Button} class="wide-only" kind="quiet" icon="keyboard" label="Keys" onClick=${onHelp} />
      ${who && html`<span class="who cut" title="${who.owner}, ${who.role}">${who.owner}</span>`}
      ${who && who.signedIn && !who.keyless && html`<${Button} kind="quiet" icon="log-out" label="Sign out" onClick=${signOut} />`}
    </div>
  </header>`;
}

/** Leads the other tabs of this browser out, too: their streams would go on. */
const signedOut = new BroadcastChannel(`signed out of ${address("")}`);
signedOut.onmessage = leaveForSignIn;

async function signOut() {
  await call("DELETE", "console/session");
  signedOut.postMessage(null);
  leaveForSignIn();
}

function Live() {
  // Pages without a stream look every now and then, and rest while updates are paused, too.
  const now = paused.value ? "paused" : live.value;
  const [tone, text, title] = LIVE[now];
  if (now === "off") return null;
  return html`<button type="button" class="live" data-tone=${tone} title=${title} onClick=${() => (paused.value = !paused.value)}>
    <i aria-hidden="true"></i><span>${text}</span>
  </button>`;
}

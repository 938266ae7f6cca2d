import { useEffect, useRef, useState } from "preact/hooks";
import { call, explain, get } from "../api.js";
import { html } from "../html.js";
import { Button } from "../parts/button.js";
import { TextField } from "../parts/field.js";
import { Notice } from "../parts/notice.js";
import { go, query } from "../route.js";
import { me } from "../store.js";

/** Where an API key becomes a cookie that scripts cannot read. */
export function SignIn() {
  const form = useRef(/** @type {HTMLFormElement | null} */ (null));
  const [key, setKey] = useState("");
  const [problem, setProblem] = useState("");
  const [busy, setBusy] = useState(false);
  useEffect(() => {
    document.title = "Sign in · Penstock";
    form.current?.querySelector("input")?.focus();
  }, []);
  const submit = async (/** @type {SubmitEvent} */ event) => {
    event.preventDefault();
    setBusy(true);
    setProblem("");
    try {
      await call("POST", "console/session", { body: { key: key.trim() } });
      me.value = await get("api/me");
      const next = query.peek().next ?? "/";
      go(`#${next.startsWith("/") ? next : "/"}`, { replace: true });
    } catch (error) {
      setProblem(explain(error));
      setBusy(false);
    }
  };
  return html`<main class="page sign-in" id="main" tabindex="-1">
    <form class="card stack" ref=${form} onSubmit=${submit}>
      <h1>Sign in</h1>
      <p class="soft">With an API key of this server. The page keeps a cookie in its place, which ends after a while or when the key is revoked.</p>
      <${TextField} label="API key" type="password" value=${key} onInput=${setKey} mono autocomplete="current-password" spellcheck=${false} required />
      ${problem && html`<${Notice} tone="bad">${problem}<//>`}
      <${Button} kind="primary" icon="log-in" type="submit" disabled=${busy || !key.trim()}>Sign in<//>
      <p class="soft small">No key yet? Whoever runs the server makes one: <code>penstock keys create --owner you</code></p>
    </form>
  </main>`;
}

import { useCallback, useEffect, useRef, useState } from "preact/hooks";
import { explain, isAbort } from "../api.js";
import { html } from "../html.js";
import { Button } from "./button.js";
import { Skeleton } from "./empty.js";
import { Notice } from "./notice.js";

/**
 * @template T
 * @typedef {{data: T | null, problem: string | null, busy: boolean, reload: () => Promise<void>, set: (data: T) => void, stop: () => void}} Loaded
 */

/**
 * Load something, again when `depends` change or `reload` is called. What was there stays while it is loaded anew, and
 * an answer that comes too late is dropped.
 * @template T
 * @param {(signal: AbortSignal) => Promise<T>} load
 * @param {unknown[]} depends
 * @returns {Loaded<T>}
 */
export function useLoad(load, depends) {
  const [state, setState] = useState(/** @type {{data: T | null, problem: string | null, busy: boolean}} */ ({ data: null, problem: null, busy: true }));
  const running = useRef(/** @type {AbortController | null} */ (null));
  const latest = useRef(load);
  latest.current = load;
  const reload = useCallback(async () => {
    running.current?.abort();
    const controller = new AbortController();
    running.current = controller;
    setState((before) => ({ ...before, busy: true }));
    try {
      const data = await latest.current(controller.signal);
      if (!controller.signal.aborted) setState({ data, problem: null, busy: false });
    } catch (error) {
      if (isAbort(error) || controller.signal.aborted) return;
      setState((before) => ({ ...before, problem: explain(error), busy: false }));
    }
  }, []);
  useEffect(() => {
    setState((before) => ({ ...before, data: null }));
    reload();
    return () => running.current?.abort();
  }, depends);
  const set = useCallback((/** @type {T} */ data) => setState({ data, problem: null, busy: false }), []);
  const stop = useCallback(() => running.current?.abort(), []);
  return { ...state, reload, set, stop };
}

/**
 * What was loaded, or a skeleton, or what went wrong with a way to try again.
 * @template T
 * @param {{of: Loaded<T>, lines?: number, children: (data: T) => any}} props
 */
export function Loading({ of, lines = 6, children }) {
  const again = html`<${Button} small icon="refresh-cw" onClick=${of.reload}>Try again<//>`;
  const problem = of.problem && html`<${Notice} tone="bad" action=${again}>${of.problem}<//>`;
  if (of.data === null) return problem || html`<${Skeleton} lines=${lines} />`;
  return html`${problem}${children(of.data)}`;
}

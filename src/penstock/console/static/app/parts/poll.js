import { useEffect, useRef } from "preact/hooks";
import { paused } from "../store.js";
import { useLoad } from "./load.js";

const EVERY_MS = 2000;

/**
 * Do something every two seconds while a component is shown: for pages of a few lines, which no stream tells about. It
 * rests while the tab is hidden, while updates are paused, and while it is still at it.
 * @param {() => Promise<unknown>} run
 */
export function useEvery(run) {
  const latest = useRef(run);
  latest.current = run;
  useEffect(() => {
    let busy = false;
    const timer = setInterval(async () => {
      if (busy || document.hidden || paused.peek()) return;
      busy = true;
      try {
        await latest.current();
      } finally {
        busy = false;
      }
    }, EVERY_MS);
    return () => clearInterval(timer);
  }, []);
}

/**
 * Load something, and again every two seconds.
 * @template T
 * @param {(signal: AbortSignal) => Promise<T>} load
 * @param {unknown[]} depends
 * @returns {import("./load.js").Loaded<T>}
 */
export function usePolled(load, depends) {
  const loaded = useLoad(load, depends);
  useEvery(loaded.reload);
  return loaded;
}

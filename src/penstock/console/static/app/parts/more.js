import { useEffect, useRef, useState } from "preact/hooks";
import { explain } from "../api.js";
import { html } from "../html.js";
import { notify } from "../store.js";
import { Button } from "./button.js";
import { useLoad } from "./load.js";

/** @typedef {{data: any[], has_more: boolean, last_id: string | null}} ListPage a page of a list under /v1 */

/**
 * A list that is read page by page. `reload` reads as many pages again as were shown, so that nothing jumps.
 * @param {(after: string | undefined, signal?: AbortSignal) => Promise<ListPage>} load
 * @param {unknown[]} [depends]
 */
export function usePages(load, depends = []) {
  const shown = useRef(1);
  const [more, setMore] = useState(/** @type {ListPage[]} */ ([]));
  const loaded = useLoad(async (signal) => {
    const pages = [];
    let after;
    do {
      const page = await load(after, signal);
      pages.push(page);
      after = page.has_more ? (page.last_id ?? undefined) : undefined;
    } while (after && pages.length < shown.current);
    setMore(pages.slice(1));
    return pages[0];
  }, depends);
  useEffect(() => {
    shown.current = 1;
  }, depends);
  const pages = loaded.data ? [loaded.data, ...more] : [];
  const last = pages.at(-1);
  const latest = useRef(last);
  latest.current = last;
  const next = async () => {
    if (!last?.last_id) return;
    try {
      const page = await load(last.last_id);
      if (latest.current?.last_id !== last.last_id) return; // other pages, or those that were read again meanwhile
      shown.current = pages.length + 1;
      setMore((before) => [...before, page]);
    } catch (error) {
      notify("bad", explain(error));
    }
  };
  return { loaded, rows: pages.flatMap((page) => page.data), hasMore: last?.has_more ?? false, next, reload: loaded.reload };
}

/** The way to the next page. @param {{of: ReturnType<typeof usePages>}} props */
export function More({ of }) {
  return of.hasMore && html`<div class="line more"><${Button} onClick=${of.next}>Show more<//></div>`;
}

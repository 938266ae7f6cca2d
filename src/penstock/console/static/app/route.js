// Where the reader is: the URL's fragment, as a path and a query. Filters, tabs and the open row live here, so that a
// link shows what its sender saw.
import { computed, signal } from "@preact/signals";

/** @typedef {Record<string, string>} Query */

const hash = signal(location.hash);
addEventListener("hashchange", () => {
  hash.value = location.hash;
});

/** @param {string} text */
function parse(text) {
  const [path, query = ""] = text.replace(/^#/, "").split("?", 2);
  return { path: path || "/", query: /** @type {Query} */ (Object.fromEntries(new URLSearchParams(query))) };
}

const here = computed(() => parse(hash.value));

/** Path of the page, such as `/work/job_01…`. */
export const path = computed(() => here.value.path);

/** Parameters of the page: filters, tab, open row. */
export const query = computed(() => here.value.query);

/**
 * Address of a page, for `href`.
 * @param {string} target
 * @param {Record<string, string | number | null | undefined>} [values] empty values are left out
 */
export function link(target, values = {}) {
  const search = new URLSearchParams();
  for (const [name, value] of Object.entries(values)) {
    if (value !== null && value !== undefined && value !== "") search.set(name, String(value));
  }
  const text = search.toString();
  return `#${target}${text ? `?${text}` : ""}`;
}

/**
 * Go to a page.
 * @param {string} address as `link` makes it
 * @param {{replace?: boolean}} [options] `replace` leaves no step for the back button
 */
export function go(address, { replace = false } = {}) {
  if (address === location.hash) return;
  if (replace) {
    history.replaceState(null, "", `${location.pathname}${location.search}${address}`);
  } else {
    history.pushState(null, "", `${location.pathname}${location.search}${address}`);
  }
  hash.value = address;
}

addEventListener("popstate", () => {
  hash.value = location.hash;
});

/**
 * Change some of the page's parameters; null removes one.
 * @param {Record<string, string | number | null>} changes
 * @param {{replace?: boolean}} [options]
 */
export function setQuery(changes, { replace = true } = {}) {
  go(link(path.value, { ...query.value, ...changes }), { replace });
}

/**
 * Values of a pattern's variable parts, if a path fits it.
 * @param {string} pattern such as `/work/:id`
 * @param {string} text
 * @returns {Record<string, string> | null}
 */
export function match(pattern, text) {
  const wanted = pattern.split("/");
  const given = text.split("/");
  if (wanted.length !== given.length) return null;
  /** @type {Record<string, string>} */
  const found = {};
  for (const [at, part] of wanted.entries()) {
    if (part.startsWith(":")) {
      try {
        found[part.slice(1)] = decodeURIComponent(given[at]);
      } catch {
        return null;
      }
    } else if (part !== given[at]) return null;
  }
  return found;
}

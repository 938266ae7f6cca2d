// Rows for the grid: those in view are fetched, some around them are kept, and the rest is forgotten.
import { signal } from "@preact/signals";
import { explain, get, isAbort } from "../api.js";

/** @typedef {import("../work_types.js").Item} Item */
/** @typedef {{status?: string, fingerprint?: string, customId?: string, from?: number}} Filter */

const WINDOW_ROWS = 60;
const KEPT_ROWS = 600;
const SETTLE_MS = 40;
const CELL_BYTES = 240;
const MAX_FILTERED = 5000;
const OPEN = new Set(["PENDING", "PROCESSING"]);

/** @param {string} id @param {import("../api.js").Values} query @param {AbortSignal} signal */
const fetchItems = (id, query, signal) =>
  get(`api/jobs/${encodeURIComponent(id)}/items`, { ...query, cellBytes: CELL_BYTES }, { signal, exact: true });

/** Every row by its number. */
export class AllRows {
  /** @param {string} id @param {number} total */
  constructor(id, total) {
    this.id = id;
    this.total = total;
    /** Moves when rows have come. */
    this.version = signal(0);
    this.problem = signal(/** @type {string | null} */ (null));
    /** @type {Map<number, Item>} */
    this.items = new Map();
    this.first = 0;
    this.end = 0;
    /** @type {AbortController | null} */
    this.running = null;
    /** @type {ReturnType<typeof setTimeout> | undefined} */
    this.timer = undefined;
  }

  more = null;

  /** @param {number} index */
  get = (index) => this.items.get(index);

  /** A row that is loaded, whichever. @returns {Item | undefined} */
  any() {
    return this.items.values().next().value;
  }

  /** The rows in view are these now. @param {number} first @param {number} end */
  want = (first, end) => {
    this.first = first;
    this.end = end;
    if (this.missing() === null) return;
    clearTimeout(this.timer);
    // A scrollbar that is dragged passes thousands of rows: fetch where it rests.
    this.timer = setTimeout(() => this.load(), this.items.size ? SETTLE_MS : 0);
  };

  missing() {
    for (let index = this.first; index < this.end; index++) if (!this.items.has(index)) return index;
    return null;
  }

  /** Whether rows in view may still change by themselves. */
  get open() {
    for (let index = this.first; index < this.end; index++) {
      const item = this.items.get(index);
      if (!item || OPEN.has(item.status)) return true;
    }
    return false;
  }

  async load() {
    const from = this.missing();
    if (from === null) return;
    await this.fetch(from, Math.min(this.total, Math.max(this.end, from + WINDOW_ROWS)));
    const left = this.missing();
    if (left !== null && left !== from && this.problem.peek() === null) await this.load(); // a page of large rows has fewer
  }

  /** Fetch the rows in view again. */
  async refresh() {
    if (this.end > this.first) await this.fetch(this.first, this.end);
  }

  /** @param {number} first @param {number} end */
  async fetch(first, end) {
    this.running?.abort();
    const controller = new AbortController();
    this.running = controller;
    try {
      const page = await fetchItems(this.id, { from: first + 1, pageSize: Math.min(WINDOW_ROWS, end - first) }, controller.signal);
      for (const item of page.items) this.items.set(item.row - 1, item);
      this.problem.value = null;
      this.forget();
    } catch (error) {
      if (isAbort(error)) return;
      this.problem.value = explain(error);
    }
    this.version.value++;
  }

  forget() {
    if (this.items.size <= KEPT_ROWS) return;
    const middle = (this.first + this.end) / 2;
    const near = [...this.items.keys()].sort((a, b) => Math.abs(a - middle) - Math.abs(b - middle));
    for (const index of near.slice(KEPT_ROWS / 2)) this.items.delete(index);
  }

  close() {
    clearTimeout(this.timer);
    this.running?.abort();
  }
}

/** Rows that fit a filter, in their order, from the first one on: as many as the reader has scrolled through. */
export class FilteredRows {
  /** @param {string} id @param {Filter} filter */
  constructor(id, filter) {
    this.id = id;
    this.filter = filter;
    this.version = signal(0);
    this.problem = signal(/** @type {string | null} */ (null));
    /** @type {Item[]} */
    this.items = [];
    /** Number of the row from which the next page begins; null at the end. @type {number | null} */
    this.next = filter.from ?? 1;
    this.controller = new AbortController();
    this.busy = false;
    this.load();
  }

  get total() {
    return this.items.length;
  }

  /** Row from which a reader must begin anew to see more: a list is not kept without end. */
  get more() {
    return this.items.length >= MAX_FILTERED ? this.next : null;
  }

  /** Whether it is all there. */
  get ended() {
    return this.next === null;
  }

  open = false;

  /** @param {number} index */
  get = (index) => this.items[index];

  /** A row that is loaded, whichever. @returns {Item | undefined} */
  any() {
    return this.items[0];
  }

  /** @param {number} _first @param {number} end */
  want = (_first, end) => {
    if (end + WINDOW_ROWS / 2 >= this.items.length) this.load();
  };

  async load() {
    if (this.busy || this.next === null || this.more !== null) return;
    this.busy = true;
    const { status, fingerprint, customId } = this.filter;
    try {
      const query = { statuses: status, fingerprint, customId, from: this.next, pageSize: WINDOW_ROWS };
      const page = await fetchItems(this.id, query, this.controller.signal);
      this.items.push(...page.items);
      // A custom id is one row's: the search ends where it is found.
      this.next = page.next === null || (customId && page.items.length) ? null : Number(page.next);
      this.problem.value = null;
    } catch (error) {
      if (isAbort(error)) return;
      this.problem.value = explain(error);
    } finally {
      this.busy = false;
    }
    this.version.value++;
    // A page may be empty although there are more: the server looks at so many rows in one go.
    if (this.items.length === 0 && this.problem.peek() === null) await this.load();
  }

  /** What is shown stays where it is; a reader who wants it anew asks for it. */
  async refresh() {}

  close() {
    this.controller.abort();
  }
}

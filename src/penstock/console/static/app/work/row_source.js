// Rows for the grid: those in view are fetched, some around them are kept, and the rest is forgotten.
import { signal } from "@preact/signals";
import { explain, get, isAbort } from "../api.js";
import { live } from "../ticks.js";

/** @typedef {import("../work_types.js").Item} Item */
/** @typedef {{changes: string, reruns: number}} Moves how far work had moved: another text whenever a row has, and how often rows were put back to run again */
/** @typedef {{item: Item, at: Moves}} Known a row, and how far the work had moved before it was read */
/** @typedef {{status?: string, fingerprint?: string, customId?: string, from?: number}} Filter */

const WINDOW_ROWS = 60;
const KEPT_ROWS = 600;
const SETTLE_MS = 40;
const REFRESH_MS = 1000;
const CELL_BYTES = 240;
const MAX_FILTERED = 5000;
const SAMPLE_ROWS = 60;
const UNREAD = { changes: "", reruns: -1 };
const OPEN = new Set(["PENDING", "PROCESSING"]);

/** @param {string} id @param {import("../api.js").Values} query @param {AbortSignal} signal */
const fetchItems = (id, query, signal) =>
  get(`api/jobs/${encodeURIComponent(id)}/items`, { ...query, cellBytes: CELL_BYTES }, { signal, exact: true });

/** How far work has moved. @param {import("../work_types.js").WorkDetail} work @returns {Moves} */
export const movesOf = (work) => ({ changes: `${work.changes} ${work.total} ${work.state}`, reruns: work.reruns });

/**
 * Whether a row may be another by now than it was when it was read. One that has ended changes only if rows are put back
 * to run again: it is not asked for while a million others run.
 * @param {string} status @param {Moves} at @param {Moves} now
 */
export const mayDiffer = (status, at, now) => at.changes !== now.changes && (OPEN.has(status) || at.reruns !== now.reruns);

/** Time until something may be read that is read once a second at most. @param {number} readAt */
export const refreshWaitMs = (readAt) => Math.max(0, readAt + REFRESH_MS - Date.now());

/** Rows that are known, by their number. Those in view are read again when they may have changed. */
class Source {
  /** @param {string} id @param {Moves} now */
  constructor(id, now) {
    this.id = id;
    this.now = now;
    /** Moves when rows have come. */
    this.version = signal(0);
    this.problem = signal(/** @type {string | null} */ (null));
    /** @type {Map<number, Known>} */
    this.known = new Map();
    this.first = 0;
    this.end = 0;
    this.readAt = 0;
    /** Whether to look once more when what is being read has come. */
    this.again = false;
    /** @type {AbortController | null} */
    this.running = null;
    /** @type {ReturnType<typeof setTimeout> | undefined} */
    this.timer = undefined;
  }

  /** Number of the row at an index. @param {number} index */
  numberAt(index) {
    return index + 1;
  }

  /** @param {number} index */
  get = (index) => this.known.get(this.numberAt(index))?.item;

  /** A row by its number, if it is known to be what it was when it was read. @param {number} number */
  current(number) {
    const known = this.known.get(number);
    return known && live.peek() === "live" && !mayDiffer(known.item.status, known.at, this.now) ? known.item : undefined;
  }

  /** What all rows of the list have in common. @returns {import("../api.js").Values} */
  get query() {
    return {};
  }

  /** The work has moved: rows in view that may have changed are read again, once a second at most. @param {Moves} now */
  follow(now) {
    this.now = now;
    this.plan();
  }

  plan() {
    if (this.running) this.again = true;
    else if (this.timer === undefined && this.nextUnread(this.first) !== null) this.readIn(refreshWaitMs(this.readAt));
  }

  /** @param {number} waitMs */
  readIn(waitMs) {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.read(), waitMs);
  }

  /** Index of the next row in view that is missing or may have changed. @param {number} from */
  nextUnread(from) {
    for (let index = from; index < this.end; index++) {
      const known = this.known.get(this.numberAt(index));
      if (!known || mayDiffer(known.item.status, known.at, this.now)) return index;
    }
    return null;
  }

  /** Number of the last row to read on one page from an index on. @param {number} index */
  pageEnd(index) {
    const most = this.numberAt(index) + WINDOW_ROWS - 1;
    let last = index;
    for (let next = this.nextUnread(index + 1); next !== null && this.numberAt(next) <= most; next = this.nextUnread(next + 1)) last = next;
    return this.numberAt(last);
  }

  /** Read rows in view that are missing or may have changed, page by page: a page of large rows has fewer. */
  async read() {
    clearTimeout(this.timer);
    this.timer = undefined;
    this.running?.abort();
    this.again = false;
    const controller = new AbortController();
    this.running = controller;
    this.readAt = Date.now();
    try {
      for (let index = this.nextUnread(this.first); index !== null; index = this.nextUnread(Math.max(index, this.first))) {
        const last = await this.readPage(index, controller.signal);
        if (last === null) break;
        while (index < this.end && this.numberAt(index) <= last) index++;
      }
      this.problem.value = null;
    } catch (error) {
      if (isAbort(error)) return;
      this.problem.value = explain(error);
    }
    this.running = null;
    this.version.value++;
    if (this.again) this.plan();
  }

  /** Returns the number of the last row that came. @param {number} index @param {AbortSignal} signal @returns {Promise<number | null>} */
  async readPage(index, signal) {
    const at = this.now;
    const from = this.numberAt(index);
    const page = await fetchItems(this.id, { from, pageSize: this.pageEnd(index) - from + 1 }, signal);
    for (const item of page.items) this.keep({ item, at });
    this.version.value++;
    return page.items.length ? page.items.at(-1).row : null;
  }

  /** @param {Known} known */
  keep(known) {
    this.known.set(known.item.row, known);
  }

  /** After a problem. */
  retry() {
    this.read();
  }

  close() {
    clearTimeout(this.timer);
    this.running?.abort();
  }
}

/** Every row by its number. */
export class AllRows extends Source {
  /** @param {string} id @param {Moves} now @param {number} total */
  constructor(id, now, total) {
    super(id, now);
    this.total = total;
  }

  more = null;

  /** Rows from which columns are made. */
  get sample() {
    return [...this.known.values()].map(({ item }) => item);
  }

  /** The rows in view are these now. @param {number} first @param {number} end */
  want = (first, end) => {
    this.first = first;
    this.end = end;
    for (let index = first; index < end; index++) {
      // A scrollbar that is dragged passes thousands of rows: fetch where it rests.
      if (!this.known.has(this.numberAt(index))) return this.readIn(this.known.size ? SETTLE_MS : 0);
    }
    this.plan();
  };

  /** Some more are read where rows are missing. @param {number} index */
  pageEnd(index) {
    const from = this.numberAt(index);
    return this.known.has(from) ? super.pageEnd(index) : Math.min(this.total, from + WINDOW_ROWS - 1);
  }

  /** @param {Known} known */
  keep(known) {
    super.keep(known);
    if (this.known.size > KEPT_ROWS) this.forget();
  }

  forget() {
    const middle = (this.first + this.end) / 2;
    const near = [...this.known.keys()].sort((a, b) => Math.abs(a - middle) - Math.abs(b - middle));
    for (const number of near.slice(KEPT_ROWS / 2)) this.known.delete(number);
  }

  /** Read everything anew. */
  reload() {
    for (const known of this.known.values()) known.at = UNREAD;
    return this.read();
  }
}

/**
 * Rows that fit a filter, in their order, from the first one on: as many as the reader has scrolled through. One that
 * fits no longer stays where it is, and is shown as what it is now.
 */
export class FilteredRows extends Source {
  /** @param {string} id @param {Moves} now @param {Filter} filter */
  constructor(id, now, filter) {
    super(id, now);
    this.filter = filter;
    /** @type {number[]} */
    this.numbers = [];
    /** Number of the row from which the next page begins; null at the end. @type {number | null} */
    this.next = filter.from ?? 1;
    this.controller = new AbortController();
    this.busy = false;
    this.load();
  }

  /** @param {number} index */
  numberAt(index) {
    return this.numbers[index];
  }

  get total() {
    return this.numbers.length;
  }

  get sample() {
    return this.numbers.slice(0, SAMPLE_ROWS).flatMap((number) => this.known.get(number)?.item ?? []);
  }

  get query() {
    return { statuses: this.filter.status, fingerprint: this.filter.fingerprint };
  }

  /** Row from which a reader must begin anew to see more: a list is not kept without end. */
  get more() {
    return this.numbers.length >= MAX_FILTERED ? this.next : null;
  }

  /** Whether it is all there. */
  get ended() {
    return this.next === null;
  }

  /** @param {number} first @param {number} end */
  want = (first, end) => {
    this.first = first;
    this.end = end;
    if (end + WINDOW_ROWS / 2 >= this.numbers.length) this.load();
    this.plan();
  };

  async load() {
    if (this.busy || this.next === null || this.more !== null) return;
    this.busy = true;
    const { customId } = this.filter;
    const at = this.now;
    try {
      const query = { ...this.query, customId, from: this.next, pageSize: WINDOW_ROWS };
      const page = await fetchItems(this.id, query, this.controller.signal);
      for (const item of page.items) {
        this.known.set(item.row, { item, at });
        this.numbers.push(item.row);
      }
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
    if (this.numbers.length === 0 && this.problem.peek() === null) await this.load();
  }

  /** @param {Known} known */
  keep(known) {
    // Rows between those of the list come with them.
    if (this.known.has(known.item.row)) super.keep(known);
  }

  retry() {
    this.load();
    super.retry();
  }

  close() {
    super.close();
    this.controller.abort();
  }
}

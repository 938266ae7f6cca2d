// Pending rows in the order of their last change, as they were when they were read: nothing moves under the reader.
import { signal } from "@preact/signals";
import { explain, isAbort } from "../api.js";

/**
 * @typedef {{id: string, row: number, jobId: string, owner?: string, jobType?: string, status: string, attempts: number,
 *   lockedBy: string | null, updatedAt: string, summary: string | null}} PendingRow
 * @typedef {(after: string | undefined, signal: AbortSignal) => Promise<{items: PendingRow[], next: string | null}>} Load
 */

const AHEAD_ROWS = 60;
const MAX_ROWS = 20_000;
const MAX_EMPTY_PAGES = 20;

/** A list that grows as it is scrolled through. A row that has changed meanwhile comes again, later: once is enough. */
export class PendingRows {
  /** @param {Load} load */
  constructor(load) {
    this.load_ = load;
    this.version = signal(0);
    this.problem = signal(/** @type {string | null} */ (null));
    /** @type {PendingRow[]} */
    this.items = [];
    /** @type {Set<string>} */
    this.seen = new Set();
    /** @type {string | undefined} */
    this.next = undefined;
    this.ended = false;
    this.busy = false;
    this.controller = new AbortController();
    this.load();
  }

  get total() {
    return this.items.length;
  }

  /** Whether there is more than a list keeps. */
  get full() {
    return this.items.length >= MAX_ROWS;
  }

  /** @param {number} index */
  get = (index) => this.items[index];

  /** @param {number} _first @param {number} end */
  want = (_first, end) => {
    if (end + AHEAD_ROWS >= this.items.length) this.load();
  };

  async load() {
    if (this.busy || this.ended || this.full) return;
    this.busy = true;
    try {
      // A page may be empty though others follow.
      for (let pages = 0, fresh = 0; fresh === 0 && !this.ended && pages < MAX_EMPTY_PAGES; pages++) {
        const page = await this.load_(this.next, this.controller.signal);
        for (const item of page.items) {
          if (this.seen.has(item.id)) continue;
          this.seen.add(item.id);
          this.items.push(item);
          fresh++;
        }
        this.next = page.next ?? undefined;
        this.ended = page.next === null;
      }
      this.problem.value = null;
    } catch (error) {
      if (isAbort(error)) return;
      this.problem.value = explain(error);
    } finally {
      this.busy = false;
    }
    this.version.value++;
  }

  close() {
    this.controller.abort();
  }
}

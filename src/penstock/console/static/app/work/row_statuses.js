// What some rows of a job or batch are now, wherever in it they are.
import { get } from "../api.js";

const WINDOW_ROWS = 100;
const CELL_BYTES = 40;

/** Windows of row numbers that hold all of these. @param {number[]} rows in ascending order */
function windows(rows) {
  /** @type {[number, number][]} */
  const found = [];
  for (const row of rows) {
    const last = found.at(-1);
    if (last && row - last[0] < WINDOW_ROWS) last[1] = row;
    else found.push([row, row]);
  }
  return found;
}

/**
 * Ids and statuses by row number.
 * @param {string} work @param {Iterable<number>} rows
 * @returns {Promise<Map<number, {id: string, status: string}>>}
 */
export async function readStatuses(work, rows) {
  const wanted = new Set(rows);
  const statuses = new Map();
  for (const [first, last] of windows([...wanted].sort((a, b) => a - b))) {
    for (let from = first; from <= last; ) {
      const page = await get(`api/jobs/${encodeURIComponent(work)}/items`, { from, pageSize: last - from + 1, cellBytes: CELL_BYTES });
      for (const item of page.items) if (wanted.has(item.row)) statuses.set(item.row, { id: item.id, status: item.status });
      if (page.next === null || !page.items.length) break;
      from = page.items.at(-1).row + 1; // a page of large rows has fewer
    }
  }
  return statuses;
}

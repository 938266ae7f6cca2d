// What some rows of a job or batch are now, wherever in it they are.
import { get } from "../api.js";

const PAGE_ROWS = 1000;
const CELL_BYTES = 16;

/**
 * Ids and statuses by row number, read with as few requests as may be: they count as their owner's.
 * @param {string} work @param {Iterable<number>} rows
 * @param {import("../api.js").Values} [query] reads those alone that fit it, and passes over all between them
 * @returns {Promise<Map<number, {id: string, status: string}>>}
 */
export async function readStatuses(work, rows, query = {}) {
  const wanted = new Set(rows);
  const order = [...wanted].sort((a, b) => a - b);
  const isNarrowed = Object.values(query).some(Boolean);
  const statuses = new Map();
  for (let at = 0; at < order.length; ) {
    const from = order[at];
    const last = isNarrowed ? order[order.length - 1] : order.findLast((row) => row < from + PAGE_ROWS) ?? from;
    const page = await get(`api/jobs/${encodeURIComponent(work)}/items`, { ...query, from, pageSize: Math.min(PAGE_ROWS, last - from + 1), cellBytes: CELL_BYTES });
    for (const item of page.items) if (wanted.has(item.row)) statuses.set(item.row, { id: item.id, status: item.status });
    // A page of large rows has fewer.
    const next = page.next === null ? Infinity : Math.max(Number(page.next), from + 1);
    while (at < order.length && order[at] < next) at++;
  }
  return statuses;
}

// Numbers, times and durations as text. Pure functions.

const whole = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });
const compact = new Intl.NumberFormat("en-US", { notation: "compact", maximumFractionDigits: 1 });
const day = new Intl.DateTimeFormat("en-GB", { day: "numeric", month: "short", year: "numeric" });
const clock = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });

/** 1,234,567 @param {number | null | undefined} value */
export const count = (value) => (value === null || value === undefined ? "–" : whole.format(value));

/** 1.2M from 100,000 on, so that columns stay narrow. @param {number | null | undefined} value */
export function short(value) {
  if (value === null || value === undefined) return "–";
  return Math.abs(value) < 100_000 ? whole.format(value) : compact.format(value);
}

/** Rows a second. @param {number | null | undefined} value */
export function rate(value) {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0";
  if (value >= 100) return whole.format(value);
  return value >= 10 ? value.toFixed(1) : value.toFixed(value >= 1 ? 1 : 2);
}

/** Share of a whole as 42.3 %; never 100 % before all is done, never 0 % once something is. @param {number} part @param {number} total */
export function percent(part, total) {
  if (!total) return "–";
  const share = (100 * part) / total;
  if (part > 0 && share < 0.1) return "<0.1 %";
  if (part < total && share > 99.9) return ">99.9 %";
  return `${share >= 100 || share === 0 ? share.toFixed(0) : share.toFixed(1)} %`;
}

/** 3 s, 4 min 20 s, 2 h 5 min, 3 d 4 h. @param {number | null | undefined} seconds */
export function duration(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return "–";
  const left = Math.max(0, Math.round(seconds));
  if (left < 60) return `${left} s`;
  const minutes = Math.floor(left / 60);
  if (minutes < 10) return left % 60 ? `${minutes} min ${left % 60} s` : `${minutes} min`;
  if (minutes < 60) return `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  if (hours < 24) return minutes % 60 ? `${hours} h ${minutes % 60} min` : `${hours} h`;
  const days = Math.floor(hours / 24);
  return hours % 24 ? `${days} d ${hours % 24} h` : `${days} d`;
}

/** 85 ms, 1.2 s, 2 min 3 s. @param {number | null | undefined} ms */
export function milliseconds(ms) {
  if (ms === null || ms === undefined) return "–";
  if (ms < 1000) return `${ms < 10 && ms > 0 ? ms.toFixed(1) : Math.round(ms)} ms`;
  if (ms < 60_000) return `${(ms / 1000).toFixed(ms < 10_000 ? 2 : 1)} s`;
  return duration(ms / 1000);
}

/** @param {number | null | undefined} value */
export function bytes(value) {
  if (value === null || value === undefined) return "–";
  const units = ["B", "KB", "MB", "GB", "TB"];
  let size = value;
  let unit = 0;
  while (size >= 1000 && unit < units.length - 1) {
    size /= 1000;
    unit++;
  }
  return `${unit && size < 100 ? size.toFixed(1) : Math.round(size)} ${units[unit]}`;
}

/** A moment of the API: RFC 3339 text, or seconds since 1970. @param {string | number} value */
export const moment = (value) => (typeof value === "number" ? value * 1000 : Date.parse(value));

/** 18 Nov 2026, 11:02:03 @param {number} ms */
export const full = (ms) => `${day.format(ms)}, ${clock.format(ms)}`;

/** "just now", "42 s ago", "in 5 min"; from 30 days on, the day. @param {number} ms @param {number} now */
export function ago(ms, now) {
  const seconds = (now - ms) / 1000;
  if (Math.abs(seconds) > 30 * 86_400) return day.format(ms);
  if (seconds < -1) return `in ${roughly(-seconds)}`;
  return seconds < 2 ? "just now" : `${roughly(seconds)} ago`;
}

/** @param {number} seconds */
function roughly(seconds) {
  if (seconds < 60) return `${Math.floor(seconds)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min`;
  if (seconds < 86_400) return `${Math.floor(seconds / 3600)} h`;
  return `${Math.floor(seconds / 86_400)} d`;
}

/** @param {number} number @param {string} one @param {string} [many] */
export const plural = (number, one, many = `${one}s`) => `${count(number)} ${number === 1 ? one : many}`;

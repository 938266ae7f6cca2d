// Which columns a grid of rows has, and what is in their cells.
import { html } from "../html.js";
import { Exact } from "../api.js";
import { count } from "../format.js";
import { StatusChip } from "../parts/chip.js";
import { fixedPx, GridCheck } from "../parts/grid.js";
import { Time } from "../parts/time.js";
import { cellName, cellText } from "../parts/value.js";

/** @typedef {import("../work_types.js").Item} Item */
/** @typedef {import("../parts/grid.js").GridColumn} GridColumn */

const MAX_COLUMNS = 40;
const MIN_CHARS = 5;
const NARROW_CHARS = 17;
const MAX_CHARS = 42;

/** @param {any} value */
const isObject = (value) => value !== null && typeof value === "object" && !Array.isArray(value) && Object.getPrototypeOf(value) === Object.prototype;

/** What a request asks: the last message, the prompt, the input. @param {any} body */
export function askedText(body) {
  if (!isObject(body)) return cellText(body);
  const messages = Array.isArray(body.messages) ? body.messages : Array.isArray(body.input) ? body.input : null;
  if (messages) return cellText(plainText(messages.at(-1)?.content));
  return cellText(body.prompt ?? body.input ?? body);
}

/** What an answer says: its text, where it has one. @param {any} body */
export function answeredText(body) {
  if (!isObject(body)) return cellText(body);
  const message = body.choices?.[0]?.message?.content ?? body.choices?.[0]?.text;
  const text = message ?? plainText(body.content ?? body.output?.flatMap?.((/** @type {any} */ each) => each?.content ?? []));
  return text === undefined || text === null || text === "" ? cellText(body.output_text ?? body.data ?? body) : cellText(plainText(text));
}

/** @param {any} content */
function plainText(content) {
  if (!Array.isArray(content)) return content;
  return content.map((part) => (typeof part === "string" ? part : part?.text ?? `[${part?.type ?? "part"}]`)).join(" ");
}

/** Names in the order in which rows have them. @param {Item[]} sample @param {"input" | "result"} side @param {string[]} [known] */
function names(sample, side, known = []) {
  const found = new Set(known);
  for (const item of sample) if (isObject(item[side])) for (const name of Object.keys(item[side])) found.add(name);
  return [...found];
}

/**
 * Width for a column from what some rows have in it: from what it must have to what it can use.
 * @param {string} label @param {string[]} texts
 */
function width(label, texts) {
  const longest = Math.max(label.length, ...texts.map((text) => text.length));
  const wide = texts.some((text) => /\d{3}/.test(text)) ? 8.6 : 7.9; // digits are wider than letters
  const pixels = (/** @type {number} */ chars) => Math.round(Math.max(MIN_CHARS, chars) * wide + 22);
  return { minPx: pixels(Math.min(longest, NARROW_CHARS)), maxPx: pixels(Math.min(longest, MAX_CHARS)) };
}

/**
 * @param {Item[]} sample rows from which columns and widths are taken
 * @param {{kind: "job" | "batch", total: number, inputColumns: string[], columns: string[], statusOf: (status: string) => string, isSelected: (index: number) => boolean}} about `inputColumns` and `columns` are known before rows are
 * @returns {GridColumn[]}
 */
export function rowColumns(sample, { kind, total, inputColumns, columns, statusOf, isSelected }) {
  const fixed = [
    { id: "#check", label: "Select", unlabelled: true, width: fixedPx(34), pinned: true, cell: (/** @type {Item} */ _item, /** @type {number} */ index) => html`<${GridCheck} index=${index} selected=${isSelected(index)} />` },
    { id: "#row", label: "Row", width: fixedPx(26 + 8 * Math.max(4, count(total).length)), pinned: true, number: true, cell: (/** @type {Item | undefined} */ item, /** @type {number} */ index) => html`<span class="soft">${count(item?.row ?? index + 1)}</span>` },
    { id: "#status", label: "Status", width: fixedPx(108), pinned: true, cell: (/** @type {Item | undefined} */ item) => item && html`<${StatusChip} status=${statusOf(item.status)} />` },
  ];
  const ends = [
    { id: "#attempts", label: "Attempts", width: fixedPx(76), number: true, cell: (/** @type {Item} */ item) => (typeof item.attempts === "number" ? count(item.attempts) : "") },
    { id: "#updated", label: "Updated", width: fixedPx(96), number: true, cell: (/** @type {Item} */ item) => html`<span class="soft"><${Time} at=${item.updatedAt} /></span>` },
  ];
  return [...fixed, ...(kind === "batch" ? requestColumns(sample) : tableColumns(sample, inputColumns, columns)), ...errorColumn(sample), ...ends];
}

/** @param {Item[]} sample */
function requestColumns(sample) {
  /** @type {[string, string, string, (item: Item) => string][]} */
  const wanted = [
    ["customId", "Custom id", "input", (item) => cellName(item.customId)],
    ["model", "Model", "input", (item) => cellName(item.input?.model)],
    ["asked", "Request", "input", (item) => askedText(item.input)],
    ["answered", "Answer", "result", (item) => (item.status === "DONE" && item.result !== null ? answeredText(item.result) : "")],
  ];
  return wanted.map(([id, label, group, text]) => ({
    id, label, group, width: width(label, sample.map(text)), cell: (/** @type {Item} */ item) => html`<bdi>${text(item)}</bdi>`,
  }));
}

/** @param {Item[]} sample @param {string[]} inputColumns @param {string[]} columns */
function tableColumns(sample, inputColumns, columns) {
  /** @type {["input" | "result", string[]][]} */
  const sides = [
    ["input", names(sample, "input", inputColumns)],
    ["result", names(sample, "result", columns)],
  ];
  return sides.flatMap(([side, found]) => [
    ...found.slice(0, MAX_COLUMNS).map((name) => {
      const text = (/** @type {Item} */ item) => (isObject(item[side]) ? cellText(item[side][name]) : "");
      const isNumber = sample.some((item) => text(item) !== "") && sample.every((item) => text(item) === "" || typeof item[side]?.[name] === "number" || item[side]?.[name] instanceof Exact);
      return {
        id: `${side}.${name}`, label: cellName(name), group: side, number: isNumber,
        width: width(name, sample.map(text)), cell: (/** @type {Item} */ item) => html`<bdi>${text(item)}</bdi>`,
      };
    }),
    ...(found.length > MAX_COLUMNS ? [leftOut(side, found.length - MAX_COLUMNS)] : []),
  ]);
}

/** In the place of columns that are more than a grid can draw at speed. @param {string} side @param {number} number @returns {GridColumn} */
const leftOut = (side, number) => ({ id: `${side}#more`, label: `+ ${count(number)} more`, group: side, width: fixedPx(96), cell: () => html`<span class="faint" title="The open row has all columns">…</span>` });

/** The column of errors is there once a row has one. @param {Item[]} sample */
function errorColumn(sample) {
  const texts = sample.map((item) => cellText(item.error)).filter(Boolean);
  if (!texts.length) return [];
  return [{ id: "#error", label: "Error", width: width("Error", texts), cell: (/** @type {Item} */ item) => html`<bdi class="failed">${cellText(item.error)}</bdi>` }];
}

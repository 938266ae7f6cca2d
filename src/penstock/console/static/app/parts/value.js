// Values of rows as text. Nothing of them is ever markup: control characters and marks that turn the direction of text
// are shown as what they are, so that a name cannot look like another.
import { Exact } from "../api.js";

const CELL_CHARS = 300;
const HIDDEN = /[\u0000-\u0008\u000b\u000c\u000e-\u001f\u007f\u202a-\u202e\u2066-\u2069]/g;
/** @type {Record<string, string>} */
const MARKS = {
  "\u202a": "[LRE]", "\u202b": "[RLE]", "\u202c": "[PDF]", "\u202d": "[LRO]", "\u202e": "[RLO]",
  "\u2066": "[LRI]", "\u2067": "[RLI]", "\u2068": "[FSI]", "\u2069": "[PDI]", "\u007f": "␡",
};

/** @param {string} text */
export const visible = (text) => text.replace(HIDDEN, (mark) => MARKS[mark] ?? String.fromCharCode(0x2400 + mark.charCodeAt(0)));

/** A value on one line, cut to what a cell can show. @param {unknown} value */
export function cellText(value) {
  if (value === null || value === undefined) return "";
  const text = typeof value === "string" ? value : typeof value === "object" && !(value instanceof Exact) ? stringify(value) : String(value);
  return visible(text.length > CELL_CHARS ? `${text.slice(0, CELL_CHARS)}…` : text);
}

/** JSON with every digit of its numbers. @param {unknown} value @param {number} [indent] */
export function stringify(value, indent) {
  /** @type {string[]} */
  const exact = [];
  const text = JSON.stringify(
    value,
    (_key, each) => {
      if (!(each instanceof Exact)) return each;
      exact.push(each.text);
      return `\u0001${exact.length - 1}\u0001`;
    },
    indent,
  );
  return exact.length ? text.replace(/"\\u0001(\d+)\\u0001"/g, (_all, at) => exact[Number(at)]) : text;
}

/** A value as a reader wants to see it in full: text as text, the rest as JSON. @param {unknown} value */
export const fullText = (value) => visible(typeof value === "string" ? value : stringify(value, 2) ?? "");

// Values of rows as text. Nothing of them is ever markup: control characters and marks that turn the direction of text
// or cannot be seen are shown as what they are, so that a name cannot look like another.
import { Exact } from "../api.js";

const CELL_CHARS = 300;
const HIDDEN = /[\u0000-\u0008\u000b\u000c\u000e-\u001f\u007f\u061c\u200b-\u200f\u202a-\u202e\u2066-\u2069\ufeff]/g;
/** In front of a joiner and behind it: families, professions and flags are several pictures in one. Chromium 156 finds no class of these at an end. */
const PICTURE_BEFORE = /(?:\p{Extended_Pictographic}|\p{Emoji_Modifier}|\ufe0f)$/u;
const PICTURE_AFTER = /^\p{Extended_Pictographic}/u;
/** @type {Record<string, string>} */
const MARKS = {
  "\u202a": "[LRE]", "\u202b": "[RLE]", "\u202c": "[PDF]", "\u202d": "[LRO]", "\u202e": "[RLO]",
  "\u2066": "[LRI]", "\u2067": "[RLI]", "\u2068": "[FSI]", "\u2069": "[PDI]", "\u007f": "␡",
  "\u061c": "[ALM]", "\u200b": "[ZWSP]", "\u200c": "[ZWNJ]", "\u200d": "[ZWJ]", "\u200e": "[LRM]", "\u200f": "[RLM]", "\ufeff": "[BOM]",
};

/** @param {string} text */
export const visible = (text) =>
  text.replace(HIDDEN, (mark, at) => {
    if (mark === "\u200d" && PICTURE_BEFORE.test(text.slice(Math.max(0, at - 2), at)) && PICTURE_AFTER.test(text.slice(at + 1, at + 3))) return mark;
    return MARKS[mark] ?? String.fromCharCode(0x2400 + mark.charCodeAt(0));
  });

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

// Values of rows as text. Nothing of them is ever markup: control characters and marks that turn the direction of text
// or cannot be seen are shown as what they are. In names all of them, so that no name looks like another; in values not
// those by which words of many scripts are spelled.
import { Exact } from "../api.js";

const CELL_CHARS = 300;
const HIDDEN = /[\u0000-\u0008\u000b\u000c\u000e-\u001f\u007f\u061c\u200b-\u200f\u202a-\u202e\u2066-\u2069\ufeff]/g;
/** In front of a joiner and behind it: families, professions and flags are several pictures in one. Chromium 156 finds no class of these at an end. */
const PICTURE_BEFORE = /(?:\p{Extended_Pictographic}|\p{Emoji_Modifier}|\ufe0f)$/u;
const PICTURE_AFTER = /^\p{Extended_Pictographic}/u;
/** Letters that a joiner shapes or parts: of every script but those in which it would do nothing that is seen. */
const JOINED_BEFORE = /(?![\p{scx=Latn}\p{scx=Grek}\p{scx=Cyrl}\p{scx=Zyyy}\p{scx=Zinh}])[\p{L}\p{M}]$/u;
const JOINED_AFTER = /^(?![\p{scx=Latn}\p{scx=Grek}\p{scx=Cyrl}\p{scx=Zyyy}\p{scx=Zinh}])[\p{L}\p{M}]/u;
/** A letter: the Arabic mark of direction counts as Arabic itself. */
const RIGHT_TO_LEFT = /(?=\p{L})[\p{sc=Arab}\p{sc=Hebr}\p{sc=Nkoo}\p{sc=Syrc}\p{sc=Thaa}]/u;
const JOINERS = new Set(["\u200c", "\u200d"]);
/** They give a neighbour its place in a line; the others turn whole stretches of it. */
const DIRECTIONS = new Set(["\u061c", "\u200e", "\u200f"]);
/** @type {Record<string, string>} */
const MARKS = {
  "\u202a": "[LRE]", "\u202b": "[RLE]", "\u202c": "[PDF]", "\u202d": "[LRO]", "\u202e": "[RLO]",
  "\u2066": "[LRI]", "\u2067": "[RLI]", "\u2068": "[FSI]", "\u2069": "[PDI]", "\u007f": "␡",
  "\u061c": "[ALM]", "\u200b": "[ZWSP]", "\u200c": "[ZWNJ]", "\u200d": "[ZWJ]", "\u200e": "[LRM]", "\u200f": "[RLM]", "\ufeff": "[BOM]",
};

/**
 * @param {string} text
 * @param {(mark: string, before: string, after: string) => boolean} isOrdinary
 */
const showMarks = (text, isOrdinary) =>
  text.replace(HIDDEN, (mark, at) => {
    const before = text.slice(Math.max(0, at - 2), at);
    const after = text.slice(at + 1, at + 3);
    if (mark === "\u200d" && PICTURE_BEFORE.test(before) && PICTURE_AFTER.test(after)) return mark;
    if (isOrdinary(mark, before, after)) return mark;
    return MARKS[mark] ?? String.fromCharCode(0x2400 + mark.charCodeAt(0));
  });

/** A name, with every mark that could hide how it differs from another. @param {string} text */
export const visible = (text) => showMarks(text, () => false);

/**
 * Text that is read rather than told apart: joiners stay beside letters that take them, and marks of direction where
 * letters run from right to left.
 * @param {string} text
 */
export function readable(text) {
  const mayTurn = RIGHT_TO_LEFT.test(text);
  return showMarks(text, (mark, before, after) => (JOINERS.has(mark) ? JOINED_BEFORE.test(before) || JOINED_AFTER.test(after) : mayTurn && DIRECTIONS.has(mark)));
}

/** @param {unknown} value */
function cut(value) {
  if (value === null || value === undefined) return "";
  const text = typeof value === "string" ? value : typeof value === "object" && !(value instanceof Exact) ? stringify(value) : String(value);
  return text.length > CELL_CHARS ? `${text.slice(0, CELL_CHARS)}…` : text;
}

/** A value on one line, cut to what a cell can show. @param {unknown} value */
export const cellText = (value) => readable(cut(value));

/** The same of a name. @param {unknown} value */
export const cellName = (value) => visible(cut(value));

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
export const fullText = (value) => readable(typeof value === "string" ? value : stringify(value, 2) ?? "");

// `html` makes virtual elements from a tagged template. Values are always text or attributes, never markup.
import htm from "htm";
import { h } from "preact";

export const html = htm.bind(h);

/** A text of the server's, what it has in backticks as code. @param {string} text */
export const withCode = (text) => text.split("`").map((part, at) => (at % 2 ? html`<code>${part}</code>` : part));

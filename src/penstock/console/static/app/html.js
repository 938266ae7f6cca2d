// `html` makes virtual elements from a tagged template. Values are always text or attributes, never markup.
import htm from "htm";
import { h } from "preact";

export const html = htm.bind(h);

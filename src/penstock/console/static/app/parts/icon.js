import { html } from "../html.js";

/**
 * A picture of the sprite. Without a title it is decoration, and not read aloud.
 * @param {{name: string, size?: number, title?: string, class?: string}} props
 */
export function Icon({ name, size = 16, title, class: extra = "" }) {
  return html`<svg
    class="icon ${extra}"
    width=${size}
    height=${size}
    role=${title ? "img" : undefined}
    aria-label=${title}
    aria-hidden=${title ? undefined : "true"}
  >
    <use href="static/vendor/icons.svg#${name}" />
  </svg>`;
}

import { useEffect, useLayoutEffect, useReducer, useRef } from "preact/hooks";
import { count } from "../format.js";
import { html } from "../html.js";
import { HEAD_PX, ROW_PX, Scroll } from "./grid_scroll.js";

/**
 * @typedef {object} GridColumn
 * @property {string} id
 * @property {string} label
 * @property {{minPx: number, maxPx: number}} width
 * @property {boolean} [unlabelled] its label is read aloud, not shown
 * @property {boolean} [number]
 * @property {boolean} [pinned] stays at the left edge
 * @property {string} [group] such as "input": columns of one group have one ground in the head
 * @property {(item: any, index: number) => any} cell
 */

/**
 * @typedef {object} GridHandle what the page around a grid can do with it
 * @property {(by: number, extend?: boolean) => void} move
 * @property {(index: number) => void} show
 * @property {() => void} focus
 */

/**
 * A grid over every row, of which the DOM holds those in view. It asks for rows by `onWindow` and draws what `get` has.
 * @param {{
 *   label: string, total: number, columns: GridColumn[], get: (index: number) => any, active: number,
 *   onActive: (index: number, extend: boolean) => void, onOpen: (index: number) => void, onToggle: (index: number) => void,
 *   isSelected: (index: number) => boolean, onWindow: (first: number, end: number) => void, handle?: (handle: GridHandle) => void,
 * }} props
 */
export function Grid({ label, total, columns, get, active, onActive, onOpen, onToggle, isSelected, onWindow, handle }) {
  const [, draw] = useReducer((/** @type {number} */ n) => n + 1, 0);
  const element = useRef(/** @type {HTMLDivElement | null} */ (null));
  const scroll = useRef(/** @type {Scroll | null} */ (null));
  scroll.current ??= new Scroll(() => draw(undefined));
  const at = scroll.current;
  useLayoutEffect(() => watchSize(/** @type {HTMLElement} */ (element.current), at, () => latest.current.total), []);
  useLayoutEffect(() => at.resize(total, at.viewPx), [total]);
  const { first, end } = at;
  useEffect(() => {
    if (end > first) onWindow(first, end);
  }, [first, end, onWindow]);
  const move = (/** @type {number} */ to, extend = false) => {
    if (total === 0) return;
    const index = Math.min(total - 1, Math.max(0, to));
    at.reveal(index);
    onActive(index, extend);
  };
  const latest = useRef({ move, active, total });
  latest.current = { move, active, total };
  useEffect(() => {
    handle?.({
      move: (by, extend) => latest.current.move(latest.current.active + by, extend),
      show: (index) => at.centre(index),
      focus: () => element.current?.focus({ preventScroll: true }),
    });
  }, []);
  const keyDown = (/** @type {KeyboardEvent} */ event) => {
    if (event.target instanceof HTMLInputElement || event.altKey) return;
    const steps = { ArrowDown: active + 1, ArrowUp: active - 1, PageDown: active + at.wholeRows, PageUp: active - at.wholeRows, Home: 0, End: total - 1 };
    if (event.key in steps) move(steps[/** @type {keyof typeof steps} */ (event.key)], event.shiftKey);
    else if (event.target instanceof Element && event.target.closest("a")) return;
    else if (event.key === "Enter" && active >= 0) onOpen(active);
    else if (event.key === " " && active >= 0) onToggle(active);
    else return;
    event.preventDefault();
  };
  const rows = [];
  for (let index = first; index < end; index++) {
    rows.push(html`<${Row} key=${index} index=${index} item=${get(index)} columns=${columns} active=${index === active} selected=${isSelected(index)} />`);
  }
  const shown = active >= first && active < end;
  return html`<div
    class="grid"
    ref=${element}
    role="grid"
    tabindex="0"
    aria-label=${label}
    aria-rowcount=${total + 1}
    aria-colcount=${columns.length}
    aria-multiselectable="true"
    aria-activedescendant=${shown ? `grid-row-${active}` : undefined}
    onScroll=${() => at.scrolled()}
    onKeyDown=${keyDown}
    onClick=${(/** @type {MouseEvent} */ event) => click(event, { onActive, onOpen, onToggle })}
  >
    <div class="grid-space" style=${{ height: `${HEAD_PX + at.scale.heightPx}px`, minWidth: `${columns.reduce((sum, column) => sum + column.width.minPx, 0)}px` }}>
      <div class="grid-pane" style=${{ height: `${HEAD_PX + at.viewPx}px`, ...measures(columns) }}>
        <div class="grid-row grid-head" role="row" aria-rowindex="1">
          ${columns.map(
            (column, n) => html`<div key=${column.id} role="columnheader" class="${column.number ? "number" : ""} ${column.pinned ? "pinned" : ""}" data-group=${column.group} data-pin=${column.pinned ? n : undefined} title=${column.label}>${column.unlabelled ? html`<span class="only-read">${column.label}</span>` : column.label}</div>`,
          )}
        </div>
        <div class="grid-rows" role="rowgroup" style=${{ transform: `translateY(${first * ROW_PX - at.topPx}px)` }}>${rows}</div>
      </div>
    </div>
  </div>`;
}

/**
 * @param {{index: number, item: any, columns: GridColumn[], active: boolean, selected: boolean}} props
 */
function Row({ index, item, columns, active, selected }) {
  return html`<div
    class="grid-row"
    role="row"
    id="grid-row-${index}"
    data-index=${index}
    data-active=${active ? "" : undefined}
    aria-rowindex=${index + 2}
    aria-selected=${selected}
    aria-busy=${item === undefined ? "true" : undefined}
  >
    ${columns.map(
      (column, n) => html`<div key=${column.id} role="gridcell" class="${column.number ? "number" : ""} ${column.pinned ? "pinned" : ""}" data-pin=${column.pinned ? n : undefined}>
        ${item !== undefined || column.pinned ? column.cell(item, index) : html`<i class="grid-wait"></i>`}
      </div>`,
    )}
  </div>`;
}

/** Widths of columns: they share the room there is, and from their narrowest on the grid scrolls sideways. @param {GridColumn[]} columns */
function measures(columns) {
  const tracks = columns.map(({ width }) => (width.minPx === width.maxPx ? `${width.minPx}px` : `minmax(${width.minPx}px, ${width.maxPx}px)`));
  return { "--columns": `${tracks.join(" ")} minmax(0, 1fr)`, "--pin-1": `${columns[0].width.minPx}px`, "--pin-2": `${columns[0].width.minPx + columns[1].width.minPx}px` };
}

/** @param {HTMLElement} element @param {Scroll} at @param {() => number} total */
function watchSize(element, at, total) {
  at.element = element;
  const measure = () => at.resize(total(), Math.max(ROW_PX, element.clientHeight - HEAD_PX));
  const observer = new ResizeObserver(measure);
  observer.observe(element);
  const wheel = (/** @type {WheelEvent} */ event) => at.wheel(event);
  element.addEventListener("wheel", wheel, { passive: false });
  measure();
  return () => {
    observer.disconnect();
    element.removeEventListener("wheel", wheel);
  };
}

/**
 * @param {MouseEvent} event
 * @param {{onActive: (index: number, extend: boolean) => void, onOpen: (index: number) => void, onToggle: (index: number) => void}} to
 */
function click(event, { onActive, onOpen, onToggle }) {
  const target = /** @type {HTMLElement} */ (event.target);
  const row = target.closest("[data-index]");
  if (!(row instanceof HTMLElement) || target.closest("a")) return;
  const index = Number(row.dataset.index);
  if (target.closest(".grid-check")) {
    if (event.shiftKey) onActive(index, true);
    else onToggle(index);
    return;
  }
  if (event.shiftKey) {
    onActive(index, true);
    getSelection()?.removeAllRanges();
  } else if (event.ctrlKey || event.metaKey) onToggle(index);
  else if (getSelection()?.isCollapsed !== false) {
    onActive(index, false);
    onOpen(index);
  }
}

/** A width that stays. @param {number} px */
export const fixedPx = (px) => ({ minPx: px, maxPx: px });

/** Selects a row. @param {{index: number, selected: boolean}} props */
export function GridCheck({ index, selected }) {
  return html`<span class="grid-check" aria-hidden="true"><i data-on=${selected ? "" : undefined}></i><span class="only-read">Row ${count(index + 1)}</span></span>`;
}

// Scrolling over any number of rows of one height. A browser's elements end at some 16 million pixels, so from there on
// the scrollbar stands for more than it shows: a pixel of it is several of the rows'. Wheel and keys still move by rows.

export const ROW_PX = 28;
export const HEAD_PX = 32;
const MAX_PX = 8_000_000;

/**
 * @param {number} total rows
 * @param {number} viewPx height of the part that shows rows
 */
export function scale(total, viewPx) {
  const fullPx = Math.max(total * ROW_PX, viewPx);
  const heightPx = Math.min(fullPx, MAX_PX);
  const rangePx = fullPx - viewPx;
  const scrollPx = heightPx - viewPx;
  return { heightPx, rangePx, factor: scrollPx > 0 ? rangePx / scrollPx : 1 };
}

/** Where a grid stands. What is exact is `topPx`, in pixels of the rows; the scrollbar follows it. */
export class Scroll {
  /** @param {() => void} onMove */
  constructor(onMove) {
    this.onMove = onMove;
    this.topPx = 0;
    this.viewPx = 0;
    this.total = 0;
    /** @type {HTMLElement | null} */
    this.element = null;
    this.setTo = 0;
  }

  get scale() {
    return scale(this.total, this.viewPx);
  }

  get first() {
    return Math.floor(this.topPx / ROW_PX);
  }

  /** Index after the last row that is at least partly in view. */
  get end() {
    return Math.min(this.total, Math.ceil((this.topPx + this.viewPx) / ROW_PX));
  }

  get wholeRows() {
    return Math.max(1, Math.floor(this.viewPx / ROW_PX));
  }

  /** The scrollbar was moved, by the reader or by `moveTo`. */
  scrolled() {
    const element = this.element;
    if (!element || Math.abs(element.scrollTop - this.setTo) < 1) return;
    this.setTo = element.scrollTop;
    const { factor, rangePx } = this.scale;
    // The end of the scrollbar is the end of the rows, whatever was rounded on the way.
    const atEnd = element.scrollTop >= element.scrollHeight - element.clientHeight - 1;
    this.topPx = atEnd ? rangePx : Math.min(rangePx, element.scrollTop * factor);
    this.onMove();
  }

  /** @param {number} topPx */
  moveTo(topPx) {
    const { factor, rangePx } = this.scale;
    this.topPx = Math.min(Math.max(0, topPx), rangePx);
    if (this.element) {
      this.element.scrollTop = this.topPx / factor;
      this.setTo = this.element.scrollTop;
    }
    this.onMove();
  }

  /** Bring a row into view, moving as little as possible. @param {number} index */
  reveal(index) {
    const above = index * ROW_PX;
    const below = above + ROW_PX - this.viewPx;
    if (above < this.topPx) this.moveTo(above);
    else if (below > this.topPx) this.moveTo(below);
  }

  /** Bring a row into the middle. @param {number} index */
  centre(index) {
    this.moveTo(index * ROW_PX - (this.viewPx - ROW_PX) / 2);
  }

  /** @param {number} total @param {number} viewPx */
  resize(total, viewPx) {
    if (total === this.total && viewPx === this.viewPx) return;
    this.total = total;
    this.viewPx = viewPx;
    this.moveTo(this.topPx);
  }

  /** A turn of the wheel moves as many pixels of rows as it would on a short list. @param {WheelEvent} event */
  wheel(event) {
    if (event.ctrlKey || event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY) || this.scale.factor === 1) return;
    const unit = event.deltaMode === WheelEvent.DOM_DELTA_LINE ? ROW_PX : event.deltaMode === WheelEvent.DOM_DELTA_PAGE ? this.viewPx : 1;
    event.preventDefault();
    this.moveTo(this.topPx + event.deltaY * unit);
  }
}

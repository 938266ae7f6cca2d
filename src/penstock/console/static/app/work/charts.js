import { signal } from "@preact/signals";
import { useEffect, useRef } from "preact/hooks";
import uPlot from "uplot";
import { get } from "../api.js";
import { count, full, milliseconds, rate } from "../format.js";
import { html } from "../html.js";
import { Button } from "../parts/button.js";
import { Empty } from "../parts/empty.js";
import { Loading, useLoad } from "../parts/load.js";
import { Segments } from "../parts/tabs.js";
import { link, query, setQuery } from "../route.js";
import { painted, paused } from "../store.js";
import { hasEnded } from "./actions.js";

/** @typedef {import("../work_types.js").WorkDetail} WorkDetail */
/** @typedef {{at: string, seconds: number, complete: boolean, completed: number, failed: number, notFound: number, skipped: number, retried: number, refused: number, p50Ms: number | null, p95Ms: number | null, p99Ms: number | null, limitNow: number | null, inFlight: number | null, [more: string]: any}} Sample */
/** @typedef {{label: string, tone: string, of: (sample: Sample) => number | null, area?: boolean}} Line */
/** @typedef {{title: string, unit: string, show: (value: number) => string, whole?: boolean, lines: Line[]}} ChartSpec */

const HEIGHT_PX = 190;
const REFRESH_MS = 2000;
/** Workers write the figures of a second when it is over: charts are loaded so often after the end, for the last ones. */
const REFRESHES_AFTER_END = 10;
const WHOLE_STEPS = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000];
const SPANS = [
  { id: "5", label: "5 min" },
  { id: "60", label: "1 h" },
  { id: "", label: "All" },
];

const perSecond = (/** @type {string} */ name) => (/** @type {Sample} */ sample) => sample[name] / sample.seconds;

/** @type {ChartSpec[]} */
const CHARTS = [
  {
    title: "Throughput", unit: "rows/s", show: rate,
    lines: [
      { label: "Done", tone: "good", of: perSecond("completed"), area: true },
      { label: "Failed", tone: "bad", of: perSecond("failed") },
      { label: "Not found", tone: "warn", of: perSecond("notFound") },
      { label: "Skipped", tone: "calm", of: perSecond("skipped") },
    ],
  },
  {
    title: "Limit and calls in flight", unit: "calls", show: count, whole: true,
    lines: [
      { label: "Limit", tone: "calm", of: (sample) => sample.limitNow },
      { label: "In flight", tone: "busy", of: (sample) => sample.inFlight, area: true },
    ],
  },
  {
    title: "Latency", unit: "", show: milliseconds,
    lines: [
      { label: "p50", tone: "busy", of: (sample) => sample.p50Ms },
      { label: "p95", tone: "retry", of: (sample) => sample.p95Ms },
      { label: "p99", tone: "warn", of: (sample) => sample.p99Ms },
    ],
  },
  {
    title: "Errors", unit: "a second", show: rate,
    lines: [
      { label: "Failed", tone: "bad", of: perSecond("failed"), area: true },
      { label: "Tried again", tone: "retry", of: perSecond("retried") },
      { label: "Refused (429)", tone: "warn", of: perSecond("refused") },
    ],
  },
];

/** Index of the sample under the cursor, for the numbers of all charts; null is the last one. */
const pointed = signal(/** @type {number | null} */ (null));

/** Figures over time, with one cursor for all charts. @param {{work: WorkDetail}} props */
export function Charts({ work }) {
  const { span = "" } = query.value;
  const loaded = useLoad(
    (abort) => {
      const from = span ? new Date(Date.now() - Number(span) * 60_000).toISOString() : undefined;
      return /** @type {Promise<{samples: Sample[]}>} */ (get(`api/work/${encodeURIComponent(work.id)}/samples`, { from }, { signal: abort }));
    },
    [work.id, span],
  );
  useEffect(() => {
    let left = hasEnded(work) ? REFRESHES_AFTER_END : Infinity;
    const timer = setInterval(() => {
      if (document.hidden || paused.peek()) return;
      loaded.reload();
      left -= 1;
      if (left === 0) clearInterval(timer);
    }, REFRESH_MS);
    return () => clearInterval(timer);
  }, [work.id, hasEnded(work)]);
  const none = html`<div class="card">
    <${Empty} icon="activity" title="No figures for this time" action=${span ? html`<${Button} onClick=${() => setQuery({ span: null })}>Show all<//>` : html`<${Button} href=${link(`/work/${encodeURIComponent(work.id)}`)}>Show the rows<//>`}>Figures appear second by second once calls are made.<//>
  </div>`;
  return html`
    <div class="filters"><${Segments} label="Time" now=${span} options=${SPANS} onPick=${(/** @type {string} */ id) => setQuery({ span: id })} /></div>
    <${Loading} of=${loaded} lines=${8}>
      ${(/** @type {{samples: Sample[]}} */ { samples }) => (samples.length ? html`<div class="charts">${CHARTS.map((spec) => html`<${Chart} key=${spec.title} spec=${spec} samples=${samples} />`)}</div>` : none)}
    <//>`;
}

/** @param {{spec: ChartSpec, samples: Sample[]}} props */
function Chart({ spec, samples }) {
  const host = useRef(/** @type {HTMLDivElement | null} */ (null));
  const plot = useRef(/** @type {any} */ (null));
  const colours = painted.value;
  const data = toData(spec, samples);
  const latest = useRef(data);
  latest.current = data;
  useEffect(() => {
    const element = /** @type {HTMLDivElement} */ (host.current);
    const made = new uPlot(options(spec, element.clientWidth), /** @type {any} */ (latest.current), element);
    plot.current = made;
    const observer = new ResizeObserver(() => made.setSize({ width: element.clientWidth, height: HEIGHT_PX }));
    observer.observe(element);
    return () => {
      observer.disconnect();
      made.destroy();
      plot.current = null;
    };
  }, [colours]);
  useEffect(() => plot.current?.setData(data), [samples]);
  const at = Math.min(pointed.value ?? samples.length - 1, samples.length - 1);
  return html`<figure class="card chart">
    <figcaption class="line wrap">
      <h2 class="grow">${spec.title} <span class="small soft">${spec.unit}</span></h2>
      <span class="small faint chart-at">${full(Date.parse(samples[at].at))}</span>
    </figcaption>
    <ul class="legend small">
      ${spec.lines.map((line) => {
        const value = line.of(samples[at]);
        return html`<li key=${line.label}><i data-tone=${line.tone} aria-hidden="true"></i><span class="soft">${line.label}</span> <b>${value === null ? "–" : spec.show(value)}</b></li>`;
      })}
    </ul>
    ${spec.lines.every((line) => samples.every((sample) => line.of(sample) === null)) && html`<p class="plot-none soft small">Nothing was recorded of it in this time.</p>`}
    <div ref=${host} class="plot" role="img" aria-label="${spec.title} over time"></div>
  </figure>`;
}

/** Seconds and values. Where nothing happened for a while there is a gap of zeros, not a slope. @param {ChartSpec} spec @param {Sample[]} samples */
function toData(spec, samples) {
  return [samples.map((sample) => Date.parse(sample.at) / 1000), ...spec.lines.map((line) => samples.map(line.of))];
}

/** @param {ChartSpec} spec @param {number} width @returns {any} */
function options(spec, width) {
  const grid = { stroke: colour("--line"), width: 1 };
  const axis = { stroke: colour("--text-soft"), font: `11px ${getComputedStyle(document.body).fontFamily}`, grid, ticks: { show: false } };
  return {
    width,
    height: HEIGHT_PX,
    legend: { show: false },
    cursor: { sync: { key: "work" }, y: false, points: { size: 6 }, drag: { x: true, y: false } },
    scales: { x: { time: true }, y: { range: (/** @type {any} */ _plot, /** @type {number} */ _low, /** @type {number} */ high) => [0, high > 0 ? high * 1.08 : 1] } },
    axes: [
      { ...axis, space: 80, size: 28, values: (/** @type {any} */ _plot, /** @type {number[]} */ ticks) => ticks.map(timeOfDay(ticks)) },
      { ...axis, size: 56, space: 34, ...(spec.whole ? { incrs: WHOLE_STEPS } : {}), values: (/** @type {any} */ _plot, /** @type {number[]} */ ticks) => ticks.map((tick) => spec.show(tick)) },
    ],
    series: [
      {},
      ...spec.lines.map((line) => ({
        label: line.label, stroke: colour(`--${line.tone}-fill`), width: 1.5, points: { show: false }, spanGaps: true,
        fill: line.area ? colour(`--${line.tone}-fill`, 0.14) : undefined,
      })),
    ],
    hooks: { setCursor: [(/** @type {any} */ made) => (pointed.value = made.cursor.idx ?? null)] },
  };
}

/** Labels of the time axis: the time, with seconds where ticks are close; the day where they are days apart. @param {number[]} ticks */
function timeOfDay(ticks) {
  const step = ticks.length > 1 ? ticks[1] - ticks[0] : 60;
  /** @type {Intl.DateTimeFormatOptions} */
  const parts = step >= 43_200 ? { day: "numeric", month: "short" } : { hour: "2-digit", minute: "2-digit", ...(step < 60 ? { second: "2-digit" } : {}) };
  const format = new Intl.DateTimeFormat("en-GB", parts);
  return (/** @type {number} */ tick) => format.format(tick * 1000);
}

/** A colour of the style as it is now, for the canvas. @param {string} name @param {number} [alpha] */
function colour(name, alpha = 1) {
  const probe = document.createElement("i");
  probe.style.color = alpha === 1 ? `var(${name})` : `color-mix(in srgb, var(${name}) ${alpha * 100}%, transparent)`;
  document.body.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}

/** A line chart of the last ten minutes, drawn by uPlot in the page's colors. */

import { html, useEffect, useRef, useState } from "../vendor/htm-preact.js";
import { count } from "./format.js";

const HEIGHT_PX = 150;
const SHOWN_S = 600;
const FEWEST_S = 60; // shown when the page has just begun to read
const STEPS_S = [15, 30, 60, 120]; // between names on the time axis
const WHOLE_STEPS = [1, 10, 100, 1000].flatMap((ten) => [ten, 2 * ten, 5 * ten]); // between the numbers of an axis of counts

/**
 * @param {{title: string, names: string[], columns: number[][], show: (value: number) => string, top: number}} props
 *   `names`: of the series, the first in the accent color; `columns`: times, then series; `top`: the axis' lowest end
 */
export function Chart({ title, names, columns, show, top }) {
  const place = useRef(null);
  const plot = useRef(null);
  const [pointed, setPointed] = useState(null); // the place of the reading under the pointer, of this chart or another

  useEffect(() => {
    const draw = () => {
      plot.current?.destroy();
      plot.current = new window.uPlot(optionsOf(place.current, names, show, top, setPointed), columns, place.current);
    };
    const resized = new ResizeObserver(() => plot.current.setSize({ width: place.current.clientWidth, height: HEIGHT_PX }));
    const scheme = matchMedia("(prefers-color-scheme: dark)");
    draw();
    resized.observe(place.current);
    scheme.addEventListener("change", draw);
    return () => {
      resized.disconnect();
      scheme.removeEventListener("change", draw);
      plot.current.destroy();
    };
  }, []);
  useEffect(() => plot.current.setData(columns), [columns]);

  const [times, ...series] = columns;
  const said = names.map((name, at) => `${name} ${show(series[at].at(-1))}`).join(", ");
  const shown = pointed ?? times.length - 1;
  return html`
    <figure class="chart">
      <figcaption>
        <h3>${title}</h3>
        <span class="legend">
          ${pointed !== null && times[pointed] !== undefined && html`<span>${ago(times[pointed], times)}</span>`}
          ${names.map((name, at) => html`<span><span class=${`swatch series-${at}`}></span>${name} <b>${show(series[at][shown])}</b></span>`)}
        </span>
      </figcaption>
      <div ref=${place} role="img" aria-label=${`${title} over ten minutes; now ${said}`}></div>
    </figure>
  `;
}

function optionsOf(place, names, show, top, onPoint) {
  const style = getComputedStyle(document.documentElement);
  const color = (name) => style.getPropertyValue(`--${name}`).trim();
  const grid = { stroke: color("line"), width: 1 };
  const axis = { stroke: color("muted"), font: "11px system-ui, sans-serif", ticks: { show: false }, gap: 4 };
  const strokes = [color("accent"), color("compute")];
  return {
    width: place.clientWidth,
    height: HEIGHT_PX,
    padding: [8, 16, 0, 0],
    legend: { show: false },
    cursor: { y: false, drag: { x: false, y: false }, sync: { key: "moment" }, points: { size: 6 } },
    hooks: { setCursor: [({ cursor }) => onPoint(cursor.idx ?? null)] },
    scales: {
      // The newest reading stands at the right edge, so the range changes with each and uPlot asks for the axis' names again.
      x: { time: false, range: (_, from, to) => [Math.max(to - SHOWN_S, Math.min(from, to - FEWEST_S)), to] },
      y: { range: (_, __, highest) => [0, highest > top ? highest * 1.1 : top] },
    },
    axes: [
      { ...axis, grid: { show: false }, size: 28, gap: 10, splits: momentsOf, values: (self, splits) => splits.map((time) => ago(time, self.data[0])) },
      { ...axis, grid, size: 56, space: 36, incrs: show === count ? WHOLE_STEPS : undefined, values: (_, splits) => splits.map(show) },
    ],
    series: [{}, ...names.map((name, at) => ({ label: name, stroke: strokes[at], width: 1.6, points: { show: false }, spanGaps: false }))],
  };
}

/** Moments to name on the time axis: the newest reading, and even steps back from it. */
function momentsOf(plot, _, from) {
  const now = plot.data[0].at(-1) ?? 0;
  const step = STEPS_S.find((s) => (now - from) / s < 5) ?? STEPS_S.at(-1);
  return Array.from({ length: Math.floor((now - from) / step) + 1 }, (__, at) => now - at * step).reverse();
}

function ago(time, times) {
  const s = Math.round(times.at(-1) - time);
  if (s === 0) return "now";
  return s % 60 ? `−${s} s` : `−${s / 60} min`;
}

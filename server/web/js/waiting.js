/** Says that the prompt is being read: for how long and, once the server tells, how much of it and how fast. */

import { html, useEffect, useState } from "../vendor/htm-preact.js";
import { count, rate, seconds } from "./format.js";

const TICK_MS = 100;

/** @param {{progress?: import("./answer.js").Answer["progress"]}} props */
export function Waiting({ progress }) {
  const [start] = useState(() => performance.now());
  const [now, setNow] = useState(start);
  useEffect(() => {
    const timer = setInterval(() => setNow(performance.now()), TICK_MS);
    return () => clearInterval(timer);
  }, []);
  const elapsed = html`<span aria-hidden="true">${seconds((now - start) / 1000)}</span>`;
  if (!progress) return html`<p class="waiting">Reading the prompt ${elapsed}</p>`;
  const { prompt_tokens: total, cached, computed, seconds: spent } = progress;
  const done = cached + computed;
  const facts = [
    `${count(done)} of ${count(total)} tokens${cached ? ` (${count(cached)} cached)` : ""}`,
    spent > 0 && `${rate(computed / spent)} tokens/s`,
  ].filter(Boolean);
  return html`
    <div class="reading">
      <p>Reading the prompt ${elapsed}</p>
      <progress max=${total} value=${done} aria-label="Prompt"></progress>
      <p class="facts">${facts.map((fact) => html`<span>${fact}</span>${" "}`)}</p>
    </div>
  `;
}

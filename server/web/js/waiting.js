/** Says that the prompt is being read, and for how long. */

import { html, useEffect, useState } from "../vendor/htm-preact.js";
import { seconds } from "./format.js";

const TICK_MS = 100;

export function Waiting() {
  const [start] = useState(() => performance.now());
  const [now, setNow] = useState(start);
  useEffect(() => {
    const timer = setInterval(() => setNow(performance.now()), TICK_MS);
    return () => clearInterval(timer);
  }, []);
  return html`<p class="waiting">Reading the prompt <span aria-hidden="true">${seconds((now - start) / 1000)}</span></p>`;
}

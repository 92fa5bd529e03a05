/** Where the time to the first token went: a bar and a list of the server's parts. */

import { html } from "../vendor/htm-preact.js";
import { splitOfFirstToken } from "./answer.js";
import { percent, seconds } from "./format.js";

/**
 * @param {{answer: object, longestS?: number}} props `longestS`: the time that fills the bar, to compare several
 */
export function SplitBar({ answer, longestS }) {
  const split = splitOfFirstToken(answer);
  if (!split || !split.total) return null;
  const said = split.parts.map((part) => `${part.name} ${seconds(part.seconds)}`).join(", ");
  const width = (part) => ({ width: `${((part.seconds ?? 0) / (longestS ?? split.total)) * 100}%` });
  return html`
    <div class="split" role="img" aria-label=${`Time to first token in the server: ${said}`}>
      ${split.parts.map((part) => html`<span class=${`part ${part.name}`} style=${width(part)}></span>`)}
    </div>
  `;
}

/** The parts as a list, with their share. */
export function SplitList({ answer }) {
  const split = splitOfFirstToken(answer);
  if (!split) return null;
  return html`
    <dl class="parts">
      ${split.parts.map(
        ({ name, seconds: time, about }) => html`
          <div><dt><span class=${`swatch ${name}`}></span>${name}</dt><dd>${seconds(time)}</dd><dd>${percent(time == null ? null : time / split.total)}</dd><dd class="about">${about}</dd></div>
        `,
      )}
    </dl>
  `;
}

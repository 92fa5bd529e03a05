/** The times and bytes of two answers in two columns, and how they compare. */

import { html } from "../vendor/htm-preact.js";
import { algorithmsOf, bytesPerToken, splitOfFirstToken, tokensPerSecond } from "./answer.js";
import { bytes, rate, seconds } from "./format.js";

const PARTS = ["compute", "codec", "wire", "other"];

/** Label, value of an answer, its text, whether more is better, indented part. */
const ROWS = [
  ["First token", (a) => splitOfFirstToken(a)?.total, seconds],
  ...PARTS.map((name) => [name, (a) => splitOfFirstToken(a)?.parts.find((part) => part.name === name).seconds, seconds, name]),
  ["Tokens/s", tokensPerSecond, rate],
  ["Sent for a prompt token", (a) => bytesPerToken(a).prompt, bytes],
  ["Sent for an answer token", (a) => bytesPerToken(a).answer, bytes],
];

/** @param {{names: string[], answers: import("./answer.js").Answer[]}} props */
export function ComparisonTable({ names, answers }) {
  return html`
    <div class="scroll" tabindex="0" role="region" aria-label="Comparison">
      <table class="comparison">
        <thead><tr><td></td>${names.map((name) => html`<th scope="col">${name}</th>`)}<th scope="col">ratio</th></tr></thead>
        <tbody>
          ${ROWS.map(([label, valueOf, show, part]) => {
            const values = answers.map(valueOf);
            return html`<tr class=${part ? "part" : ""}>
              <th scope="row">${part && html`<span class=${`swatch ${part}`}></span>`}${label}</th>
              ${values.map((value) => html`<td>${show(value)}</td>`)}
              <td>${ratio(values)}</td>
            </tr>`;
          })}
          <tr><th scope="row">Summed by</th>${answers.map((a) => html`<td>${algorithmsOf(a).join(", ") || "–"}</td>`)}<td></td></tr>
          <tr><th scope="row">Text</th><td colspan="3">${agreement(answers)}</td></tr>
        </tbody>
      </table>
    </div>
    <p class="note">Times are the server's, bytes are those that rank 0 sent. Other requests that run meanwhile count too.</p>
  `;
}

/** The second value by the first. */
function ratio([a, b]) {
  return a > 0 && b != null ? `${(b / a).toFixed(2)}×` : "";
}

function agreement([a, b]) {
  if (a.state !== "done" || b.state !== "done") return "–";
  if (a.text === b.text) return "the same";
  const words = [a, b].map(({ text }) => text.split(/\s+/));
  const at = words[0].findIndex((word, place) => word !== words[1][place]);
  return at < 0 ? "the second goes on" : `differs from word ${at + 1} on`;
}

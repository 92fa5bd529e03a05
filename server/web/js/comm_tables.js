/** Tables about communication: cost by algorithm, ranks and links, policies with their reasons, self-tests. */

import { html, useState } from "../vendor/htm-preact.js";
import { bytes, percent, rate, seconds } from "./format.js";
import { Choice } from "./settings.js";

/** A table that scrolls sideways. @param {{caption: string, heads: string[], rows: any[][], empty: string}} props */
function Table({ caption, heads, rows, empty }) {
  if (!rows.length) return html`<p class="note">${empty}</p>`;
  return html`
    <div class="scroll" tabindex="0" role="region" aria-label=${caption}>
      <table>
        <thead><tr>${heads.map((head) => html`<th scope="col">${head}</th>`)}</tr></thead>
        <tbody>${rows.map((row) => html`<tr>${row.map((cell) => html`<td>${cell}</td>`)}</tr>`)}</tbody>
      </table>
    </div>
  `;
}

/** A text of the server, whose commands stand between backticks. */
const withCode = (text) => text.split("`").map((part, at) => (at % 2 ? html`<code>${part}</code>` : part));

const us = (value) => (value == null ? "–" : seconds(value / 1e6));

/**
 * Where rank 0's collective time went.
 * @param {{growth: object[], comm: object}} props `growth`: over the last window; `comm`: what GET /comm says
 */
export function CostTable({ growth, comm }) {
  const costs = new Map(comm.counters.map((cost) => [`${cost.op}|${cost.algorithm}|${cost.phase}`, cost]));
  const rows = growth.map(({ key, op, algorithm, phase, share, callRate, byteRate, saved }) => [
    algorithm,
    `${op.replaceAll("_", " ")}${phase ? `, ${phase}` : ""}`,
    html`<span class="meter"><span style=${{ width: `${Math.min(share, 1) * 100}%` }}></span></span> ${percent(share)}`,
    `${rate(callRate)}/s`,
    `${bytes(byteRate)}/s`,
    saved > 0 ? percent(saved) : "–",
    us(costs.get(key)?.p50_us),
    us(costs.get(key)?.p99_us),
  ]);
  const heads = ["Algorithm", "Collective", "Share of time", "Calls", "Sent", "Saved", "p50", "p99"];
  const empty = comm.counters.length ? "Two readings of a running server are needed." : "Nothing was exchanged yet.";
  return html`<${Table} caption="Communication by algorithm" heads=${heads} rows=${rows} empty=${empty} />`;
}

/** @param {{comm: object}} props */
export function Ranks({ comm }) {
  const { tp, dp, num_nodes: numNodes, transport, transport_reason: why, link, replicas } = comm;
  const perNode = (tp * dp) / numNodes;
  const isEmulated = numNodes === 1 && link && link.emulation !== "network"; // then each rank counts as a node
  const rows = Array.from({ length: tp * dp }, (_, rank) => {
    const replica = Math.floor(rank / tp);
    const load = replicas[replica];
    return [
      rank,
      isEmulated ? `${rank % tp}, emulated` : Math.floor(rank / perNode),
      dp > 1 ? `${replica}, part ${(rank % tp) + 1} of ${tp}` : `part ${rank + 1} of ${tp}`,
      rank === 0 ? "plans and samples" : "follows",
      load && rank % tp === 0 ? `${load.num_running} running, ${load.num_waiting} waiting` : "",
    ];
  });
  const heads = ["Rank", "Node", dp > 1 ? "Replica" : "Model", "Role", ...(replicas.length ? ["Load"] : [])];
  return html`
    <dl class="facts">
      <div><dt>Transport</dt><dd>${transport}${why && html`<span class="about"> ${withCode(why)}</span>`}</dd></div>
      <div><dt>Layout</dt><dd>${comm.layout}</dd></div>
      ${link && html`<div><dt>Link</dt><dd>${describeLink(link)}</dd></div>`}
      <div><dt>Sums in</dt><dd>${comm.sum_dtype || "–"}</dd></div>
      <div><dt>Overlap</dt><dd>${comm.overlap ? "half of a prompt is computed while the other is summed" : "off"}</dd></div>
    </dl>
    <${Table} caption="Ranks" heads=${heads} rows=${rows.map((row) => row.slice(0, heads.length))} empty="" />
    <${Links} link=${link} />
  `;
}

function describeLink({ name, asked_bytes_per_s: asked, measured_bytes_per_s: measured, latency_s: latency, emulation }) {
  const parts = [
    measured ? `${bytes(measured)}/s measured` : asked && `${bytes(asked)}/s`,
    latency > 0 && `${seconds(latency)} latency`,
    emulation === "network" ? "probed at start" : `emulated in ${emulation.replace("-", " ")}`,
  ];
  return `${name}: ${parts.filter(Boolean).join(", ")}`;
}

/** The network between nodes, as the hosts probed it. */
function Links({ link }) {
  const rows = (link?.pairs ?? []).map(({ nodes, bytes_per_s: speed, round_trip_s: trip, jitter_s: jitter }) => [
    nodes.join(" to "), `${bytes(speed)}/s`, seconds(trip), seconds(jitter),
  ]);
  if (!rows.length) return null;
  return html`<h3>Links</h3><${Table} caption="Links" heads=${["Nodes", "Rate", "Round trip", "Jitter"]} rows=${rows} empty="" />`;
}

/** Lines that differ in one field only, as one line with all its values. */
function joined(lines, field) {
  const groups = new Map();
  for (const line of lines) {
    const key = JSON.stringify({ ...line, [field]: "" });
    groups.set(key, [...(groups.get(key) ?? []), line]);
  }
  return [...groups.values()].map((group) => ({ ...group[0], [field]: group.map((line) => line[field]).join(", ") }));
}

/** The lines of a policy and why each is so. @param {{comm: object}} props */
export function Policies({ comm }) {
  const policies = { [comm.algorithm]: comm.choices, ...comm.extra };
  const names = Object.keys(policies);
  const [chosen, setChosen] = useState(null);
  const name = names.includes(chosen) ? chosen : names[0];
  const lines = joined(joined(policies[name], "site"), "phase");
  const rows = lines.map((line) => [
    line.algorithm,
    line.site,
    line.phase || "any",
    line.layers ? line.layers.join(", ") : "all",
    line.up_to_bytes == null ? "any" : `up to ${bytes(line.up_to_bytes)}`,
    html`<span class="about">${withCode(line.reason)}</span>`,
  ]);
  const tests = comm.self_test.map(({ algorithm, ok, detail }) => [
    algorithm, ok ? "right" : html`<b class="problem">wrong, never used</b>`, html`<span class="about">${withCode(detail)}</span>`,
  ]);
  return html`
    <div class="policy"><${Choice} id="policy" label="Policy" names=${names} value=${name} onChange=${setChosen} /></div>
    <${Table} caption="Policy" heads=${["Algorithm", "Site", "Phase", "Layers", "Message", "Reason"]} rows=${rows} empty="One rank sums nothing." />
    ${tests.length > 0 && html`
      <h3>Self-test at start</h3>
      <${Table} caption="Self-test" heads=${["Algorithm", "Sums", "Tested with"]} rows=${tests} empty="" />
    `}
  `;
}

/** System prompt, model, policy and sampling: their form, and the fields of a request that they become. */

import { html } from "../vendor/htm-preact.js";
import { hasKey } from "./api.js";
import { policiesOf } from "./server.js";
import { keep, kept } from "./store.js";

/** The most tokens of two compared answers, unless the settings say another number. */
export const comparedTokens = ({ contextTokens }) => Math.min(256, Math.floor(contextTokens / 4));

const STORE = "tightwire.settings";

/** Number fields: name in the request, label, the server's default, smallest, largest, step. */
const NUMBERS = [
  ["temperature", "Temperature", "model's", 0, 2, 0.05],
  ["max_tokens", "Max tokens", "what fits", 1, undefined, 1],
  ["top_p", "Top-p", "model's", 0.01, 1, 0.01],
  ["top_k", "Top-k", "model's", 0, undefined, 1],
  ["min_p", "Min-p", "model's", 0, 1, 0.01],
  ["repetition_penalty", "Repetition penalty", "model's", 0.01, 100, 0.01],
  ["seed", "Seed", "random", 0, undefined, 1],
];

/** The settings of a new tab. Numbers are texts, as typed; empty: the server's default. */
const INITIAL = { system: "", model: "", policy: "", sampling: { temperature: "0.2" } };

export function loadSettings() {
  try {
    return { ...INITIAL, ...JSON.parse(kept(STORE)) };
  } catch {
    return INITIAL;
  }
}

export const saveSettings = (settings) => keep(STORE, JSON.stringify(settings));

/** The sampling fields of a request; the server checks their ranges. */
export function samplingOf(settings) {
  const given = Object.entries(settings.sampling).filter(([, text]) => text !== "");
  return Object.fromEntries(given.map(([name, text]) => [name, Number(text)]));
}

/** The chosen model, or the first that the server lists. */
export const modelOf = (settings, server) =>
  server.models.includes(settings.model) ? settings.model : (server.models[0] ?? "");

/** The policy to ask for; empty: the server's own. */
export function policyOf(settings, server) {
  const [own, ...extra] = policiesOf(server.comm);
  return extra.includes(settings.policy) && settings.policy !== own ? settings.policy : "";
}

/**
 * @param {{settings: object, server: object, hasPolicy: boolean, onChange: (changes: object) => void}} props
 *   `hasPolicy`: a policy is chosen here, for one answer and not for two
 */
export function Settings({ settings, server, hasPolicy, onChange }) {
  const policies = policiesOf(server.comm);
  const setNumber = (name) => (event) => onChange({ sampling: { ...settings.sampling, [name]: event.target.value } });
  return html`
    <aside class="settings" id="settings" aria-label="Settings">
      <label for="system">System prompt</label>
      <textarea id="system" rows="3" placeholder="None" value=${settings.system} onInput=${(e) => onChange({ system: e.target.value })}></textarea>
      <${Choice} id="model" label="Model" names=${server.models} value=${modelOf(settings, server)} onChange=${(model) => onChange({ model })} />
      ${hasPolicy && html`<${Choice} id="policy" label="AllReduce policy" names=${policies} value=${policyOf(settings, server) || policies[0]} onChange=${(policy) => onChange({ policy })} />`}
      <fieldset>
        <legend>Sampling</legend>
        ${NUMBERS.map(
          ([name, label, otherwise, min, max, step]) => html`
            <label for=${name}>${label}</label>
            <input id=${name} type="number" inputmode="decimal" min=${min} max=${max} step=${step} placeholder=${name === "max_tokens" && !hasPolicy ? comparedTokens(server) : otherwise}
              value=${settings.sampling[name] ?? ""} onInput=${setNumber(name)} />
          `,
        )}
      </fieldset>
      <p class="note">An empty field takes the server's default. Conversation and settings stay in this tab. ${server.models.length > 0 && !hasKey() && html`<a href="/docs">Routes of the API</a>`}</p>
    </aside>
  `;
}

/** A list to choose from; one name is shown as text. @param {{id: string, label: string, names: string[]}} props */
export function Choice({ id, label, names, value, onChange }) {
  if (names.length < 2) return html`<p class="label">${label}</p><p class="only">${names[0] ?? "–"}</p>`;
  return html`
    <label for=${id}>${label}</label>
    <select id=${id} value=${value} onChange=${(event) => onChange(event.target.value)}>
      ${names.map((name) => html`<option value=${name} selected=${name === value}>${name}</option>`)}
    </select>
  `;
}

/** Two AllReduce policies answer the same prompt, one after the other, with their times and bytes side by side. */

import { html, useEffect, useRef, useState } from "../vendor/htm-preact.js";
import { Announcer } from "./announcer.js";
import { newAnswer, runAnswer, splitOfFirstToken } from "./answer.js";
import { ComparisonTable } from "./comparison_table.js";
import { Composer } from "./composer.js";
import { seconds } from "./format.js";
import { policiesOf } from "./server.js";
import { Choice, comparedTokens, modelOf, samplingOf } from "./settings.js";
import { SplitBar } from "./split.js";
import { Waiting } from "./waiting.js";

/** @param {{settings: object, server: import("./server.js").Server}} props */
export function Compare({ settings, server }) {
  const policies = policiesOf(server.comm);
  const [chosen, setChosen] = useState([null, null]);
  const [prompt, setPrompt] = useState("");
  const [ran, setRan] = useState({ names: [], answers: null }); // the policies that answered, and their answers
  const [newest, setNewest] = useState(0); // the side that answers or answered last
  const [isRunning, setRunning] = useState(false);
  const control = useRef(null);
  const numRuns = useRef(0);

  useEffect(() => () => control.current?.abort(), []);

  if (!server.comm) return html`<p class="note pad">${server.refusal || "Waiting for the server."}</p>`;
  if (policies.length < 2) return html`<${OnePolicy} comm=${server.comm} />`;

  const names = [0, 1].map((side) => (policies.includes(chosen[side]) ? chosen[side] : policies[side]));
  const answers = names.every((name, side) => name === ran.names[side]) ? ran.answers : null; // no other policy's name stands above them
  const run = async (text) => {
    control.current = new AbortController();
    const { signal } = control.current;
    setPrompt(text);
    setRunning(true);
    setRan({ names, answers: names.map((name) => newAnswer(name)) });
    const body = bodyOf(text, settings, server);
    const order = numRuns.current++ % 2 ? [1, 0] : [0, 1]; // neither is always the first
    for (const side of order) {
      setNewest(side);
      const onUpdate = (answer) => setRan(({ answers }) => ({ names, answers: answers.map((other, place) => (place === side ? answer : other)) }));
      const options = { policy: names[side] === policies[0] ? "" : names[side], signal, onUpdate };
      // Neither may continue from the other's cached prompt.
      await runAnswer({ ...body, cache_salt: crypto.randomUUID?.() ?? `${Math.random()}` }, options);
      if (signal.aborted) break;
    }
    setRunning(false);
  };
  const setName = (side) => (name) => setChosen(names.map((other, place) => (place === side ? name : other)));
  const longestS = answers && Math.max(...answers.map((answer) => splitOfFirstToken(answer)?.total ?? 0));
  return html`
    <div class="log compare">
      ${prompt && html`<p class="prompt"><span class="label">Prompt</span> ${prompt}</p>`}
      <div class="sides">
        ${names.map(
          (name, side) => html`
            <section key=${side} aria-label=${name}>
              <${Choice} id=${`policy-${side}`} label=${`Policy ${side + 1}`} names=${policies} value=${name} onChange=${setName(side)} />
              ${answers && html`<${Side} answers=${answers} side=${side} runs=${isRunning && newest === side} longestS=${longestS} />`}
            </section>
          `,
        )}
      </div>
      ${answers
        ? html`<${ComparisonTable} names=${names} answers=${answers} />`
        : html`<p class="note">${names.some((name) => name.endsWith("/tensor")) && "/tensor: the prompt is summed by all ranks and passes no stages. "}Both answer the same prompt with the same seed, one after the other, so that neither slows the other down.
            A long prompt shows the difference best: its messages are the largest.</p>`}
    </div>
    <div class="foot">
      <${Composer} label="Prompt for both" busy=${isRunning} server=${server} onSend=${run} onStop=${() => control.current.abort()} />
      <div class="tools">
        <span class="hint">The bars share one scale</span>
        ${prompt && !isRunning && html`<button class="quiet" onClick=${() => run(prompt)}>Run again, in the other order</button>`}
      </div>
    </div>
    <${Announcer} answer=${answers?.[newest]} />
  `;
}

function bodyOf(text, settings, server) {
  const system = settings.system.trim() ? [{ role: "system", content: settings.system }] : [];
  const seed = Math.floor(Math.random() * 2 ** 31);
  const messages = [...system, { role: "user", content: text }];
  return { model: modelOf(settings, server) || undefined, messages, seed, max_tokens: comparedTokens(server), ...samplingOf(settings) };
}

/** One answer; its text from the first difference to the other on is marked. */
function Side({ answers, side, runs, longestS }) {
  const answer = answers[side];
  const other = answers[1 - side];
  const same = sameLength(answer.text, other.text);
  // What the other has not written yet is no difference.
  const differs = other.text && (same < other.text.length || other.state !== "streaming");
  const rest = answer.text.slice(same);
  return html`
    <p class="first"><span>Time to first token</span><b>${seconds(splitOfFirstToken(answer)?.total ?? answer.firstS)}</b></p>
    <${SplitBar} answer=${answer} longestS=${longestS} />
    <div class="text" aria-busy=${answer.state === "streaming"}>
      ${answer.state === "waiting" && (runs ? html`<${Waiting} progress=${answer.progress} />` : html`<p class="note">Waits for the other.</p>`)}
      ${answer.text.slice(0, same)}${rest && differs ? html`<mark>${rest}</mark>` : rest}
    </div>
    ${answer.error && html`<p class="problem" role="alert">${answer.error}</p>`}
    ${answer.state === "stopped" && html`<p class="note">Stopped.</p>`}
  `;
}

/** The characters that two texts have in common from the start, to the last whole word. */
function sameLength(a, b) {
  let length = 0;
  while (length < a.length && a[length] === b[length]) length++;
  if (length === a.length || length === b.length) return length; // one may still be written
  return a.lastIndexOf(" ", length) + 1;
}

function OnePolicy({ comm }) {
  const alone = comm.tp === 1;
  const isPipeline = comm.layout.startsWith("pipeline");
  const others = isPipeline ? "--layout hybrid" : "--allreduce-extra ring,flash-int8";
  const command = `tightwire serve --tp ${alone ? 2 : comm.tp} ${others}`;
  const reason = isPipeline ? "All rows of this server pass stages, which sum nothing between them." : "This server was started with one AllReduce policy.";
  return html`
    <div class="log"><section class="empty">
      <h1>Compare two AllReduces</h1>
      <p>${alone ? "This server has one rank, so it sums nothing." : reason}${" "}
        Start it with others, and they answer the same prompt side by side here:</p>
      <pre tabindex="0">${command}</pre>
      <p class="note">Keep the options that you already give. <code>tightwire explain</code> lists the AllReduces with their cost.</p>
    </section></div>
  `;
}

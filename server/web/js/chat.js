/** The conversation and what can be done with it: ask, stop, edit, regenerate, export, start anew. */

import { html, useEffect, useRef, useState } from "../vendor/htm-preact.js";
import { Announcer } from "./announcer.js";
import { runAnswer } from "./answer.js";
import { Composer } from "./composer.js";
import { again, ask, edit, loadTurns, saveTurns, showVersion, shownOf, toMessages, withAnswer } from "./conversation.js";
import { save, toJson, toMarkdown } from "./export.js";
import { Question, Reply } from "./message.js";
import { takesRequests } from "./server.js";
import { modelOf, policyOf, samplingOf } from "./settings.js";

const EXAMPLES = ["What is the capital of France?", "Explain tensor parallelism in three sentences.", "Write a haiku about slow wires."];
const NEAR_END_PX = 80; // a reader this near the end follows the text

/** @param {{settings: object, server: import("./server.js").Server}} props */
export function Chat({ settings, server }) {
  const [turns, setTurns] = useState(loadTurns);
  const [isRunning, setRunning] = useState(false);
  const control = useRef(null);
  const log = useRef(null);
  const newest = useRef(turns);
  const model = modelOf(settings, server);
  newest.current = turns;

  useEffect(() => isRunning || saveTurns(turns), [turns, isRunning]);
  useEffect(() => {
    // An answer that still streams is kept as far as it came, when the page or this view is left.
    const keep = () => saveTurns(newest.current);
    window.addEventListener("pagehide", keep);
    return () => {
      window.removeEventListener("pagehide", keep);
      control.current?.abort();
      keep();
    };
  }, []);
  useFollowing(log, turns);

  const run = async (next) => {
    control.current = new AbortController();
    setTurns(next);
    saveTurns(next);
    setRunning(true);
    const body = { model: model || undefined, messages: toMessages(next, settings.system), ...samplingOf(settings) };
    const onUpdate = (answer) => setTurns((now) => withAnswer(now, answer));
    await runAnswer(body, { policy: policyOf(settings, server), signal: control.current.signal, onUpdate });
    setRunning(false);
  };
  const exported = { model, system: settings.system, sampling: samplingOf(settings) };
  const last = turns.at(-1);
  return html`
    <div class="log" ref=${log}>
      ${turns.length === 0 && html`<${Empty} model=${model} disabled=${!takesRequests(server)} onPick=${(text) => run(ask([], text))} />`}
      ${turns.map((turn, index) =>
        turn.role === "user"
          ? html`<${Question} key=${index} text=${turn.text} busy=${isRunning} onEdit=${(text) => run(edit(turns, index, text))} />`
          : html`<${Reply} key=${index} reply=${turn} model=${model} busy=${isRunning} isLast=${turn === last}
              onAgain=${() => run(again(turns))} onVersion=${(shown) => setTurns(showVersion(turns, index, shown))} />`,
      )}
    </div>
    <div class="foot">
      <${Composer} label="Message" busy=${isRunning} server=${server}
        onSend=${(text) => run(ask(turns, text))} onStop=${() => control.current.abort()} />
      <div class="tools">
        <span class="hint">Enter sends, Shift+Enter breaks the line, Esc stops</span>
        ${turns.length > 0 && !isRunning && html`
          <button class="quiet" onClick=${() => setTurns([])}>New chat</button>
          <button class="quiet" onClick=${() => save("conversation.md", "text/markdown", toMarkdown(turns, exported))}>Export Markdown</button>
          <button class="quiet" onClick=${() => save("conversation.json", "application/json", toJson(turns, exported))}>Export JSON</button>
        `}
      </div>
    </div>
    <${Announcer} answer=${last ? shownOf(last) : null} />
  `;
}

/** Scroll to a new question, and with the text while the reader is at its end. */
function useFollowing(log, turns) {
  const follows = useRef(true);
  useEffect(() => {
    const { current } = log;
    const onScroll = () => (follows.current = current.scrollHeight - current.scrollTop - current.clientHeight < NEAR_END_PX);
    current.addEventListener("scroll", onScroll, { passive: true });
    return () => current.removeEventListener("scroll", onScroll);
  }, []);
  useEffect(() => void (follows.current = true), [turns.length]);
  useEffect(() => {
    if (follows.current) log.current.scrollTop = log.current.scrollHeight;
  }, [turns]);
}

function Empty({ model, disabled, onPick }) {
  return html`
    <section class="empty">
      <h1>Talk to ${model || "the model"}</h1>
      <p>Each answer shows its speed, and where the time to its first token went.</p>
      <ul>${EXAMPLES.map((text) => html`<li><button disabled=${disabled} onClick=${() => onPick(text)}>${text}</button></li>`)}</ul>
    </section>
  `;
}

/** One turn of the conversation: a question that can be edited, or an answer with its measurements. */

import { html, useEffect, useMemo, useRef, useState } from "../vendor/htm-preact.js";
import { algorithmsOf, bytesPerToken, tokensPerSecond } from "./answer.js";
import { shownOf } from "./conversation.js";
import { Copy } from "./copy.js";
import { bytes, plural, rate, seconds } from "./format.js";
import { markdown } from "./markdown.js";
import { SplitBar, SplitList } from "./split.js";
import { Waiting } from "./waiting.js";

/** @param {{text: string, busy: boolean, onEdit: (text: string) => void}} props */
export function Question({ text, busy, onEdit }) {
  const [isEdited, setEdited] = useState(false);
  if (isEdited) {
    const onSend = (changed) => {
      setEdited(false);
      onEdit(changed);
    };
    return html`<${Editor} text=${text} busy=${busy} onSend=${onSend} onCancel=${() => setEdited(false)} />`;
  }
  return html`
    <article class="turn question" aria-label="You">
      <p class="text">${text}</p>
      <div class="actions"><button class="quiet" disabled=${busy} onClick=${() => setEdited(true)}>Edit</button></div>
    </article>
  `;
}

function Editor({ text, busy, onSend, onCancel }) {
  const [draft, setDraft] = useState(text);
  const field = useRef(null);
  useEffect(() => {
    field.current.focus();
    field.current.setSelectionRange(text.length, text.length);
  }, []);
  const submit = (event) => {
    event.preventDefault();
    if (!busy && draft.trim()) onSend(draft.trim());
  };
  const onKeyDown = (event) => {
    if (event.key === "Escape") onCancel();
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing && event.target === field.current) submit(event);
  };
  return html`
    <form class="turn question editing" onSubmit=${submit} onKeyDown=${onKeyDown}>
      <label class="hidden" for="edit">Edit the message</label>
      <textarea id="edit" rows="3" value=${draft} onInput=${(e) => setDraft(e.target.value)} ref=${field}></textarea>
      <div class="actions">
        <span class="note">What follows is asked again.</span>
        <button type="button" onClick=${onCancel}>Cancel</button>
        <button type="submit" class="primary" disabled=${busy || !draft.trim()}>Send</button>
      </div>
    </form>
  `;
}

/**
 * @param {{reply: object, model: string, isLast: boolean, busy: boolean, onAgain: () => void,
 *   onVersion: (shown: number) => void}} props
 */
export function Reply({ reply, model, isLast, busy, onAgain, onVersion }) {
  const answer = shownOf(reply);
  const drawn = useMemo(() => markdown(answer.text), [answer.text]);
  const runs = answer.state === "waiting" || answer.state === "streaming";
  return html`
    <article class="turn reply" aria-label=${model} aria-busy=${runs}>
      ${answer.state === "waiting" ? html`<${Waiting} progress=${answer.progress} />` : html`<div class="text">${drawn}</div>`}
      ${answer.error && html`<p class="problem" role="alert">${answer.error}</p>`}
      ${answer.state !== "waiting" && html`<${Facts} answer=${answer} />`}
      ${!runs && html`<div class="actions">
        ${reply.versions.length > 1 && html`<${Versions} reply=${reply} onVersion=${onVersion} />`}
        ${isLast && html`<button class="quiet" disabled=${busy} onClick=${onAgain}>${answer.error ? "Try again" : "Regenerate"}</button>`}
        <${Copy} text=${answer.text} />
      </div>`}
    </article>
  `;
}

function Facts({ answer }) {
  const { usage, firstS } = answer;
  const speed = tokensPerSecond(answer);
  const sent = bytesPerToken(answer);
  const cached = usage?.prompt_tokens_details.cached_tokens;
  const facts = [
    answer.state === "stopped" && "stopped",
    answer.finish === "length" && "cut at the token limit",
    algorithmsOf(answer).join(" and "),
    firstS != null && `first token ${seconds(firstS)}`,
    speed && `${rate(speed)} tokens/s`,
    usage && `${plural(usage.completion_tokens, "token")} after a prompt of ${usage.prompt_tokens}${cached ? ` (${cached} cached)` : ""}`,
    sent.answer && `${bytes(sent.answer)} sent a token`,
  ].filter(Boolean);
  const line = html`<span class="facts">${facts.map((fact) => html`<span>${fact}</span>${" "}`)}</span>`;
  if (!answer.timing) return facts.length ? html`<p class="measured">${line}</p>` : null;
  return html`
    <details class="measured">
      <summary>${line}</summary>
      <${SplitBar} answer=${answer} />
      <${SplitList} answer=${answer} />
      <p class="note">Rank 0 sent ${bytes(sent.prompt)} for each token of the prompt and ${bytes(sent.answer)} for each token of the answer.</p>
    </details>
  `;
}

function Versions({ reply, onVersion }) {
  const { shown, versions } = reply;
  return html`<span class="versions" role="group" aria-label="Versions of this answer">
    <button class="quiet" aria-label="Earlier version" disabled=${shown === 0} onClick=${() => onVersion(shown - 1)}>‹</button>
    ${shown + 1} of ${versions.length}
    <button class="quiet" aria-label="Later version" disabled=${shown === versions.length - 1} onClick=${() => onVersion(shown + 1)}>›</button>
  </span>`;
}

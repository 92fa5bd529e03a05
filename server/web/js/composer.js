/** The field for the next message. Enter sends, Shift+Enter breaks the line, Escape stops an answer. */

import { html, useEffect, useRef, useState } from "../vendor/htm-preact.js";
import { takesRequests } from "./server.js";

const MOST_PX = 220; // then the field scrolls

/** @param {{label: string, busy: boolean, server: import("./server.js").Server, onSend: (text: string) => void, onStop: () => void}} props */
export function Composer({ label, busy, server, onSend, onStop }) {
  const disabled = !takesRequests(server);
  const [text, setText] = useState("");
  const field = useRef(null);

  useEffect(() => {
    const { style } = field.current;
    style.height = "auto";
    style.height = `${Math.min(field.current.scrollHeight + 2, MOST_PX)}px`;
  }, [text]);

  useEffect(() => {
    if (!busy) return;
    const onKey = (event) => event.key === "Escape" && onStop();
    window.addEventListener("keydown", onKey);
    return () => {
      window.removeEventListener("keydown", onKey);
      if (document.activeElement === document.body) field.current?.focus(); // the button that had the focus is gone
    };
  }, [busy]);

  const send = (event) => {
    event.preventDefault();
    if (busy || disabled || !text.trim()) return;
    onSend(text.trim());
    setText("");
  };
  const onKeyDown = (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event);
  };
  return html`
    <form class="composer" onSubmit=${send}>
      <label class="hidden" for="message">${label}</label>
      <textarea id="message" ref=${field} rows="1" placeholder=${server.refusal || label} value=${text} autofocus disabled=${Boolean(server.refusal)}
        onInput=${(e) => setText(e.target.value)} onKeyDown=${onKeyDown}></textarea>
      ${busy
        ? html`<button type="button" onClick=${onStop} aria-keyshortcuts="Escape">Stop</button>`
        : html`<button type="submit" class="primary" disabled=${disabled || !text.trim()}>Send</button>`}
    </form>
  `;
}

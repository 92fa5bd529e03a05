/** A button that puts a text on the clipboard. */

import { html, useState } from "../vendor/htm-preact.js";

/** Nothing where the browser has no clipboard: on pages that come from another host without HTTPS. @param {{text: string}} props */
export function Copy({ text }) {
  const [done, setDone] = useState(false);
  if (!navigator.clipboard || !text) return null;
  const copy = async () => {
    await navigator.clipboard.writeText(text);
    setDone(true);
    setTimeout(() => setDone(false), 1500);
  };
  return html`<button class="quiet" onClick=${copy} aria-live="polite">${done ? "Copied" : "Copy"}</button>`;
}

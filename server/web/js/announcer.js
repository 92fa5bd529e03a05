/** Says new text to screen readers, whole sentences at a time, because single tokens could not be followed. */

import { html, useEffect, useRef, useState } from "../vendor/htm-preact.js";

const PAUSE_MS = 1500; // between two announcements of a streamed answer

/** @param {{answer: ?object}} props the newest answer; one that had ended before is not said */
export function Announcer({ answer }) {
  const [said, setSaid] = useState("");
  const place = useRef({ spoken: 0, at: 0, state: answer?.state });

  useEffect(() => {
    if (!answer) return;
    const { current } = place;
    if (answer.text.length < current.spoken || answer.state === "waiting") current.spoken = 0;
    const ended = answer.state !== "streaming" && answer.state !== "waiting";
    const fresh = answer.text.slice(current.spoken);
    const end = ended ? fresh.length : fresh.search(/[.!?:\n](?=\s[^.!?:\n]*$)/) + 1;
    if (ended && current.state !== answer.state) setSaid(`${fresh} ${closing(answer)}`);
    else if (!ended && end && performance.now() - current.at > PAUSE_MS) setSaid(fresh.slice(0, end));
    else if (answer.state === "waiting" && current.state !== "waiting") setSaid("Waiting for the first token.");
    else return;
    place.current = { spoken: ended ? 0 : current.spoken + end, at: performance.now(), state: answer.state };
  }, [answer]);

  return html`<div class="hidden" role="log" aria-live="polite" aria-atomic="true">${said}</div>`;
}

function closing({ state, error }) {
  if (state === "failed") return `The answer failed: ${error}`;
  return state === "stopped" ? "Stopped." : "End of the answer.";
}

/** Asks for the API key, once the server has refused a request without it. */

import { html, useEffect, useRef, useState } from "../vendor/htm-preact.js";
import { KEY_NEEDED, send, setKey } from "./api.js";

/**
 * A dialog that opens by itself.
 * @param {{onKey: () => void}} props `onKey`: called with a key that the server accepts
 */
export function KeyPrompt({ onKey }) {
  const dialog = useRef(null);
  const [problem, setProblem] = useState("");

  useEffect(() => {
    const open = () => dialog.current.open || dialog.current.showModal();
    window.addEventListener(KEY_NEEDED, open);
    return () => window.removeEventListener(KEY_NEEDED, open);
  }, []);

  const submit = async (event) => {
    event.preventDefault();
    const key = event.target.elements.key.value.trim();
    if (!/^[\x21-\x7e]+$/.test(key)) return setProblem("A key has no spaces and only ASCII characters.");
    setKey(key);
    const status = await statusOf("/v1/models");
    if (status === 401) return setProblem("The server refuses this key.");
    if (status === 0) return setProblem("The server does not answer.");
    setProblem("");
    dialog.current.close();
    onKey();
  };

  return html`
    <dialog ref=${dialog} class="key" aria-labelledby="key-title">
      <form onSubmit=${submit}>
        <h2 id="key-title">API key</h2>
        <p>This server was started with <code>--api-key</code>. The key stays in this tab and is forgotten when it closes.</p>
        <label for="key">Key</label>
        <input id="key" name="key" type="password" autocomplete="off" required aria-describedby="key-problem" />
        <p id="key-problem" class="problem" role="alert">${problem}</p>
        <div class="actions">
          <button type="button" onClick=${() => dialog.current.close()}>Cancel</button>
          <button type="submit" class="primary">Continue</button>
        </div>
      </form>
    </dialog>
  `;
}

async function statusOf(path) {
  try {
    return (await send(path)).status;
  } catch {
    return 0;
  }
}

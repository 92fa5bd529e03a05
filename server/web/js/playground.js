/** The playground: a conversation, or two AllReduce policies that answer the same prompt. */

import { html, render, useEffect, useState } from "../vendor/htm-preact.js";
import { Chat } from "./chat.js";
import { Compare } from "./compare.js";
import { Header } from "./header.js";
import { KeyPrompt } from "./key.js";
import { useServer } from "./server.js";
import { Settings, loadSettings, modelOf, saveSettings } from "./settings.js";

const VIEWS = { chat: "Chat", compare: "Compare" };

function Playground() {
  const [version, setVersion] = useState(0);
  const [view, setView] = useState(() => (location.hash === "#compare" ? "compare" : "chat"));
  const [open, setOpen] = useState(false);
  const [settings, setSettings] = useState(loadSettings);
  const server = useServer(version);

  useEffect(() => saveSettings(settings), [settings]);

  const choose = (name) => {
    setView(name);
    history.replaceState(null, "", name === "compare" ? "#compare" : "/");
  };
  const Shown = view === "chat" ? Chat : Compare;
  return html`
    <${Header} page="/" model=${modelOf(settings, server)} health=${server.health} />
    <div class="views">
      <div role="group" aria-label="View">
        ${Object.entries(VIEWS).map(
          ([name, title]) => html`<button aria-pressed=${name === view} onClick=${() => choose(name)}>${title}</button>`,
        )}
      </div>
      <button class="toggle" aria-expanded=${open} aria-controls="settings" onClick=${() => setOpen(!open)}>Settings</button>
    </div>
    <div class=${`columns ${open ? "open" : ""}`}>
      <${Settings} settings=${settings} server=${server} hasPolicy=${view === "chat"} onChange=${(changes) => setSettings({ ...settings, ...changes })} />
      <main id="main" tabindex="-1"><${Shown} settings=${settings} server=${server} /></main>
    </div>
    <${KeyPrompt} onKey=${() => setVersion((n) => n + 1)} />
  `;
}

render(html`<${Playground} />`, document.getElementById("app"));

/** The bar at the top of each page: name, pages, model, state of the server. */

import { html } from "../vendor/htm-preact.js";

const PAGES = [
  ["/", "Playground"],
  ["/dashboard", "Dashboard"],
];
const WORDS = { ready: "Ready", loading: "Loading", draining: "Shutting down", dead: "Failed", gone: "No answer" };

/** @param {{page: string, model?: string, health: ?{status: string, reason: string}}} props */
export function Header({ page, model, health }) {
  const status = health?.status ?? "connecting";
  const reason = health?.reason && status !== "gone" ? `: ${health.reason}` : "";
  return html`
    <header class="bar">
      <a class="skip" href="#main">Skip to the content</a>
      <span class="name">Tightwire</span>
      <nav aria-label="Pages">
        ${PAGES.map(([path, title]) => html`<a href=${path} aria-current=${path === page ? "page" : undefined}>${title}</a>`)}
      </nav>
      <span class="model" title=${model}>${model}</span>
      <span class="status" data-status=${status} role="status">${WORDS[status] ?? "Connecting"}<span class="reason">${reason}</span></span>
    </header>
  `;
}

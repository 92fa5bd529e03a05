/** Saves a conversation as a file. */

import { shownOf } from "./conversation.js";

/** @param {import("./conversation.js").Turns} turns */
export function toMarkdown(turns, { model, system }) {
  const parts = [`# Conversation with ${model}`];
  if (system.trim()) parts.push(`## System\n\n${system}`);
  for (const turn of turns) {
    parts.push(turn.role === "user" ? `## You\n\n${turn.text}` : `## ${model}\n\n${shownOf(turn).text}`);
  }
  return `${parts.join("\n\n")}\n`;
}

/** Everything the page knows, measurements included. @param {import("./conversation.js").Turns} turns */
export function toJson(turns, { model, system, sampling }) {
  const messages = turns.map((turn) => {
    if (turn.role === "user") return { role: "user", content: turn.text };
    const { text, ...measured } = shownOf(turn);
    return { role: "assistant", content: text, tightwire: measured };
  });
  if (system.trim()) messages.unshift({ role: "system", content: system });
  return JSON.stringify({ model, exported: new Date().toISOString(), sampling, messages }, null, 2);
}

/** Hand the browser a file to save. */
export function save(name, type, text) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  const link = document.createElement("a");
  link.href = url;
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}
